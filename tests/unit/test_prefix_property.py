"""A folder of prefixes against a plain model of it: all texts that were ever stored."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.prefix_texts import Int32s, load, make_heap, make_tier, released, session, text

from kvflash_ggml import files
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.policy.drafter import common_prefix
from kvflash_ggml.store import disk
from kvflash_ggml.store.segments import SEGMENT, TAIL, Entry, Segments, file_stat

PARTS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([30, 64, 70, 128, 200])), min_size=1, max_size=4)


class FolderMachine(RuleBasedStateMachine):
    """Two processes in one folder. While nothing is evicted, every text is found as far as one was stored."""

    @initialize(stateful=st.booleans(), most=st.sampled_from([2, 256]))
    def open(self, stateful: bool, most: int) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(disk, "MAX_CHUNKS", most)
        self.patches.setattr(files.os, "fsync", lambda handle: None)  # slow, and nothing crashes here
        self.folder = Path(tempfile.mkdtemp())
        self.stateful = stateful
        self.heap = make_heap()
        self.tiers = [make_tier(self.folder, self.heap, stateful=stateful) for _ in range(2)]
        self.stored: list[Int32s] = []
        self.lossy = False

    def known(self, tokens: Int32s) -> int:
        """What the plain model says can be continued."""
        best = 0
        for other in self.stored:
            shared = common_prefix(other, tokens)
            if shared == len(other):
                best = max(best, shared)
            elif not self.stateful:
                best = max(best, shared // CHUNK * CHUNK)
        return best

    @rule(who=st.integers(0, 1), parts=PARTS, shares=st.booleans())
    def put(self, who: int, parts: list[tuple[int, int]], shares: bool) -> None:
        tokens = text(*parts)
        if shares and self.stored:
            tokens = np.concatenate([self.stored[-1], tokens])[:900]
        with released(session(self.heap, tokens, stateful=self.stateful)) as saved:
            self.tiers[who].put(saved)
        self.stored.append(tokens)
        assert load(self.tiers[1 - who], tokens, stateful=self.stateful) == len(tokens)

    @rule(who=st.integers(0, 1), parts=PARTS)
    def find(self, who: int, parts: list[tuple[int, int]]) -> None:
        tokens = text(*parts)
        length = load(self.tiers[who], tokens, stateful=self.stateful)
        assert length <= self.known(tokens)
        assert self.lossy or length == self.known(tokens)

    @rule(who=st.integers(0, 1), share=st.floats(0, 1))
    def evict(self, who: int, share: float) -> None:
        before = self.sizes()
        capacity = int(share * sum(before.values()))
        Segments(self.folder, capacity=capacity).evict()
        after = self.sizes()
        gone = before.keys() - after.keys()
        self.lossy = self.lossy or bool(gone)
        assert sum(after.values()) <= capacity
        if gone:
            smallest_over = sum(after.values()) + max(before[entry] for entry in gone)
            assert smallest_over > capacity, "more went than had to"

    @rule()
    def restart(self) -> None:
        self.tiers = [make_tier(self.folder, self.heap, stateful=self.stateful) for _ in range(2)]

    @invariant()
    def whole(self) -> None:
        """Whatever is there has all that it goes on from."""
        entries = list(self.sizes()) if hasattr(self, "folder") else []
        names = {self.tiers[0]._root}
        for entry in entries:
            if entry.kind == SEGMENT:
                names.update(Segments(self.folder, capacity=0).names(entry))
        assert all(entry.parent in names for entry in entries)
        assert all(entry.count < CHUNK for entry in entries if entry.kind == TAIL)

    def sizes(self) -> dict[Entry, int]:
        entries = Segments(self.folder, capacity=0).entries(self.tiers[0]._folder)
        return {entry: stat.st_size for entry in entries if (stat := file_stat(entry.path)) is not None}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.patches.undo()
            shutil.rmtree(self.folder)
            assert self.heap.host_bytes == 0


TestFolder = FolderMachine.TestCase
TestFolder.settings = settings(TestFolder.settings, max_examples=settings().max_examples // 2)
