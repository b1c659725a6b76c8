"""A change of the page table as a value: what it will be, and what has to move. Nothing is done by making one."""

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
        """It has this one no longer; nothing, if it never had."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """block: where it is, or ABSENT. last_use: clock of last append or recall."""

    block: int = ABSENT
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """What a change of the table asks of the device, as (chunk, block) pairs, to be done in this order.

    evict: the block is free now. recall: fill the block from the host. fresh: a block for a chunk that has no bytes
    yet. drop: with the change the host has these chunks no longer, as they are gone, or their bytes are others;
    `PageTable.commit` does that.
    """

    evict: list[tuple[int, int]] = field(default_factory=list)
    recall: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.evict or self.recall or self.fresh)

    @property
    def blocks(self) -> set[int]:
        """All blocks that are touched."""
        return {block for _, block in (*self.evict, *self.recall, *self.fresh)}


NO_MOVES = Moves()


def moves_between(old: Sequence[Chunk], new: Sequence[Chunk], images: Images) -> Moves:
    """What has to move for chunks of one text to lie as in `new`: there may be more of them than in `old`."""
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


@dataclass(frozen=True, slots=True)
class Layout:
    """The table at one moment. A change makes another one aside, which takes its place in a single statement.

    length: committed tokens. clock: of the last change. epoch: changes whenever a block changes its chunk. settled:
    whatever must stay beside the append head is resident. resident_chunks: those that have a block, ascending; kept,
    so that a step of a text of 16,384 chunks looks at the few in the pool only.
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
        """The slot of a position, or ABSENT."""
        block = self.chunks[pos // CHUNK].block
        return ABSENT if block == ABSENT else block * CHUNK + pos % CHUNK

    def slots(self, start: int, out: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Fill `out` with the slots of the positions from `start` on, all of them resident."""
        n = len(out)
        if n == 1:  # once a token
            out[0] = self.chunks[start // CHUNK].block * CHUNK + start % CHUNK
            return out
        at = 0
        while at < n:
            size = min(CHUNK - (start + at) % CHUNK, n - at)
            slot = self.slot_of(start + at)
            out[at : at + size] = np.arange(slot, slot + size)
            at += size
        return out


class Plan(NamedTuple):
    """What the table will be, once the moves are done."""

    layout: Layout
    moves: Moves
