"""The page table of one text: which chunk is in which block, and which chunk is evicted.

It is a pure mapping: nothing here moves a byte. A method returns a change as a `Plan`, or raises. `commit` puts the
plan's layout in place of the old one once the moves are done. Chunk `c` holds the positions [c*CHUNK, (c+1)*CHUNK).
Only the images know whether the host has a chunk.

Draft rows lie in the blocks of the layout beyond its length, until `accept` takes the first of them over and drops the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..constants import CHUNK
from ..errors import ConfigError, PoolExhausted
from . import residency
from .plan import ABSENT, NO_MOVES, Chunk, Images, Layout, Moves, Plan, moves_between
from .residency import Chunks, Ranking


class BlockAllocator:
    """The blocks that one text may hold, in the order in which they are handed out (0, 1, 2, ... by default).

    It keeps no list of free blocks: the page table says which blocks it holds. So no interrupt can make the two
    disagree, and a restored text continues in the blocks of the saved text.

    count: blocks that a text with a request can count on, whatever `order` becomes later. order: `count` blocks of the
    pool, each once.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None) -> None:
        self.order = list(range(count) if order is None else order)
        assert len(set(self.order)) == len(self.order) == count, "order must name every block once"
        self.count = count

    def free(self, taken: Iterable[int]) -> list[int]:
        """Return the blocks that `taken` does not name, in the order they are handed out."""
        out = set(taken)
        return [block for block in self.order if block not in out]


ANY = -2

PREFILL_FREE_SHARE = 0.25
"""Share of the blocks that are free for a prompt step which the step leaves to chunks that it may refer to."""


@dataclass(slots=True, kw_only=True)
class PageTableState:
    """The table of a swapped-out text: per chunk its block (or ABSENT), its last use, and its last score."""

    blocks: list[int]
    last_use: list[int]
    clock: int
    settled: bool
    pins: frozenset[int]
    scores: Ranking | None


class PageTable:
    """A page table with sinks, a tail, pins, and eviction by a ranking or of the least recently used chunk.

    blocks: where the table gets blocks from. images: the chunks on the host. sinks, tail: chunks at both ends that
    stay. bounded: the text can outgrow the blocks; otherwise chunks lie in the order of the text.
    """

    def __init__(self, blocks: BlockAllocator, images: Images, *, sinks: int, tail: int, bounded: bool = True) -> None:
        if bounded and sinks + tail + 2 > blocks.count:
            raise ConfigError(
                f"a pool of {blocks.count * CHUNK} tokens leaves nothing to evict beside {sinks} sink chunks and "
                f"a tail of {tail}: use at least {(sinks + tail + 2) * CHUNK} tokens"
            )
        self.blocks = blocks
        self.images = images
        self.sinks = sinks
        self.tail = tail
        self.bounded = bounded
        self.pins: set[int] = set()
        self.layout = Layout()

    # --- queries

    @property
    def chunks(self) -> list[Chunk]:
        return self.layout.chunks

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layout.length

    @property
    def held(self) -> frozenset[int]:
        """The blocks that hold the text."""
        return self.layout.blocks

    @property
    def quota(self) -> int:
        """The most blocks that the text can hold."""
        return len(self.blocks.order)

    @property
    def epoch(self) -> int:
        """A number that changes whenever a block changes its chunk."""
        return self.layout.epoch

    @property
    def resident(self) -> int:
        return len(self.resident_chunks)

    @property
    def resident_chunks(self) -> tuple[int, ...]:
        return self.layout.resident_chunks

    @property
    def unsaved(self) -> range:
        """Sealed chunks whose bytes are only on the device: the newest ones."""
        images = self.images
        first = end = self.layout.length // CHUNK
        while first and first - 1 not in images:
            first -= 1
        return range(first, end)

    def protected(self, first: int, last: int) -> set[int]:
        """Return the chunks that may not leave while [first, last] is appended."""
        return residency.protected(first, last, sinks=self.sinks, tail=self.tail, pins=self.pins)

    def protected_at(self, length: int) -> set[int]:
        """Return the chunks that may not leave between two steps of a text of `length` tokens."""
        head = max(0, length - 1) // CHUNK
        return self.protected(head, head)

    @property
    def unevictable(self) -> int:
        """How many resident chunks cannot leave between two steps: protected ones, and those without an image."""
        keep = self.protected_at(self.length)
        return sum(c in keep or c not in self.images for c in self.resident_chunks)

    def unprotected(self) -> tuple[Chunks, Chunks]:
        """Return the sealed chunks that reselection may move: (resident, evicted)."""
        sealed, keep, here = self.length // CHUNK, self.protected_at(self.length), self.resident_chunks
        inside = np.array([c for c in here if c < sealed and c not in keep], np.intp)
        return inside, residency.others(sealed, keep.union(here))

    def would_recall(self, start: int, ranking: Ranking) -> bool:
        """Return whether reselection would page anything in, for the tokens from `start` on."""
        keep = self.protected(start // CHUNK, max(0, self.length - 1) // CHUNK)
        return not self._best(self.resident_chunks, keep, ranking).issubset(self.resident_chunks)

    def room(self, start: int, *, spare: bool = False) -> int:
        """Return how many tokens one step can append at `start` without evicting its own chunks.

        spare: leave some blocks to chunks that a reselection would make resident beside the step.
        """
        if not self.bounded:
            return self.quota * CHUNK - start
        first = start // CHUNK
        able = self.quota - len(self.protected(first, first)) + 1
        if spare:
            able -= min(able - 1, max(1, int(PREFILL_FREE_SHARE * able)))
        return able * CHUNK - start % CHUNK

    # --- changes

    def pin_range(self, lo: int, hi: int) -> None:
        """Never evict the chunks of [lo, hi). ConfigError, and no new pin, if nothing could be evicted any more."""
        if not 0 <= lo < hi:
            raise ConfigError(f"a pin is [lo, hi) with 0 <= lo < hi, not [{lo}, {hi})")
        first, end = lo // CHUNK, (hi - 1) // CHUNK + 1
        if not self.bounded:
            end = min(end, self.blocks.count)  # later chunks do not exist
        self._check_pins(end - first, f"pinning [{lo}, {hi})")  # before a set of any size is made
        pins = self.pins.union(range(first, end))
        self._check_pins(len(pins), f"pinning [{lo}, {hi})")
        self.layout = replace(self.layout, settled=False)
        self.pins = pins

    def _check_pins(self, count: int, what: str) -> None:
        max_pins = self.blocks.count - self.sinks - self.tail - 2
        if self.bounded and count > max_pins:
            raise ConfigError(
                f"{what} would hold {count} chunks, but a pool of {self.blocks.count} blocks can "
                f"hold {max_pins} pins: use a larger pool or pin less"
            )

    def unpin_all(self) -> None:
        self.pins = set()

    def reserve(
        self,
        start: int,
        count: int,
        ranking: Ranking | None = None,
        rebuild: bool = False,
        places: PageTableState | None = None,
    ) -> Plan:
        """Plan the text with positions [start, start + count), and with whatever must be resident beside them.

        ranking: the lowest score is evicted first. rebuild: make the chunks with the best scores resident. places: plan
        as if the text lay as in this table of it. Raises PoolExhausted.
        """
        old = self.layout
        assert start == old.length
        assert count > 0
        assert len(old.chunks) == -(-start // CHUNK), "rows ahead of the text are neither taken over nor dropped"
        first, last = start // CHUNK, (start + count - 1) // CHUNK
        if old.settled and not rebuild and places is None and first == last and start % CHUNK:
            # once a token: not `replace`, which reads every field
            return Plan(Layout(old.chunks, start + count, old.clock, old.epoch, True, old.resident_chunks), NO_MOVES)
        known = old.chunks if places is None else self._placed(places)
        here = old.resident_chunks if places is None else residency.resident(known)
        keep = self.protected(first, last)
        if rebuild and ranking is not None:
            keep |= self._best(here, keep, ranking)
        missing = sorted(c for c in keep if c >= len(known) or known[c].block == ABSENT)
        short = max(0, len(missing) - len(self.blocks.free([known[c].block for c in here])))
        able = residency.victims(known, here, self.images, keep, ranking) if short else []
        if len(able) < short:
            raise PoolExhausted(
                f"{short} blocks are needed and {len(able)} can be evicted from a pool of {self.quota}: "
                f"append fewer tokens at once, pin less, or use a larger pool"
            )
        victims = able[:short]

        moves, clock = Moves(), max(old.clock, 0 if places is None else places.clock) + 1
        chunks = known + [Chunk() for _ in range(len(known), last + 1)]
        _evict(victims, chunks, moves)
        stay = set(here).difference(victims)
        free = self.blocks.free([chunks[c].block for c in stay])
        assert len(free) >= len(missing), "a text longer than the pool that holds it"
        for c, block in zip(missing, free, strict=False):
            (moves.recall if c in self.images else moves.fresh).append((c, block))
            chunks[c] = Chunk(block, clock)
        for c in range(first, last + 1):
            chunks[c] = Chunk(chunks[c].block, clock)
        if places is not None:
            moves = moves_between(old.chunks, chunks, self.images)
        if first in self.images:
            moves.drop.append(first)  # its bytes change in the step
        there = tuple(sorted(stay.union(missing)))
        epoch = old.epoch + bool(moves)
        return Plan(Layout(chunks, start + count, clock, epoch, True, there), moves)

    def truncate(self, length: int) -> Plan:
        """Plan the text without positions >= `length`, in the pool and on the host."""
        old = self.layout
        assert 0 <= length <= old.length
        keep = -(-length // CHUNK)
        chunks, moves = old.chunks[:keep], Moves()
        for c, chunk in enumerate(old.chunks[keep:], keep):
            moves.drop.append(c)
            if chunk.block != ABSENT:
                moves.evict.append((c, chunk.block))
        if length % CHUNK and chunks[-1].block != ABSENT:
            moves.drop.append(keep - 1)  # open again: the block is the only true copy
        there = tuple(c for c in old.resident_chunks if c < keep)
        return Plan(Layout(chunks, length, old.clock, old.epoch + 1, False, there), moves)

    def commit(self, plan: Plan) -> None:
        """Take a plan over whose moves are done. Repeat it if it was interrupted."""
        for c in plan.moves.drop:
            self.images.drop(c)
        self.layout = plan.layout  # last: until then the plan names the images left to drop

    def commit_ahead(self, plan: Plan) -> None:
        """Take a plan over whose moves are done and whose rows are draft rows. `accept` follows."""
        self.commit(plan._replace(layout=replace(plan.layout, length=self.length)))

    def shrink(self, max_blocks: int, ranking: Ranking | None = None) -> Plan:
        """Plan the text in `max_blocks` blocks, or in the `unevictable` ones. ranking: the lowest leave first."""
        old = self.layout
        keep = self.protected_at(old.length)
        able = residency.victims(old.chunks, old.resident_chunks, self.images, keep, ranking)
        gone = able[: max(0, len(old.resident_chunks) - max_blocks)]
        if not gone:
            return Plan(old, NO_MOVES)
        chunks, moves = [*old.chunks], Moves()
        _evict(gone, chunks, moves)
        there = tuple(sorted(set(old.resident_chunks).difference(gone)))
        return Plan(Layout(chunks, old.length, old.clock, old.epoch + 1, old.settled, there), moves)

    def accept(self, length: int) -> Plan:
        """Plan the text with the draft rows before `length`, and without the other draft rows."""
        old = self.layout
        chunks, moves = old.chunks[: -(-length // CHUNK)], Moves()
        for c in range(len(chunks), len(old.chunks)):
            moves.evict.append((c, old.chunks[c].block))
        # the tail was that of the last draft chunk, which may be gone
        settled = old.settled and not moves
        there = tuple(c for c in old.resident_chunks if c < len(chunks))
        return Plan(Layout(chunks, length, old.clock, old.epoch + bool(moves), settled, there), moves)

    def strand(self, c: int) -> None:
        """Note that a block has lost its bytes and cannot be filled again: the chunk is only on the host."""
        old = self.layout
        chunks = [*old.chunks]
        chunks[c] = replace(chunks[c], block=ABSENT)
        there = tuple(other for other in old.resident_chunks if other != c)
        self.layout = Layout(chunks, old.length, old.clock, old.epoch + 1, False, there)

    def state(self, ranking: Ranking | None = None) -> PageTableState:
        """Return the table as it is, to be loaded later."""
        return PageTableState(
            blocks=[chunk.block for chunk in self.chunks],
            last_use=[chunk.last_use for chunk in self.chunks],
            clock=self.layout.clock,
            settled=self.layout.settled,
            pins=frozenset(self.pins),
            scores=ranking,
        )

    def place(self, length: int, table: PageTableState) -> list[int]:
        """Return where the chunks of a table would go: to their blocks, to ANY if a block is taken, or ABSENT.

        The order of the chunks decides how the logits round. So in a pool that holds the whole context they go where
        its own texts have them, and otherwise to the same places in this text's share, if it can hold all of them. If
        it cannot, the chunks with the best scores stay. length: tokens of the text. ConfigError if the pool cannot hold
        the table's pins beside its own.
        """
        pins = self.pins | table.pins
        self._check_pins(len(pins), f"pinning {len(pins)} chunks, as saved,")
        able = [c for c, block in enumerate(table.blocks) if block != ABSENT or not self.bounded]
        if len(able) > self.quota:
            keep = self.protected_at(length) | pins
            scores = residency.known(table.scores, len(table.blocks)).tolist()
            able.sort(key=lambda c: (c not in keep, -scores[c], -table.last_use[c], -c))
        resident, free = set(able[: self.quota]), set(self.blocks.order)
        blocks = table.blocks if self.bounded else self.blocks.order[: len(table.blocks)]
        if len(able) <= self.quota and not free.issuperset([blocks[c] for c in able]):
            blocks = self._shared_out(blocks, able)
        return [ABSENT if c not in resident else block if block in free else ANY for c, block in enumerate(blocks)]

    def _shared_out(self, blocks: list[int], able: list[int]) -> list[int]:
        """Return the blocks of chunks of another share: the same places in this one, or at least the same order."""
        own, blocks = sorted(self.blocks.order), blocks.copy()
        held = sorted(able, key=blocks.__getitem__)
        there = [own[blocks[c] % len(own)] for c in held]
        for c, block in zip(held, own if any(a >= b for a, b in pairwise(there)) else there, strict=False):
            blocks[c] = block
        return blocks

    def load(self, length: int, table: PageTableState) -> None:
        """After a reset, take over the table of a text of `length` tokens, in the blocks that `place` returns."""
        assert not self.chunks
        assert len(table.blocks) == len(table.last_use) == -(-length // CHUNK)
        places = self.place(length, table)
        assert len(set(places) - {ABSENT, ANY}) == sum(block >= 0 for block in places), "two chunks in one block"
        chunks = self._chunks_at(places, table)
        self.pins |= table.pins
        here = residency.resident(chunks)
        there = all(c in here for c in self.protected_at(length) if c < len(chunks))
        self.layout = Layout(
            chunks=chunks,
            length=length,
            clock=table.clock,
            epoch=self.epoch + 1,
            settled=table.settled and there and places == table.blocks,
            resident_chunks=here,
        )

    def reset(self) -> None:
        """Forget the text. Pins stay, as positions of the next text."""
        self.layout = Layout(clock=self.layout.clock, epoch=self.epoch + 1)

    def _best(self, here: Sequence[int], keep: set[int], ranking: Ranking) -> set[int]:
        """Return the chunks with the best scores, as many as fit beside the protected chunks. here: resident chunks."""
        return residency.best(here, self.length // CHUNK, self.images, keep, ranking, self.quota - len(keep))

    def _placed(self, table: PageTableState) -> list[Chunk]:
        """Return the chunks where a table of this text has them. A chunk that is only in the pool stays where it is."""
        stay = {c: chunk.block for c, chunk in enumerate(self.chunks) if chunk.block != ABSENT and c not in self.images}
        taken = set(stay.values())
        places = [
            stay.get(c, ANY if block in taken else block) for c, block in enumerate(self.place(self.length, table))
        ]
        return self._chunks_at(places, table)

    def _chunks_at(self, places: Sequence[int], table: PageTableState) -> list[Chunk]:
        """Return the chunks of a table in these blocks, a free block for each ANY as long as there is one."""
        free = iter(self.blocks.free(places))
        return [
            Chunk(next(free, ABSENT) if block == ANY else block, use)
            for block, use in zip(places, table.last_use, strict=True)
        ]


def _evict(gone: Iterable[int], chunks: list[Chunk], moves: Moves) -> None:
    """Take the blocks of some chunks away: in `chunks`, and as a move."""
    for c in gone:
        moves.evict.append((c, chunks[c].block))
        chunks[c] = replace(chunks[c], block=ABSENT)
