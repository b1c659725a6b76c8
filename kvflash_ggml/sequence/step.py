"""One step of a text: what it keeps, and what it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..arrays import Int32s
from ..constants import CHUNK
from ..native.streamed import NOBODY, Asked
from ..pool.branches import Branches
from ..pool.page_table import PageTable
from ..pool.plan import Chunk, Plan
from ..pool.residency import Ranking
from ..pool.view import View, choose, everything_is_resident, lies_in_order
from ..state.draft import SavedDraft
from .pool import Pool

AfterStep = Callable[[int, int], None]
"""Called as (start, count) once a text has the tokens of a step, while their logits are at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is kept of a step: logits of every token, or of the last. asked: attention masses, if it is streamed."""

    every: bool
    last: bool
    asked: Asked = NOBODY


EVERY = Output(every=True, last=True)
LAST = Output(every=False, last=True)


@dataclass(slots=True)  # not frozen, as little as a step is
class Logits:
    """Of which positions logits are at hand: of `count` from `start` on, in rows of the newest step.

    first: the row of the first of them; from the end, if it is negative. path: their rows, if these are not in order.
    """

    start: int = 0
    count: int = 0
    first: int = -1
    path: tuple[int, ...] = ()

    def row(self, pos: int) -> int | None:
        """The row of a position, None if its logits are not at hand."""
        at = pos - self.start
        if not 0 <= at < self.count:
            return None
        return self.path[at] if self.path else self.first + at

    def before(self, length: int) -> Logits:
        """Without those of positions from `length` on."""
        return replace(self, count=max(0, min(self.count, length - self.start)))


NO_LOGITS = Logits()


@dataclass(slots=True)  # one is made for each token: freezing it would take longer than all of its fields
class Step:
    """start: position of the first token. ahead: its rows are not of the text yet, and room is made for so many, 0 if
    they are. branches: how its rows lie if they are a tree. view: what it sees in place of the pool. whole: it sees the
    whole text before it.

    codes: what llama_decode has answered; empty until it has run.
    """

    start: int
    tokens: Int32s
    output: Output
    plan: Plan
    ahead: int = 0
    branches: Branches | None = None
    view: View | None = None
    whole: bool = True
    codes: list[int] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Does the device hold its tokens?"""
        return self.codes == [0]

    @property
    def logits(self) -> Logits:
        """What is at hand once it is computed."""
        count = len(self.tokens)
        if self.branches is not None:
            return NO_LOGITS  # of the path, once there is one
        if self.output.every:
            return Logits(self.start, count, 0)
        return Logits(self.start + count - 1, 1, -1) if self.output.last else NO_LOGITS


class Follower(Protocol):
    """Is told what becomes of a text. Each can be told again if it was interrupted."""

    def evaluated(self, start: int, tokens: Int32s, *, ahead: bool) -> None:
        """A step has computed these tokens; ahead: they are not of the text yet."""
        ...

    def retained(self, length: int) -> None:
        """The rows ahead that the newest step has computed end at this position: others will follow them there.

        What is settled next is that none of them has been.
        """
        ...

    def settled(self, path: Sequence[int]) -> None:
        """Of the rows ahead these are of the text now, in this order; the others have never been."""
        ...

    def truncated(self, length: int) -> None:
        """The text has `length` tokens left."""
        ...

    def state(self) -> Sequence[SavedDraft]:
        """What is known of the text, to be adopted later. It goes on unchanged."""
        ...

    def load(self, saved: Sequence[SavedDraft], tokens: Int32s) -> None:
        """After it was cut to nothing, the text is this, of which so much is known. What does not fit is left out."""
        ...


class AttentionSpan:
    """What the steps of one text see: the pool, or in its place chunks in the stages.

    bounded: the text can outgrow the pool.
    """

    def __init__(self, pool: Pool, table: PageTable, *, bounded: bool) -> None:
        self._pool = pool
        self._table = table
        self._bounded = bounded
        self._known_chunks: list[Chunk] = []
        self._all_resident = self._in_order = True

    @property
    def tokens(self) -> int:
        """Tokens that a streamed step can see at the least, its own with them; 0 without stages."""
        most = self._pool.heap.most
        return self._pool.stage_slots if most is None else min(self._pool.stage_slots, most * CHUNK)

    def of(
        self, plan: Plan, start: int, count: int, ranking: Ranking | None, *, stream: bool
    ) -> tuple[View | None, bool]:
        """What a step of `count` tokens at `start` sees in place of the pool, and whether it sees everything.

        stream: it may read stages. It does so, too, where the pool has everything in other blocks than a full cache
        would: attention sums in their order, and rounds otherwise.
        """
        if not self._bounded:
            return None, True
        layout = plan.layout
        if self._known_chunks is not layout.chunks:  # not `epoch`, which a plan that came to nothing has had too
            self._known_chunks, self._all_resident = layout.chunks, everything_is_resident(layout, start)
            self._in_order = lies_in_order(layout)
        ordered = self._all_resident and (self._in_order or start < CHUNK)  # a stage begins with a sealed chunk
        if ordered or not stream:
            return None, self._all_resident
        room = (self._pool.stage_slots - count - start % CHUNK) // CHUNK
        if self._pool.heap.most is not None:
            room = min(room, self._pool.heap.most)  # all images of a step are in memory together
        if room < (start // CHUNK if self._all_resident else 1):
            return None, self._all_resident
        first, last = start // CHUNK, (start + count - 1) // CHUNK
        view = choose(start, room, self._table.protected(first, last), ranking)
        return view, view.whole
