"""Steps of several texts in one step of the engine: what is one's own stays so, whatever becomes of the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import ROW_BYTES, FakeEngine
from support.integrity import check_table

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, HostMemoryError, NotFinite
from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.pool import Pool
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.reading import Reading
from kvflash_ggml.sequence.scoring import DEVICE_RATE, DEVICE_STEP
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.sequence.step import LAST
from kvflash_ggml.speculation.decision import Fixed
from kvflash_ggml.speculation.loop import Speculator

SHARE = 8 * CHUNK
N_CTX = 40 * CHUNK


def on_one_pool(
    count: int, *, host_chunks: int | None = None, **engine: Any
) -> tuple[FakeEngine, Pool, list[Sequence]]:
    made = FakeEngine(count * SHARE, 512, n_seq=count, **engine)
    limit = None if host_chunks is None else host_chunks * made.info.page_bytes
    pool = Pool(made, n_ubatch=512, host_limit=limit)  # type: ignore[arg-type]
    return made, pool, [open_text(pool, seq) for seq in range(count)]


def open_text(pool: Pool, seq: int, scorer: Any = None, tau: int | None = None) -> Sequence:
    config = KVFlashConfig(pool=SHARE, sinks=1, tail=2, tau=tau)
    return Sequence(pool, config, seq=seq, n_ctx=N_CTX, n_batch=512, scorer=scorer)


def numbers(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def advance(texts: list[Sequence], counts: list[int], seed: int = 0) -> list[Exception | None]:
    steps = []
    for text, count in zip(texts, counts, strict=True):
        text.begin(count)
        steps.append((text, text.prepare_answer(numbers(count, seed + text.seq + text.length), LAST)))
    return together.compute(steps)


def calls_of_a_token(count: int) -> int:
    """How many Python functions run while the pool computes a token of one of `count` texts."""
    _, pool, (text, *_) = on_one_pool(count)
    advance([text], [9])
    text.begin(1)
    step, calls = text.prepare_answer(numbers(1, 0), LAST), 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        pool.run([step])
    finally:
        sys.setprofile(None)
    text.commit(step)
    return calls


def test_texts_beside_cost_a_lone_user_hardly_a_call() -> None:
    assert calls_of_a_token(8) <= calls_of_a_token(1) + 3


def check(engine: FakeEngine, texts: list[Sequence]) -> None:
    """Every row of every text is where its table says, and was computed for it."""
    rows, _ = engine.settled()
    for text in texts:
        check_table(text.table)
        assert text.length == len(engine.truths[text.seq])
        assert text.tokens.tolist() == engine.texts[text.seq]
        assert text.table.held <= set(text.table.blocks.order)
        for c, chunk in enumerate(text.table.chunks):
            lo, end = c * CHUNK, min((c + 1) * CHUNK, text.length)
            if chunk.block >= 0:
                found = rows[chunk.block * CHUNK : chunk.block * CHUNK + end - lo].tobytes()
            else:
                found = text.store.bytes_of(c)[: (end - lo) * ROW_BYTES]
            assert bytes(found) == b"".join(engine.truths[text.seq][lo:end])


def test_the_queries_of_single_tokens_lie_behind_those_of_a_prompt() -> None:
    _, _, texts = on_one_pool(2, query_rows=16)
    assert advance(texts, [20, 9]) == [None, None]
    for step in range(3):
        assert advance(texts, [1, 1], seed=step) == [None, None]
    for text in texts:
        end = text.length
        where = np.arange(end - 8, end)
        want = np.sin(np.outer(text.ids[where] + 7 * where, np.arange(1, ROW_BYTES + 1)))
        got = text.queries.newest_now(end, 8).reshape(8, -1)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


class Scorer:
    name, query_rows, index_bytes = "equal", 0, 0

    def open(self, keys: Any, n_chunks: int) -> None: ...
    def seal(self, chunk: int) -> None: ...
    def truncate(self, n_chunks: int) -> None: ...
    def close(self) -> None: ...
    def score(self, request: Any) -> Any:
        return np.zeros(request.n_chunks, np.float32)


@pytest.mark.parametrize("count", [1, 4])
def test_texts_beside_a_device_share_the_time_for_looks(count: int) -> None:
    """A text that decodes with three others waits for their scores too."""
    made = FakeEngine(4 * SHARE, 512, n_seq=4, asynchronous=True)
    pool = Pool(made, n_ubatch=512)  # type: ignore[arg-type]
    texts = [open_text(pool, seq, Scorer()) for seq in range(4)]
    advance(texts[:count], [1] * count)
    scoring = texts[0].scoring
    assert scoring is not None
    assert scoring.clock is not None
    told: list[tuple[float, int]] = []
    scoring.clock.on_score = lambda *what: told.append(what)  # type: ignore[method-assign]
    texts[0].relevance.request(texts[0].tokens, None, rows=1)
    scoring.take()
    assert told == [(pytest.approx(scoring.seconds), count)]
    for text in texts:
        text.close()


class Dear(Scorer):
    """A score costs what the steps of a device leave for one text."""

    def work(self, n_chunks: int) -> float:
        return DEVICE_STEP / DEVICE_RATE


@pytest.mark.parametrize("count", [1, 3])
def test_texts_beside_a_device_share_what_its_steps_leave(count: int) -> None:
    pool = Pool(FakeEngine(4 * SHARE, 512, n_seq=4, asynchronous=True), n_ubatch=512)  # type: ignore[arg-type]
    texts = [open_text(pool, seq, Dear()) for seq in range(4)]
    advance(texts[:count], [1] * count)
    advance(texts[:count], [CHUNK] * count)
    scoring = texts[0].scoring
    assert scoring is not None
    assert scoring.selection.interval == count
    advance(texts[:1], [1])
    assert scoring.selection.interval == 1, "nothing else decodes now"
    for text in texts:
        text.close()


def test_rows_of_several_texts_lie_side_by_side() -> None:
    engine, _, texts = on_one_pool(3)
    assert advance(texts, [5, 70, 1]) == [None] * 3
    assert advance(texts, [1, 1, 1]) == [None] * 3
    assert engine.steps == [76, 3]
    assert [text.logits.row(text.length - 1) for text in texts] == [0, 1, 2]
    assert advance(texts[:1], [1]) == [None]
    assert texts[1].logits.row(texts[1].length - 1) is None, "they are those of another step"
    check(engine, texts)


def test_a_text_that_decodes_opens_one_entry_of_its_mask_row(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, texts = on_one_pool(3)
    advance(texts, [100, 90, 80])
    advance(texts, [1, 1, 1])
    for text in texts:
        monkeypatch.setattr(text.mask, "_take", None)
    assert advance(texts, [1, 1, 1]) == [None] * 3
    monkeypatch.undo()
    assert advance(texts[::-1], [1, 1, 1]) == [None] * 3
    assert advance(texts, [1, 1, 1]) == [None] * 3


def test_a_neighbour_changes_nothing_that_is_resident() -> None:
    """A text alone and beside others that outgrow the pool has the same chunks in the same blocks at each step."""
    places = []
    for beside in (False, True):
        engine, _, texts = on_one_pool(3)
        mine = []
        for turn in range(60):
            running = texts if beside else texts[1:2]
            assert not any(advance(running, [40 if text.seq == 1 else 1 + turn for text in running]))
            mine.append([chunk.block for chunk in texts[1].table.chunks])
        assert texts[1].paging.page_outs > 0
        assert any(block == -1 for block in mine[-1])
        check(engine, running)
        places.append(mine)
    assert places[0] == places[1]


@pytest.mark.parametrize("both", [False, True])
def test_logits_that_are_not_finite_are_one_texts_own(both: bool) -> None:
    engine, _, texts = on_one_pool(3)
    advance(texts, [100, 90, 80])
    before = [text.length for text in texts]
    engine.spoiled = {1, 2} if both else {1}
    errors = advance(texts, [1, 60, 1])
    assert errors[0] is None
    assert isinstance(errors[1], NotFinite)
    assert isinstance(errors[2], NotFinite) == both
    assert [text.length for text in texts] == [before[0] + 1, before[1], before[2] + (not both)]
    block = texts[1].table.chunks[1].block * CHUNK
    assert not engine.pool[block + 90 - CHUNK : block + CHUNK].any(), "rows that are no numbers stay"
    check(engine, texts)
    engine.spoiled = set()
    assert advance(texts, [1, 60, 1]) == [None] * 3
    check(engine, texts)


@pytest.mark.parametrize("finite", [True, False])
def test_a_prompt_is_checked_before_the_next_step_of_another_text(
    finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once. If it is not finite, nothing of it stays in the engine, and it begins again after a reset or a cut."""
    engine, _, texts = on_one_pool(3)
    extend(texts[1], numbers(150, 0))
    engine.spoiled = set() if finite else {1}
    argmax, asked = engine.argmax, []
    monkeypatch.setattr(engine, "argmax", lambda rows: asked.append(engine.seq[rows].tolist()) or argmax(rows))
    for _ in range(3):
        assert advance(texts[:1], [1]) == [None]
    assert asked == [[1], [0], [0], [0]]
    assert texts[1].spoiled == (not finite)
    assert (engine.cell_seq[engine.cell_pos >= 0] == 1).any() == finite
    if not finite:
        assert not engine.pool[engine.cell_pos < 0].any(), "rows that are no numbers stay"
        with pytest.raises(NotFinite, match="reset"):
            texts[1].prepare(numbers(1, 150), LAST)
        assert (texts[1].can_truncate(100), texts[1].truncates_to(100), texts[1].truncate(100)) == (False, 0, 0)
        engine.spoiled = set()
    assert advance(texts, [1, 1, 1]) == [None] * 3
    check(engine, texts)


def test_a_step_that_fails_is_computed_again_alone() -> None:
    engine, _, texts = on_one_pool(3)
    advance(texts, [100, 90, 80])
    engine.faults.step = 0
    assert advance(texts, [1, 1, 1]) == [None] * 3
    assert engine.steps[-3:] == [1, 1, 1]
    check(engine, texts)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("at", [0, 5])
def test_a_step_of_one_text_fails_for_good(victim: int, at: int) -> None:
    """It fails among the others and alone. They have the tokens, in the places, of a run without that."""
    found = []
    for fails in (False, True):
        engine, _, texts = on_one_pool(3)
        advance(texts, [100, 90, 80])
        for step in range(8):
            engine.spoiled = {victim} if fails and step == at else set()
            errors = advance(texts, [1, 1, 1])
            assert [i for i, error in enumerate(errors) if error is not None] == sorted(engine.spoiled)
            check(engine, texts)
            if engine.spoiled:
                texts[victim].reset()
        others = [text for text in texts if text.seq != victim]
        found.append([(text.tokens.tolist(), [chunk.block for chunk in text.table.chunks]) for text in others])
    assert found[0] == found[1]


def test_host_memory_that_is_full_stops_who_needs_more() -> None:
    """Nothing of that text is lost, and a text that seals no chunk goes on beside it."""
    engine, _, texts = on_one_pool(2, host_chunks=4)
    stopped = set()
    for _ in range(CHUNK - 1):
        steps = []
        for text, count in zip(texts, (16, 1), strict=True):
            text.begin(count)
            try:
                steps.append((text, text.prepare_answer(numbers(count, text.length), LAST)))
            except HostMemoryError:
                stopped.add(text.seq)
        for (text, _), error in zip(steps, together.compute(steps), strict=True):
            if error is not None:
                assert isinstance(error, HostMemoryError)
                stopped.add(text.seq)
        check(engine, texts)
    assert stopped == {0}
    assert texts[0].length >= 4 * CHUNK
    assert texts[1].length == CHUNK - 1


def test_an_interrupt_leaves_each_text_with_all_or_nothing() -> None:
    for late in (False, True):
        engine, _, texts = on_one_pool(2)
        advance(texts, [100, 90])
        engine.faults.step, engine.faults.error, engine.faults.late = 0, KeyboardInterrupt, late
        with pytest.raises(KeyboardInterrupt):
            advance(texts, [1, 30])
        assert [text.length for text in texts] == ([101, 120] if late else [100, 90])
        check(engine, texts)
        assert advance(texts, [1, 1]) == [None] * 2


def test_a_sequence_has_one_text_and_the_last_one_closes_the_pool() -> None:
    engine, pool, texts = on_one_pool(2)
    with pytest.raises(ConfigError, match="sequence 1 has a text"):
        open_text(pool, 1)
    with pytest.raises(ConfigError, match="sequence 2 of a context made for 2"):
        open_text(pool, 2)
    advance(texts, [100, 90])
    texts[1].close()
    again = open_text(pool, 1)
    assert advance([texts[0], again], [1, 70]) == [None] * 2
    check(engine, [texts[0], again])
    texts[0].close()
    assert not engine.closed
    again.close()
    assert engine.closed


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "cut", "reset", "reopen", "fail", "spoil"]),
        st.lists(st.integers(0, 90), min_size=6, max_size=6),
    ),
    max_size=30,
)


def test_a_text_alone_has_what_idle_ones_can_let_go_of() -> None:
    engine, pool, texts = on_one_pool(3)
    for text in texts:
        while text.length < 20 * CHUNK:
            assert advance([text], [100]) == [None]
    assert [text.table.resident for text in texts] == [8] * 3
    pool.deal({1: N_CTX})
    assert [len(text.table.held) for text in (texts[0], texts[2])] == [4, 4]  # a sink, a tail of two, the newest
    assert texts[1].table.quota == 3 * 8 - 8
    check(engine, texts)
    for _ in range(10):
        assert advance([texts[1]], [100]) == [None]
    assert texts[1].table.resident == 16
    check(engine, texts)
    pool.deal({0: N_CTX, 1: N_CTX})
    assert [text.table.quota for text in texts] == [10, 10, 4]
    assert texts[1].table.resident == 10
    check(engine, texts)
    assert advance(texts[:2], [1, 1]) == [None] * 2
    pool.deal(dict.fromkeys(range(3), N_CTX))
    assert advance(texts, [1, 1, 1]) == [None] * 3
    assert [text.table.quota for text in texts] == [8] * 3
    check(engine, texts)


def test_a_short_request_takes_no_more_than_it_needs() -> None:
    engine, pool, texts = on_one_pool(3)
    pool.deal({0: N_CTX})
    while texts[0].length < 30 * CHUNK:
        assert advance(texts[:1], [100]) == [None]
    assert texts[0].table.resident == 24
    pool.deal({0: N_CTX, 1: 100})
    assert [text.table.quota for text in texts] == [16, 8, 0]
    check(engine, texts)


def test_a_text_that_gets_more_fills_it_at_the_next_reselection() -> None:
    engine = FakeEngine(2 * SHARE, 512, n_seq=2)
    pool = Pool(engine, n_ubatch=512)  # type: ignore[arg-type]
    texts = [open_text(pool, seq, Scorer(), tau=64) for seq in range(2)]
    while texts[0].length < 20 * CHUNK:
        assert advance(texts[:1], [100]) == [None]
    assert texts[0].table.resident == 8
    pool.deal({0: N_CTX})
    for _ in range(8):
        assert advance(texts[:1], [64]) == [None]
        assert texts[0].scoring is not None
        for look in texts[0].scoring.pending:
            look.result()
    assert texts[0].table.resident == 16
    check(engine, texts)
    for text in texts:
        text.close()


def test_an_interrupt_while_chunks_leave_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pool, texts = on_one_pool(2)
    for _ in range(10):
        assert advance(texts, [100, 90]) == [None] * 2
    before = [list(text.table.blocks.order) for text in texts]
    calls = iter(range(5))

    def clear(self: FakeEngine, slot: int, count: int, kept: Any = FakeEngine.clear_cells) -> None:
        if next(calls, None) == 2:
            raise KeyboardInterrupt
        kept(self, slot, count)

    monkeypatch.setattr(FakeEngine, "clear_cells", clear)
    with pytest.raises(KeyboardInterrupt):
        pool.deal({0: N_CTX})
    monkeypatch.undo()
    assert [text.table.blocks.order for text in texts] == before
    check(engine, texts)
    assert texts[1].table.resident == 4
    pool.deal({0: N_CTX})
    assert [text.table.quota for text in texts] == [12, 4]
    assert advance(texts[:1], [100]) == [None]
    check(engine, texts)


def test_a_text_is_not_levelled_into_a_step_that_streams() -> None:
    """Its token fits the pool. As many rows as another text's draft evict a chunk, and stream in an exact answer."""
    from kvflash_ggml.runtime.task import Pending, Task, TaskRequest

    engine, pool, texts = on_one_pool(2, rs_planes=3)
    pool.make_stages(2 * SHARE)
    for text in texts:
        text.reading = Reading(answers_exactly=True)
    while texts[0].length < SHARE - 2:
        assert advance(texts, [min(62, SHARE - 2 - texts[0].length), 1]) == [None, None]
    speculator = Speculator([], Fixed(4), n_vocab=1000, ends=[])
    for text, streams in zip(texts, (True, False), strict=True):
        owner: Any = SimpleNamespace(text=SimpleNamespace(speculator=speculator, draw=lambda pos: 0))
        answer = Task(owner, TaskRequest(tokens=numbers(1, 7), sampler=None))
        text.begin(1)
        before = text.prepare_answer(numbers(1, 7), LAST)
        assert before.view is None
        pending = Pending(answer, text, before)
        assert answer.level(pending, 4) is not streams
        assert (pending.step is before) is (pending.verified is None) is streams
        assert not pending.alone
        assert pending.rows == (1 if streams else 4)
        pending.finish()
        text.settle()
    check(engine, texts)
    assert texts[0].length == SHARE - 1
    speculator.propose(texts[1], 5)
    copies = speculator.levelled(5, None, 4)
    copies.path += [0, 1]
    copies.end()
    assert speculator.last.filled == 2, "tokens that copies have won are counted"


@pytest.mark.parametrize("elastic", [False, True])
@settings(deadline=None)
@given(actions=ACTIONS, count=st.integers(2, 6), timing=st.sampled_from(["lazy", "eager", "random"]))
def test_random_use(elastic: bool, actions: list[tuple[str, list[int]]], count: int, timing: str) -> None:
    """Texts of all lengths, cut, closed and failing beside each other. The engine checks each row of each mask.

    elastic: the blocks are dealt anew to those that take each step.
    """
    engine, pool, texts = on_one_pool(count, timing=timing, query_rows=8 * count)
    for action, values in actions:
        chosen = [text for text, value in zip(texts, values, strict=False) if value]
        if elastic and action not in ("cut", "reset", "reopen"):
            pool.deal({text.seq: text.length + 40 * values[0] for text in chosen})
            check(engine, texts)
            assert sum(text.table.quota for text in texts) <= count * SHARE // CHUNK
            assert all(text.table.quota >= SHARE // CHUNK for text in chosen)
        counts = [min(value, text.table.room(text.length)) for text, value in zip(texts, values, strict=False) if value]
        victim = values[0] % count
        engine.spoiled = {victim} if action == "spoil" else set()
        before = {text.seq: text.length for text in texts}
        if action == "cut":
            texts[victim].truncate(min(texts[victim].length, 20 * values[1]))
        elif action == "reset":
            texts[victim].reset()
        elif action == "reopen":
            if count > 1:
                texts[victim].close()
                texts[victim] = open_text(pool, victim)
        elif chosen:
            if action == "fail":
                engine.faults.step = 0
            errors = advance(chosen, counts, seed=sum(values))
            engine.faults.step = None
            for text, more, error in zip(chosen, counts, errors, strict=True):
                failed = text.seq in engine.spoiled or (action == "fail" and len(chosen) == 1)
                assert (error is not None) == failed
                assert text.length == before[text.seq] + (0 if failed else more)
        check(engine, texts)
