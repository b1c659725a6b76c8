"""The attention span of a step: the pool, or chunks that it streams in place of the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..pool.masks import View, choose, everything_is_resident, lies_in_order
from ..pool.page_table import PageTable
from ..pool.plan import Chunk, Plan
from ..pool.residency import Ranking

if TYPE_CHECKING:
    from .pool import Pool


class AttentionSpan:
    """Decides what the steps of one text see: the pool, or chunks in the layer buffers.

    bounded: the text can outgrow its share of the pool, whose first block is `first`.
    """

    def __init__(self, pool: Pool, table: PageTable, *, first: int, bounded: bool) -> None:
        self._pool = pool
        self._table = table
        self._first = first
        self._bounded = bounded
        self._known_chunks: list[Chunk] = []
        self._all_resident = self._in_order = True

    @property
    def tokens(self) -> int:
        """Tokens that a streamed step can see at least, its own included; 0 without layer buffers."""
        most = self._pool.heap.most
        return self._pool.stage_slots if most is None else min(self._pool.stage_slots, most * CHUNK)

    def of(
        self, plan: Plan, start: int, count: int, ranking: Ranking | None, *, stream: bool
    ) -> tuple[View | None, bool]:
        """Return the view of a step of `count` tokens at `start`, None for the pool, and whether it sees everything.

        stream: the step may use layer buffers. It also uses them where the pool has the whole text, but in other blocks
        than a full cache: attention sums in the order of blocks, and would round differently.
        """
        if not self._bounded:
            return None, True
        layout = plan.layout
        if self._known_chunks is not layout.chunks:  # not `epoch`: a dropped plan had the same one
            self._known_chunks, self._all_resident = layout.chunks, everything_is_resident(layout, start)
            self._in_order = lies_in_order(layout, self._first)
        ordered = self._all_resident and (self._in_order or start < CHUNK)  # a layer buffer begins with a sealed chunk
        if ordered or not stream:
            return None, self._all_resident
        room = (self._pool.stage_slots - count - start % CHUNK) // CHUNK
        if self._pool.heap.most is not None:
            room = min(room, self._pool.heap.most)  # all images of a step must be in memory together
        if room < (start // CHUNK if self._all_resident else 1):
            return None, self._all_resident
        first, last = start // CHUNK, (start + count - 1) // CHUNK
        view = choose(start, room, self._table.protected(first, last), ranking)
        return view, view.whole
