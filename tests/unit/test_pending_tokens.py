"""What a drafter was told and has not read is the newest of it, in order, whatever was cut, told again or left out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflash_ggml.speculation.model_drafter import PendingTokens

MAX_PENDING = 7

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-4, 3), st.integers(0, 12)),
        st.tuples(st.just("cut"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(CALLS)
@settings(max_examples=settings().max_examples * 15 // 2)
def test_it_is_the_newest_of_the_text(calls: list[tuple[str, int, int]]) -> None:
    pending, length = PendingTokens(MAX_PENDING), 0
    model: dict[int, int] = {}  # position to token, of what is to be read
    token = 0
    for call, at, count in calls:
        if call == "add":
            start = max(0, length + at)  # back, further, or with a gap
            tokens = np.arange(token, token + count, dtype=np.int32)
            token += count
            pending.add(start, tokens, tokens[:, None] * np.ones((1, 2), np.float32))
            model = {} if start > length else {p: t for p, t in model.items() if p < start}
            model |= {start + i: int(t) for i, t in enumerate(tokens)}
            length = start + count
        elif call == "cut":
            length = min(at, length)
            pending.truncate(length)
            model = {p: t for p, t in model.items() if p < length}
        model = {p: t for p, t in model.items() if p >= length - MAX_PENDING}
        assert pending.end == length
        if call == "take":
            start, tokens, rows = pending.take()
            assert {start + i: int(t) for i, t in enumerate(tokens)} == model
            assert start + len(tokens) == pending.end == length
            assert ([] if rows is None else rows[:, 1].tolist()) == tokens.tolist()
            model = {}


def test_rows_are_copied_and_may_be_missing() -> None:
    pending, rows = PendingTokens(4), np.ones((2, 3), np.float32)
    pending.add(0, np.array([5, 6], np.int32), rows)
    rows[:] = 9
    assert (pending.take()[2] == 1).all()
    pending.add(2, np.array([7], np.int32))
    assert pending.take()[2] is None
