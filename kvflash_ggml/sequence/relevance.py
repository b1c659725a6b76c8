"""The scores of a text's chunks, and whether the next step moves pages for them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats, Int32s
from ..constants import CHUNK
from ..native.streamed import NO_MASSES, MassRequest
from ..pool.masks import View
from ..pool.page_table import PageTable
from ..pool.residency import Ranking
from ..trace.events import Events
from .query_ring import QueryRing
from .scoring import ASKS, Scoring

if TYPE_CHECKING:
    from ..state.session import PolicyState


SOON = 2 * CHUNK
"""Tokens of an answer after which a score has faded so far (`fade` of `QKScorer`) that it need not have been made."""


class Relevance:
    """The scores that one text uses.

    scoring: None where recency alone decides. ranking: one score a chunk, None before any were taken; the lowest leave
    first. rebuild: the next step makes the chunks with the best scores resident.
    """

    def __init__(self, table: PageTable, queries: QueryRing, events: Events, scoring: Scoring | None) -> None:
        self.scoring = scoring
        self.ranking: Ranking | None = None
        self.rebuild = False
        self._table = table
        self._queries = queries
        self._events = events

    def take(self, scores: Floats | None, *, sparingly: bool = False) -> None:
        """Use new scores, if there are any. sparingly: combine them with the old ones, and move pages only where that
        pays.
        """
        if scores is None or self.scoring is None:
            return
        self._events.score(scores)
        if not sparingly:
            self.ranking, self.rebuild = scores, True
            return
        lasting = self.scoring.lasting(scores, self.ranking)
        self.ranking, self.rebuild = self.scoring.sparing(lasting, *self._table.unprotected(), self._table.quota)

    def take_ready(self) -> None:
        """Use the scores that are due."""
        assert self.scoring is not None
        self.take(self.scoring.take_due(), sparingly=True)

    def matters(self, length: int) -> bool:
        """Return whether a score of a text of `length` tokens can matter: a chunk is evicted, or will be soon."""
        assert self.scoring is not None
        resident = self._table.resident * CHUNK
        blocks = min(self._table.quota, self._table.blocks.count)  # others may take the blocks beyond its own share
        return resident < length or blocks * CHUNK - resident < max(SOON, self.scoring.selection.interval)

    def fade(self) -> None:
        """Age the scores as a new one would: at its place none is made."""
        assert self.scoring is not None
        if self.ranking is not None:
            self.ranking = self.scoring.faded(self.ranking)

    def asks_for_more(self) -> bool:
        """Return whether the newest scores ask for evicted chunks, which the next step makes resident."""
        if not self.rebuild or self.ranking is None:
            return False
        evicted = self._table.unprotected()[1]
        return bool(self.ranking[evicted[evicted < len(self.ranking)]].max(initial=-np.inf) >= ASKS)

    def take_overlapped(self) -> None:
        """While a prompt is read: use the oldest finished scores, if they are available without a wait."""
        if self.scoring is not None:
            self.take(self.scoring.take_overlapped())

    def ask(self, end: int) -> MassRequest:
        """Return the attention scores to request from the last step of a prompt, which ends at `end`, if it is
        streamed.
        """
        return NO_MASSES if self.scoring is None else self.scoring.ask(end, end - self._queries.valid_from)

    def request(
        self, tokens: Int32s, view: View | None, *, rows: int | None, wanted: MassRequest = NO_MASSES, start: int = 0,
        beside: list[Event] | None = None,
    ) -> None:  # fmt: skip
        """Score the chunks of a text of these tokens against the newest `rows` queries, None for all.

        wanted: the request to the newest step, which began at `start` and saw `view`. beside: see `Scoring.request`.
        """
        assert self.scoring is not None
        length = len(tokens)
        protected = frozenset(self._table.protected_at(length))
        captured = length - self._queries.valid_from
        seen = () if view is None else (*view.chunks, *range(start // CHUNK, length // CHUNK))
        self.scoring.request(
            tokens, length // CHUNK, protected, rows=rows, captured=captured, wanted=wanted, seen=seen, beside=beside
        )

    def forget(self) -> None:
        """Begin a new request: no score of the last one counts."""
        self.ranking, self.rebuild = None, False
        self._events.reset()
        if self.scoring is not None:
            self.scoring.restart()

    def sealed(self, chunks: Sequence[int]) -> None:
        """Note that images of sealed chunks are on the host, so their keys can be read."""
        if self.scoring is not None:
            self.scoring.sealed(chunks)

    def truncated(self, length: int) -> None:
        """Note that the text was cut to `length` tokens. It can be repeated."""
        self.ranking, self.rebuild = None, False
        if self.scoring is not None:
            self.scoring.truncate(length)

    def state(self, length: int, cut: int | None = None) -> PolicyState | None:
        """Return the policy's knowledge and plans for a text of `length` tokens. cut: only what stays true after that
        cut.
        """
        if self.scoring is None:
            return None
        if cut is None:
            return self.scoring.state(length // CHUNK)
        blank = self.scoring.blank_state()
        blank.found = self.scoring.replays.state()
        return blank.before(cut)

    def load(self, saved: PolicyState | None, tokens: Int32s, ranking: Ranking | None, *, rebuild: bool) -> None:
        """Continue with the knowledge that a policy had of a text of these tokens, which is in place now."""
        own = saved is not None and self.scoring is not None and saved.name == self.scoring.scorer.name
        self.ranking = ranking if own else None  # else in the units of another policy, or of none
        if self.scoring is not None:
            self.scoring.load(saved, tokens)
        self.rebuild = rebuild
