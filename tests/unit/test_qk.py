"""The default policy on keys that are known: shortlist, exact scores, age of the queries, followers."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_ggml.config import CHUNK
from kvflash_ggml.policy.base import KeyShape, Look
from kvflash_ggml.policy.qk import LOWER, QKScorer, row_ages
from kvflash_ggml.policy.statistics import split

SHAPES = [KeyShape(n_head=4, n_head_kv=2, head=8, scale=0.5), KeyShape(n_head=2, n_head_kv=2, head=4, scale=1.0)]


class Keys:
    """Bounds are those of the whole chunk, whatever the group."""

    shapes = SHAPES

    def __init__(self, chunks):
        self.chunks = chunks  # per chunk and layer [CHUNK, n_head_kv, head]
        self.exact = []

    def read(self, chunk):
        return self.chunks[chunk]

    def read_layer(self, chunk, layer):
        return self.read(chunk)[layer]

    def bounds_size(self, group):
        return 8

    def bounds(self, chunk, group, out):
        out[:] = np.frombuffer(np.int64(chunk).tobytes(), np.uint8)

    def score_bounds(self, group, bounds, look):
        ids = [int(row.view(np.int64)[0]) for row in bounds]
        return np.stack([self._columns(c, look, lambda s: s.max(axis=0)) for c in ids], axis=1)

    def score_keys(self, chunks, look):
        self.exact.append(list(chunks))
        return np.stack(
            [self._columns(c, look, lambda s: np.log(np.exp(s).sum(axis=0))) for c in chunks], axis=1
        )  # fmt: skip

    def _columns(self, chunk, look, reduce):
        out = []
        for shape, queries, keys in zip(SHAPES, split(look, SHAPES), self.chunks[chunk], strict=True):
            for row in queries:
                for head, query in enumerate(row):
                    kv_head = head // (shape.n_head // shape.n_head_kv)
                    out.append(reduce(shape.scale * (keys[:, kv_head] @ query)))
        return np.array(out, np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def text(rng, n):
    return [[rng.normal(0, 0.3, (CHUNK, s.n_head_kv, s.head)).astype(np.float32) for s in SHAPES] for _ in range(n)]


def look(queries, n_chunks, kept=(0,)):
    rows = len(queries[0])
    return Look(
        tokens=np.zeros(n_chunks * CHUNK, np.int32), n_chunks=n_chunks, rows=rows,
        queries=np.concatenate([q.reshape(-1) for q in queries]), kept=frozenset(kept),
    )  # fmt: skip


def quiet(rng, rows):
    return [rng.normal(0, 0.3, (rows, s.n_head, s.head)).astype(np.float32) for s in SHAPES]


def draw(queries, chunks, *, row, chunk, at, dim=2, strength=4.0):
    """Make the query of a row, in one head, match one key."""
    key = chunks[chunk][0][at, 1]
    key[:] = 0
    key[dim] = strength
    queries[0][row, 3] = 0
    queries[0][row, 3, dim] = strength


def made(keys, n, **settings):
    scorer = QKScorer(**settings)
    scorer.open(keys, n)
    for chunk in range(n):
        scorer.seal(chunk)
    return scorer


def test_the_chunk_that_is_asked_for_is_best(rng):
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=5)
    scores = made(Keys(chunks), 40).score(look(queries, 40))
    assert scores.argmax() == 17
    assert scores.shape == (40,)


def test_a_fact_across_two_chunks_brings_both(rng):
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=CHUNK - 3)
    assert set(np.argsort(-made(Keys(chunks), 40).score(look(queries, 40)))[:2].tolist()) == {17, 18}
    alone = made(Keys(chunks), 40, followers=False).score(look(queries, 40))
    assert np.argsort(-alone)[0] == 17
    assert np.argsort(-alone).tolist().index(18) > 0
    assert alone[18] < alone[17] - 0.5


def test_newer_queries_count_more(rng):
    chunks, queries = text(rng, 20), quiet(rng, 32)
    draw(queries, chunks, row=0, chunk=5, at=5)
    draw(queries, chunks, row=31, chunk=11, at=5, dim=6)
    scores = made(Keys(chunks), 20).score(look(queries, 20))
    assert np.argsort(-scores)[:2].tolist() == [11, 5]
    level = made(Keys(chunks), 20, age=0.0).score(look(queries, 20))
    assert scores[5] < level[5]
    assert scores[11] == pytest.approx(level[11], abs=0.02)


def test_a_head_that_rests_on_what_is_kept_says_nothing(rng):
    """Two heads: one finds a key, the other likes a chunk a little and the first tokens much more."""
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=5, chunk=17, at=5)
    queries[1][5, 1] = 0
    queries[1][5, 1, 3] = 6.0
    for chunk, strength in ((0, 4.0), (23, 3.0)):
        chunks[chunk][1][7, 1] = 0
        chunks[chunk][1][7, 1, 3] = strength
    resting = made(Keys(chunks), 40).score(look(queries, 40, kept=(0,)))
    looking = made(Keys(chunks), 40).score(look(queries, 40, kept=(1,)))
    assert resting[23] < resting[17] - 2
    assert looking[0] > looking[17]


def test_nothing_need_be_kept(rng):
    chunks, queries = text(rng, 10), quiet(rng, 2)
    draw(queries, chunks, row=1, chunk=6, at=5)
    assert made(Keys(chunks), 10).score(look(queries, 10, kept=())).argmax() == 6


def test_only_the_shortlist_is_scored_exactly(rng):
    chunks, queries = text(rng, 60), quiet(rng, 2)
    keys = Keys(chunks)
    scores = made(keys, 60, least=8, shortlist=0.0, followers=False).score(look(queries, 60, kept=(0, 58, 59)))
    rivals, chosen = keys.exact
    assert rivals == [0, 58, 59]
    assert len(chosen) == 8
    assert not {0, 58, 59} & set(chosen)
    inside = scores[chosen]
    assert (scores > inside.max() - LOWER / 2).sum() == 8


def test_rows_in_the_order_of_the_columns(rng):
    ages = row_ages(look(quiet(rng, 3), 4), SHAPES)
    assert ages[:, 0].tolist() == [2] * 4 + [1] * 4 + [0] * 4 + [2] * 2 + [1] * 2 + [0] * 2


def test_an_empty_text_has_no_scores(rng):
    assert made(Keys([]), 0).score(look(quiet(rng, 1), 0)) is None
