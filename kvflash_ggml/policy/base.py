"""The interface of policies: a policy scores the sealed chunks of a text for the tokens being read or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..state.statistics import Row, RowForm

if TYPE_CHECKING:
    from ..state.session import DrafterState

LRU = "lru"
"""The policy without a scorer: the chunks that were written or recalled last stay. The baseline."""

DRAFTER = "drafter"
"""The policy that asks a small model beside the target."""

Pairs = npt.NDArray[np.int32]
"""Shape [n, 2], sorted: the index of a pooled layer, and of a query head in it, or of a KV head (a unit)."""

Rows = Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """One pooled layer as a policy sees it. scale: an attention score is scale*q*k."""

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
        """Return the keys of one chunk, dequantised: per layer [CHUNK, n_head_kv, head]."""
        ...

    def read_head(self, chunk: int, layer: int, head: int) -> Floats:
        """Return the keys of one KV head of one chunk, dequantised: [CHUNK, head]."""
        ...

    def index_size(self, units: Pairs) -> int:
        """Return the bytes of the four-bit keys of these KV heads of one chunk."""
        ...

    def index(self, chunk: int, units: Pairs) -> Row:
        """Return the four-bit keys of these KV heads of one chunk, [index_size] bytes."""
        ...

    def score_index(self, units: Pairs, rows: Sequence[Row], heads: Pairs, request: ScoreRequest) -> Floats:
        """Return the result of `score_keys`, computed from rows that `index` returned. The queries of the request, or
        the newest of them, must be as they came: a device has them already.
        """
        ...

    def score_keys(self, chunks: Sequence[int], request: ScoreRequest, heads: Pairs | None = None) -> Floats:
        """Return the log of the attention mass of each chunk, not normalised, [columns, len(chunks)]; by default of all
        heads.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Masses:
    """Attention scores of some chunks from their real keys, as a streamed step has computed them.

    heads: (pooled layer, head), sorted, [n, 2]. rows: of the newest queries. chunks: ascending. values: logs of
    attention masses as `Keys.score_keys` returns them, [n * rows, len(chunks)].
    """

    heads: Pairs
    rows: int
    chunks: npt.NDArray[np.int64]
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One request to score the text.

    tokens: [length], the whole text; a row of an image is negative. n_chunks: chunks to score, from the first on. rows:
    query rows that there are, at most `query_rows`. queries: flat, per layer [rows, n_head, head], the oldest first.
    protected: chunks that stay whatever their score. masses: attention scores that are known already, of the heads that
    the scorer requests now, for a scorer that is `Exact`; queries of other heads are 0 then, and both arrays are valid
    until `score` returns.
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

    name: as the user wrote it. query_rows: newest query rows it wants per layer, 0 if it uses tokens only.
    """

    name: str
    query_rows: int

    def open(self, keys: Keys, n_chunks: int) -> None:
        """Start an empty text of at most `n_chunks` chunks."""
        ...

    def seal(self, chunk: int) -> None:
        """Note that the keys of a chunk are final and can be read."""
        ...

    def truncate(self, n_chunks: int) -> None:
        """Forget the chunks from `n_chunks` on."""
        ...

    def score(self, request: ScoreRequest) -> Floats | None:
        """Return one score per chunk [n_chunks], higher is more relevant; None to leave the resident set as it is."""
        ...

    @property
    def index_bytes(self) -> int:
        """Bytes of the statistics of a whole context."""
        ...

    def close(self) -> None:
        """Free everything that `open` allocated."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A scorer whose statistics are saved with the text. Other scorers read all keys again after a restore."""

    @property
    def layout(self) -> RowForm:
        """Layout of the rows it keeps at present."""
        ...

    def dump(self, n_chunks: int) -> Rows:
        """Return the statistics of the first chunks. They are not written to afterwards."""
        ...

    def load(self, rows: Rows) -> None:
        """Take over rows of the present layout for the first chunks of the text."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A scorer that can restrict itself to some heads."""

    def use(self, heads: Pairs) -> None:
        """Use only these heads from now on, and make present statistics fit."""
        ...


@runtime_checkable
class Exact(Protocol):
    """A scorer that can use attention scores of a streamed step in place of its statistics.

    Its `score` may then be called before `seal` for the chunks that this step has sealed.
    """

    def masses_wanted(self, n_chunks: int, rows: int) -> tuple[Pairs, int]:
        """Return the heads and the number of newest queries to compute scores for; no heads where they would be too
        many.

        rows: available queries. Called from any thread.
        """
        ...

    def most_masses(self, n_chunks: int, n_heads: int) -> int:
        """Return the most values ever requested, heads x rows x chunks, of a model with `n_heads` heads in its pooled
        layers.

        A placement leaves room for them. Called before `open`.
        """
        ...


@runtime_checkable
class Indexed(Protocol):
    """A scorer that asks `Keys.score_index` for the scores of a text. A device can have a copy of its rows. What it
    computes costs the host nothing: `Costed.work` counts the rest.
    """

    @property
    def units(self) -> Pairs:
        """The KV heads that are indexed. They change with `open` and `Selective.use` alone; before, it may be none."""
        ...


@runtime_checkable
class Costed(Protocol):
    """A scorer that knows what a score costs. Without this the chunks are scored at every 16th token of an answer."""

    def work(self, n_chunks: int) -> float:
        """Return the multiplications of a score of `n_chunks` chunks by the newest token, or what takes as long.

        For a scorer that is `Indexed`, of so many that the host scores. Called from any thread.
        """
        ...


@runtime_checkable
class Lasting(Protocol):
    """A scorer whose scores during an answer do not replace the earlier ones, but are combined with them.

    fade: how much a score loses for each later token, in the units of the scores.
    """

    fade: float


@runtime_checkable
class ReadsAlong(Protocol):
    """A scorer with a model of its own that reads along, and continues where it was after a restore."""

    def reader_state(self) -> DrafterState | None:
        """Return its state, to be released; None if it has not begun."""
        ...

    def load_reader(self, saved: DrafterState, tokens: npt.NDArray[np.int32]) -> None:
        """Continue from there, for a text of these tokens. It reads again what does not fit."""
        ...


REGISTRY: dict[str, Callable[[], Scorer]] = {}


def register(name: str) -> Callable[[Callable[[], Scorer]], Callable[[], Scorer]]:
    """Class decorator: register a scorer by name. A scorer with settings registers a function of no arguments."""

    def add(factory: Callable[[], Scorer]) -> Callable[[], Scorer]:
        REGISTRY[name] = factory
        return factory

    return add
