"""Between two moves at tau few pages move, and each for one that is clearly better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.masks import choose
from kvflash_ggml.pool.residency import few_moves
from kvflash_ggml.sequence.prefill import extend

INSIDE, OUTSIDE = np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7, 8])


def ranked(*scores: float) -> Any:
    return np.array(scores, np.float32)


@pytest.mark.parametrize(
    ("most", "there"), [(1, {1, 2, 3, 7}), (2, {2, 3, 6, 7}), (3, {2, 3, 6, 7}), (9, {2, 3, 6, 7})]
)
def test_the_best_come_for_the_worst_while_it_pays(most: int, there: set[int]) -> None:
    ranking = ranked(0, 1, 5, 6, 0, 2, 3, 7, 1)
    few = few_moves(ranking, INSIDE, OUTSIDE, margin=2, max_moves=most)
    assert few is not None
    assert set(np.argsort(-few)[: len(there)]) == there
    np.testing.assert_array_equal(few[list(there)], ranking[list(there)])
    others = sorted({*range(9)} - there)
    assert few[others].max() < few[list(there)].min()
    order = np.argsort(ranking[others], kind="stable")
    assert (np.diff(few[others][order]) >= 0).all()


@pytest.mark.parametrize("worst", [-np.inf, 0])
def test_the_first_of_all_are_no_more_than_may_move(worst: float) -> None:
    """A policy may find several chunks infinitely good, or bad."""
    ranking = ranked(worst, 4, 5, 6, np.inf, np.inf, np.inf, 0, -np.inf)
    few = few_moves(ranking, INSIDE, OUTSIDE, margin=2, max_moves=2)
    assert few is not None
    assert not np.isnan(few).any()
    assert set(np.argsort(-few)[:4]) == {2, 3, 5, 6}


def test_a_step_that_sees_more_than_the_pool_has_what_ranks_best_in_view() -> None:
    ranking = ranked(5, 6, 7, 8, 4, 3.5, 0, 0, 9)
    few = few_moves(ranking, INSIDE, OUTSIDE, margin=1, max_moves=1)
    assert choose(9 * CHUNK, 6, (), few).chunks == choose(9 * CHUNK, 6, (), ranking).chunks == (0, 1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    "ranking",
    [
        ranked(1, 2, 3, 4, 0, 1, 2, 2.9, 1),
        ranked(np.inf, np.inf, np.inf, np.inf, 0, 0, np.inf, 0, 0),
        ranked(-np.inf, 0, 0, 0, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf),
        ranked(0, 1, 2),
    ],
)
def test_nothing_moves_for_noise(ranking: Any) -> None:
    assert few_moves(ranking, INSIDE, OUTSIDE, margin=2, max_moves=4) is None


def test_without_chunks_nothing_moves() -> None:
    none = np.zeros(0, np.intp)
    assert few_moves(ranked(1, 2), none, np.array([0, 1]), margin=0, max_moves=3) is None
    assert few_moves(ranked(1, 2), np.array([0, 1]), none, margin=0, max_moves=3) is None


class Noise:
    """Each look finds something else."""

    name, query_rows, index_bytes = "noise", 0, 0

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def open(self, keys: Any, n_chunks: int) -> None: ...
    def seal(self, chunk: int) -> None: ...
    def truncate(self, n_chunks: int) -> None: ...
    def close(self) -> None: ...

    def score(self, request: Any) -> Any:
        return 9 * self.random.random(request.n_chunks, np.float32)


def test_all_of_the_pool_moves_at_tau_only() -> None:
    config = KVFlashConfig(pool=4096, tau=64)
    one = make_session(FakeEngine(4096, 128), config, n_ctx=16384, n_batch=128, n_ubatch=128, scorer=Noise())  # type: ignore[arg-type]
    extend(one, np.arange(12000, dtype=np.int32))
    moved, before = [], one.paging.page_ins
    for token in range(256):
        extend(one, np.array([token], np.int32))
        if one.paging.page_ins > before:
            moved.append(one.paging.page_ins - before)
        before = one.paging.page_ins
    one.close()
    assert len(moved) == 15
    assert moved[:3] + moved[4:7] + moved[8:11] == [8] * 9
    assert min(moved[3], moved[7], moved[11]) > 32
