"""Draft rows: where they lie, and how accepted rows come to their places."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..errors import SnapshotError
from ..pool.masks import Branches, leaving, moving
from ..pool.plan import Layout
from .copies import DeviceStates, SavedState
from .query_ring import QueryRing

if TYPE_CHECKING:
    from ..native.engine import PagedEngine

logger = logging.getLogger("kvflash_ggml")


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows written behind the text from position `start` on, where there is `room` for so many.

    path: the accepted rows, in the order of the text. state: recurrent state before the rows; None if the memory can
    roll back by itself. streamed: whether they saw more than the pool. branches: the rows of a tree; None for a chain.
    moved: how the path moved to its place, empty before. lost: the rows are tokens of the text, no longer in memory.
    """

    start: int
    tokens: Int32s
    room: int
    state: SavedState | None
    streamed: bool
    path: tuple[int, ...] = ()
    branches: Branches | None = None
    moved: list[int] = field(default_factory=list)
    lost: bool = False

    @property
    def kept(self) -> int:
        return len(self.path)

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + (len(self.tokens) if self.branches is None else int(self.branches.depth.max()) + 1)

    def with_row(self, row: int) -> DraftRows:
        """Return the rows with one more accepted: the next of a chain, a child of the last accepted of a tree."""
        before = row - 1 if self.branches is None else int(self.branches.parent[row])
        assert before == (self.path[-1] if self.path else -1)
        assert row < len(self.tokens)
        return replace(self, path=(*self.path, row))


def gather(
    engine: PagedEngine,
    layout: Layout,
    queries: QueryRing,
    ahead: DraftRows,
    tree: Branches,
    order: npt.NDArray[np.intp],
) -> None:
    """Move the rows of a tree's path to their places, and forget the other rows. It can be repeated.

    order: of the captured queries before.
    """
    start = ahead.start
    source, target = moving(ahead.path, tree.where)
    if not ahead.moved:
        for at in leaving(ahead.path, tree.where):
            engine.clear_cells(layout.slot_of(start + at), 1)
        where, to = ([layout.slot_of(start + at) for at in side] for side in (source, target))
        engine.settle(where, to, ahead.moved)
    if queries.rows and source:
        queries.moved(order, np.array(source, np.int32) + start, np.array(target, np.int32) + start)


def goes_back(engine: PagedEngine, seq: int, states: DeviceStates, ahead: DraftRows, length: int) -> bool:
    """Make the memory forget the rows from `length` on. Returns False where it cannot, as a window that is too
    short.
    """
    try:
        if ahead.state is not None:
            states.put(ahead.state, length, seq)
    except SnapshotError as err:
        logger.warning("the state before %d drafts cannot be put back: %s", len(ahead.tokens), err)
        return False
    return engine.truncate(length, seq=seq)
