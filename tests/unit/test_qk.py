"""The default policy on keys that are known: heads, index, real keys, age of the queries, successors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.policy import qk
from kvflash_ggml.policy.base import KeyShape, Masses, ScoreRequest
from kvflash_ggml.policy.heads import BLOCK, as_heads, deciding, every_head, log_shares, over_chunks, split, units_of
from kvflash_ggml.policy.qk import QKScorer
from kvflash_ggml.sequence.scoring import MARGIN

SHAPES = [KeyShape(n_head=4, n_head_kv=2, head=8, scale=0.5), KeyShape(n_head=2, n_head_kv=2, head=4, scale=1.0)]


class Keys:
    """An index row says which chunk it is of, once for each unit. noise: by how much what it tells may be wrong."""

    shapes = SHAPES

    def __init__(self, chunks, noise=0.0):
        self.chunks = chunks  # per chunk and layer [CHUNK, n_head_kv, head]
        self.noise = noise
        self.exact = []
        self.indexed = []

    def read(self, chunk):
        return self.chunks[chunk]

    def read_head(self, chunk, layer, head):
        return self.read(chunk)[layer][:, head]

    def index_size(self, units):
        return 8 * len(units)

    def index(self, chunk, units):
        self.indexed.append(chunk)
        return np.repeat(np.int64(chunk), len(units)).view(np.uint8)

    def score_index(self, units, rows, heads, request):
        assert set(map(tuple, units_of(heads, SHAPES).tolist())) <= set(map(tuple, units.tolist()))
        assert all(len(row) == self.index_size(units) for row in rows)
        return self._columns([int(row.view(np.int64)[0]) for row in rows], request, heads, noise=self.noise)

    def score_keys(self, chunks, request, heads=None):
        self.exact.append(list(chunks))
        return self._columns(chunks, request, every_head(SHAPES) if heads is None else heads)

    def _columns(self, chunks, request, heads, noise=0.0):
        layers = split(request, SHAPES)
        out = []
        for layer, head in heads.tolist():
            shape = SHAPES[layer]
            for row in range(request.rows):
                query = shape.scale * layers[layer][row, head]
                scores = [self.chunks[c][layer][:, head // shape.group] @ query for c in chunks]
                out.append([np.log(np.exp(s).sum()) + noise * np.sin(c) for c, s in zip(chunks, scores, strict=True)])
        return np.array(out, np.float32).reshape(-1, len(chunks))


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def text(rng, n):
    return [[rng.normal(0, 0.3, (CHUNK, s.n_head_kv, s.head)).astype(np.float32) for s in SHAPES] for _ in range(n)]


def look(queries, n_chunks, kept=(0,)):
    rows = len(queries[0])
    return ScoreRequest(
        tokens=np.zeros(n_chunks * CHUNK, np.int32), n_chunks=n_chunks, rows=rows,
        queries=np.concatenate([q.reshape(-1) for q in queries]), protected=frozenset(kept),
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
    scorer = QKScorer(**({"exact_work": 0} | settings))
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
    alone = made(Keys(chunks), 40, successors=False).score(look(queries, 40))
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


def test_only_the_best_are_scored_by_their_real_keys(rng):
    chunks, queries = text(rng, 60), quiet(rng, 2)
    keys = Keys(chunks, noise=0.01)
    scorer = made(keys, 60, least=8, share=0.0, successors=False)
    scores = scorer.score(look(queries, 60, kept=(0, 58, 59)))
    (chosen,) = keys.exact
    assert len(chosen) == 8
    assert not {0, 58, 59} & set(chosen)
    exact = made(Keys(chunks), 60, exact_work=1e12, successors=False).score(look(queries, 60, kept=(0, 58, 59)))
    np.testing.assert_allclose(scores[chosen], exact[chosen], atol=0.02)


def test_a_short_text_is_scored_by_its_real_keys_alone(rng):
    chunks, queries = text(rng, 20), quiet(rng, 2)
    keys = Keys(chunks, noise=9.0)
    assert made(keys, 20, exact_work=1e12, successors=False).score(look(queries, 20)) is not None
    assert keys.exact == [list(range(20))]


def test_only_retrieval_heads_are_asked(rng):
    """Head 3 of layer 0 finds chunk 17, head 0 of layer 1 finds chunk 5."""
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=5)
    queries[1][4, 0], chunks[5][1][9, 0] = [0, 6, 0, 0], [0, 6, 0, 0]
    for heads, best in (([(0, 3)], 17), ([(1, 0)], 5)):
        assert made(Keys(chunks), 40, heads=as_heads(heads)).score(look(queries, 40)).argmax() == best


def test_heads_that_are_named_later_score_as_if_they_had_been_known(rng):
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=5)
    heads = as_heads([(0, 3), (1, 1)])
    keys = Keys(chunks)
    scorer = made(keys, 40)
    before = scorer.layout
    scorer.use(heads)
    assert keys.indexed == list(range(40)), "cut from what was there"
    assert scorer.layout.row_bytes < before.row_bytes
    known = made(Keys(chunks), 40, heads=heads)
    np.testing.assert_array_equal(scorer.score(look(queries, 40)), known.score(look(queries, 40)))
    assert scorer.layout == known.layout
    scorer.use(every_head(SHAPES))
    np.testing.assert_array_equal(scorer.score(look(queries, 40)), made(Keys(chunks), 40).score(look(queries, 40)))
    assert len(keys.indexed) == 80, "more than was there is read anew"


def test_a_chunk_that_could_not_be_indexed_is_indexed_when_it_is_asked_for(rng):
    chunks, queries = text(rng, 10), quiet(rng, 2)
    keys = Keys(chunks)
    scorer = QKScorer(exact_work=0)
    scorer.open(keys, 10)
    for chunk in (*range(4), *range(5, 10)):
        scorer.seal(chunk)
    assert scorer.score(look(queries, 10)).shape == (10,)
    assert keys.indexed[-1] == 4


def test_what_is_dumped_is_shared_and_outlives_a_cut(rng):
    keys = Keys(text(rng, 10))
    scorer = made(keys, 10)
    rows = scorer.dump(10)
    scorer.truncate(4)
    scorer.seal(4)
    other = made(keys, 4)
    other.load(rows)
    assert other.dump(10)[7] is rows[7]
    assert scorer.dump(5)[3] is rows[3]
    assert scorer.dump(5)[4] is not rows[4]


def test_a_long_text_is_asked_with_fewer_rows(rng, monkeypatch):
    chunks, queries = text(rng, 20), quiet(rng, 32)
    draw(queries, chunks, row=0, chunk=5, at=5)
    scorer = made(Keys(chunks), 20)
    whole = scorer.score(look(queries, 20))
    monkeypatch.setattr(qk, "MAX_WORK", 1)
    newest = scorer.score(look([part[-qk.MIN_ROWS :] for part in queries], 20))
    np.testing.assert_array_equal(scorer.score(look(queries, 20)), newest)
    assert whole.argmax() == 5 != newest.argmax()


def test_an_empty_text_has_no_scores(rng):
    assert made(Keys([]), 0).score(look(quiet(rng, 1), 0)) is None


def test_what_decided_is_what_the_maximum_went_by(rng):
    columns = rng.normal(0, 2, (2 * BLOCK + 7, 30)).astype(np.float32)
    ages = rng.uniform(0, 1, (len(columns), 1)).astype(np.float32)
    chunks = np.array([3, 0, 29, 11])
    found = over_chunks(columns, ages)
    which, shares = deciding(columns, found.wholes, chunks, ages)
    wanted = log_shares(columns) - ages
    np.testing.assert_array_equal(which, wanted[:, chunks].argmax(axis=0))
    np.testing.assert_allclose(shares - ages[which, 0], found.best[chunks], atol=1e-5)


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK + 7])
def test_one_pass_finds_what_each_alone_would(rng, count):
    columns = rng.normal(0, 2, (count, 30)).astype(np.float32)
    ages = rng.uniform(0, 1, (count, 1)).astype(np.float32)
    before, logs = columns.copy(), log_shares(columns)
    found = over_chunks(columns, ages)
    np.testing.assert_array_equal(columns, before)
    np.testing.assert_array_equal(columns - found.wholes, logs)
    np.testing.assert_allclose(found.best, (logs - ages).max(axis=0), atol=1e-5)
    weights = np.exp(logs).max(axis=1)
    np.testing.assert_allclose(found.shares, weights @ np.exp(logs) / weights.sum(), rtol=1e-4)


def test_a_chunk_says_why_it_is_asked_for(rng):
    """The head, and the token whose query it was; the chunk behind it, that it follows."""
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=CHUNK - 1)
    scorer = made(Keys(chunks), 40)
    scores = scorer.score(look(queries, 40))
    assert scorer.reasons_of(scores) == [], "nobody wants to know"
    scorer.explains = True
    scores = scorer.score(look(queries, 40))
    reasons = {reason.chunk: reason for reason in scorer.reasons_of(scores)}
    found = reasons[17]
    assert (found.layer, found.head, found.token, found.follows) == (0, 3, 40 * CHUNK - 6 + 2, False)
    assert 0 < found.share <= 1
    assert reasons[18].follows
    assert 0 not in reasons, "what stays needs no reason"


@pytest.mark.parametrize("strength", [3.0, 4.0])
def test_a_chunk_that_follows_is_followed_only_for_what_it_has_itself(rng, strength):
    """Attention on the last keys of two neighbours: on those of the second less, or as much."""
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=18, at=CHUNK - 1, strength=strength)
    draw(queries, chunks, row=2, chunk=17, at=CHUNK - 1)
    scores = made(Keys(chunks), 40).score(look(queries, 40))
    alone = made(Keys(chunks), 40, successors=False).score(look(queries, 40))
    assert scores[18] == pytest.approx(alone[17], abs=0.01)
    assert scores[19] == pytest.approx(alone[18], abs=0.01)


def with_masses(request, keys, heads, seen, rows=None):
    rows = request.rows if rows is None else rows
    short = qk.newest(request, rows, SHAPES)
    values = keys._columns(seen, short, heads)
    known = Masses(heads=heads, rows=rows, chunks=np.array(seen, np.int64), values=values)
    return replace(request, masses=known)


def test_masses_that_came_with_a_request_replace_the_look(rng):
    chunks, queries = text(rng, 40), quiet(rng, 6)
    draw(queries, chunks, row=2, chunk=17, at=5)
    keys = Keys(chunks, noise=9.0)  # the index is of no use
    scorer = made(keys, 40)
    heads, rows = scorer.masses_wanted(40, 6)
    assert (heads.tolist(), rows) == (every_head(SHAPES).tolist(), 6)
    scores = scorer.score(with_masses(look(queries, 40), keys, heads, range(40)))
    assert keys.exact == []
    best = made(Keys(chunks), 40, exact_work=1e18).score(look(queries, 40))
    np.testing.assert_allclose(scores, best, atol=1e-5)


def test_chunks_without_masses_are_scored_from_the_index(rng):
    chunks, queries = text(rng, 40), quiet(rng, 6)
    keys = Keys(chunks)
    scorer, seen = made(keys, 40), [c for c in range(40) if c % 3]
    request = with_masses(look(queries, 40), keys, every_head(SHAPES), seen, rows=4)
    best = made(Keys(chunks), 40, exact_work=1e18).score(qk.newest(request, 4, SHAPES))
    np.testing.assert_allclose(scorer.score(request), best, atol=1e-5)


def test_few_masses_are_asked_of_a_long_text():
    scorer = made(Keys([]), 0)
    assert scorer.masses_wanted(1000, 32)[1] == 32
    assert scorer.masses_wanted(10**5, 32)[1] == qk.MIN_ROWS
    assert scorer.masses_wanted(10**5, 3)[1] == 3
    assert scorer.masses_wanted(10**6, 32)[1] == 2
    assert len(scorer.masses_wanted(10**7, 32)[0]) == 0
    scorer.measures = False
    assert len(scorer.masses_wanted(1000, 32)[0]) == 0


def test_most_tokens_ask_for_nothing(rng):
    """The one query of a token that no chunk answers: no real keys are read, and the scores differ too little to move
    pages. Their order stays.
    """
    chunks, queries = text(rng, 40), quiet(rng, 1)
    keys = Keys(chunks)
    scores = made(keys, 40).score(look(queries, 40))
    assert keys.exact == []
    assert np.ptp(scores) < MARGIN
    several = [np.concatenate([q, q]) for q in queries]
    order = made(Keys(chunks), 40, least=0, share=0, successors=False, age=0).score(look(several, 40))
    assert np.argsort(scores).tolist() == np.argsort(order).tolist()


def test_a_token_that_asks_is_heard(rng):
    chunks, queries = text(rng, 40), quiet(rng, 1)
    draw(queries, chunks, row=0, chunk=17, at=5)
    keys = Keys(chunks, noise=0.01)
    scores = made(keys, 40).score(look(queries, 40))
    assert keys.exact == [[17]], "the real keys of what it asks for, and of nothing else"
    assert scores.argmax() == 17
    assert scores[17] > np.delete(scores, 17).max() + MARGIN


def test_the_reasons_of_a_token_name_what_it_asks_for(rng):
    chunks, queries = text(rng, 40), quiet(rng, 1)
    draw(queries, chunks, row=0, chunk=17, at=CHUNK - 3)
    scorer = made(Keys(chunks), 40)
    scorer.explains = True
    scores = scorer.score(look(queries, 40))
    assert [(reason.chunk, reason.follows) for reason in scorer.reasons_of(scores)] == [(17, False), (18, True)]
