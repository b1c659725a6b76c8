"""What each verb measures, as values that are its options: the verbs of speed and of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kvflash_ggml.config import SPEC_DEFAULT_WINDOW, SPEC_WINDOW
from kvflash_ggml.constants import KV_TYPES

from .filler import read_text
from .options import Factors, Fractions, Names, Number, Numbers, Shares
from .verb import Plan, option

POLICIES = "With ':exact' prompts are read with the whole text in view, else with what the pool holds."
PREVIEWS = (
    " With ':preview5' a preview's 5 % of each prompt are read: of drafter the passages that the small model ranks, of "
    "others those that share words with the question."
)
DEPTHS = "Of the facts asked for, in %."
DOCUMENTS = "Tokens of each document."
FULL = "Also run the full cache."
ARMS = ("full", "exact", "pool")
"""Of `streaming`: the full cache, exact reading, and reading with what the pool holds."""

WAYS = {
    "ours": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "libgomp": {"GOMP_SPINCOUNT": "300000"},
}
"""Of `busy`: variables of each way to wait."""

COUNT = click.IntRange(min=1)


def file(**more: bool) -> click.Path:
    return click.Path(dir_okay=False, path_type=Path, **more)


def _pool(default: str) -> int:
    number: int = option(default, "Tokens.", type=Number("one pool"))
    return number


@dataclass(frozen=True, kw_only=True)
class OfText(Plan):
    """A plan that needs text to make documents of."""

    text: tuple[Path, ...] = option(
        (),
        "Text to make documents of. Default: the texts of the checkout's tests.",
        type=file(exists=True),
        multiple=True,
    )

    def check(self) -> None:
        self.filler()

    def filler(self) -> str:
        """The text. ConfigError if it cannot be read."""
        return read_text(self.text)


# --- time


@dataclass(frozen=True, kw_only=True)
class Depth(Plan):
    """Decode and prefill speed of the full cache and of pools, at several depths."""

    depths: tuple[int, ...] = option("1K,8K,32K", "Tokens in the cache.", type=Numbers())
    pools: tuple[int, ...] = option("1K", "Pool sizes to compare.", type=Numbers())
    policies: tuple[str, ...] = option(
        "lru,qk,qk:exact",
        "Who stays resident, one arm each; with ':exact' prompts are read with the whole text in view.",
        type=Names(),
    )
    full: bool = option(True, FULL)
    window: int = option(4096, "Prefill is timed over so many tokens.")
    decode: int = option(64, "Decode steps timed at each depth.")
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Busy(Plan):
    """Decoding on cores that other programs use too, by how threads wait for each other.

    Each way runs in a process of its own, alone and beside the loops, in turns. cpu_ms: of all threads, for a token.
    """

    ways: tuple[str, ...] = option(
        "ours,passive,active,libgomp",
        "ours: as a user has it. passive, active: OMP_WAIT_POLICY. libgomp: its default. A number: GOMP_SPINCOUNT.",
        type=Names(),
    )
    loops: int | None = option(None, "Programs that loop.  [default: one a core]", type=COUNT)
    seconds: float = option(3.0, "Of decoding, for each run.", type=click.FloatRange(min=0.1))
    length: int = option(256, "Tokens before the first.", type=COUNT)
    pool: int = _pool("512")
    repeats: int = option(3, "Runs of each; medians are reported.", type=COUNT)
    stock: Path | None = option(
        None,
        "Folder of upstream's programs: scripts/vendor.py stock builds them.  [default: ours only]",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
    )
    stock_tokens: int = option(32, "Tokens that stock decodes, however long it takes.", type=COUNT)

    def check(self) -> None:
        for way in self.ways:
            if way not in WAYS and not way.isdecimal():
                raise click.BadParameter(f"{way!r} is no number, and none of {', '.join(WAYS)}", param_hint="--ways")


@dataclass(frozen=True, kw_only=True)
class Streaming(Plan):
    """Exact reading through stages, beside the full cache and a pool that reads with a hole."""

    depths: tuple[int, ...] = option("8K,32K", "Tokens of the texts.", type=Numbers())
    pool: int = _pool("2K")
    rows: tuple[int, ...] = option("1,8,32", "Tokens of the steps timed there.", type=Numbers())
    arms: tuple[str, ...] = option(",".join(ARMS), "Which to run.", type=Names())
    repeats: int = 3
    seed: int = 0

    def check(self) -> None:
        if unknown := set(self.arms) - set(ARMS):
            raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(ARMS)}", param_hint="--arms")


@dataclass(frozen=True, kw_only=True)
class Paging(Plan):
    """Bandwidth of page-outs and page-ins against a plain copy of the same bytes."""

    pool: int = option(4096, "Tokens.")
    chunks: tuple[int, ...] = option("1,4,16,64", "Chunks moved at once.", type=Numbers())
    lanes: bool = option(False, "Also a plain copy of the share of each device.")


@dataclass(frozen=True, kw_only=True)
class Scoring(Plan):
    """Time of one look of the qk policy: every key at four bits, then the real keys of the best chunks."""

    contexts: tuple[int, ...] = option("32K,128K,256K", "Tokens of text.", type=Numbers())
    rows: tuple[int, ...] = option("1,8", "Query rows per look.", type=Numbers())
    threads: tuple[int, ...] = option("2", "Host threads.", type=Numbers())
    heads: tuple[int, ...] = option("8,0", "Heads that count; 0: all.", type=Numbers())
    cache_type_k: str = option("q8_0", names=("-ctk", "--cache-type-k"), type=click.Choice(list(KV_TYPES)))


@dataclass(frozen=True, kw_only=True)
class Restore(Plan):
    """A question about a text that was saved, against reading the text again.

    Both in one run. A turn is timed to the first token of its answer; what is restored must answer as the
    session that was not interrupted.
    """

    contexts: tuple[int, ...] = option("32K", "Tokens of each text.", type=Numbers())
    pool: int = _pool("2K")
    policy: str = option("qk", "Who stays resident.")
    question: int = option(64, "Tokens asked after the text.")
    answer: int = option(16, "Tokens that are compared.")
    repeats: int = option(3, "Restored sessions; medians are reported.")
    compress: bool = option(False, "Save with Zstandard.")
    fresh_process: bool = option(False, "Where to restore.", names=("--fresh-process/--same-process",))
    folder: Path | None = option(
        None,
        "For the file, which is as large as the text's KV.  [default: the folder for temporary files]",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
    )


# --- drafts


@dataclass(frozen=True, kw_only=True)
class Spec(Plan):
    """Steps that verify drafts, beside plain decoding in the same process.

    The drafter knows the text and is wrong as often as it takes to win so many tokens a step: what a real one wins
    depends on the text and is another question.

    With --lossless the pool itself drafts, beside plain streamed steps, the pool's own speed and the full cache: it
    really decodes, and is then told how often it was right.
    """

    depths: tuple[int, ...] = option("1K", "Tokens of the prompt, or of several.", names=("--depth",), type=Numbers())
    pool: int = _pool("2K")
    tokens: int = option(256, "Generated by each run.")
    widths: tuple[int, ...] = option("2,4,8,16", "Rows of a step.", type=Numbers())
    accept: tuple[float, ...] = option("3,5,7", "Tokens that a step wins, its own one included.", type=Factors())
    bare: bool = option(True, "Also run a context without room for drafts.")
    draft_ms: float = option(0.0, "What a draft takes, but for the pool's.")
    drafts: tuple[int, ...] = option(
        (),
        "Measure lossless answers instead, with so many tokens drafted on the pool for a step.",
        names=("--lossless",),
        type=Numbers(),
        metavar="NUMBERS",
    )
    right: tuple[float, ...] = option(
        "88,95", "Of 100 such tokens, those that are right if all before them were.", type=Fractions()
    )
    source: tuple[float, ...] = option(
        (),
        "Beside lossless answers: others whose drafts the pool verifies, of 100 tokens so many what it draws.",
        type=Fractions(),
        metavar="SHARES",
    )
    source_rows: int = option(4, "Rows of such a step.", type=click.IntRange(min=2))
    full: bool = option(True, "Beside lossless answers: the full cache.")
    repeats: int = option(3, "Runs of each, in turns; medians are reported.")
    seed: int = 0

    def check(self) -> None:
        if self.drafts and len(self.depths) > 1:
            raise click.BadParameter("one at a time", param_hint="--depth")


@dataclass(frozen=True, kw_only=True)
class Drafters(OfText):
    """Real drafters on real text, with the controller, beside plain decoding in the same process.

    Says what each wins, and what it costs where it wins nothing.
    """

    types: tuple[str, ...] = option(
        "wrong,ngram",
        "Drafters, each alone: names as --kvflash-spec takes them, NAME=FILE too, with :tree at the end for trees;"
        " 'wrong' is never right.",
        type=Names(),
    )
    passage: int = option("0", "Tokens that the prompt repeats; 0: none.", type=Number())
    depth: int = option("1K", "Tokens of the prompt.", type=Number())
    pool: int = _pool("2K")
    tokens: int = option(256, "Generated by each answer.")
    repeats: int = option(3, "Answers of each after the first; medians are reported.")
    width: int | None = option(
        None, "Rows of each step that verifies.  [default: the controller decides]", type=click.IntRange(2, 32)
    )


@dataclass(frozen=True, kw_only=True)
class Acceptance(OfText):
    """How much of what is drafted is accepted: in a pool beside the full cache, at the same places of the same texts.

    How each text goes on is forced, so that both are asked the same: plain text by itself, a question by the answer of
    the full cache. What is accepted is the greedy choice of each.
    """

    types: tuple[str, ...] = option(
        "ngram", "Drafters, each alone: names as --kvflash-spec takes them, NAME=FILE too.", type=Names()
    )
    tasks: tuple[str, ...] = option(
        "text,single",
        "text: plain text, by whose own tokens it goes on; others are those of recall, answered by the full cache.",
        type=Names(),
    )
    contexts: tuple[int, ...] = option("4K", DOCUMENTS, type=Numbers())
    residency: tuple[float, ...] | None = option(
        None, "Pools, in % of the context.  [default: 50,25,12.5 without --pools]", type=Shares()
    )
    pools: tuple[int, ...] = option((), "Pools, in tokens.", type=Numbers())
    policies: tuple[str, ...] = option("qk:exact", POLICIES, type=Names())
    drafts: int = option(4, "Tokens of a draft.", type=click.IntRange(1, 31))
    window: int = option(
        SPEC_DEFAULT_WINDOW, "Newest tokens that a drafting model sees.", type=click.IntRange(min=SPEC_WINDOW)
    )
    tokens: int = option(64, "Places after each document.", type=COUNT)
    depths: tuple[float, ...] = option("10,50,90", DEPTHS, type=Fractions())
    trials: int = option(8, "Of each task.", type=COUNT)
    seed: int = option(0, "Of the first document.")
    crossed: bool = option(
        False,
        "Also verify each arm's drafts by the other: does the pool choose other tokens, or is worse drafted in it?",
        names=("--crossed/--not-crossed",),
    )
