"""When chunks are scored: tokens of the text and work are counted, and a rejected draft is none."""

from __future__ import annotations

import ctypes
from collections import abc, deque
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, Faults, make_session
from support.fake_session import accept, reach
from support.integrity import check_table
from support.interrupter import Interrupter

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import DecodeError, SnapshotError
from kvflash_ggml.llama.stats import PoolStats
from kvflash_ggml.runtime.text import Text
from kvflash_ggml.sequence import scoring
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.relevance import SOON
from kvflash_ggml.sequence.scoring import DELAY, DEVICE_RATE, DEVICE_STEP, WORK_SHARE
from kvflash_ggml.sequence.selection import Selection
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.sequence.step import LAST

PROMPT = 2048


class Counted:
    """A scorer that finds everything equally good."""

    name, query_rows, index_bytes = "counted", 0, 0

    def __init__(self) -> None:
        self.seen: list[int] = []

    def open(self, keys: Any, n_chunks: int) -> None: ...
    def seal(self, chunk: int) -> None: ...
    def truncate(self, n_chunks: int) -> None:
        self.seen.clear()

    def close(self) -> None: ...

    def score(self, request: Any) -> Any:
        self.seen.append(len(request.tokens))
        return np.zeros(request.n_chunks, np.float32)


class Finding(Counted):
    """A prompt's end has found one chunk, and the answer asks for another one from its 100th token on."""

    ASKED, LATER = 5, 9

    def __init__(self, fade: float) -> None:
        super().__init__()
        self.fade = fade

    def score(self, request: Any) -> Any:
        scores = np.full(request.n_chunks, -5, np.float32)
        if len(request.tokens) == PROMPT:
            scores[self.ASKED] = 0
        if len(request.tokens) >= PROMPT + 100:
            scores[self.LATER] = 0
        return scores


def session(scorer: Counted, tau: int | None = 64, **info: Any) -> Sequence:
    engine = FakeEngine(1024, 128, **info)
    config = KVFlashConfig(pool=1024, tau=tau)
    one = make_session(engine, config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT, dtype=np.int32))
    scorer.seen.clear()
    return one


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 8])
def test_looks_go_on_while_drafts_are_rejected(wrong: int, recurrent: bool) -> None:
    """400 tokens in steps of a token and its drafts: as many looks as one by one, whatever is rejected."""
    scorer = Counted()
    one = session(scorer, recurrent=recurrent)
    while one.length < PROMPT + 400:
        one.finish(one.prepare_drafts(np.full(4 + wrong, 7, np.int32), None))
        accept(one, 4)
    assert len(scorer.seen) == 400 // 16
    one.close()


@pytest.mark.parametrize(("fade", "stays"), [(0.02, True), (0.1, False)])
def test_what_a_question_has_found_stays_while_it_is_answered(fade: float, stays: bool) -> None:
    """Until it has faded below what else there is; and what is asked for later comes all the same."""
    one = session(Finding(fade))
    assert Finding.ASKED in one.table.resident_chunks
    assert Finding.LATER not in one.table.resident_chunks
    for token in range(200):
        extend(one, np.array([token], np.int32))
    assert (Finding.ASKED in one.table.resident_chunks) == stays
    assert Finding.LATER in one.table.resident_chunks
    one.close()


def test_drafts_leave_no_trace() -> None:
    """The same text, token by token and through drafts of which most are wrong."""
    plain, drafted = session(Counted()), session(Counted())
    rng = np.random.default_rng(0)
    done = 0
    while done < 300:
        right = int(rng.integers(1, 5))
        tokens = rng.integers(0, 100, right).astype(np.int32)
        for token in tokens:
            extend(plain, token[None])
        drafted.finish(
            drafted.prepare_drafts(np.concatenate([tokens, rng.integers(200, 300, 5).astype(np.int32)]), None)
        )
        accept(drafted, right)
        done += right
        assert drafted.tokens.tolist() == plain.tokens.tolist()
        assert set(drafted.store) == set(plain.store)
    for each in (plain, drafted):
        each.close()


@pytest.mark.parametrize("counts", [[1] * 200, [5] * 40, [3, 7] * 20])
def test_tokens_are_counted_and_not_steps(counts: abc.Sequence[int]) -> None:
    clock = Selection(tau=64)
    asked = sum(clock.on_tokens(count, waiting=0) for count in counts)
    assert sum(counts) // 16 - 2 <= asked <= sum(counts) // 16
    assert clock.must_move
    clock.moved()
    assert not clock.must_move


def test_scores_are_used_after_the_delay() -> None:
    clock = Selection(tau=256, delay=16)
    assert clock.on_tokens(64, waiting=0)
    for _ in range(3):
        assert not clock.is_due
        clock.on_tokens(5, waiting=1)
    clock.on_tokens(1, waiting=1)
    assert clock.is_due
    assert clock.since_asked == 17


def test_nothing_of_the_last_text_delays_the_next() -> None:
    clock = Selection(tau=16, delay=16)
    assert clock.on_tokens(4, waiting=0)
    clock.on_tokens(3, waiting=1)
    clock.restart()
    assert not clock.on_tokens(3, waiting=0)
    assert clock.on_tokens(1, waiting=0)
    assert clock.since_asked == 1


def test_a_restored_clock_knows_since_when_scores_wait_at_any_interval() -> None:
    """A clock can have chosen another interval for the text that is restored."""
    one, other, scoring = Selection(tau=None, delay=16), Selection(tau=None, delay=16), session(Counted()).scoring
    assert scoring is not None
    one.interval, other.interval = 2, 16
    one.on_tokens(2, waiting=0)
    one.on_tokens(2, waiting=1)
    saved = replace(scoring.blank_state(), pending=[None, None])
    one.write(saved)
    other.load(saved)
    assert one.since_asked == other.since_asked == 3
    other.used()
    assert other.since_asked == 1


@pytest.mark.parametrize(("interval", "moves"), [(1, 0), (8, 0), (16, 3), (64, 3)])
def test_all_of_the_pool_moves_only_where_few_tokens_are_scored(interval: int, moves: int) -> None:
    """Scores at every token move what is asked for at once. The rest of the pool would move for noise."""
    clock, moved = Selection(tau=None), 0
    clock.interval = interval
    for _ in range(3 * 4 * interval):
        clock.on_tokens(1, waiting=0)
        if clock.must_move:
            clock.moved()
            moved += 1
    assert moved == moves


@pytest.mark.parametrize(("tau", "later"), [(4, 1), (8, 1), (16, 2), (64, 8), (256, 16)])
def test_scores_are_used_half_an_interval_later_and_no_more_than_the_delay(tau: int, later: int) -> None:
    clock = Selection(tau=tau, delay=16)
    assert clock.on_tokens(tau // 4, waiting=0)
    for _ in range(later):
        assert not clock.is_due
        clock.on_tokens(1, waiting=1)
    assert clock.is_due


@pytest.mark.parametrize("interval", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("delay", [0, DELAY])
def test_a_request_waits_for_its_use_and_the_next_one_does_not_wait_for_it(delay: int, interval: int) -> None:
    clock, requests = Selection(tau=None, delay=delay), deque[int]()
    clock.interval = interval
    asked, used = list[int](), list[int]()
    for token in range(1000):
        while requests and clock.is_due:
            assert clock.since_asked == token - requests[0]
            used.append(token - requests.popleft())
            clock.used()
        if clock.on_tokens(1, waiting=len(requests)):
            requests.append(token)
            asked.append(token)
    assert set(np.diff(asked)) == {interval}
    assert set(used) == {1 + min(delay, (interval + 1) // 2)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("tau", "tokens"), [(4, 80), (64, 80), (256, 128)])
def test_a_score_loses_as_much_a_token_whatever_is_scored_how_often(tau: int, tokens: int, asynchronous: bool) -> None:
    """Beside a device too, where a score waits to be used."""
    one = session(Finding(0.02), tau=tau, asynchronous=asynchronous)
    before = None
    for token in range(tokens):
        extend(one, np.array([token], np.int32))
        assert one.relevance.ranking is not None
        if before is None:
            before = one.relevance.ranking[Finding.ASKED]
    lost = before - one.relevance.ranking[Finding.ASKED]
    assert lost == pytest.approx(0.02 * tokens, abs=0.02 * 3 * one.scoring.selection.interval)  # type: ignore[union-attr]
    one.close()


class Costly(Counted):
    """A score costs as much as so many steps for each chunk."""

    def __init__(self, steps: float = 0.0) -> None:
        super().__init__()
        self.steps = steps

    def work(self, n_chunks: int) -> float:
        return self.steps * STEP * n_chunks


STEP = 10**9
"""Multiplications of a step of the model that is scored here, beside which attention is nothing."""

PRICE = WORK_SHARE / 32
"""Steps of a chunk, so that 32 chunks are scored at each token."""


def looks(one: Sequence, count: int) -> list[int]:
    """At which lengths the chunks are scored while `count` tokens follow."""
    scorer = one.scoring.scorer  # type: ignore[union-attr]
    scorer.seen.clear()  # type: ignore[attr-defined]
    for token in range(count):
        extend(one, np.array([token], np.int32))
    return scorer.seen  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("price", "interval"), [(0, 1), (0.999, 1), (1.1, 2), (3.5, 4), (40, 40)])
def test_scores_take_their_share_of_the_work_and_no_more(price: float, interval: int) -> None:
    one = session(Costly(price * PRICE), tau=None, step_work=STEP)
    seen = looks(one, 63)
    assert seen == list(range(PROMPT + interval, PROMPT + 64, interval))
    one.close()


def test_nothing_is_scored_while_all_of_the_text_is_in_the_pool_and_will_be() -> None:
    one = session(Counted(), tau=4)
    one.reset()
    extend(one, np.arange(700, dtype=np.int32))
    assert looks(one, 300) == list(range(1024 - SOON + 1, 1001))
    one.truncate(800)
    assert looks(one, 90) == []
    extend(one, np.arange(200, dtype=np.int32))
    assert one.table.resident * CHUNK < one.length
    end = one.length
    assert looks(one, 3) == [end + 1, end + 2, end + 3]
    one.close()


def test_a_score_is_made_before_a_chunk_leaves_however_rare_they_are() -> None:
    one = session(Counted(), tau=1024)
    one.reset()
    extend(one, np.arange(300, dtype=np.int32))
    assert looks(one, 724) == [300 + 512]
    one.close()


def test_a_score_that_is_not_made_ages_the_last_one() -> None:
    scorer = Finding(0.02)
    one = session(scorer, tau=4)
    one.reset()
    extend(one, np.arange(700, dtype=np.int32))
    extend(one, np.array([1], np.int32))
    assert one.relevance.ranking is not None
    before = one.relevance.ranking.copy()
    assert looks(one, 50) == []
    np.testing.assert_allclose(one.relevance.ranking, before - 50 * 0.02, atol=1e-5)
    one.close()


def test_chunks_are_scored_less_often_as_the_text_grows_and_more_often_after_a_cut() -> None:
    one = session(Costly(PRICE), tau=None, step_work=STEP)
    assert looks(one, 4) == [PROMPT + 1, PROMPT + 2, PROMPT + 3, PROMPT + 4]
    extend(one, np.arange(PROMPT, dtype=np.int32))
    end = one.length
    assert looks(one, 8) == [end + 2, end + 4, end + 6, end + 8]
    one.truncate(PROMPT)
    assert looks(one, 2) == [PROMPT + 1, PROMPT + 2]
    one.close()


@pytest.mark.parametrize(("steps", "interval"), [(0, 1), (0.9, 1), (2.5, 3), (40, 40)])
def test_beside_a_device_scores_take_the_time_that_its_steps_leave(steps: float, interval: int) -> None:
    """Each counts a token later than it was asked for, while the next one is computed."""
    price = steps * (STEP + DEVICE_STEP) / DEVICE_RATE / STEP / 32
    one = session(Costly(price), tau=None, step_work=STEP, asynchronous=True)
    assert one.scoring is not None
    assert one.scoring.selection.interval == interval
    one.scoring.clock = None  # which would measure this computer
    found = looks(one, 63)
    one.scoring.take()  # the last one may run
    assert found == list(range(PROMPT + interval, PROMPT + 64, interval))
    told: Any = PoolStats(one, None, None, None, swa_full=False)  # type: ignore[arg-type]
    assert told.scored_every == interval
    one.close()


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_no_clock_changes_what_is_scored(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call scores the same tokens, however long the scores take."""
    times = count(0.0, seconds)
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    one = session(Costly(1.5 * PRICE), tau=None, step_work=STEP)
    assert looks(one, 200) == list(range(PROMPT + 2, PROMPT + 201, 2))
    one.close()


@pytest.mark.parametrize(("tau", "interval"), [(4, 1), (64, 16), (1024, 256)])
def test_a_tau_that_somebody_asks_for_counts_whatever_the_cost(tau: int, interval: int) -> None:
    one = session(Costly(1000.0), tau=tau, step_work=STEP)
    assert looks(one, 256) == list(range(PROMPT + interval, PROMPT + 257, interval))
    one.close()


def test_a_scorer_that_does_not_know_its_cost_scores_every_16th_token() -> None:
    one = session(Counted(), tau=None)
    assert looks(one, 64) == [PROMPT + 16, PROMPT + 32, PROMPT + 48, PROMPT + 64]
    one.close()


class Turning(Costly):
    """So many tokens of the answer, and another chunk is asked for."""

    fade = 0.02

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def score(self, request: Any) -> Any:
        scores = np.full(request.n_chunks, -2.3, np.float32)
        scores[self.asked(len(request.tokens))] = -0.5
        return scores

    def asked(self, length: int) -> int:
        return 2 + length // self.every % 11 if length > PROMPT and length % self.every == 0 else 0


@pytest.mark.parametrize("every", [4, 8])
@pytest.mark.parametrize("pool", [512, 1024])
def test_what_a_token_asks_for_is_there_for_the_next(pool: int, every: int) -> None:
    """An answer that turns to eleven places, with no prompt between them, and without a page that comes for nothing.

    A list turns so fast that four places of the pool were all asked for within 16 tokens.
    """
    config, scorer = KVFlashConfig(pool=pool), Turning(every)
    one = make_session(FakeEngine(pool, 128), config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT, dtype=np.int32))
    before = one.paging.page_ins
    for token in range(176):
        asked = scorer.asked(one.length)
        extend(one, np.array([token], np.int32))
        assert asked in one.table.resident_chunks
    assert one.paging.page_ins - before <= 176 // every
    one.close()


@pytest.mark.parametrize("info", [{}, {"recurrent": True}, {"n_swa": 128}])
def test_a_token_that_asks_is_evaluated_again_with_what_it_asked_for(info: dict[str, Any]) -> None:
    """In the step of the next token. Not where a text that is restored could not do it."""
    engine, scorer = FakeEngine(512, 128, **info), Turning(8)
    one = make_session(engine, KVFlashConfig(pool=512), n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT, dtype=np.int32))
    engine.steps.clear()
    asked = []
    for token in range(100, 276):
        asked.append(2 if scorer.asked(one.length) not in (0, *one.table.resident_chunks) else 1)
        if one.length % 64 == 0:
            asked[-1] = 1  # its chunk is sealed
        extend(one, np.array([token], np.int32))
    assert engine.steps == ([1] * 176 if info else asked)
    assert sum(asked) > 176 + 10
    assert one.tokens.tolist() == [*range(PROMPT), *range(100, 276)] == engine.tokens
    assert one.stats.generated == 176
    check_table(one.table)
    one.close()


def beside_a_device() -> tuple[FakeEngine, Turning, Sequence]:
    """An engine that computes beside the host, a scorer that turns every eight tokens, and a text with a prompt."""
    engine, scorer = FakeEngine(512, 128, asynchronous=True), Turning(8)
    one = make_session(engine, KVFlashConfig(pool=512), n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    assert one.scoring is not None
    one.scoring.clock = None  # which would measure this computer
    extend(one, np.arange(PROMPT, dtype=np.int32))
    engine.steps.clear()
    return engine, scorer, one


def test_beside_a_device_what_was_drawn_meanwhile_is_evaluated_again_too() -> None:
    """The token that asks, the next one, which was computed while it was scored, and the new one make a step."""
    engine, scorer, one = beside_a_device()
    asked = []
    for token in range(100, 276):
        rows, chunk = 1, scorer.asked(one.length - 1)
        if chunk not in (0, *one.table.resident_chunks):
            rows = 1 + min(2, one.length % 64)  # the chunk before is sealed
        extend(one, np.array([token], np.int32))
        asked.append(rows)
        assert rows == 1 or chunk in one.table.resident_chunks
    assert engine.steps == asked
    assert asked.count(3) > 10
    assert one.tokens.tolist() == [*range(PROMPT), *range(100, 276)] == engine.tokens
    assert one.stats.generated == 176
    check_table(one.table)
    one.close()


@pytest.mark.parametrize("more", [0, 12])
def test_scores_that_come_much_later_evaluate_nothing_again(more: int) -> None:
    """Nor where a chunk begins between a request and its use, so that few of these tokens could be evaluated again."""
    engine, scorer = FakeEngine(512, 128, asynchronous=True), Turning(4)
    config = KVFlashConfig(pool=512, tau=64)
    one = make_session(engine, config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT + more, dtype=np.int32))
    engine.steps.clear()
    before = one.paging.page_ins
    for token in range(176):
        extend(one, np.array([token], np.int32))
    assert engine.steps == [1] * 176
    assert one.paging.page_ins > before
    one.close()


def test_a_score_runs_beside_the_next_step_and_not_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that is submitted, the thread that scores would take the interpreter from it. It may come later still."""
    monkeypatch.setattr(scoring, "MOST_HELD", 60)  # this computer may be busy
    scorer = Counted()
    one = session(scorer, tau=4, asynchronous=True)
    engine, score, ahead = one.engine, scorer.score, []

    def watched(request: Any) -> Any:
        ahead.append(len(engine.tokens) - len(request.tokens))  # type: ignore[attr-defined]
        return score(request) - 5  # which asks for nothing

    scorer.score = watched  # type: ignore[method-assign]
    for token in range(40):
        extend(one, np.array([token], np.int32))
    (newest,) = one.pool.beside
    one.evaluate(np.array([40], np.int32), LAST)
    assert newest.is_set()
    assert one.scoring is not None
    one.scoring.take()
    assert len(ahead) == 40
    assert min(ahead) == 1
    one.close()


def test_a_token_keeps_the_logits_that_the_next_one_was_drawn_from() -> None:
    """Each is told of once, whatever a step evaluates again."""
    engine, _, one = beside_a_device()
    logits: Any = (ctypes.c_float * 8)()
    context = SimpleNamespace(get_logits_ith=lambda _: ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)))
    model: Any = SimpleNamespace(n_ctx=8192, n_vocab=1, logits_all=True, context=context)
    text, told = Text(), list[tuple[int, int]]()
    text.open(model)
    text.sequence, text.n_tokens, text.scores = one, PROMPT, np.zeros((8192, 1), np.float32)
    text.on_logits = lambda start, rows: told.append((start, len(rows)))
    for token in range(100):
        logits[:] = [token] * 8
        extend(one, np.array([token], np.int32), output_all=True, after=text.after_step)
    assert max(engine.steps) == 3
    assert told == [(PROMPT + token, 1) for token in range(100)]
    assert text.scores[PROMPT : PROMPT + 100, 0].tolist() == list(range(100))
    one.close()


def about_to_ask(engine: FakeEngine) -> Sequence:
    """A text whose newest token asks for a chunk that is not resident."""
    scorer = Turning(8)
    one = make_session(engine, KVFlashConfig(pool=512), n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT + 1, dtype=np.int32))
    while scorer.asked(one.length) in (0, *one.table.resident_chunks):
        extend(one, np.array([one.length], np.int32))
    return one


@pytest.mark.slow
def test_an_interrupt_at_any_line_loses_no_token() -> None:
    k, interrupted = 0, True
    while interrupted:
        k += 1
        one = about_to_ask(FakeEngine(512, 128))
        before = one.length
        more = np.array([before], np.int32)
        interrupted = Interrupter(k, ("sequence/sequence.py", "sequence/step.py")).run(
            partial(extend, one, more), partial(reach, one)
        )
        one.settle()
        assert one.length in (before, before + 1), f"line {k}"
        known = before - PROMPT - 1
        assert known <= one.stats.generated <= known + one.length - before, f"line {k}"
        extend(one, np.arange(one.length, before + 3, dtype=np.int32))
        assert one.tokens.tolist() == list(range(before + 3)) == one.engine.tokens, f"line {k}"
        check_table(one.table)
        one.close()
    assert k > 50


def test_a_step_that_fails_takes_no_token_along() -> None:
    """The token that it was to compute again is of the text all the while, and what comes next computes it."""
    engine = FakeEngine(512, 128)
    one = about_to_ask(engine)
    before, engine.faults = one.length, Faults(0)
    with pytest.raises(DecodeError):
        extend(one, np.array([7], np.int32))
    assert one.tokens.tolist() == list(range(before))
    assert len(engine.tokens) == one.table.layout.length == before - 1
    assert one.stats.generated == before - PROMPT - 1
    one.settle()
    assert one.stats.generated == before - PROMPT - 1
    extend(one, np.array([before], np.int32))
    assert one.tokens.tolist() == list(range(before + 1)) == engine.tokens
    check_table(one.table)
    one.close()


@pytest.mark.parametrize(("recurrent", "read"), [(False, [6]), (True, [6, 2])])
def test_a_rejected_draft_is_not_read_again(recurrent: bool, read: list[int]) -> None:
    """Only recurrent state needs what was accepted once more, and nothing of what was read before."""
    one = session(Counted(), recurrent=recurrent)
    for token in range(500):
        extend(one, np.array([token], np.int32))
    steps: list[int] = []
    step = one.engine.step

    def count(n: int, *rest: Any) -> None:
        steps.append(n)
        step(n, *rest)

    one.engine.step = count  # type: ignore[method-assign]
    one.finish(one.prepare_drafts(np.arange(6, dtype=np.int32), None))
    accept(one, 2)
    assert steps == read
    assert one.length == PROMPT + 502
    one.close()


def test_a_failed_step_that_takes_text_along_counts_no_tokens() -> None:
    one = session(Counted(), recurrent=True)
    for token in range(100):
        extend(one, np.array([token], np.int32))
    assert one.scoring is not None
    ticks: list[int] = []
    clock = one.scoring.selection.on_tokens

    def counted(tokens: int, **rest: Any) -> bool:
        ticks.append(tokens)
        return clock(tokens, **rest)

    one.scoring.selection.on_tokens = counted  # type: ignore[method-assign]
    one.engine.faults = Faults(0, spoil=True)  # type: ignore[attr-defined]
    before = one.length
    with pytest.raises(DecodeError):
        extend(one, np.array([7], np.int32))
    one.engine.faults = Faults()  # type: ignore[attr-defined]
    assert one.length < before, "the recurrent state has gone back to a checkpoint"
    assert ticks == []
    one.close()


def test_drafts_whose_state_cannot_be_put_back_cost_text_and_not_the_session() -> None:
    one = session(Counted(), recurrent=True)
    one.finish(one.prepare_drafts(np.arange(6, dtype=np.int32), None))
    put_back, failed = one.engine.put_state, False

    def fail_once(length: int, *, seq: int) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise SnapshotError("on purpose")
        put_back(length, seq=seq)

    one.engine.put_state = fail_once  # type: ignore[method-assign]
    accept(one, 0)
    assert failed
    assert one.ahead == 0
    assert one.length < PROMPT
    extend(one, np.arange(one.length, PROMPT + 3, dtype=np.int32))
    assert one.length == PROMPT + 3
    check_table(one.table)
    one.close()
