"""Any number of texts on one allocator, against a plain model: whose each block is, and what each text has read."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.integrity import check_table
from support.on_host import OnHost
from support.on_host import save as save_all

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import PoolExhausted
from kvflash_ggml.pool.page_table import BlockAllocator, PageTable

COUNT = 24
MAX_TEXTS = 4


class TextsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(COUNT)
        self.texts: list[PageTable] = []
        self.read: list[int] = []

    def any_text(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.texts) - 1), "text")

    @precondition(lambda self: len(self.texts) < MAX_TEXTS)
    @rule(sinks=st.integers(0, 2), tail=st.integers(1, 3))
    def join(self, sinks: int, tail: int) -> None:
        self.texts.append(PageTable(self.blocks, OnHost(), sinks=sinks, tail=tail))
        self.read.append(0)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        which = self.any_text(data)
        self.texts.pop(which).close()
        self.read.pop(which)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 6 * CHUNK), save=st.booleans())
    def append(self, data: st.DataObject, count: int, save: bool) -> None:
        which = self.any_text(data)
        table = self.texts[which]
        others = [other.layout for other in self.texts if other is not table]
        with contextlib.suppress(PoolExhausted):
            table.commit(table.reserve(table.length, min(count, max(1, table.room(table.length)))))
            self.read[which] = table.length
        if save:
            save_all(table)
        assert [other.layout for other in self.texts if other is not table] == others

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 32))
    def verify(self, data: st.DataObject, count: int) -> None:
        which = self.any_text(data)
        table = self.texts[which]
        with contextlib.suppress(PoolExhausted):
            table.commit_ahead(table.reserve(table.length, min(count, max(1, table.room(table.length)))))
            accepted = data.draw(st.integers(0, count), "accepted")
            accepted = min(accepted, len(table.chunks) * CHUNK - table.length)
            table.commit(table.accept(table.length + accepted))
            self.read[which] += accepted

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        which = self.any_text(data)
        self.read[which] = data.draw(st.integers(0, self.read[which]), "length")
        self.texts[which].commit(self.texts[which].truncate(self.read[which]))

    @invariant()
    def nobody_has_what_another_has(self) -> None:
        for table, read in zip(self.texts, self.read, strict=True):
            assert table.length == read
            check_table(table)
        held = [block for table in self.texts for block in table.held]
        assert len(held) == len(set(held))
        for table in self.texts:
            free = self.blocks.free(table, table.held)
            assert len(free) + len(held) == COUNT
            assert not set(free) & set(held)
            assert table.quota == COUNT - len(held) + len(table.held)


TestTexts = TextsMachine.TestCase
TestTexts.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=40, deadline=None)
