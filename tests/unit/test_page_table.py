"""The page table, case by case."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.integrity import check_table
from support.on_host import OnHost, save

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, PoolExhausted
from kvflash_ggml.pool import residency
from kvflash_ggml.pool.masks import everything_is_resident
from kvflash_ggml.pool.page_table import BlockAllocator, PageTable, PageTableState
from kvflash_ggml.pool.plan import ABSENT, NO_MOVES, Chunk, Moves
from kvflash_ggml.pool.residency import Ranking


def make(blocks: int = 8, *, sinks: int = 1, tail: int = 2, bounded: bool = True) -> PageTable:
    return PageTable(BlockAllocator(blocks), OnHost(), sinks=sinks, tail=tail, bounded=bounded)


def append(pager: PageTable, count: int) -> None:
    """As a session does it: whole chunks are saved as soon as they are sealed."""
    while count:
        step = min(count, CHUNK - pager.length % CHUNK)
        reserve(pager, step)
        save(pager)
        check_table(pager)
        count -= step


def reserve(pager: PageTable, count: int, ranking: Ranking | None = None) -> Moves:
    """A step that goes well."""
    plan = pager.reserve(pager.length, count, ranking, rebuild=ranking is not None)
    pager.commit(plan)
    return plan.moves


def cut(pager: PageTable, length: int) -> Moves:
    plan = pager.truncate(length)
    pager.commit(plan)
    return plan.moves


def table(pager: PageTable) -> list[int]:
    return [chunk.block for chunk in pager.chunks]


def state(pager: PageTable) -> tuple[object, ...]:
    return copy.deepcopy((pager.layout, pager.pins, pager.images))


class TestBlocks:
    def test_hands_out_in_order(self) -> None:
        assert BlockAllocator(3, [2, 0, 1]).free(()) == [2, 0, 1]
        assert BlockAllocator(6, [5, 4, 3, 2, 1, 0]).free([4, 0, 3]) == [5, 2, 1]

    def test_order_must_name_every_block_once(self) -> None:
        with pytest.raises(AssertionError):
            BlockAllocator(3, [0, 0, 1])


class TestLimits:
    def test_a_pool_without_a_victim_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least 320 tokens"):
            make(4)
        assert make(5).quota == 5

    def test_a_pool_that_holds_the_whole_context_needs_no_victim(self) -> None:
        pager = make(2, sinks=1, tail=4, bounded=False)
        append(pager, 2 * CHUNK)
        assert table(pager) == [0, 1]

    @pytest.mark.parametrize("span", [(-1, 10), (-64, 64), (5, 5), (64, 64), (10, 3)])
    @pytest.mark.parametrize("bounded", [True, False])
    def test_an_empty_or_negative_pin_is_refused(self, span: tuple[int, int], bounded: bool) -> None:
        pager = make(bounded=bounded)
        with pytest.raises(ConfigError, match="pin"):
            pager.pin_range(*span)
        assert not pager.pins

    def test_pins_are_half_open(self) -> None:
        pager = make()
        pager.pin_range(CHUNK, 2 * CHUNK)
        assert pager.pins == {1}
        pager.pin_range(0, CHUNK + 1)
        assert pager.pins == {0, 1}

    def test_a_far_pin_takes_no_memory(self) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match="1562500000 chunks"):
                make().pin_range(0, 10**11)
            whole = make(bounded=False)
            whole.pin_range(CHUNK, 10**11)
            assert whole.pins == set(range(1, 8))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_too_many_pins_are_refused_as_a_whole(self) -> None:
        pager = make()
        pager.pin_range(0, 2 * CHUNK)
        with pytest.raises(ConfigError, match="3 pins"):
            pager.pin_range(4 * CHUNK, 6 * CHUNK)
        assert pager.pins == {0, 1}


class TestAppend:
    def test_fresh_blocks_come_in_order(self) -> None:
        pager = make()
        moves = reserve(pager, 3 * CHUNK - 1)
        assert moves.fresh == [(0, 0), (1, 1), (2, 2)]
        assert not moves.evict
        assert not moves.recall

    def test_inside_a_chunk_nothing_moves(self) -> None:
        pager = make()
        append(pager, 10)
        epoch = pager.epoch
        assert reserve(pager, CHUNK - 10) is NO_MOVES
        assert pager.epoch == epoch
        assert not NO_MOVES

    def test_the_least_recently_used_leaves_and_of_equals_the_oldest_text(self) -> None:
        pager = make()
        reserve(pager, 8 * CHUNK)  # one clock for all
        save(pager)
        moves = reserve(pager, 1)
        assert moves.evict == [(1, 1)]  # 0 is a sink
        assert moves.fresh == [(8, 1)]

    def test_the_head_and_the_tail_before_it_stay(self) -> None:
        pager = make(5)
        append(pager, 20 * CHUNK + 1)
        assert pager.resident_chunks == (0, 17, 18, 19, 20)

    def test_an_unsaved_chunk_cannot_leave(self) -> None:
        pager = make()
        reserve(pager, 8 * CHUNK)
        before = state(pager)
        with pytest.raises(PoolExhausted):
            pager.reserve(8 * CHUNK, 1)
        assert state(pager) == before

    def test_a_span_longer_than_room_is_refused_and_changes_nothing(self) -> None:
        pager = make()
        append(pager, 20 * CHUNK + 5)
        before = state(pager)
        room = pager.room(pager.length)
        assert room == 5 * CHUNK - 5  # 8 blocks less one sink and two of tail; the head is half used
        with pytest.raises(PoolExhausted, match="can be evicted"):
            pager.reserve(pager.length, room + 1)
        assert state(pager) == before
        reserve(pager, room)
        check_table(pager)

    def test_a_plan_changes_nothing(self) -> None:
        pager = make(6)
        append(pager, 12 * CHUNK)
        pager.pin_range(CHUNK, CHUNK + 1)
        before = state(pager)
        plan, cut = pager.reserve(pager.length, 2 * CHUNK), pager.truncate(5 * CHUNK + 7)
        assert plan.moves.evict
        assert plan.moves.recall
        assert plan.moves.fresh
        assert cut.moves.drop
        assert state(pager) == before
        pager.commit(plan)
        assert state(pager) != before
        check_table(pager)

    def test_room_counts_only_pins_that_exist(self) -> None:
        pager = make()
        pager.pin_range(5 * CHUNK, 8 * CHUNK)
        assert pager.room(0) == 8 * CHUNK
        pager.reserve(0, 8 * CHUNK)

    @pytest.mark.parametrize(("blocks", "left"), [(5, 1), (6, 1), (8, 1), (16, 3), (64, 15)])
    def test_room_that_leaves_some_for_recall(self, blocks: int, left: int) -> None:
        pager = make(blocks)
        append(pager, 2 * blocks * CHUNK + 5)
        able = blocks - 3  # one sink and two of tail; the head is half used
        assert pager.room(pager.length, spare=True) == (able - left) * CHUNK - 5
        reserve(pager, pager.room(pager.length, spare=True), -np.arange(2 * blocks, dtype=np.float32))
        assert set(range(1 + left)) <= set(pager.resident_chunks)
        check_table(pager)

    def test_room_is_never_less_than_a_block(self) -> None:
        pager = make()
        pager.pin_range(CHUNK, 4 * CHUNK)
        append(pager, 20 * CHUNK)
        assert pager.room(pager.length) == 2 * CHUNK
        assert pager.room(pager.length, spare=True) == CHUNK

    def test_room_of_a_whole_context_pool_is_the_rest_of_it(self) -> None:
        pager = make(bounded=False)
        assert pager.room(100) == 8 * CHUNK - 100


class TestRecall:
    def test_a_pinned_chunk_comes_back_into_any_block(self) -> None:
        pager = make(6)
        append(pager, 10 * CHUNK + 1)
        assert pager.chunks[1].block == ABSENT
        pager.pin_range(CHUNK, CHUNK + 1)
        moves = reserve(pager, 1)
        assert [c for c, _ in moves.recall] == [1]
        assert moves.evict[0][1] == moves.recall[0][1]
        assert 1 in pager.images

    def test_a_truncated_tail_comes_back(self) -> None:
        pager = make(6)
        append(pager, 12 * CHUNK)
        cut(pager, 5 * CHUNK + 7)
        assert pager.chunks[5].block == ABSENT
        moves = reserve(pager, 1)
        assert {3, 4, 5} <= set(pager.resident_chunks)
        assert {c for c, _ in moves.recall} == {3, 4, 5}
        assert 5 not in pager.images

    def test_a_chunk_whose_block_is_lost_is_on_the_host_and_comes_back(self) -> None:
        pager = make(6)
        append(pager, 12 * CHUNK)
        epoch, block = pager.epoch, pager.chunks[11].block
        pager.strand(11)
        check_table(pager)
        assert pager.chunks[11].block == ABSENT
        assert 11 in pager.images
        assert pager.epoch > epoch
        assert reserve(pager, 1).recall == [(11, block)]


class TestTruncate:
    def test_forgets_on_both_tiers(self) -> None:
        pager = make(6)
        append(pager, 12 * CHUNK)
        moves = cut(pager, 5 * CHUNK)
        assert sorted(moves.drop) == list(range(5, 12))
        assert {c for c, _ in moves.evict} == {7, 8, 9, 10, 11}
        check_table(pager)

    def test_a_reopened_chunk_has_no_image(self) -> None:
        pager = make()
        append(pager, 3 * CHUNK)
        cut(pager, 2 * CHUNK + 1)
        assert 2 not in pager.images
        cut(pager, 2 * CHUNK)
        assert 1 in pager.images

    def test_a_whole_context_pool_stays_in_order(self) -> None:
        """Only the identity layout gives the same bits as an unpooled cache."""
        pager = make(8, bounded=False)
        append(pager, 7 * CHUNK + 3)
        cut(pager, 2 * CHUNK + 3)
        append(pager, 5 * CHUNK)
        assert table(pager) == list(range(8))

    def test_reset_forgets_everything_but_the_settings(self) -> None:
        pager = make()
        append(pager, 12 * CHUNK)
        pager.pin_range(0, 1)
        epoch = pager.epoch
        pager.reset()
        assert (pager.length, pager.chunks, pager.pins) == (0, [], {0})
        assert pager.epoch > epoch
        append(pager, 4 * CHUNK)
        assert table(pager) == [0, 1, 2, 3]


class TestAdopt:
    def test_places_are_taken_over(self) -> None:
        pager = make()
        pager.images.update([0, 1])
        pager.load(2 * CHUNK + 1, frozen([ABSENT, 5, 2]))
        check_table(pager)
        assert pager.layout.slot_of(CHUNK + 3) == 5 * CHUNK + 3
        assert pager.layout.slot_of(3) == ABSENT
        moves = reserve(pager, 1)
        assert moves.recall == [(0, 0)]

    def test_in_other_blocks_the_order_is_the_same(self) -> None:
        """Another text has one of the blocks, or all of them; or none: then they are the old blocks."""
        for order in ([8, 9, 10, 11, 12, 13], [9, 2, 4, 3, 5, 6], [6, 4, 2, 0, 1, 5]):
            pager = PageTable(BlockAllocator(6, order), OnHost(), sinks=1, tail=2)
            pager.images.update(range(4))
            saved = [0, ABSENT, 5, 2]
            pager.load(4 * CHUNK, frozen(saved))
            check_table(pager)
            own = table(pager)
            assert [block == ABSENT for block in own] == [block == ABSENT for block in saved]
            assert own[0] < own[3] < own[2]
            assert (own == saved) == ({0, 2, 5} <= {*order})
            assert order[0] != 8 or own == [8, ABSENT, 13, 10], "as far apart in a share of the same size"

    def test_a_block_cannot_be_adopted_twice(self) -> None:
        with pytest.raises(AssertionError, match="two chunks"):
            make().load(2 * CHUNK, frozen([3, 3]))

    def test_a_smaller_pool_keeps_what_must_stay_and_the_best(self) -> None:
        """7 blocks for 12 chunks that were resident: a sink, the tail, the head, and the best of the rest."""
        pager = make()
        blocks = pager.blocks.count
        count = blocks + 5
        pager.images.update(range(count))
        scores = np.array([0.0, 5, 1, 9, 2, 8, 3, 7], np.float32)
        pager.load(count * CHUNK, frozen(range(count), scores=scores))
        check_table(pager)
        kept = pager.protected(count - 1, count - 1)
        inside = set(pager.resident_chunks)
        assert len(inside) == blocks
        assert kept <= inside
        lost = set(range(count)) - inside
        rank = residency.known(scores, count)
        assert max(rank[c] for c in lost) <= min(rank[c] for c in inside - kept)
        assert all(pager.chunks[c].block == c for c in inside if c < blocks)

    def test_a_table_that_says_too_much_is_not_believed(self) -> None:
        """Settled, it says, but the chunk that is being written is not resident."""
        pager = make()
        pager.images.update(range(3))
        pager.load(2 * CHUNK + 1, frozen([0, 1, ABSENT], settled=True))
        assert reserve(pager, 1).recall == [(2, 2)]

    def test_pins_that_do_not_fit_change_nothing(self) -> None:
        pager = make()
        with pytest.raises(ConfigError, match="as saved"):
            pager.load(9 * CHUNK, frozen(range(9), pins=frozenset(range(99))))
        assert not pager.chunks
        assert not pager.pins


def frozen(blocks: Sequence[int], **values: Any) -> PageTable:
    defaults: dict[str, Any] = {"clock": 9, "settled": False, "pins": frozenset(), "scores": None}
    return PageTableState(blocks=list(blocks), last_use=[0] * len(blocks), **{**defaults, **values})


def test_integrity_is_checked() -> None:
    """The check itself can fail."""
    for harm in (
        lambda pager: pager.chunks.__setitem__(1, pager.chunks[0]),
        lambda pager: pager.chunks.__setitem__(0, Chunk(block=99)),
        lambda pager: pager.chunks.pop(),
        lambda pager: pager.chunks.append(Chunk(block=7)),
        lambda pager: pager.strand(1) or pager.images.clear(),
    ):
        pager = make()
        append(pager, 3 * CHUNK)
        harm(pager)
        with pytest.raises(AssertionError):
            check_table(pager)


class TestAhead:
    """Rows that are written ahead of the text, and may never be of it."""

    def ahead(self, pager: PageTable, count: int) -> None:
        pager.commit_ahead(pager.reserve(pager.length, count))

    def accept(self, pager: PageTable, length: int) -> Moves:
        plan = pager.accept(length)
        pager.commit(plan)
        return plan.moves

    @pytest.mark.parametrize("accepted", range(0, 101, 10))
    def test_those_that_are_accepted_are_as_if_they_had_been_read(self, accepted: int) -> None:
        pager, plain = make(), make()
        for each in (pager, plain):
            append(each, 3 * CHUNK + 30)
        self.ahead(pager, 100)
        assert pager.length == 3 * CHUNK + 30
        assert not pager.unsaved, "nothing that is not accepted is sealed"
        moves = self.accept(pager, pager.length + accepted)
        check_table(pager)
        if accepted:
            reserve(plain, accepted)
        assert [c.block for c in pager.chunks] == [c.block for c in plain.chunks]
        assert pager.unsaved == plain.unsaved
        assert [c for c, _ in moves.evict] == list(range(len(pager.chunks), 6))

    def test_nothing_is_reserved_beside_them(self) -> None:
        pager = make()
        append(pager, CHUNK + 60)
        self.ahead(pager, 10)
        with pytest.raises(AssertionError, match="ahead"):
            pager.reserve(pager.length, 1)

    def test_a_cut_takes_them_along(self) -> None:
        pager = make()
        append(pager, CHUNK + 60)
        self.ahead(pager, 10)
        cut(pager, CHUNK + 60)
        check_table(pager)
        assert len(pager.chunks) == 2

    def test_the_tail_is_whole_again_when_a_chunk_of_them_is_dropped(self) -> None:
        """A span of two chunks has the window of its last; if that goes, the window of the first counts again."""
        pager = make()
        append(pager, 7 * CHUNK + 60)
        worst = np.ones(8)
        worst[5] = 0
        pager.commit_ahead(pager.reserve(pager.length, 10, worst))
        assert pager.chunks[5].block == ABSENT
        self.accept(pager, pager.length + 2)
        reserve(pager, 1)
        assert pager.protected(7, 7) <= set(pager.resident_chunks)


# --- what a long text costs


class Seen(Chunk):
    """Counts who looks where it is."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "block":
            Seen.looks += 1
        return super().__getattribute__(name)


def looks_of_a_step(count: int, size: int) -> int:
    """How often a step of `size` tokens looks where a chunk is, behind `count` sealed chunks; seven are resident."""
    pager = make(8)
    blocks = [0, *[ABSENT] * (count - 7), *range(1, 7)]
    pager.images.update(range(count))  # type: ignore[attr-defined]
    uses = [1] * count
    saved = PageTableState(blocks=blocks, last_use=uses, clock=1, settled=True, pins=frozenset(), scores=None)
    pager.load(count * CHUNK, saved)
    pager.layout = replace(pager.layout, chunks=[Seen(chunk.block, chunk.last_use) for chunk in pager.chunks])
    Seen.looks = 0
    plan = pager.reserve(pager.length, size, np.arange(count, dtype=np.float32))
    assert len(plan.moves.evict) == len(plan.moves.fresh) - 1 == -(-size // CHUNK) - 1, "one block was free"
    assert everything_is_resident(plan.layout, plan.layout.length) is False
    assert len(plan.layout.blocks) == 8
    return Seen.looks


@pytest.mark.parametrize("size", [1, 2 * CHUNK])
def test_a_step_of_a_long_text_looks_at_no_more_chunks_than_one_of_a_short_text(size: int) -> None:
    assert 0 < looks_of_a_step(100, size) == looks_of_a_step(10_000, size) < 100
