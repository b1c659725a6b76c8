"""What a user can ask of the pool, of a prefix cache, and of fitting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import notation
from .constants import CHUNK, POOL_STEP, round_up
from .errors import ConfigError
from .settings import check, documented, in_section, is_whole, settings

if TYPE_CHECKING:
    from .policy.base import Scorer


NGRAM, SIMPLE, DFLASH, EAGLE3, MTP = SPEC_TYPES = (
    "ngram", "draft-simple", "draft-dflash", "draft-eagle3", "draft-mtp",
)  # fmt: skip
"""Who can draft, by upstream's names: the text itself, a small model, and kinds that look into the target."""

ROWS_ALIKE = 4
"""Rows of packed weights that a CPU computes at once. One with AVX2 alone rounds those that are left over otherwise."""

SPEC_WINDOW = 256
"""Tokens that a drafting model has to see, at least."""

SPEC_DEFAULT_WINDOW = 4096
"""Tokens that it sees, if nothing else is asked for."""

_ALSO_NGRAM = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")

_spec = in_section("Speculative decoding")
_pool = in_section("KVFlash")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Speculative decoding: which drafters propose tokens, and how many of them one step verifies.

    types: of SPEC_TYPES, asked in this order; empty to take what fits the model and the file. width: rows of every step
    that verifies a draft: the newest token, and width - 1 draft tokens, to which a shorter chain is filled up. Then the
    same call takes the same steps. None to choose the width by what steps cost. max_width: most rows of a step.
    """

    types: tuple[str, ...] = ()
    draft: Path | None = _spec(
        Path, "-md", "--spec-draft-model", "--model-draft", metavar="FILE", exists=True,
        help="A drafter: DFlash, EAGLE3, a head for further tokens, or a small model of the same vocabulary.",
    )  # fmt: skip
    tree: bool | None = _spec(
        bool, "--spec-tree/--no-spec-tree",
        help="Let DFlash drafters propose trees, on models without recurrent state or sliding window.  [default: no]",
    )  # fmt: skip
    width: int | None = None
    max_width: int | None = None
    window: int = _spec(
        notation.tokens, "--spec-window", default=SPEC_DEFAULT_WINDOW, least=SPEC_WINDOW,
        help="Newest tokens that a drafting model sees.",
    )  # fmt: skip
    n_gpu_layers: int | None = _spec(
        int, "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft",
        help="0 keeps a drafting model off the GPU, any other number puts all of it there.  [default: as the model]",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in self.types:
            if name not in SPEC_TYPES:
                raise ConfigError(f"speculative decoding has no type {name!r}: there are {', '.join(SPEC_TYPES)}")
        if len(set(self.types)) < len(self.types):
            raise ConfigError(f"types of speculative decoding are named once each, not {', '.join(self.types)}")
        if self.draft is not None:
            object.__setattr__(self, "draft", Path(self.draft))
        check(self, " of speculative decoding")
        for name in ("width", "max_width"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 2):
                raise ConfigError(f"{name} of speculative decoding is a whole number of at least 2, not {value!r}")
        if self.n_gpu_layers is not None and not is_whole(self.n_gpu_layers):
            raise ConfigError(
                f"n_gpu_layers of speculative decoding is a whole number or None, not {self.n_gpu_layers!r}"
            )

    @classmethod
    def read(cls, text: str) -> SpecConfig | None:
        """Read names separated by commas, with or without "draft-", one perhaps NAME=FILE; or "auto", or "none".

        ConfigError for any other.
        """
        if text in ("none", "off"):
            return None
        words = [] if text == "auto" else [word.strip().partition("=") for word in text.split(",")]
        files = [Path(file) for _, _, file in words if file]
        if len(files) > 1:
            raise ConfigError(f"one file drafts at a time, not {', '.join(map(str, files))}")
        types = dict.fromkeys(_type(name) for name, _, _ in words)  # several of upstream's names are one here
        return cls(types=tuple(types), draft=files[0] if files else None)


def _type(name: str) -> str:
    if name in _ALSO_NGRAM:
        return "ngram"
    return f"draft-{name}" if f"draft-{name}" in SPEC_TYPES else name


def _read_drafts(text: str) -> str:
    SpecConfig.read(text.strip())
    return text.strip()


def _read_pool(text: str) -> str:
    notation.pool(text)
    return text.strip().lower()


def _read_policy(text: str) -> str:
    from . import policy

    policy.check(text)
    return text


def _read_calibration(text: str) -> bool | Path:
    asked = notation.calibrate(text)
    return asked if isinstance(asked, bool) else Path(asked)


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Which pool there is, and where texts are kept that were read. The rest is in `KVFlashConfig`."""

    kvflash: str = _pool(
        _read_pool, default="off", variable="KVFLASH_POOL", metavar="TOKENS|SIZE|auto|off",
        help="Keep the KV cache in a pool of so many tokens (4096, 4K) or bytes (512M, 2G). The rest is paged to host"
        " memory. auto sizes the pool from free device memory.",
    )  # fmt: skip
    cache: Path | None = _pool(
        Path, "--kvflash-cache", metavar="DIR",
        help="Folder that keeps the texts that were read, so that later runs need not read them again.",
    )  # fmt: skip
    cache_size: int = _pool(
        notation.size, "--kvflash-cache-size", default=16 << 30, metavar="SIZE",
        help="What that folder may take, for all models together.  [default: 16G]", shown=False,
    )  # fmt: skip


INDEX = 256 << 20
"""Bytes of a GPU that a sequence's index takes at most, by default."""

INDEX_WORK = 5_000_000_000
"""Multiplications of a step of one token, beyond which there is none by default."""

TAIL, SHORT_TAIL, SMALL_SHARE = 4, 2, 1024
"""Chunks of the tail by default, and in a share of fewer tokens. Of 8 blocks a tail of 4 leaves two to choose from, and
two facts push each other out.
"""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class KVFlashConfig:
    """Settings of a bounded KV cache. Everything is counted in tokens unless said otherwise.

    `policy` can also be an object of your own (policy.base.Scorer), and `spec` is a SpecConfig.

    pool: slots on the device, or "auto" to size it from free device memory.
    pool_bytes: the same as bytes on the device, instead of a number of slots.
    reselect_prefill: rebuild the resident set while a prompt is read too, and not at its end only.
    sinks: leading chunks that are never evicted.
    tail: newest chunks that are never evicted, besides the one being filled. None: 4, or 2 where a sequence has less
        than 1,024 tokens of the pool.
    embedding: tokens of a text that llama.embedding.Embedder takes at once, for which memory is left. 0 for none.
    parallel: sequences that are computed together; `pool_share` says how they divide the pool. "auto" is 4 at
        most. It is fewer where their states take more than a quarter of the pool's bytes, or do not fit into memory.
        It is also fewer where half of the pool has no room for the least shares of the others. It is 1 with
        deterministic, and beside settings that serve one sequence only.
    pool_share: "elastic" lets a scheduler deal the pool anew whenever a request begins or ends, to the texts with one;
        "strict" keeps the shares. None is elastic, and strict where the same bits are promised: with deterministic or
        deterministic_batch.
    deterministic_batch: each step has a row for every sequence, so other answers change no bit of one. On a GPU that
        holds for one sequence: kernels round by where keys lie. Needs no spec, a model without recurrent state and
        sliding windows, and up to 4 sequences, or a multiple of 4.
    checkpoints: how many recurrent (or sliding-window) states are kept for truncation.
    """

    pool: int | Literal["auto"] = "auto"
    pool_bytes: int | None = None
    policy: str | Scorer = _pool(
        _read_policy, "--kvflash-policy", default="qk", metavar="NAME",
        help="Which chunks stay resident. qk keeps what the newest queries attend to, drafter what a small model of"
        " its own attends to, lru what was used last. Another installed package can add a policy.",
    )  # fmt: skip
    scorer: Path | None = _pool(
        Path, "--kvflash-scorer", metavar="FILE",
        help="Small GGUF model for the policy 'drafter'.  [default: one with 'scorer', 'drafter' or 'draft' in its name"
        " beside the model, or in a folder 'drafter' or 'draft' there]",
    )  # fmt: skip
    tau: int | None = _pool(
        notation.tokens, "--kvflash-tau", least=1,
        help="Tokens between two reselections while generating; chunks are scored four times as often. Beside a GPU the"
        " same call computes the same bits with a number only.  [default: chunks of a text that outgrows the pool are"
        " scored at every token, or as often as that costs little; beside a GPU at every second, or as often as a"
        " thread has time]",
    )  # fmt: skip
    calibrate: bool | Path = _pool(
        _read_calibration, "--kvflash-calibrate", default=True, metavar="on|off|FILE", shown=False,
        help="Find the model's retrieval heads once, after the first answer. FILE: take them from a file of"
        " 'kvflash-run calibrate'. off: ask all heads.  [default: on]",
    )  # fmt: skip
    index: int | None = _pool(
        notation.size, "--kvflash-index", metavar="SIZE", least=0, shown=False,
        help="Most memory of a CUDA GPU for the index by which chunks are scored, for each sequence. The host scores"
        " what has no room there.  [default: 256M for models that are so fast that the host cannot keep up, up to 5"
        " billion weights a token; 0 for others]",
    )  # fmt: skip
    deterministic: bool = _pool(
        bool, "--kvflash-deterministic", default=False,
        help="The same text brings the same chunks. Each prompt is read from its beginning, no clock says how often"
        " chunks are scored beside a GPU, and heads that are found meanwhile count in the next run.",
    )  # fmt: skip
    reselect_prefill: bool = True
    sinks: int = 1
    tail: int | None = None
    pins: tuple[tuple[int, int], ...] = _pool(
        notation.pin, "--kvflash-pin", default=(), many=True, metavar="LO:HI",
        help="Half-open range of tokens that are never evicted; may be repeated.",
    )  # fmt: skip
    host_limit: int | Literal["auto"] | None = _pool(
        notation.ceiling, "--kvflash-host-limit", default="auto", metavar="SIZE|auto",
        help="Ceiling on host memory for page images, as 8G or 512M. auto: no ceiling without a spill folder; with"
        " one, what is available beyond a margin and the weights. Exact reading sees no more of a text than that"
        " holds at a time.",
    )  # fmt: skip
    spill: Path | None = _pool(
        Path, "--kvflash-spill", metavar="DIR",
        help="Folder for page images that do not fit under that ceiling.",
    )  # fmt: skip
    reading: Literal["auto", "exact", "pool", "preview"] = _pool(
        ("auto", "exact", "pool", "preview"), "--kvflash-reading", default="auto",
        help="What a prompt's tokens see of the text before them. exact: all of it, copied to the device layer by"
        " layer, with the bits of a full cache. pool: the resident chunks. auto: all of it if there is memory for"
        " that. preview: the first answer comes from a part of a long prompt and can miss facts; all of it is"
        " read later.",
    )  # fmt: skip
    preview_share: float = _pool(
        float, "--preview-share", least=0, above=True, most=1, default=0.05, metavar="SHARE",
        help="The part of a prompt that a preview reads; at least 2,048 tokens.",
    )  # fmt: skip
    stage: int | None = _pool(
        notation.tokens, "--kvflash-stage", least=1, metavar="TOKENS",
        help="Tokens that exact reading can see at most. Of a longer text it sees the best chunks.  [default: all, or"
        " what a third of the free device memory holds]",
    )  # fmt: skip
    answer: Literal["pool", "exact", "lossless", "auto"] = _pool(
        ("pool", "exact", "lossless", "auto"), "--kvflash-answer", default="pool",
        help="What the answer's tokens see. pool: the resident chunks. exact: the whole text, at the speed of the bus."
        " lossless: the whole text too; the pool drafts several tokens, and one pass over the text verifies them."
        " auto: the same, but what the pool drafts stays unless the whole text finds it unlikely. How much it drafts"
        " follows a clock unless --kvflash-spec has a fixed width."
        " Other drafters (--kvflash-spec, -md) draft for the pool then.",
    )  # fmt: skip
    spec: SpecConfig | None = _pool(
        _read_drafts, "--kvflash-spec", "--spec-type", metavar="auto|none|NAMES",
        help=f"Speculative decoding: the drafters whose tokens one step verifies, of {', '.join(SPEC_TYPES)}, separated"
        " by commas. NAME=FILE names a drafter's file. auto: the text itself, and a drafter in the model's file"
        " or beside it.  [default: none]",
    )  # fmt: skip
    checkpoints: int = 8
    embedding: int = 0
    parallel: int | Literal["auto"] = 1
    pool_share: Literal["strict", "elastic"] | None = None
    deterministic_batch: bool = False

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.calibrate, (bool, Path)):
            raise ConfigError(f"calibrate is True, False or a path, not {self.calibrate!r}")
        self._check_pool()
        for name, least in (("sinks", 0), ("tail", 1), ("checkpoints", 0), ("embedding", 0), ("parallel", 1)):
            value = getattr(self, name)
            if (name, value) in (("parallel", "auto"), ("tail", None)):
                continue
            if not is_whole(value) or value < least:
                raise ConfigError(f"{name} is a whole number of at least {least}, not {value!r}")
        for span in self.pins:
            if not _is_span(span):
                raise ConfigError(f"a pin is (lo, hi) with 0 <= lo < hi, not {span!r}")
        limit = self.host_limit
        if limit not in (None, "auto") and (not is_whole(limit) or limit < 0):  # type: ignore[operator]
            raise ConfigError(f"host_limit is a number of bytes, 'auto' or None, not {limit!r}")
        self._check_combinations()

    def _check_pool(self) -> None:
        if self.pool != "auto" and (not is_whole(self.pool) or self.pool <= 0):
            raise ConfigError(f"pool is a positive number of tokens or 'auto', not {self.pool!r}")
        if self.pool_bytes is None:
            return
        if not is_whole(self.pool_bytes) or self.pool_bytes <= 0:
            raise ConfigError(f"pool_bytes is a positive number of bytes, not {self.pool_bytes!r}")
        if self.pool != "auto":
            raise ConfigError(f"give the pool in tokens ({self.pool}) or in bytes ({self.pool_bytes}), not both")

    def _check_combinations(self) -> None:
        if self.scorer is not None and self.policy != "drafter":
            raise ConfigError(f"the scorer {self.scorer} serves policy='drafter', not policy={self.policy!r}")
        if self.answer != "pool" and self.reading in ("pool", "preview"):
            raise ConfigError(
                f"answer={self.answer!r} sees the whole text, which reading={self.reading!r} does not: leave out one of"
                " them"
            )
        if self.spec is not None and not isinstance(self.spec, SpecConfig):
            raise ConfigError(f"spec is a SpecConfig or None, not {self.spec!r}")
        self._check_parallel()
        timed = self.spec is not None or self.pool_drafts
        if self.deterministic and timed and (self.spec is None or self.spec.width is None):
            raise ConfigError(
                "deterministic: how much of a draft is verified depends on the clock; give a width of spec"
            )

    def _check_parallel(self) -> None:
        if self.sequences > 1 and (alone := self.serves_one):
            raise ConfigError(f"{alone} serves one sequence, and parallel is {self.parallel}: leave out one of them")
        if self.deterministic_batch and self.parallel == 1:
            raise ConfigError(
                "deterministic_batch: a sequence alone has nobody beside it, and parallel is 1: leave it out, or give"
                " parallel"
            )
        if self.deterministic_batch and self.sequences > ROWS_ALIKE and self.sequences % ROWS_ALIKE:
            raise ConfigError(
                f"deterministic_batch: parallel is {self.parallel}, and some CPUs round the rows that are left over"
                f" from fours otherwise: give {ROWS_ALIKE} or fewer, or a multiple of {ROWS_ALIKE}"
            )
        if self.deterministic_batch and self.spec is not None:
            raise ConfigError(
                "deterministic_batch: drafts change how many rows a step has, and bits with it: leave out spec"
            )
        if self.pool_share not in (None, "strict", "elastic"):
            raise ConfigError(f"pool_share is 'strict', 'elastic' or None, not {self.pool_share!r}")
        if self.pool_share == "elastic" and self.same_bits:
            name = "deterministic" if self.deterministic else "deterministic_batch"
            raise ConfigError(
                f"{name}: with pool_share='elastic' others change what is resident: leave out one of them"
            )

    @property
    def sequences(self) -> int:
        """Sequences that are computed together; of "auto", those that there are at the least."""
        return 1 if self.parallel == "auto" else self.parallel

    @property
    def serves_one(self) -> str:
        """What is asked for that serves one sequence; empty if nothing is."""
        alone = {
            f"answer={self.answer!r}": self.pool_drafts,
            "policy='drafter'": self.policy == "drafter",
            "reading='preview'": self.reading == "preview",
            "a policy that is an object": not isinstance(self.policy, str),
        }
        return next((name for name, asked in alone.items() if asked), "")

    @property
    def same_bits(self) -> bool:
        """Does no bit of an answer depend on the clock, or on what others ask?"""
        return self.deterministic or self.deterministic_batch

    @property
    def is_elastic(self) -> bool:
        """Can the shares of sequences change?"""
        return self.sequences > 1 and (self.pool_share or ("strict" if self.same_bits else "elastic")) == "elastic"

    def tail_of(self, share: int = SMALL_SHARE) -> int:
        """Return the tail of a sequence with `share` tokens of the pool; by default the longest tail."""
        return self.tail or (TAIL if share >= SMALL_SHARE else SHORT_TAIL)

    def index_limit(self, work: int) -> int:
        """Return the most bytes of a GPU for a sequence's index. work: multiplications of a step of one token.

        With an index the steps of a model of 27 billion weights took 0.4 ms longer on an H200, of 10 ms. The host
        scores it at every token of 4,096, and at every third of 131,072.
        """
        return (INDEX if work <= INDEX_WORK else 0) if self.index is None else self.index

    @property
    def minimum_pool(self) -> int:
        """Slots below which no chunk of a sequence could ever be evicted, rounded up to the pool step."""
        padding = round_up(self.sequences, CHUNK) if self.deterministic_batch else 0
        return round_up((self.sinks + self.tail_of() + 2) * CHUNK * self.sequences + padding, POOL_STEP)

    @property
    def pool_drafts(self) -> bool:
        """Does the pool draft tokens that the whole text verifies?"""
        return self.answer in ("lossless", "auto")

    @property
    def sees_all(self) -> bool:
        """Is there a token that has to see the whole text, whatever memory there is?"""
        return self.reading == "exact" or self.answer != "pool"


def _is_span(span: object) -> bool:
    return isinstance(span, (tuple, list)) and len(span) == 2 and all(map(is_whole, span)) and 0 <= span[0] < span[1]


POOL_SETTINGS = settings(PoolSettings) | settings(KVFlashConfig)
"""What can be said of a pool outside Python, by field. The keyword of `Llama` is kvflash, or kvflash_ and the field."""


def keyword(name: str) -> str:
    """Return the keyword of `Llama` for a field of POOL_SETTINGS."""
    return name if name == "kvflash" else f"kvflash_{name}"


def from_environment() -> dict[str, Any]:
    """Return the keywords of `Llama` that the variables of the pool's options say; none without a pool.

    ConfigError names the variable that has a wrong value.
    """
    if os.environ.get("KVFLASH_POOL", "off").strip().lower() in ("", "off"):
        return {}
    found = {}
    for name, one in POOL_SETTINGS.items():
        variable = one.variable_of(name)
        if text := os.environ.get(variable):
            try:
                found[keyword(name)] = one.read(text)
            except ValueError as err:
                raise ConfigError(f"{variable}: {err}") from err
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Settings of a prefix cache, for `Llama.set_cache`. One can serve several models.

    folder: stores prefixes for other processes and later runs; None for memory only. disk_bytes: capacity of the
    folder, for all models together. memory_bytes: capacity in memory, per model. least: tokens of the shortest prefix
    that is kept.
    """

    folder: Path | None = None
    disk_bytes: int = 16 << 30
    memory_bytes: int = 8 << 30
    least: int = 256

    def __post_init__(self) -> None:
        for name in ("disk_bytes", "memory_bytes", "least"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r}")
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder).absolute())  # the process may change its directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a user can ask of fitting. None and an empty mapping: as usual.

    margin: bytes left free, of every device or by name. free: bytes that a device counts as free, by name, instead of
    what it tells. prefer: "pool" keeps a pool where a full cache fits too, since it is faster at long contexts;
    "exact" takes the full cache then. ConfigError for anything else.
    """

    margin: int | Mapping[str, int] | None = None
    free: Mapping[str, int] = field(default_factory=dict)
    prefer: Literal["pool", "exact"] = "pool"

    def __post_init__(self) -> None:
        margins = self.margin if isinstance(self.margin, Mapping) else {"": 0 if self.margin is None else self.margin}
        for what, sizes in (("margin", margins), ("free", self.free)):
            if not isinstance(sizes, Mapping):
                raise ConfigError(f"fit: {what} is a number of bytes for each device's name, not {sizes!r}")
            for name, size in sizes.items():
                if not is_whole(size) or size < 0:
                    of = f" of {name}" if name else ""
                    raise ConfigError(f"fit: {what}{of} is a number of bytes, 0 or more, not {size!r}")
        if self.prefer not in ("pool", "exact"):
            raise ConfigError(f"fit: prefer is 'pool' or 'exact', not {self.prefer!r}")
