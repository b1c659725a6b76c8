"""What a user can ask of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .constants import CHUNK, POOL_STEP, round_up
from .errors import ConfigError

if TYPE_CHECKING:
    from .policy.base import Scorer


SPEC_TYPES = ("ngram", "draft-simple", "draft-dflash", "draft-eagle3", "draft-mtp")
"""Who can draft, by upstream's names: the text itself, a small model, and kinds that look into the target."""

SPEC_WINDOW = 256
"""Tokens that a drafting model has to see, at least."""

SPEC_DEFAULT_WINDOW = 4096
"""Tokens that it sees, if nothing else is asked for."""

_ALSO_NGRAM = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Speculative decoding: who drafts, and how much of it one step verifies.

    types: of SPEC_TYPES, asked in this order; empty to take what fits the model and the file. draft: GGUF file of a
    drafter; None takes one found beside the model, or in its file. tree: drafters of blocks propose trees, where the
    memory of the model has branches; None to leave that open, which is no so far. width: rows of a step that verifies
    a draft, the newest token's with them; a shorter chain is filled up. Then no clock decides, and the same call
    takes the same steps; None to go by what steps cost. max_width: rows at most. window: newest tokens that a
    drafting model sees. n_gpu_layers: 0 keeps a drafting model off the device, any other number puts all of it there;
    None to go by the target's.
    """

    types: tuple[str, ...] = ()
    draft: Path | None = None
    tree: bool | None = None
    width: int | None = None
    max_width: int | None = None
    window: int = SPEC_DEFAULT_WINDOW
    n_gpu_layers: int | None = None

    def __post_init__(self) -> None:
        for name in self.types:
            if name not in SPEC_TYPES:
                raise ConfigError(f"speculative decoding has no type {name!r}: there are {', '.join(SPEC_TYPES)}")
        if len(set(self.types)) < len(self.types):
            raise ConfigError(f"types of speculative decoding are named once each, not {', '.join(self.types)}")
        if self.draft is not None:
            object.__setattr__(self, "draft", Path(self.draft))
        for name, least in (("width", 2), ("max_width", 2), ("window", SPEC_WINDOW)):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < least):
                raise ConfigError(
                    f"{name} of speculative decoding is a whole number of at least {least}, not {value!r}"
                )
        if self.tree not in (None, True, False):
            raise ConfigError(f"tree of speculative decoding is True, False or None, not {self.tree!r}")
        if self.n_gpu_layers is not None and not _is_int(self.n_gpu_layers):
            raise ConfigError(
                f"n_gpu_layers of speculative decoding is a whole number or None, not {self.n_gpu_layers!r}"
            )

    @classmethod
    def read(cls, text: str) -> SpecConfig | None:
        """Names separated by commas, with or without "draft-", one of them perhaps NAME=FILE; or "auto", or "none".

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFlashConfig:
    """Settings of a bounded KV cache. Everything is counted in tokens unless said otherwise.

    pool: slots on the device, or "auto" to size it from free device memory.
    pool_bytes: the same as bytes on the device, instead of a number of slots.
    policy: who stays resident: a name, or an object of your own (policy.base.Scorer). "qk" keeps what the newest
        queries attend to, "drafter" what a small model of its own attends to, "lru" what was used last.
    drafter: GGUF file of that small model; None takes one found by its name near the model (drafter.find).
    tau: tokens between two reselections while generating, None to adapt to what scoring costs. With a number, the same
        call computes the same bits however fast the machine is.
    calibrate: find the heads of the model that retrieve, behind the first answer, so that the policy "qk" asks them
        only; they are kept in the user's cache folder. False asks all heads; a path names a file that
        'kvflash-run calibrate' has written.
    deterministic: what is resident at a prompt's end is a function of the text alone: each prompt is read from its
        beginning, tau does not adapt, and heads that are found meanwhile count in the next object.
    reselect_prefill: rebuild the resident set while a prompt is read too, and not at its end only.
    sinks: leading chunks that are never evicted.
    tail: newest chunks that are never evicted, besides the one being filled.
    pins: half-open token ranges (lo, hi) that are never evicted.
    host_limit: ceiling in bytes on host memory for page images, None for no ceiling. "auto" is none without a spill
        folder, and with one what is available when the model has been loaded, beyond a margin and the weights. Exact
        reading sees no more of a text than that holds at a time.
    spill: folder for page images that do not fit under `host_limit`.
    reading: what a token of a prompt sees of the text before it: "exact" all of it, copied to the device a layer at a
        time, as the full cache computes it; "pool" what is resident; "auto" all of it if there is memory for that.
    stage: tokens that can be seen so, None to size it from free memory. Of a longer text the best chunks are seen.
    answer: what a generated token sees: "pool" what is resident, "exact" all of the text, at the speed of the bus;
        "lossless" all of it too, but what is resident drafts several tokens, and all of the text verifies them at once;
        who drafts by `spec` drafts for the pool then.
    repair: after so many tokens of an answer these are evaluated again with all of the text in view; None for never.
    spec: speculative decoding; None for none.
    checkpoints: how many recurrent (or sliding-window) states are kept for truncation.
    """

    pool: int | Literal["auto"] = "auto"
    pool_bytes: int | None = None
    policy: str | Scorer = "qk"
    drafter: Path | None = None
    tau: int | None = None
    calibrate: bool | Path = True
    deterministic: bool = False
    reselect_prefill: bool = True
    sinks: int = 1
    tail: int = 4
    pins: tuple[tuple[int, int], ...] = ()
    host_limit: int | Literal["auto"] | None = "auto"
    spill: Path | None = None
    reading: Literal["auto", "exact", "pool"] = "auto"
    stage: int | None = None
    answer: Literal["pool", "exact", "lossless"] = "pool"
    repair: int | None = None
    spec: SpecConfig | None = None
    checkpoints: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.calibrate, (bool, Path)):
            raise ConfigError(f"calibrate is True, False or a path, not {self.calibrate!r}")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic is True or False, not {self.deterministic!r}")
        if self.pool != "auto" and (not _is_int(self.pool) or self.pool <= 0):
            raise ConfigError(f"pool must be a positive number of tokens or 'auto', not {self.pool!r}")
        if self.pool_bytes is not None:
            if not _is_int(self.pool_bytes) or self.pool_bytes <= 0:
                raise ConfigError(f"pool_bytes must be a positive number of bytes, not {self.pool_bytes!r}")
            if self.pool != "auto":
                raise ConfigError(f"give the pool in tokens ({self.pool}) or in bytes ({self.pool_bytes}), not both")
        if self.drafter is not None and self.policy != "drafter":
            raise ConfigError(f"the drafter {self.drafter} serves policy='drafter', not policy={self.policy!r}")
        if self.tau is not None and (not _is_int(self.tau) or self.tau < 1):
            raise ConfigError(f"tau must be a whole number of at least 1, or None to adapt, not {self.tau!r}")
        for name, known in (("reading", ("auto", "exact", "pool")), ("answer", ("pool", "exact", "lossless"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("stage", "repair"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(f"{name} must be a whole number of tokens of at least 1, or None, not {value!r}")
        for name, asked in ((f"answer={self.answer!r}", self.answer != "pool"), (f"repair={self.repair}", self.repair)):
            if asked and self.reading == "pool":
                raise ConfigError(f"{name} sees the whole text, which reading='pool' does not: leave out one of them")
        for name, least in (("sinks", 0), ("tail", 1), ("checkpoints", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.spec is not None and not isinstance(self.spec, SpecConfig):
            raise ConfigError(f"spec is a SpecConfig or None, not {self.spec!r}")
        timed = self.spec is not None or self.answer == "lossless"
        if self.deterministic and timed and (self.spec is None or self.spec.width is None):
            raise ConfigError(
                "deterministic: how much of a draft is verified depends on the clock; give a width of spec"
            )
        for span in self.pins:
            if (
                not isinstance(span, (tuple, list))
                or len(span) != 2
                or not all(_is_int(x) for x in span)
                or not 0 <= span[0] < span[1]
            ):
                raise ConfigError(f"a pin is (lo, hi) with 0 <= lo < hi, not {span!r}")
        limit = self.host_limit
        if limit not in (None, "auto") and (not _is_int(limit) or limit < 0):  # type: ignore[operator]
            raise ConfigError(f"host_limit must be a number of bytes, 'auto' or None, not {limit!r}")

    @property
    def minimum_pool(self) -> int:
        """Slots below which no chunk could ever be evicted, rounded up to the pool step."""
        return round_up((self.sinks + self.tail + 2) * CHUNK, POOL_STEP)

    @property
    def sees_all(self) -> bool:
        """Is there a token that has to see the whole text, whatever memory there is?"""
        return self.reading == "exact" or self.answer != "pool" or self.repair is not None


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
