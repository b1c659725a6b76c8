"""Rows of a tree on a page table: what is kept lies where a text would have it, and nothing else has changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.integrity import check_table
from support.on_host import OnHost, save

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.masks import leaving, moving, places
from kvflash_ggml.pool.page_table import BlockAllocator, PageTable
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.tree import Rows, rows

BLOCKS = 12
Device = dict[int, str]
"""What lies in each slot that is taken."""


@st.composite
def trees(draw: st.DrawFn) -> Rows:
    """The rows of any draft: in the order of depth, with a main chain."""
    n = draw(st.integers(0, 15), "nodes")
    parent = np.array([draw(st.integers(-1, i - 1)) for i in range(n)], np.int32)
    logp = np.array([draw(st.floats(-9, 0)) for _ in range(n)], np.float32)
    return rows(0, Draft(np.arange(n, dtype=np.int32), parent, "a test", logp))


def path_to(tree: Rows, row: int) -> list[int]:
    """From the root to this row."""
    path = [row]
    while path[0] > 0:
        path.insert(0, int(tree.parent[path[0]]))
    return path


@given(trees())
def test_places(tree: Rows) -> None:
    """Each row has its own; the main chain its own positions; and no path goes where a row off the main chain lies."""
    where = places(tree.depth, tree.main)
    assert len(set(where.tolist())) == len(tree)
    assert (where[tree.main] == tree.depth[tree.main]).all()
    assert where.dtype == np.int32
    beyond = where[~tree.main]
    assert sorted(beyond.tolist()) == list(range(tree.depth.max() + 1, tree.depth.max() + 1 + len(beyond)))


class Text:
    """A page table, and a device that remembers which row was written to which slot."""

    def __init__(self, blocks: BlockAllocator, length: int) -> None:
        self.table = PageTable(blocks, OnHost(), sinks=1, tail=2)
        self.device: Device = {}
        self.tokens: list[str] = []
        step = 4 * CHUNK
        for at in range(0, length, step):
            self.extend([f"token {p}" for p in range(at, min(at + step, length))])

    def reserve(self, count: int) -> list[int]:
        """The slots of the next positions. What is evicted is lost to the device, what is recalled is not."""
        plan = self.table.reserve(self.table.length, count)
        for _, block in plan.moves.evict:
            self.device = {slot: row for slot, row in self.device.items() if slot // CHUNK != block}
        for c, block in plan.moves.recall:
            self.device.update({block * CHUNK + i: self.tokens[c * CHUNK + i] for i in range(CHUNK)})
        self.table.commit_ahead(plan)
        return plan.layout.slots(self.table.length, np.zeros(count, np.int32)).tolist()

    def extend(self, labels: list[str]) -> None:
        slots = self.reserve(len(labels))
        self.device.update(zip(slots, labels, strict=True))
        self.accept(labels)

    def accept(self, labels: list[str]) -> None:
        self.tokens += labels
        self.table.commit(self.table.accept(len(self.tokens)))
        check_table(self.table)
        save(self.table)


@given(trees(), st.integers(1, 20 * CHUNK), st.data())
def test_a_settled_path_lies_where_a_text_would_have_it(tree: Rows, length: int, data: st.DataObject) -> None:
    one, other = Text(BlockAllocator(BLOCKS), length), Text(BlockAllocator(BLOCKS), length)
    assert one.device == other.device
    path = path_to(tree, data.draw(st.integers(0, len(tree) - 1), "last row"))
    labels = [f"row {row}" for row in path]

    where = places(tree.depth, tree.main)
    slots = one.reserve(int(where.max()) + 1)
    before = dict(one.device)
    one.device.update({slots[at]: f"row {row}" for row, at in enumerate(where.tolist())})
    for at in leaving(path, where):
        del one.device[slots[at]]
    source, target = moving(path, where)
    moved = [one.device.pop(slots[at]) for at in source]
    for at, label in zip(target, moved, strict=True):
        assert slots[at] not in one.device, "a row is lost"
        one.device[slots[at]] = label
    one.accept(labels)

    kept = dict(one.device)
    for at, label in enumerate(labels):
        assert kept.pop(one.table.layout.slot_of(length + at)) == label
    assert kept == before, "nothing else has changed"

    # the same text, read straight on: the same rows at every position that is resident in both
    other.extend(labels)
    assert one.tokens == other.tokens
    for text in (one, other):
        for p, token in enumerate(text.tokens):
            slot = text.table.layout.slot_of(p)
            assert slot < 0 or text.device[slot] == token
