"""What a streamed step attends to: the chunks it chooses, and its mask, against the rule itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.constants import CHUNK, POOL_STEP, round_up
from kvflash_ggml.pool.masks import AlibiStageMask, StageMask, View, choose, everything_is_resident
from kvflash_ggml.pool.plan import ABSENT, Chunk, Layout

MAX_ROWS = 128


def test_a_text_that_fits_is_seen_as_a_whole() -> None:
    assert choose(5 * CHUNK + 3, 5, {0, 4}, None) == View((0, 1, 2, 3, 4), 3, True)
    assert choose(CHUNK - 1, 0, {0}, None) == View((), CHUNK - 1, True)


def test_of_a_longer_text_what_is_kept_then_what_ranks_best_then_the_newest() -> None:
    ranking = np.array([0, 9, 1, 9, 2, 8, 0, 0], np.float32)
    assert choose(8 * CHUNK + 1, 4, {0, 7, 8}, ranking) == View((0, 1, 3, 7), 1, False)
    assert choose(8 * CHUNK, 3, {0}, ranking) == View((0, 1, 3), 0, False)
    assert choose(8 * CHUNK, 3, {0}, None) == View((0, 6, 7), 0, False)
    assert choose(8 * CHUNK, 2, set(), np.zeros(8)) == View((6, 7), 0, False)


def test_chunks_newer_than_the_ranking_count_as_best() -> None:
    assert choose(6 * CHUNK, 3, {0}, np.array([5, 5, 5, 5], np.float32)).chunks == (0, 4, 5)


def test_more_to_keep_than_there_is_room_for() -> None:
    view = choose(9 * CHUNK, 2, {0, 1, 5, 8}, np.arange(9, dtype=np.float32))
    assert view.chunks == (5, 8)


@given(st.integers(0, 3000), st.integers(0, 50), st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_a_view_is_always_in_order_and_no_larger_than_its_room(
    start: int, room: int, keep: set[int], scored: int
) -> None:
    view = choose(start, room, keep, np.arange(scored)[::-1].astype(np.float32))
    assert list(view.chunks) == sorted(set(view.chunks))
    assert len(view.chunks) == min(room, start // CHUNK)
    assert view.whole == (view.tokens == start)
    assert view.rows == start % CHUNK


def test_what_is_resident() -> None:
    layout = Layout(chunks=[Chunk(3), Chunk(ABSENT), Chunk(0)], resident_chunks=(0, 2))
    assert everything_is_resident(layout, 0)
    assert everything_is_resident(layout, CHUNK)
    assert not everything_is_resident(layout, CHUNK + 1)


def rule(start: int, count: int, view: View, *, alibi: bool) -> Any:
    """Every row of the stage, position by position."""
    positions = [c * CHUNK + i for c in view.chunks for i in range(CHUNK)]
    positions += range(start - view.rows, start + count)
    rows = np.full((count, round_up(len(positions), POOL_STEP)), -np.inf, np.float16)
    for i in range(count):
        for row, p in enumerate(positions):
            if p <= start + i:
                rows[i, row] = -(start + i - p) if alibi else 0
    return rows


CASES = [
    (0, 1, 0),
    (0, MAX_ROWS, 0),
    (63, 1, 1),
    (130, 7, 2),
    (130, 7, 2),
    (191, MAX_ROWS, 1),
    (192, 64, 3),
    (500, 3, 5),
]


@pytest.mark.parametrize("mask", [StageMask, AlibiStageMask])
def test_a_mask_is_the_rule(mask: Any) -> None:
    """One object for all steps, in any order: what it keeps from one to the next is right."""
    one = mask(MAX_ROWS)
    for start, count, room in [*CASES, *reversed(CASES)]:
        view = choose(start, room, {0}, None)
        got, first = one.fill(start, count, view)
        want = rule(start, count, view, alibi=mask is AlibiStageMask)
        width = want.shape[1] - first
        assert got.shape[0] == count
        assert got.shape[1] >= width
        np.testing.assert_array_equal(got[:, :width], want[:, first:])
        assert (want[:, :first] == 0).all(), "what is left out is visible to all"
        assert (got[:, width:] == -np.inf).all()
