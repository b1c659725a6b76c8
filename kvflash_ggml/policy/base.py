"""What a policy is: something that scores the sealed chunks of a text against what is being read or written now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..state.session import DrafterState, Layout, Row

LRU = "lru"
"""The policy without a scorer: chunks that were written or recalled last stay. The baseline."""

Pairs = npt.NDArray[np.int32]
Rows = Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """One pooled layer as a policy sees it. scale: attention scores are scale*q*k."""

    n_head: int
    n_head_kv: int
    head: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.n_head // self.n_head_kv


class Keys(Protocol):
    """The keys of sealed chunks, as the host holds them.

    heads, units: pairs (pooled layer, query head or KV head), sorted, [n, 2] (policy.heads). Columns of scores run over
    heads and then query rows, the oldest first.
    """

    shapes: Sequence[KeyShape]

    def read(self, chunk: int) -> list[Floats]:
        """The keys of one chunk, dequantised: per layer [CHUNK, n_head_kv, head]."""
        ...

    def read_head(self, chunk: int, layer: int, head: int) -> Floats:
        """The keys of one KV head of one chunk, dequantised: [CHUNK, head]."""
        ...

    def index_size(self, units: Pairs) -> int:
        """Bytes that the keys of some KV heads of one chunk take at four bits."""
        ...

    def index(self, chunk: int, units: Pairs) -> Row:
        """Return the four-bit keys of these KV heads of one chunk, [index_size] bytes."""
        ...

    def score_index(self, units: Pairs, rows: Sequence[Row], heads: Pairs, request: ScoreRequest) -> Floats:
        """As `score_keys`, from what `index` gave for some chunks."""
        ...

    def score_keys(self, chunks: Sequence[int], request: ScoreRequest, heads: Pairs | None = None) -> Floats:
        """Log of the attention mass of each chunk, not normalised, [columns, len(chunks)]; by default of all heads."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Masses:
    """Logs of the attention mass of some chunks, from every key of theirs: what a streamed step has computed.

    heads: (pooled layer, head), sorted, [n, 2]. rows: of the newest queries. chunks: ascending. values: as
    `Keys.score_keys` gives them for these, [n * rows, len(chunks)].
    """

    heads: Pairs
    rows: int
    chunks: npt.NDArray[np.int64]
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One look at the text.

    tokens: all of them. queries: flat, per layer [rows, n_head, head]. protected: chunks that stay anyway. masses: what
    is known already, for a scorer that is `Exact`: of the heads that it wants now.
    """

    tokens: npt.NDArray[np.int32]
    n_chunks: int
    rows: int
    queries: Floats
    protected: frozenset[int]
    masses: Masses | None = None


@runtime_checkable
class Scorer(Protocol):
    """A policy. All calls come from one thread, in the order of the text. One object serves one model.

    name: as the user wrote it. query_rows: newest query rows it wants per layer, 0 if it looks at tokens only.
    """

    name: str
    query_rows: int

    def open(self, keys: Keys, n_chunks: int) -> None:
        """Start an empty text of at most `n_chunks` chunks."""
        ...

    def seal(self, chunk: int) -> None:
        """The keys of a chunk are final and can be read."""
        ...

    def truncate(self, n_chunks: int) -> None:
        """Chunks from `n_chunks` on are gone."""
        ...

    def score(self, request: ScoreRequest) -> Floats | None:
        """One score per chunk [n_chunks], higher is more relevant; None to leave the resident set as it is."""
        ...

    @property
    def index_bytes(self) -> int:
        """Bytes that the statistics take for a whole context."""
        ...

    def close(self) -> None:
        """Free what `open` has taken."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A scorer whose statistics are saved with the text. One that is not reads all keys again after a restore."""

    @property
    def layout(self) -> Layout:
        """Of the rows it keeps at present."""
        ...

    def dump(self, n_chunks: int) -> Rows:
        """The statistics of the first chunks. Nobody writes to them afterwards."""
        ...

    def load(self, rows: Rows) -> None:
        """Take over rows of the present layout for the first chunks of the text."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A scorer that can ask some heads only."""

    def use(self, heads: Pairs) -> None:
        """From now on these heads count, and no others. Statistics that are at hand are made to fit."""
        ...


@runtime_checkable
class Exact(Protocol):
    """A scorer that can go by masses which a streamed step has computed, instead of a look at its statistics.

    It may be asked for scores then before `seal` tells of the chunks that this step has sealed.
    """

    def masses_wanted(self, n_chunks: int, rows: int) -> tuple[Pairs, int]:
        """Of which heads, and of how many of the newest `rows` queries; of none, where they would be too many.

        Called from any thread.
        """
        ...

    def most_masses(self, n_chunks: int, n_heads: int) -> int:
        """The most that is ever asked for, heads x rows x chunks, of a model with so many heads in its pooled layers.

        A placement leaves room for them. Called before `open`.
        """
        ...


@runtime_checkable
class Lasting(Protocol):
    """A scorer whose looks at an answer do not replace what was found before, but stand beside it.

    fade: by how much a score counts less for each token since its look, in the units of the scores.
    """

    fade: float


@runtime_checkable
class Reading(Protocol):
    """A scorer with a model of its own that reads along, and continues where it was after a restore."""

    def reader_state(self) -> DrafterState | None:
        """Where it is; None if it has not begun. To be released."""
        ...

    def load_reader(self, saved: DrafterState, tokens: npt.NDArray[np.int32]) -> None:
        """Go on from there, for a text of these tokens. What does not fit it reads again."""
        ...


REGISTRY: dict[str, Callable[[], Scorer]] = {}


def register(name: str) -> Callable[[Callable[[], Scorer]], Callable[[], Scorer]]:
    """Class decorator: make a scorer known by name. A scorer with settings registers a function of no arguments."""

    def add(factory: Callable[[], Scorer]) -> Callable[[], Scorer]:
        REGISTRY[name] = factory
        return factory

    return add
