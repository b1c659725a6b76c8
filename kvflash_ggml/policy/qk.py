"""The default policy: the model's own queries against its own keys, in the heads that retrieve.

A few heads of a model find the fact that a question asks for; the rest win a maximum by chance (docs/policies.md). Of
these heads the policy keeps every key at four bits, in an index that grows as chunks are sealed. No statistic of a
group of keys finds a fact among real text; every key at four bits does. The real keys of the best few chunks, which the
host holds anyway, then decide the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Int64s
from ..constants import CHUNK
from ..pool.residency import others
from ..state.statistics import Row, RowForm
from .base import Keys, Masses, Pairs, Rows, ScoreRequest, register
from .heads import boost_successors, deciding, every_head, newest, over_chunks, units_of

SCORES_KEPT = 4
"""Scores whose shares are kept: more than can be pending at once."""

MAX_WORK = 4e9
"""Multiplications of one request. A question has as many rows as fit, but at least MIN_ROWS. About 150 ms on two
cores.
"""

MIN_ROWS = 8
"""Fewest query rows. The marks of a chat template after a question can fill as many."""

MAX_MASSES = 2**20
"""Values of one request, heads x rows x chunks, that are fetched from a streamed step. MIN_ROWS may exceed it."""

MAX_FETCHED = 2**24
"""Most values of one request, MIN_ROWS included: 64 MiB. The index is faster than fetching more."""

ASKED = 0.1
"""Share of a head's attention below which the query of one token does not ask for a chunk. Most tokens ask for none:
their scores need no real keys, and must not exchange chunks.
"""

ASKED_SCORE = np.float32(np.log(ASKED))

UNASKED = 0.02
"""What is left of the differences between the scores of chunks that a token does not ask for. Their order stays."""

BESIDES = 6e6
"""Multiplications that take as long as what a score of one query row does besides the index: half a millisecond of
Python, and the real keys of chunks that are asked for.
"""

EXACT_WORK = 64 * 2**20
"""Multiplications up to which every chunk is scored by its real keys, in about 3 ms on two cores."""


class Reason(NamedTuple):
    """The reason of a chunk's score: a head of a layer, the position of the token whose query it was, and the chunk's
    share of that head's attention. follows: it is recalled because of the chunk before it.
    """

    chunk: int
    layer: int
    head: int
    token: int
    share: float
    follows: bool


class QKScorer:
    """heads: the retrieval heads, which `use` then cannot change; None for all heads until `use` names some.

    query_rows: enough for a question and the marks of a chat template after it. age: how much a query loses for each
    token after it, in the units of the scores: the end of a question says best what is wanted. fade: how much an
    earlier score loses for each token of an answer. share, least: how many chunks are scored again by their real keys,
    as a share and at least. successors: also recall the chunk after one whose end gets the attention. `explains`, off
    by default, keeps the reason of each score for `reasons_of`. `measures`, on by default, uses exact attention scores
    where a streamed step has them.
    """

    name = "qk"

    def __init__(
        self,
        *,
        heads: Pairs | None = None,
        query_rows: int = 32,
        age: float = 0.02,
        fade: float = 0.02,
        share: float = 0.04,
        least: int = 16,
        exact_work: float = EXACT_WORK,
        successors: bool = True,
    ) -> None:
        self.query_rows = query_rows
        self._given = heads
        self._fixed = heads is not None
        self._age = age
        self.fade = fade
        self._share = share
        self._least = least
        self._exact_work = exact_work
        self._successors = successors
        self._rows: list[Row | None] = []
        self._units: Pairs = np.empty((0, 2), np.int32)
        self._shares: deque[tuple[Floats, Floats]] = deque(maxlen=SCORES_KEPT)
        self.explains = False
        self.measures = True
        self._reasons: deque[tuple[Floats, list[Reason]]] = deque(maxlen=SCORES_KEPT)

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys
        self._rows = [None] * n_chunks
        self._set_heads(every_head(keys.shapes) if self._given is None else self._given)

    def use(self, heads: Pairs) -> None:
        if self._fixed:
            return
        self._given = heads
        if not self._rows:
            return  # not open yet
        rows, had = self._rows, self._units
        self._rows = [None] * len(rows)  # first: if this fails, no row of other units stays
        self._set_heads(heads)
        parts, units = self._parts(had), [tuple(unit) for unit in self._units.tolist()]
        if all(unit in parts for unit in units):
            self._rows = [None if row is None else np.concatenate([row[parts[unit]] for unit in units]) for row in rows]

    def _parts(self, units: Pairs) -> dict[tuple[int, ...], slice]:
        """Return where each unit lies in a row."""
        ends = np.cumsum([self._keys.index_size(units[i : i + 1]) for i in range(len(units))]).tolist()
        starts = [0, *ends]
        return {tuple(unit): slice(lo, hi) for unit, lo, hi in zip(units.tolist(), starts, ends, strict=False)}

    def _set_heads(self, heads: Pairs) -> None:
        shapes = self._keys.shapes
        self._heads, self._units = heads, units_of(heads, shapes)
        self._work = CHUNK * sum(
            shapes[layer].head for layer, _ in heads.tolist()
        )  # multiplications of a chunk and a query row

    def seal(self, chunk: int) -> None:
        self._rows[chunk] = self._keys.index(chunk, self._units)

    def truncate(self, n_chunks: int) -> None:
        self._rows[n_chunks:] = [None] * (len(self._rows) - n_chunks)

    @property
    def layout(self) -> RowForm:
        units = " ".join(f"{layer}.{head}" for layer, head in self._units.tolist())
        return RowForm(f"q4_0 {units}", self._keys.index_size(self._units))

    def dump(self, n_chunks: int) -> Rows:
        return self._whole(range(n_chunks))

    def load(self, rows: Rows) -> None:
        self._rows[: len(rows)] = rows

    def _whole(self, chunks: Iterable[int]) -> list[Row]:
        """Return the rows of some chunks. A row that is missing is made now."""
        rows = []
        for chunk in chunks:
            row = self._rows[chunk]
            if row is None:
                row = self._rows[chunk] = self._keys.index(chunk, self._units)
            rows.append(row)
        return rows

    @property
    def units(self) -> Pairs:
        """The KV heads that are indexed; none before `open`."""
        return self._units

    def rescored(self, n_chunks: int) -> int:
        """Return how many chunks of a text are scored again by their real keys."""
        return max(self._least, int(self._share * n_chunks))

    def score(self, request: ScoreRequest) -> Floats | None:
        n = request.n_chunks
        if n == 0:
            return None
        known = request.masses
        request = newest(request, self._rows_for(n) if known is None else known.rows, self._keys.shapes)
        ages = np.tile(self._age * np.arange(request.rows - 1, -1, -1, dtype=np.float32), len(self._heads))[:, None]
        free = others(n, request.protected)
        if known is not None:
            masses, best = self._complete(known, request), free
        elif request.rows > 1 and n * self._work * request.rows <= self._exact_work:
            masses, best = self._keys.score_keys(range(n), request, self._heads), free
        else:
            masses = self._keys.score_index(self._units, self._whole(range(n)), self._heads, request)
            coarse = over_chunks(masses, ages).best
            asked = free if request.rows > 1 else free[coarse[free] > ASKED_SCORE]
            best = asked[np.argsort(-coarse[asked], kind="stable")[: self.rescored(n)]]
            if len(best):
                masses[:, best] = self._keys.score_keys(best.tolist(), request, self._heads)
        scores, wholes, shares = over_chunks(masses, ages)
        if request.rows == 1:
            scores = np.where(scores < ASKED_SCORE, ASKED_SCORE + UNASKED * (scores - ASKED_SCORE), scores)
        if self._successors:
            boost_successors(self._keys, request, self._heads, masses, wholes, best.tolist(), scores, ages)
        self._shares.append((scores, shares))
        if self.explains:
            chunks = np.intersect1d(np.concatenate([best, best + 1]), free)  # and the chunks that follow them
            self._reasons.append((scores, self._explain(masses, wholes, chunks, ages, request, scores)))
        return scores

    def _rows_for(self, n_chunks: int) -> int:
        """Return how many query rows a score by the index has time for."""
        return max(MIN_ROWS, int(MAX_WORK / (n_chunks * self._work)))

    def work(self, n_chunks: int) -> float:
        return float(BESIDES + n_chunks * self._work)

    def masses_wanted(self, n_chunks: int, rows: int) -> tuple[Pairs, int]:
        heads = self._heads
        values = max(1, n_chunks * len(heads))
        rows = min(rows, max(MIN_ROWS, MAX_MASSES // values), MAX_FETCHED // values)
        return (heads, rows) if self.measures and rows > 0 else (heads[:0], 0)

    def most_masses(self, n_chunks: int, n_heads: int) -> int:
        values = n_chunks * n_heads
        return min(values * self.query_rows, max(values * MIN_ROWS, MAX_MASSES), MAX_FETCHED)

    def _complete(self, known: Masses, request: ScoreRequest) -> Floats:
        """Return the attention scores of all chunks. The index scores chunks that were not in view."""
        n = request.n_chunks
        if len(known.chunks) == n:
            return known.values
        masses = np.empty((len(known.values), n), np.float32)
        unseen = others(n, known.chunks)
        masses[:, known.chunks] = known.values
        masses[:, unseen] = self._keys.score_index(self._units, self._whole(unseen), self._heads, request)
        return masses

    def _explain(
        self, masses: Floats, wholes: Floats, chunks: Int64s, ages: Floats, request: ScoreRequest, scores: Floats
    ) -> list[Reason]:
        columns, shares = deciding(masses, wholes, chunks, ages)
        follows = scores[chunks] > shares - ages[columns, 0] + 1e-3
        first, heads = len(request.tokens) - request.rows, self._heads.tolist()
        reasons = []
        values = zip(chunks.tolist(), columns.tolist(), np.exp(shares).tolist(), follows.tolist(), strict=True)
        for chunk, column, share, follow in values:
            layer, head = heads[column // request.rows]
            reasons.append(Reason(chunk, layer, head, first + column % request.rows, share, follow))
        return reasons

    def reasons_of(self, scores: Floats) -> list[Reason]:
        """Return why the best chunks of these scores are there, while `explains` is set; nothing for old scores."""
        return next((reasons for known, reasons in list(self._reasons) if known is scores), [])

    def shares_of(self, scores: Floats) -> Floats | None:
        """Return the estimated share of attention on each chunk for these scores; None for old scores."""
        return next((shares for known, shares in list(self._shares) if known is scores), None)

    @property
    def index_bytes(self) -> int:
        return len(self._rows) * self.layout.row_bytes if self._rows else 0

    def close(self) -> None:
        self._rows.clear()
        self._shares.clear()
        self._reasons.clear()


@register("qk")
def default() -> QKScorer:
    return QKScorer()
