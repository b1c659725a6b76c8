"""The chunk after one whose end is attended to is wanted too."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.policy.base import KeyShape, ScoreRequest
from kvflash_ggml.policy.heads import EDGE, FOLLOWED, boost_successors, every_head, over_chunks

SHAPES = [KeyShape(n_head=2, n_head_kv=1, head=8, scale=1.0), KeyShape(n_head=4, n_head_kv=2, head=4, scale=2.0)]


class Keys:
    """Keys of zeros, but for one that a query is drawn to."""

    shapes = SHAPES

    def __init__(self, places):
        self.places = places  # chunk -> (layer, KV head, row)

    def read(self, chunk):
        out = [np.zeros((CHUNK, s.n_head_kv, s.head), np.float32) for s in SHAPES]
        if chunk in self.places:
            layer, head, row = self.places[chunk]
            out[layer][row, head, 0] = 10
        return out

    def read_head(self, chunk, layer, head):
        return self.read(chunk)[layer][:, head]


def look(n_chunks=20, rows=3, kept=()):
    queries = []
    for shape in SHAPES:
        q = np.zeros((rows, shape.n_head, shape.head), np.float32)
        q[..., 0] = 1
        queries.append(q.reshape(-1))
    return ScoreRequest(
        tokens=np.zeros(CHUNK * n_chunks, np.int32), n_chunks=n_chunks, rows=rows,
        queries=np.concatenate(queries), protected=frozenset(kept),
    )  # fmt: skip


def masses(*, best, column, rows=3, n_chunks=20):
    columns = np.zeros((rows * 6, n_chunks), np.float32)
    columns[column, best] = 9
    return columns


def boost(keys, look, heads, columns, *others):
    boost_successors(keys, look, heads, columns, over_chunks(columns).wholes, *others)


HEADS = every_head(SHAPES)
LAYER0, LAYER1 = 0, 3 * 2 + 3 * 3  # head 0, row 0; and head 3 of the other layer, row 0, which reads KV head 1


@pytest.mark.parametrize(("place", "column"), [((0, 0, CHUNK - 1), LAYER0), ((1, 1, CHUNK - EDGE), LAYER1)])
def test_the_next_chunk_follows(place, column):
    scores = np.full(20, -50.0, np.float32)
    scores[[4, 9]] = -1, -3
    boost(Keys({4: place}), look(), HEADS, masses(best=4, column=column), [4, 9], scores)
    assert -3 < scores[5] < -1
    assert np.flatnonzero(scores > -50).tolist() == [4, 5, 9]


@pytest.mark.parametrize("place", [(0, 0, CHUNK - EDGE - 1), (1, 0, CHUNK - 1)])
def test_nothing_follows_from_elsewhere(place):
    scores = np.full(20, -50.0, np.float32)
    scores[4] = -1
    before = scores.copy()
    boost(Keys({4: place}), look(), HEADS, masses(best=4, column=LAYER0), [4], scores)
    assert scores.tolist() == before.tolist()


def test_only_the_best_are_read():
    chunks = list(range(0, 40, 2))
    scores = np.full(40, -50.0, np.float32)
    scores[chunks] = -np.arange(20)
    keys = Keys(dict.fromkeys(chunks, (0, 0, CHUNK - 1)))
    columns = np.zeros((18, 40), np.float32)
    columns[LAYER0, chunks] = 9
    boost(keys, look(n_chunks=40), HEADS, columns, chunks, scores)
    assert (scores[1::2] > -50).sum() == FOLLOWED


def test_the_end_of_the_text_and_what_is_kept_are_left_alone():
    scores = np.full(20, -50.0, np.float32)
    scores[[7, 19]] = -1
    before = scores.copy()
    keys = Keys({7: (0, 0, CHUNK - 1), 19: (0, 0, CHUNK - 1)})
    columns = np.zeros((18, 20), np.float32)
    columns[LAYER0, [7, 19]] = 9
    boost(keys, look(kept={8}), HEADS, columns, [7, 19], scores)
    assert scores.tolist() == before.tolist()


def test_an_older_query_counts_less():
    """Two columns tie; the one without a penalty tells where the chunk is attended to."""
    columns = np.zeros((18, 20), np.float32)
    columns[[LAYER0, LAYER1], 4] = 9
    for penalised, follows in ((LAYER0, False), (LAYER1, True)):
        scores = np.full(20, -50.0, np.float32)
        scores[4] = -1
        penalty = np.zeros((18, 1), np.float32)
        penalty[penalised] = 0.5
        boost(Keys({4: (0, 0, CHUNK - 1)}), look(), HEADS, columns, [4, 9], scores, penalty)
        assert (scores[5] > -50) == follows
