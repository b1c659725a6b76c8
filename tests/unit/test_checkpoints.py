"""Which states of what is not pooled are kept along a text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.fake_engine import FakeEngine

from kvflash_ggml.sequence.checkpoints import Checkpoints

MOST = 8


@pytest.mark.parametrize("shared", [8192, 32768, 131072, 500_000])
def test_where_a_shared_beginning_ends_is_kept_through_turns(shared: int) -> None:
    """However long it is: others ask about the same document, and it takes a minute to read."""
    checkpoints = Checkpoints(FakeEngine(512, 64, recurrent=True), 0, max_count=MOST, n_ctx=shared + 4096)
    for pos in range(2048, shared, 2048):
        checkpoints.before_step(pos, wanted=False)
    pos = shared
    for _ in range(30):
        checkpoints.before_step(pos, wanted=True)
        assert shared in checkpoints.state()
        assert max(checkpoints.state()) == pos
        assert len(checkpoints.state()) <= MOST
        pos += 60


def test_a_long_prompt_can_be_cut_at_several_places() -> None:
    checkpoints = Checkpoints(FakeEngine(512, 64, recurrent=True), 0, max_count=MOST, n_ctx=131072)
    for pos in range(2048, 131072, 2048):
        checkpoints.before_step(pos, wanted=False)
    places = [0, *sorted(checkpoints.state()), 131072]
    assert max(b - a for a, b in pairwise(places)) <= 131072 // 3


@pytest.mark.parametrize("system", [8192, 32_768, 120_000, 131_072])
def test_an_agent_reads_little_again(system: int) -> None:
    """A system prompt, and many short turns: another request that begins with it, or the newest one again."""
    spacing = 131_072 // 8
    checkpoints = Checkpoints(FakeEngine(256, 64, recurrent=True), 0, max_count=8, n_ctx=system + 2048)  # type: ignore[arg-type]
    for pos in range(2048, system, 2048):
        checkpoints.before_step(pos, wanted=False)
    checkpoints.before_step(system, wanted=True)
    length = system
    for _ in range(20):
        prompt = length + 64
        for pos in (length, prompt, prompt + 15):  # before a question, behind it, and behind its answer
            checkpoints.before_step(pos, wanted=True)
        assert system - checkpoints.nearest(system) < spacing // 2
        assert prompt - checkpoints.nearest(prompt - 1) < spacing // 2
        length = prompt + 15
        assert checkpoints.nearest(length) == length
