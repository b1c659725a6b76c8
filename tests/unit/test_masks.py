"""Masks against the rule itself, one pair of slot and query at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.masks import FREE, AlibiMask, MaskRows, SlotMask

BLOCKS = 5
SLOTS = BLOCKS * CHUNK
KINDS = [(SlotMask, False), (SlotMask, True), (AlibiMask, False), (AlibiMask, True)]


def make_rows(f32: bool, count: int = 200) -> MaskRows:
    return MaskRows(SLOTS, count, f32=f32)


class World:
    """A mask, and which chunk the test has put into which block."""

    def __init__(self, kind: type[SlotMask], rows: MaskRows) -> None:
        self.mask = kind(rows)
        self.rows = rows
        self.alibi = kind is AlibiMask
        self.chunks: dict[int, int] = {}  # chunk -> block

    def place(self, block: int, chunk: int) -> None:
        self.chunks[chunk] = block
        self.mask.place(block, chunk)

    def clear(self, block: int) -> None:
        self.chunks = {c: b for c, b in self.chunks.items() if b != block}
        self.mask.clear(block)

    def slots(self, start: int, count: int) -> np.ndarray[Any, Any]:
        return np.array(
            [self.chunks[p // CHUNK] * CHUNK + p % CHUNK for p in range(start, start + count)],
            np.int32,
        )

    def fill(self, start: int, count: int) -> None:
        """Fill and compare every value with the rule."""
        slots = self.slots(start, count)
        if count == 1:
            self.mask.fill_token(start, int(slots[0]))
        rows = self.rows.data[:1] if count == 1 else self.mask.fill(start, slots)
        want = np.full((count, SLOTS), -np.inf, self.rows.data.dtype)
        for i in range(count):
            for chunk, block in self.chunks.items():
                for offset in range(CHUNK):
                    distance = start + i - (chunk * CHUNK + offset)
                    if distance >= 0:
                        want[i, block * CHUNK + offset] = -distance if self.alibi else 0
        np.testing.assert_array_equal(rows, want)
        assert np.shares_memory(rows, self.rows.data)
        assert rows.dtype == self.rows.data.dtype


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{'f32' if kind[1] else 'f16'}")
def world(request: pytest.FixtureRequest) -> World:
    kind, f32 = request.param
    return World(kind, make_rows(f32))


def test_raw_values(world: World) -> None:
    world.place(0, 0)
    rows = world.mask.fill(0, world.slots(0, 2))
    bits = rows.view(np.uint32 if rows.dtype == np.float32 else np.uint16)
    closed = 0xFF800000 if rows.dtype == np.float32 else 0xFC00
    assert bits[0, 0] == bits[1, 1] & 0x7FFF == 0
    assert bits[0, 1] == bits[0, 64] == bits[1, 2] == closed


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 200), (63, 2), (10, 54), (60, 140), (64, 64)])
def test_a_prompt_over_scattered_blocks(world: World, start: int, count: int) -> None:
    for chunk, block in enumerate((3, 0, 4, 1)):
        world.place(block, chunk)
    world.fill(start, count)


def test_token_after_token(world: World) -> None:
    world.place(2, 0)
    for pos in range(CHUNK):
        world.fill(pos, 1)
    world.place(0, 1)
    for pos in range(CHUNK, CHUNK + 10):
        world.fill(pos, 1)


CHANGES = {
    "evicted": lambda w: w.clear(1),
    "recalled": lambda w: w.place(4, 7),
    "replaced": lambda w: (w.clear(1), w.place(1, 9)),
    "cut back": lambda w: w.mask.truncate(),
    "many rows": lambda w: w.fill(150, 20),
    "one row elsewhere": lambda w: w.fill(140, 1),
    "nothing": lambda w: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("start", [150, 171, 140, 151])
def test_one_token_after_every_kind_of_change(world: World, change: str, start: int) -> None:
    """The fast path of decoding may only be taken when nothing has moved."""
    for chunk, block in enumerate((3, 1, 0)):
        world.place(block, chunk)
    world.fill(149, 1)
    world.fill(150, 1)
    CHANGES[change](world)
    world.fill(start, 1)
    world.fill(start + 1, 1)


def test_rows_of_rejected_drafts_are_hidden(world: World) -> None:
    world.place(0, 0)
    world.fill(0, 10)
    world.mask.truncate()  # six drafts were refused
    world.fill(4, 1)
    assert np.isneginf(world.rows.data[0, 5:10]).all()


def test_reset(world: World) -> None:
    world.place(0, 0)
    world.fill(0, 1)
    world.mask.reset()
    world.chunks.clear()
    assert (world.mask.slot_pos == FREE).all()
    world.place(3, 0)
    world.fill(0, 1)
    world.fill(1, 1)


@given(st.data(), st.sampled_from(KINDS))
def test_random_use(data: st.DataObject, kind: tuple[type[SlotMask], bool]) -> None:
    which, f32 = kind
    world = World(which, make_rows(f32, 20))
    head = data.draw(st.integers(0, 6), "first chunk")
    pos = head * CHUNK + data.draw(st.integers(0, CHUNK - 1), "offset")
    world.place(data.draw(st.integers(0, BLOCKS - 1), "block"), head)
    for _ in range(8):
        match data.draw(st.sampled_from(["one", "one", "many", "move", "cut"])):
            case "one" | "many" as kind_of_step:
                count = 1 if kind_of_step == "one" else data.draw(st.integers(2, 20), "count")
                for chunk in range(pos // CHUNK, (pos + count - 1) // CHUNK + 1):
                    if chunk not in world.chunks:
                        free = [b for b in range(BLOCKS) if b not in world.chunks.values()]
                        if not free:
                            world.clear(world.chunks[min(world.chunks)])
                            free = [b for b in range(BLOCKS) if b not in world.chunks.values()]
                        world.place(free[0], chunk)
                world.fill(pos, count)
                pos += count
            case "move":
                others = [c for c in world.chunks if c != pos // CHUNK]
                if others:
                    world.clear(world.chunks[others[0]])
            case _:
                pos = max(pos - data.draw(st.integers(0, 5), "back"), pos // CHUNK * CHUNK)
                world.mask.truncate()


@pytest.mark.parametrize(("kind", "f32"), KINDS)
def test_texts_take_turns_on_the_same_rows(kind: type[SlotMask], f32: bool) -> None:
    rows = make_rows(f32)
    one, other = World(kind, rows), World(kind, rows)
    one.place(0, 0)
    other.place(3, 0)
    one.fill(0, 10)
    other.fill(0, 20)
    for i in range(3):
        one.fill(10 + 2 * i, 1)
        one.fill(11 + 2 * i, 1)
        other.fill(20 + i, 1)


# --- trees


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> np.ndarray[Any, Any]:
    """The row before each, in the order of depth; -1 for the root."""
    depth, parent = [0], [-1]
    for i in range(draw(st.integers(0, most - 1), "rows")):
        above = [j for j in range(i + 1) if depth[j] >= depth[i] - 1]  # so that depths never fall
        parent.append(draw(st.sampled_from(above), "parent"))
        depth.append(depth[parent[-1]] + 1)
    return np.array(parent, np.int32)


def scattered(data: st.DataObject, kind: tuple[type[SlotMask], bool]) -> tuple[World, int]:
    """A text over some blocks in any order, one of its chunks paged out; and its length."""
    world = World(kind[0], make_rows(kind[1], 40))
    order = data.draw(st.permutations(range(BLOCKS)), "blocks")
    for chunk, block in enumerate(order):
        world.place(block, chunk)
    start = data.draw(st.integers(0, SLOTS - 40), "length")
    gone = data.draw(st.integers(0, BLOCKS - 1), "paged out")
    if gone < start // CHUNK:
        world.clear(order[gone])
    return world, start


@given(st.data(), st.sampled_from(KINDS), st.integers(1, 30))
def test_a_chain_is_a_tree(data: st.DataObject, kind: tuple[type[SlotMask], bool], count: int) -> None:
    world, start = scattered(data, kind)
    slots = world.slots(start, count)
    chain = world.mask.fill(start, slots).copy()
    tree = world.mask.fill_tree(start, slots, np.arange(-1, count - 1, dtype=np.int32))
    np.testing.assert_array_equal(tree, chain)
    assert np.shares_memory(tree, world.rows.data)


@given(st.data(), st.sampled_from(KINDS), trees())
def test_a_row_of_a_tree_sees_what_it_would_see_in_a_text(
    data: st.DataObject, kind: tuple[type[SlotMask], bool], parent: Any
) -> None:
    """Wherever its ancestors lie: a text with these positions in these slots."""
    world, start = scattered(data, kind)
    places = data.draw(st.permutations(range(2 * len(parent))), "places")[: len(parent)]
    slots = world.slots(start, 2 * len(parent))[places]
    rows = world.mask.fill_tree(start, slots, parent).copy()
    for i in range(len(parent)):
        path = [i]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        text = kind[0](make_rows(kind[1]))
        text.slot_pos[:] = np.where(world.mask.slot_pos < start, world.mask.slot_pos, FREE)
        text.slot_pos[slots[path]] = start + np.arange(len(path))
        np.testing.assert_array_equal(rows[i], text.fill(start + len(path) - 1, slots[i : i + 1])[0])


def test_a_token_after_a_tree(world: World) -> None:
    """The fast path of decoding is not taken on what a tree has left."""
    world.place(2, 0)
    world.fill(9, 1)
    world.mask.fill_tree(10, world.slots(10, 3), np.array([-1, 0, 0], np.int32))
    world.fill(10, 1)
    world.mask.fill_tree(11, world.slots(11, 1), np.array([-1], np.int32))
    world.fill(12, 1)
