"""The page table against a plain model of it, under random use."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.integrity import check_table
from support.on_host import OnHost, save

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, PoolExhausted
from kvflash_ggml.pool.page_table import BlockAllocator, PageTable, PageTableState
from kvflash_ggml.pool.plan import ABSENT, Moves

COUNT = 10


class PagerMachine(RuleBasedStateMachine):
    """The model: where each chunk is, what the host has, and when each was last used."""

    @initialize(
        sinks=st.integers(0, 3),
        tail=st.integers(1, 4),
        order=st.permutations(range(COUNT)),
    )
    def begin(self, sinks: int, tail: int, order: list[int]) -> None:
        self.table = PageTable(BlockAllocator(COUNT, order), OnHost(), sinks=sinks, tail=tail)
        self.order = order
        self.sinks, self.tail = sinks, tail
        self.where: list[int | None] = []
        self.host: set[int] = set()
        self.use: dict[int, int] = {}
        self.clock = 0
        self.length = 0
        self.pins: set[int] = set()
        self.epoch = self.table.epoch

    # --- what may happen

    @rule(data=st.data(), save=st.booleans())
    def append(self, data: st.DataObject, save: bool) -> None:
        """Whole life of a step: reserve, write, commit, and perhaps the copy to the host."""
        count = data.draw(st.integers(1, max(1, self.table.room(self.length))), "count")
        if self._reserve(count) is not None and save:
            self._save_all()

    @rule()
    def one_more(self) -> None:
        self._reserve(1)

    @rule(count=st.integers(1, 3 * CHUNK))
    def reserve_and_fail(self, count: int) -> None:
        """The step itself fails: its plan is of no use, and nothing has changed."""
        before = self.table.layout
        saved, images = copy.deepcopy(before), copy.copy(self.table.images)
        with contextlib.suppress(PoolExhausted):
            self.table.reserve(self.length, count)
        assert self.table.layout is before
        assert before == saved
        assert self.table.images == images

    @rule(data=st.data())
    def lose_a_block(self, data: st.DataObject) -> None:
        """What a failed step had evicted cannot be brought back."""
        able = [c for c in range(self.length // CHUNK) if self.where[c] is not None and c in self.host]
        if able:
            c = data.draw(st.sampled_from(able), "chunk")
            self.table.strand(c)
            self.where[c] = None
            self._epoch_moved(True)

    @rule()
    def save(self) -> None:
        self._save_all()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        self._truncate(data.draw(st.integers(0, self.length), "length"))

    @precondition(lambda self: self.length < 200 * CHUNK)
    @rule(lo=st.integers(0, 20 * CHUNK), size=st.integers(1, 3 * CHUNK))
    def pin(self, lo: int, size: int) -> None:
        wanted = self.pins | {pos // CHUNK for pos in range(lo, lo + size)}
        if len(wanted) + self.sinks + self.tail + 2 > COUNT:
            with pytest.raises(ConfigError):
                self.table.pin_range(lo, lo + size)
        else:
            self.table.pin_range(lo, lo + size)
            self.pins = wanted
        assert self.table.pins == self.pins

    @rule()
    def unpin(self) -> None:
        self.table.unpin_all()
        self.pins = set()

    @rule()
    def reset(self) -> None:
        self.table.reset()
        self._forget()
        self._epoch_moved(True)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """A snapshot of any placement is loaded."""
        length = data.draw(st.integers(0, 15 * CHUNK), "length")
        places = data.draw(st.permutations([*range(COUNT), *[ABSENT] * 15]), "places")
        places = places[: -(-length // CHUNK)]
        self.table.reset()
        self._forget()
        uses = [data.draw(st.integers(0, self.clock + 2), "use") for _ in places]
        self.clock = data.draw(st.integers(max(uses, default=0), self.clock + 5), "clock")
        table = PageTableState(
            blocks=list(places), last_use=uses, clock=self.clock, settled=False, pins=frozenset(), scores=None
        )
        self.table.load(length, table)
        self.length = length
        for c, block in enumerate(places):
            self.where.append(None if block == ABSENT else block)
            self.use[c] = uses[c]
            if block == ABSENT or c < length // CHUNK:
                self.host.add(c)
        self.table.images.update(self.host)
        self._epoch_moved(True)

    # --- what must hold

    @invariant()
    def agrees(self) -> None:
        check_table(self.table)
        assert self.table.length == self.length
        assert [None if c.block == ABSENT else c.block for c in self.table.chunks] == self.where
        assert self.table.images == self.host
        taken = {block for block in self.where if block is not None}
        sealed = range(self.length // CHUNK)
        newest = max((c for c in sealed if c in self.host), default=-1)
        assert list(self.table.unsaved) == [c for c in sealed if c > newest]
        assert self.table.resident == len(taken)
        for pos in {0, self.length // 2, self.length - 1} - {-1}:
            if pos < self.length:
                block = self.where[pos // CHUNK]
                assert self.table.layout.slot_of(pos) == (ABSENT if block is None else block * CHUNK + pos % CHUNK)

    @invariant()
    def room_is_exact(self) -> None:
        trial = copy.deepcopy(self.table)
        save(trial)
        room = trial.room(self.length)
        assert room > CHUNK
        more = copy.deepcopy(trial)
        trial.commit(trial.reserve(self.length, room))
        check_table(trial)
        with pytest.raises(PoolExhausted):
            more.reserve(self.length, room + 1)

    # --- the model's own arithmetic

    def _reserve(self, count: int) -> Moves | None:
        first, last = self.length // CHUNK, (self.length + count - 1) // CHUNK
        oldest = first - self.tail if last - first > 1 else last - self.tail
        kept = {c for c in range(last + 1) if c < self.sinks or c in self.pins or c >= min(first - 1, oldest)}
        absent = [c for c in sorted(kept) if c >= len(self.where) or self.where[c] is None]
        taken = {block for block in self.where if block is not None}
        able = [c for c, block in enumerate(self.where) if block is not None and c in self.host and c not in kept]
        short = len(absent) - (COUNT - len(taken))
        before = copy.deepcopy(self.table.layout)
        if short > len(able):
            with pytest.raises(PoolExhausted):
                self.table.reserve(self.length, count)
            assert self.table.layout == before
            return None
        victims = sorted(able, key=lambda c: (self.use[c], c))[: max(0, short)]
        plan = self.table.reserve(self.length, count)
        assert self.table.layout == before, "a plan alone changes nothing"
        self.table.commit(plan)
        moves = plan.moves

        assert [c for c, _ in moves.evict] == victims
        assert not kept & set(victims), "a protected chunk was evicted"
        assert set(moves.drop) == self.host & set(range(first, last + 1)), "these are about to change"
        assert sorted(c for c, _ in moves.recall) == [c for c in absent if c in self.host]
        assert sorted(c for c, _ in moves.fresh) == [c for c in absent if c not in self.host]
        for c, block in moves.evict:
            assert self.where[c] == block
            self.where[c] = None
            taken.remove(block)
        self.where.extend([None] * (last + 1 - len(self.where)))
        free = [block for block in self.order if block not in taken]
        places = dict(moves.recall + moves.fresh)
        assert [places[c] for c in absent] == free[: len(absent)], "blocks are not handed out in order"
        for c in absent:
            self.where[c] = places[c]
        self._touch([*absent, *range(first, last + 1)], moved=bool(absent or victims))
        self.host -= set(range(first, last + 1))
        self._epoch_moved(bool(absent or victims))
        self.length += count
        return moves

    def _touch(self, chunks: list[int], *, moved: bool) -> None:
        self.clock += 1
        for c in chunks:
            self.use[c] = self.clock

    def _truncate(self, length: int) -> None:
        keep = -(-length // CHUNK)
        plan = self.table.truncate(length)
        self.table.commit(plan)
        moves = plan.moves
        gone = range(keep, len(self.where))
        reopened = [keep - 1] if length % CHUNK and self.where[keep - 1] is not None else []
        assert sorted(moves.drop) == [*reopened, *gone]
        assert sorted(moves.evict) == [(c, self.where[c]) for c in gone if self.where[c] is not None]
        assert not moves.recall
        assert not moves.fresh
        del self.where[keep:]
        self.host -= set(gone)
        if length % CHUNK and self.where[keep - 1] is not None:
            self.host.discard(keep - 1)
        self.length = length
        if moves.evict:
            self._epoch_moved(True)
        self.epoch = self.table.epoch

    def _save_all(self) -> None:
        save(self.table)
        self.host.update(range(self.length // CHUNK))

    def _forget(self) -> None:
        self.where, self.host, self.use = [], set(), {}
        self.table.images.clear()
        self.length = 0

    def _epoch_moved(self, moved: bool) -> None:
        assert (self.table.epoch != self.epoch) == moved
        self.epoch = self.table.epoch


TestPager = PagerMachine.TestCase
