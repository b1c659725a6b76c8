"""A policy that somebody else has written: what it returns is checked, what it raises is told."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.saving import Digest, settle_scores

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError, NotFinite
from kvflash_ggml.policy import resolve
from kvflash_ggml.policy.base import Masses
from kvflash_ggml.sequence.keys import HostKeys
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.query_ring import QueryRing
from kvflash_ggml.sequence.scores import AttentionScores, check_scores
from kvflash_ggml.threads import Worker


class Foreign(Digest):
    """Returns, or raises, what it is told to."""

    name = "foreign"

    def __init__(self) -> None:
        self.answer: Callable[[int], Any] = lambda n: np.zeros(n, np.float32)
        self.trouble: Exception | None = None

    def seal(self, chunk: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        super().seal(chunk)

    def score(self, look: Any) -> Any:
        return self.answer(look.n_chunks)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def session(request: pytest.FixtureRequest) -> Any:
    engine = FakeEngine(512, 128, query_rows=4, asynchronous=request.param)
    config = KVFlashConfig(pool=512, tail=2, tau=4)
    session = make_session(engine, config, n_ctx=2048, n_batch=128, n_ubatch=128, scorer=Foreign())
    yield session
    session.close()


def test_a_policy_that_cannot_be_opened_leaves_nothing_behind() -> None:
    class Closed(Foreign):
        def open(self, keys: Any, n_chunks: int) -> None:
            assert engine.allocated > 0, "room for queries"
            raise RuntimeError("shut")

    engine = FakeEngine(512, 128, query_rows=4, asynchronous=True)
    with pytest.raises(RuntimeError, match="shut"):
        make_session(engine, KVFlashConfig(pool=512), n_ctx=2048, n_batch=128, n_ubatch=128, scorer=Closed())
    assert engine.allocated == 0


def some(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.int32)


WRONG: list[Callable[[int], Any]] = [
    lambda n: [0.0] * n,
    lambda n: 1.0,
    lambda n: np.float32(1),
    lambda n: np.zeros((n, 2), np.float32),
    lambda n: np.zeros(n - 1, np.float32),
    lambda n: np.zeros(n + 1, np.float32),
    lambda n: np.zeros(0, np.float32),
    lambda n: np.zeros(n, np.complex64),
    lambda n: np.zeros(n, object),
    lambda n: np.where(np.arange(n) == 1, np.nan, 0.0).astype(np.float32),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_are_no_scores_is_refused_by_name(wrong: Callable[[int], Any], session: Any) -> None:
    session.scoring.scorer.answer = wrong
    with pytest.raises(ConfigError, match="policy 'foreign' returned"):
        extend(session, some(1000))
    session.scoring.scorer.answer = lambda n: np.zeros(n, np.float32)
    session.reset()
    extend(session, some(1000))
    assert session.length == 1000


@pytest.mark.parametrize("right", [lambda n: None, lambda n: np.full(n, -np.inf), lambda n: np.arange(n, dtype="f8")])
def test_what_are_scores_is_taken(right: Callable[[int], Any], session: Any) -> None:
    session.scoring.scorer.answer = right
    extend(session, some(1000))
    assert session.length == 1000


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine")])
def test_an_error_while_a_chunk_is_sealed_is_told(error: Exception, session: Any) -> None:
    """A chunk without statistics would be scored at random."""
    session.scoring.scorer.trouble = error
    with pytest.raises(type(error), match="mine"):
        extend(session, some(1000))


# --- on a thread of its own


def asynchronous(scorer: Foreign) -> Any:
    engine = FakeEngine(512, 128, query_rows=4, asynchronous=True)
    config = KVFlashConfig(pool=512, tail=2, tau=1000)
    session = make_session(engine, config, n_ctx=2048, n_batch=128, n_ubatch=128, scorer=scorer)
    extend(session, some(1000))
    settle_scores(session)
    return session


def generate(session: Any, count: int) -> None:
    for token in some(count):
        extend(session, token[None])


def await_end(session: Any) -> None:
    """Until the thread has ended, by itself."""
    for thread in tuple(session.scoring._worker._executor._threads):
        thread.join(30)
        assert not thread.is_alive()


def test_a_chunk_whose_sealing_is_interrupted_is_sealed_again(session: Any) -> None:
    """An image that the policy has not been told of would never be scored."""
    told, sealed = [], session.paging._sealed

    def interrupted(chunks: Any) -> None:
        told.append(list(chunks))
        if len(told) == 1:
            raise KeyboardInterrupt
        sealed(chunks)

    session.paging._sealed = interrupted
    with pytest.raises(KeyboardInterrupt):
        extend(session, np.arange(100, dtype=np.int32))
    assert session.length == 100
    assert told == [[0], [0]]
    assert 0 in session.store
    assert session.store.page(0).holders == 1


def test_a_chunk_that_could_not_be_sealed_and_is_another_one_now_fails_nobody() -> None:
    class Waiting(Foreign):
        goes_on: threading.Event | None = None

        def seal(self, chunk: int) -> None:
            event, self.goes_on = self.goes_on, None
            if event is not None:
                begun.set()
                event.wait()
                raise LookupError("the page image has been released")
            super().seal(chunk)

    scorer, begun = Waiting(), threading.Event()
    session = asynchronous(scorer)
    scorer.goes_on = event = threading.Event()
    generate(session, 24)
    image = session.store.page(15)
    assert begun.wait(30)
    session.truncate(1000)
    generate(session, 24)
    assert session.store.page(15) is not image
    event.set()
    settle_scores(session)
    session.scoring.take()
    session.close()


@pytest.mark.parametrize("work", ["seal", "score"])
def test_a_session_that_is_closed_on_the_thread_that_scores(work: str) -> None:
    """A garbage collector runs on any thread: what that thread computes with is freed behind it."""
    seen: list[Any] = []

    class Closing(Foreign):
        armed = False

        def seal(self, chunk: int) -> None:
            self.collect("seal")
            super().seal(chunk)

        def score(self, look: Any) -> Any:
            self.collect("score")
            return super().score(look)

        def collect(self, where: str) -> None:
            if self.armed and where == work:
                self.armed = False
                session.close(outlived)
                seen.append((engine.closed, engine.allocated > 0, len(self._keys.read(3))))

    def outlived() -> ExitStack:
        stack = ExitStack()
        stack.callback(lambda: seen.append(("behind", engine.closed, engine.allocated)))
        return stack

    scorer = Closing()
    session = asynchronous(scorer)
    engine = session.engine
    scorer.armed = True
    if work == "seal":
        session.scoring.sealed([3])
    else:
        session.relevance.request(session.tokens, None, rows=None)
    await_end(session)
    assert seen == [(False, True, 1), ("behind", True, 0)]


def test_what_closing_on_that_thread_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    session = asynchronous(Foreign())

    def outlived() -> ExitStack:
        stack = ExitStack()
        stack.callback(lambda: 1 // 0)
        return stack

    session.scoring._run(session.close, outlived)
    await_end(session)
    assert "ZeroDivisionError" in caplog.text
    assert session.engine.closed


def test_work_is_done_although_nobody_knows_the_worker_any_more() -> None:
    """What closes a model is submitted while a garbage collector takes all of it."""
    done = threading.Event()
    worker = Worker("kvflash-score")
    worker.submit(int).result()
    (thread,), known = worker._executor._threads, weakref.ref(worker)
    del worker
    gc.collect()
    left = known()
    assert left is not None
    left.submit(done.set)
    assert done.wait(30)
    left.close()
    assert not thread.is_alive()


class Asking(Foreign):
    """Wants the masses that it is told to."""

    wanted: Any = None

    def masses_wanted(self, n_chunks: int, rows: int) -> Any:
        return self.wanted

    def most_masses(self, n_chunks: int, n_heads: int) -> int:
        return 2 * n_heads * n_chunks


def test_heads_are_read_as_the_engine_counts_them() -> None:
    """As a list, or in wider integers, which would name other heads."""
    engine, scorer = FakeEngine(512, 128, query_rows=4), Asking()
    reader = AttentionScores(engine, scorer, QueryRing(engine, 0), np.empty)  # type: ignore[arg-type]
    for heads in ([[0, 1], [1, 0]], np.array([[0, 1], [1, 0]], np.int64)):
        scorer.wanted = heads, 2
        asked = reader.ask(100, 1, 4)
        assert (asked.heads.dtype, asked.heads.tolist()) == (np.int32, [[0, 1], [1, 0]])
        assert len(asked.rows) == 2
    for wanted in (([0, 1], 2), ([[0.5, 1]], 2), ([[0, 1, 2]], 2), ([[0, 1]], 5)):
        scorer.wanted = wanted
        with pytest.raises(ConfigError, match=r"'foreign'.*masses_wanted\(\)"):
            reader.ask(100, 1, 4)


def test_masses_need_room() -> None:
    """A policy that does not say how many it asks for would be given none, and nobody told."""

    class Roomless(Foreign):
        index_bytes = 0

        def masses_wanted(self, n_chunks: int, rows: int) -> Any: ...

    class Whole(Asking):
        index_bytes = 0

    with pytest.raises(ConfigError, match=r"'foreign'.*most_masses\(\)"):
        resolve(Roomless())
    assert isinstance(resolve(Whole()), Whole)


def test_masses_of_other_heads_are_of_no_use_and_that_is_told() -> None:
    engine, scorer = FakeEngine(512, 128, query_rows=4), Asking()
    reader = AttentionScores(engine, scorer, QueryRing(engine, 0), np.empty)  # type: ignore[arg-type]
    known = Masses(
        heads=np.array([[0, 1]], np.int32), rows=2, chunks=np.zeros(1, np.int64), values=np.zeros((2, 1), np.float32)
    )
    scorer.wanted = [[0, 1]], 2
    assert reader.still_wanted(known, 1, 4) is known
    assert reader.ranked == ("exact", "")
    scorer.wanted = [[0, 1], [1, 0]], 2
    assert reader.still_wanted(known, 1, 4) is None
    assert reader.ranked == ("index", "other heads have begun to count since the prompt was read")
    assert reader.still_wanted(None, 1, 4) is None


def test_queries_of_some_heads_are_those_among_all() -> None:
    """Where masses are known, only their heads are gathered. The others are 0, in the same places."""
    engine = SimpleNamespace(
        info=SimpleNamespace(query_rows=4, n_seq=1), query_shapes=[(5, 3, 2), (5, 3, 2), (5, 2, 4)]
    )
    ring = QueryRing(engine, 0)  # type: ignore[arg-type]
    flat = np.arange(1, ring.ring_size + 1, dtype=np.float32)
    every = ring.newest(flat, ring.order, 7, 3)
    heads = [(layer, head) for layer, (_, n_head, _) in enumerate(engine.query_shapes) for head in range(n_head)]
    for some in (heads, heads[1:6:2], heads[-1:], heads[:0]):
        found = ring.newest_of(flat, ring.order, 7, 3, np.array(some, np.int32).reshape(-1, 2))
        assert found.shape == every.shape
        at = 0
        for layer, (_, n_head, size) in enumerate(engine.query_shapes):
            mine, all_ = (x[at : at + 3 * n_head * size].reshape(3, n_head, size) for x in (found, every))
            at += 3 * n_head * size
            for head in range(n_head):
                assert np.array_equal(mine[:, head], all_[:, head] if (layer, head) in some else 0 * all_[:, head])
    two = [np.array(some, np.int32) for some in (heads[:2], heads[:2], heads[1:3])]
    first, again, other = (
        ring.newest_of(x, ring.order, 7, n, some)
        for x, n, some in zip((flat, 2 * flat, flat), (3, 3, 2), two, strict=True)
    )
    assert np.shares_memory(first, again)
    assert np.array_equal(again, ring.newest_of(2 * flat, ring.order, 7, 3, two[0]))
    assert other.size * 3 == again.size * 2
    with pytest.raises(ValueError, match="read-only"):
        other += 1


def test_an_interrupt_while_rows_are_looked_up_mixes_no_looks() -> None:
    class Interrupting(list[Any]):
        times = 0

        def __iter__(self) -> Any:
            self.times += 1
            if self.times == 2:
                raise KeyboardInterrupt
            return super().__iter__()

    keys = HostKeys(FakeEngine(512, 128), None)  # type: ignore[arg-type]
    first, second = ([np.zeros(8, np.uint8) for _ in range(3)] for _ in range(2))
    want = keys._addresses_of(first).tolist()
    with pytest.raises(KeyboardInterrupt):
        keys._addresses_of(Interrupting(second))
    assert keys._addresses_of(first).tolist() == want
    assert keys._addresses_of([*first[:2], *second]).tolist() == [
        x.__array_interface__["data"][0] for x in [*first[:2], *second]
    ]


def test_rows_of_a_text_that_is_gone_are_not_held() -> None:
    keys = HostKeys(FakeEngine(512, 128), None)  # type: ignore[arg-type]
    rows = [np.zeros(8, np.uint8) for _ in range(4)]
    gone = [weakref.ref(row) for row in rows[2:]]
    keys._addresses_of(rows)
    del rows[2:]
    keys.truncate(2)
    assert [row() for row in gone] == [None, None]
    assert keys._addresses_of(rows).tolist() == [x.__array_interface__["data"][0] for x in rows]


def test_rows_of_other_heads_are_not_held(session: Any) -> None:
    """Between the change of heads and the next look there may be thousands of tokens."""
    scorer = session.scoring.scorer
    scorer.use = lambda heads: None
    rows = [np.zeros(8, np.uint8)]
    of_old_heads = weakref.ref(rows[0])
    scorer._keys._addresses_of(rows)
    rows.clear()
    session.scoring.use(np.zeros((1, 2), np.int32))
    settle_scores(session)
    assert of_old_heads() is None


def test_other_heads_cost_what_they_cost_from_the_next_score_on() -> None:
    """And not only after the next chunk: the thread that scores takes them over, whatever time it needs for that."""
    asked = threading.Event()

    class Slow(Foreign):
        heads = 1000

        def use(self, heads: Any) -> None:
            asked.wait(0.2)
            self.heads = len(heads)

        def work(self, n_chunks: int) -> float:
            asked.set()
            return 1e8 * self.heads

    scorer = Slow()
    engine = FakeEngine(512, 128, query_rows=4, asynchronous=True)
    session: Any = make_session(engine, KVFlashConfig(pool=512), n_ctx=2048, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    assert session.scoring.selection.interval == 1024
    asked.clear()
    session.scoring.use(np.zeros((1, 2), np.int32))
    assert session.scoring.selection.interval < 10
    session.close()


def test_a_text_that_is_spoiled_is_not_its_policys_fault() -> None:
    scores, queries = np.array([0.0, np.nan], np.float32), np.array([[1.0, np.inf]], np.float32)
    with pytest.raises(NotFinite, match="queries of the newest tokens"):
        check_scores(Foreign(), scores, 2, queries)
    with pytest.raises(ConfigError, match="policy"):
        check_scores(Foreign(), scores, 2, np.ones((1, 2), np.float32))
