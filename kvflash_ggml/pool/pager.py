"""The page table of one sequence: which chunk is in which block, and who has to leave.

Pure mapping: nothing here moves a byte. A call either changes the table and says what must move, or raises and changes
nothing. Chunk `c` holds the positions [c*CHUNK, (c+1)*CHUNK).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..config import CHUNK
from ..errors import ConfigError, PoolExhausted
from .blocks import Blocks

ABSENT = -1
ANY = -2
Scores = npt.NDArray[np.floating]


@dataclass(slots=True)
class Chunk:
    """block: where it is, or ABSENT. on_host: the host holds its bytes. last_use: clock of last append or recall."""

    block: int = ABSENT
    on_host: bool = False
    last_use: int = 0


@dataclass(slots=True)
class Moves:
    """What a change of the table asks of the device, as (chunk, block) pairs, to be done in this order.

    evict: the block is free now. drop: the chunk no longer exists. recall: fill the block from the host. fresh: a block
    for a chunk that has no bytes yet.
    """

    evict: list[tuple[int, int]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    recall: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.evict or self.drop or self.recall or self.fresh)


NO_MOVES = Moves()

SPARE = 0.25
"""Share of the blocks that are free for a span of a prompt, which is left to chunks that the span may refer to."""


@dataclass(slots=True, kw_only=True)
class PageTable:
    """A page table that can be put back: per chunk its block (or ABSENT) and its last use; see `Pager` for the rest."""

    blocks: list[int]
    last_use: list[int]
    clock: int
    settled: bool
    pins: frozenset[int]
    scores: Scores | None


def known_scores(scores: Scores | None, count: int) -> npt.NDArray[np.float64]:
    """The scores of `count` chunks; those newer than the look, or all without one, count as best."""
    known = np.full(count, np.inf)
    if scores is not None:
        known[: len(scores)] = scores[:count]
    return known


class Pager:
    """Page table with sinks, a tail window, pins and least-recently-used eviction.

    `length` counts committed tokens. `epoch` changes whenever a block changes its chunk. bounded: the text can outgrow
    the blocks; if not, nothing is ever evicted and every setting fits.
    """

    def __init__(self, blocks: Blocks, *, sinks: int, tail: int, bounded: bool = True) -> None:
        if bounded and sinks + tail + 2 > blocks.count:
            raise ConfigError(
                f"a pool of {blocks.count * CHUNK} tokens leaves nothing to evict beside {sinks} sink chunks and "
                f"a tail of {tail}: use at least {(sinks + tail + 2) * CHUNK} tokens"
            )
        self.blocks = blocks
        self.sinks = sinks
        self.tail = tail
        self.bounded = bounded
        self.pins: set[int] = set()
        self.scores: Scores | None = None  # per chunk, of the running request; newer chunks count as best
        self.chunks: list[Chunk] = []
        self.length = 0
        self.epoch = 0
        self._clock = 0
        self._settled = True  # whatever must stay beside the append head is resident

    # --- queries

    @property
    def resident(self) -> int:
        return sum(chunk.block != ABSENT for chunk in self.chunks)

    @property
    def resident_chunks(self) -> tuple[int, ...]:
        return tuple(c for c, chunk in enumerate(self.chunks) if chunk.block != ABSENT)

    def slot_of(self, pos: int) -> int:
        """The slot of a position, or ABSENT."""
        block = self.chunks[pos // CHUNK].block
        return ABSENT if block == ABSENT else block * CHUNK + pos % CHUNK

    def slots(self, start: int, out: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Fill `out` with the slots of the positions from `start` on, all of them resident."""
        n = len(out)
        if n == 1:
            out[0] = self.slot_of(start)
            return out
        at = 0
        while at < n:
            size = min(CHUNK - (start + at) % CHUNK, n - at)
            slot = self.slot_of(start + at)
            out[at : at + size] = np.arange(slot, slot + size)
            at += size
        return out

    def protected(self, first: int, last: int) -> set[int]:
        """Chunks that may not leave while [first, last] is appended: sinks, pins, the span and the window before it.

        A span within two chunks, such as the end of a prompt, has the window of the last: a block more to choose with.
        """
        window = range(max(0, min(first, first - self.tail if last - first > 1 else last - self.tail)), last + 1)
        return {*range(min(self.sinks, last + 1)), *(pin for pin in self.pins if pin <= last), *window}

    def unprotected(self) -> tuple[list[int], list[int]]:
        """Sealed chunks that reselection may move: (resident, evicted)."""
        head = max(0, self.length - 1) // CHUNK
        kept = self.protected(head, head)
        able = [c for c in range(self.length // CHUNK) if c not in kept]
        resident = [c for c in able if self.chunks[c].block != ABSENT]
        return resident, [c for c in able if self.chunks[c].block == ABSENT]

    def would_recall(self, start: int) -> bool:
        """Would reselection bring anything back, for the tokens from `start` on?"""
        kept = self.protected(start // CHUNK, max(0, self.length - 1) // CHUNK)
        return any(self.chunks[c].block == ABSENT for c in self._best(kept))

    def room(self, start: int, *, spare: bool = False) -> int:
        """How many tokens can be appended at `start` in one span without evicting the span itself.

        spare: leave some blocks to what a reselection would have resident beside the span.
        """
        if not self.bounded:
            return self.blocks.count * CHUNK - start
        first = start // CHUNK
        able = self.blocks.count - len(self.protected(first, first)) + 1
        if spare:
            able -= min(able - 1, max(1, int(SPARE * able)))
        return able * CHUNK - start % CHUNK

    # --- changes

    def pin_range(self, lo: int, hi: int) -> None:
        """Never evict the chunks of [lo, hi). Refused as a whole if no victim would be left."""
        if not 0 <= lo < hi:
            raise ConfigError(f"a pin is [lo, hi) with 0 <= lo < hi, not [{lo}, {hi})")
        pins = self.pins | set(range(lo // CHUNK, (hi - 1) // CHUNK + 1))
        self._check_pins(pins, f"pinning [{lo}, {hi})")
        self.pins = pins
        self._settled = False

    def _check_pins(self, pins: Set[int], what: str) -> None:
        most = self.blocks.count - self.sinks - self.tail - 2
        if self.bounded and len(pins) > most:
            raise ConfigError(
                f"{what} would hold {len(pins)} chunks, but a pool of {self.blocks.count} blocks can "
                f"hold {most} pins: use a larger pool or pin less"
            )

    def unpin_all(self) -> None:
        self.pins = set()

    def reserve(self, start: int, count: int, *, reselect: bool = False) -> Moves:
        """Make room for positions [start, start + count), and bring back whatever must be resident beside them.

        reselect: also rebuild the rest of the resident set, so that it holds the chunks with the best scores.
        """
        assert start == self.length
        assert count > 0
        first, last = start // CHUNK, (start + count - 1) // CHUNK
        if self._settled and not reselect and first == last and start % CHUNK:
            return NO_MOVES
        kept = self.protected(first, last)
        if reselect and self.scores is not None:
            kept |= self._best(kept)
        missing = sorted(c for c in kept if c >= len(self.chunks) or self.chunks[c].block == ABSENT)
        victims = self._victims(len(missing) - len(self.blocks), kept)

        moves = Moves()
        for c in victims:
            moves.evict.append((c, self.chunks[c].block))
            self._release(self.chunks[c])
        self.chunks.extend(Chunk() for _ in range(len(self.chunks), last + 1))
        self._clock += 1
        for c in missing:
            chunk = self.chunks[c]
            chunk.block = self.blocks.take()
            (moves.recall if chunk.on_host else moves.fresh).append((c, chunk.block))
            chunk.last_use = self._clock
        for c in range(first, last + 1):
            self.chunks[c].on_host = False  # its bytes are about to change
            self.chunks[c].last_use = self._clock
        self.epoch += bool(moves)
        self._settled = True
        return moves

    def commit(self, count: int) -> range:
        """The reserved positions have been written. Returns the chunks that this has sealed."""
        before = self.length // CHUNK
        self.length += count
        return range(before, self.length // CHUNK)

    def saved(self, c: int) -> None:
        """The host now holds the bytes of a sealed chunk, so evicting it moves nothing."""
        assert c < self.length // CHUNK
        self.chunks[c].on_host = True

    def recall_failed(self, c: int) -> None:
        """The bytes of a chunk could not be brought back: it stays on the host only."""
        self._release(self.chunks[c])
        self.chunks[c].on_host = True
        self.epoch += 1
        self._settled = False

    def truncate(self, length: int) -> Moves:
        """Forget positions >= `length`, on both tiers, and chunks that were reserved but never committed."""
        assert 0 <= length <= self.length
        keep = -(-length // CHUNK)
        moves = Moves()
        for c in range(keep, len(self.chunks)):
            chunk = self.chunks[c]
            moves.drop.append(c)
            if chunk.block != ABSENT:
                moves.evict.append((c, chunk.block))
                self._release(chunk)
        del self.chunks[keep:]
        if length % CHUNK and self.chunks[-1].block != ABSENT:
            self.chunks[-1].on_host = False  # open again: the block is the only true copy
        self.length = length
        self.epoch += 1
        self._settled = False
        return moves

    def freeze(self) -> PageTable:
        """The table as it is, to be adopted later."""
        return PageTable(
            blocks=[chunk.block for chunk in self.chunks],
            last_use=[chunk.last_use for chunk in self.chunks],
            clock=self._clock,
            settled=self._settled,
            pins=frozenset(self.pins),
            scores=self.scores,
        )

    def place(self, length: int, table: PageTable) -> list[int]:
        """Where the chunks of a table would go: to their blocks, to ANY where there is no such block, or ABSENT.

        length: tokens of the text. Of more resident chunks than this pool can hold, those with the best scores come
        first. ConfigError if it cannot hold the pins of the table beside those that are here.
        """
        pins = self.pins | table.pins
        self._check_pins(pins, f"pinning {len(pins)} chunks, as saved,")
        able = [c for c, block in enumerate(table.blocks) if block != ABSENT or not self.bounded]
        if len(able) > self.blocks.count:
            head = max(0, length - 1) // CHUNK
            kept = self.protected(head, head) | pins
            scores = known_scores(table.scores, len(table.blocks)).tolist()
            able.sort(key=lambda c: (c not in kept, -scores[c], -table.last_use[c], -c))
        resident = set(able[: self.blocks.count])
        return [
            ABSENT if c not in resident else block if 0 <= block < self.blocks.count else ANY
            for c, block in enumerate(table.blocks)
        ]

    def adopt(self, length: int, table: PageTable) -> None:
        """After a reset: take over the table of a text of `length` tokens, in the places that `place` tells.

        Chunks that are sealed have an image too, so that they can leave again.
        """
        assert not self.chunks
        assert len(table.blocks) == len(table.last_use) == -(-length // CHUNK)
        places = self.place(length, table)
        self.pins |= table.pins
        self.scores = table.scores
        self.length = length
        self._clock = table.clock
        for block in places:
            if block >= 0:
                self.blocks.claim(block)
        for c, (block, use) in enumerate(zip(places, table.last_use, strict=True)):
            place = self.blocks.take() if block == ANY else block
            self.chunks.append(Chunk(place, on_host=place == ABSENT or c < length // CHUNK, last_use=use))
        head = max(0, length - 1) // CHUNK
        there = all(self.chunks[c].block != ABSENT for c in self.protected(head, head) if c < len(self.chunks))
        self._settled = table.settled and there and places == table.blocks
        self.epoch += 1

    def reset(self) -> None:
        """Forget the text. Pins stay, as positions of the next one."""
        self.blocks.reset()
        self.chunks.clear()
        self.scores = None
        self.length = 0
        self.epoch += 1

    def _score(self, c: int) -> float:
        return float(self.scores[c]) if self.scores is not None and c < len(self.scores) else math.inf

    def _best(self, kept: set[int]) -> set[int]:
        """The chunks with the best scores, as many as fit beside `kept`; of equals, the newest text stays."""
        room = self.blocks.count - len(kept)
        able = np.array([c for c in range(self.length // CHUNK) if c not in kept], np.intp)
        can_leave = [self.chunks[c].block == ABSENT or self.chunks[c].on_host for c in able]
        order = np.lexsort((-able, -known_scores(self.scores, len(self.chunks))[able], can_leave))
        return set(able[order[: max(0, room)]].tolist())

    def _victims(self, count: int, kept: set[int]) -> list[int]:
        """The `count` chunks outside `kept` with the lowest scores, or least recently used without scores or of equals.

        Only chunks whose bytes are on the host can leave: eviction itself moves nothing and cannot fail.
        """
        if count <= 0:
            return []
        able = [c for c, chunk in enumerate(self.chunks) if chunk.block != ABSENT and chunk.on_host and c not in kept]
        if len(able) < count:
            raise PoolExhausted(
                f"{count} blocks are needed and {len(able)} can be evicted from a pool of {self.blocks.count}: "
                f"append fewer tokens at once, pin less, or use a larger pool"
            )
        return sorted(able, key=lambda c: (self._score(c), self.chunks[c].last_use, c))[:count]

    def _release(self, chunk: Chunk) -> None:
        self.blocks.give(chunk.block)
        chunk.block = ABSENT

    # --- for tests

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and chunks are in one-to-one order and no token is lost."""
        taken = [chunk.block for chunk in self.chunks if chunk.block != ABSENT]
        assert len(taken) == len(set(taken)), "two chunks share a block"
        assert not set(taken) & self.blocks.free(), "a taken block is free"
        assert len(taken) + len(self.blocks) == self.blocks.count, "a block is lost"
        assert len(self.chunks) >= -(-self.length // CHUNK), "a committed chunk has no entry"
        for c, chunk in enumerate(self.chunks[: -(-self.length // CHUNK)]):
            assert chunk.block != ABSENT or chunk.on_host, f"chunk {c} is neither resident nor on the host"
