"""A change of the page table as a value: the table as it will be, and the moves. Making a plan moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..constants import CHUNK

ABSENT = -1


class Images(Protocol):
    """The chunks that the host has. See `host.store.HostStore`."""

    def __contains__(self, chunk: int) -> bool: ...

    def drop(self, chunk: int) -> None:
        """Forget the image of a chunk, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """block: the block that holds the chunk, or ABSENT. last_use: clock of the last append or recall."""

    block: int = ABSENT
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves of a plan on the device, as (chunk, block) pairs. They happen in this order.

    evict: free the block. recall: fill the block from the host. fresh: a block for a chunk without bytes. drop: chunks
    whose image becomes stale or void; `PageTable.commit` drops it.
    """

    evict: list[tuple[int, int]] = field(default_factory=list)
    recall: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.evict or self.recall or self.fresh)

    @property
    def blocks(self) -> set[int]:
        """All blocks of the moves."""
        return {block for _, block in (*self.evict, *self.recall, *self.fresh)}


NO_MOVES = Moves()


def moves_between(old: Sequence[Chunk], new: Sequence[Chunk], images: Images) -> Moves:
    """Return the moves from the chunks `old` to the chunks `new` of one text. `new` may have more chunks."""
    moves = Moves()
    for c, chunk in enumerate(new):
        block = old[c].block if c < len(old) else ABSENT
        if block == chunk.block:
            continue
        if block != ABSENT:
            moves.evict.append((c, block))
        if chunk.block != ABSENT:
            (moves.recall if c in images else moves.fresh).append((c, chunk.block))
    return moves


@dataclass(slots=True)  # one is made for each token: freezing it would take longer than all of its fields
class Layout:
    """The page table at one moment. A change builds another layout, which replaces this one in a single statement.

    length: committed tokens. clock: number of the last change. epoch: changes whenever a block changes its chunk.
    settled: all protected chunks at the text's end are resident. resident_chunks: the chunks with a block, ascending.
    They are kept, so that a step of a text of 16,384 chunks reads only the few chunks in the pool.
    """

    chunks: list[Chunk] = field(default_factory=list)
    length: int = 0
    clock: int = 0
    epoch: int = 0
    settled: bool = True
    resident_chunks: tuple[int, ...] = ()

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self.chunks[c].block for c in self.resident_chunks)

    def slot_of(self, pos: int) -> int:
        """Return the slot of a position, or ABSENT."""
        block = self.chunks[pos // CHUNK].block
        return ABSENT if block == ABSENT else block * CHUNK + pos % CHUNK

    def slots(self, start: int, out: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Fill `out` with the slots of the positions from `start` on, all of them resident, and return it."""
        n, at = len(out), 0
        while at < n:
            size = min(CHUNK - (start + at) % CHUNK, n - at)
            slot = self.slot_of(start + at)
            out[at : at + size] = np.arange(slot, slot + size)
            at += size
        return out


class Plan(NamedTuple):
    """The table once the moves are done, and the moves."""

    layout: Layout
    moves: Moves
