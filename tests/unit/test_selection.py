"""The clock of a policy: it counts tokens of the text, and a rejected draft is none."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, Faults, make_session
from support.fake_session import accept
from support.integrity import check_table

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import DecodeError, SnapshotError
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.selection import MAX_TAU, TAU, Selection, steady_interval
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.state.session import PolicyState
from kvflash_ggml.state.session import done as ready

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


def session(scorer: Counted, **info: Any) -> Sequence:
    engine = FakeEngine(1024, 128, **info)
    config = KVFlashConfig(pool=1024, tau=64)
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
    clock = Selection(tau=64, share=0.02, delay=0)
    asked = sum(clock.on_tokens(count, waiting=False, now=float(i)) for i, count in enumerate(counts))
    assert sum(counts) // 16 - 2 <= asked <= sum(counts) // 16
    assert clock.must_move
    clock.moved()
    assert not clock.must_move


def test_scores_are_used_after_the_delay() -> None:
    clock = Selection(tau=4, share=0.02, delay=16)
    assert clock.on_tokens(1, waiting=False, now=0)
    for _ in range(3):
        assert not clock.is_due
        clock.on_tokens(5, waiting=True, now=0)
    clock.on_tokens(1, waiting=True, now=0)
    assert clock.is_due


def test_nothing_of_the_last_text_delays_the_next() -> None:
    clock = Selection(tau=4, share=0.02, delay=16)
    assert clock.on_tokens(1, waiting=False, now=0)
    assert not clock.is_due
    clock.restart()
    assert clock.is_due


def test_tau_follows_the_cost_of_scoring() -> None:
    clock = Selection(tau=None, share=0.02, delay=0)
    assert clock.interval == 1
    for i in range(100):
        clock.on_tokens(1, waiting=False, now=0.01 * (i + 1))
    for _ in range(20):
        clock.adapt(1.0)
    assert clock.tau == MAX_TAU
    for _ in range(20):
        clock.adapt(0.0)
    assert clock.interval == 1
    fixed = Selection(tau=128, share=0.02, delay=0)
    fixed.on_tokens(1, waiting=False, now=1)
    fixed.on_tokens(1, waiting=False, now=2)
    fixed.adapt(100.0)
    assert fixed.tau == 128


@pytest.mark.parametrize(("seconds", "interval"), [(0.0002, 1), (0.0011, 2), (0.003, 4), (0.02, 32), (0.3, 512)])
def test_scores_take_their_share_of_the_time_and_no_more(seconds: float, interval: int) -> None:
    clock = Selection(tau=None, share=0.1, delay=0)
    for i in range(100):
        clock.on_tokens(1, waiting=False, now=0.01 * (i + 1))
        clock.adapt(seconds)
    assert clock.interval == interval


def test_a_score_that_was_slow_once_changes_nothing() -> None:
    clock = Selection(tau=None, share=0.1, delay=0)
    for i in range(100):
        clock.on_tokens(1, waiting=False, now=0.01 * (i + 1))
        clock.adapt(1.0 if i % 3 == 0 else 0.0002)
    assert clock.interval == 1


def test_all_of_the_pool_moves_only_where_few_tokens_are_scored() -> None:
    """Scores at every token move what is asked for at once. The rest of the pool would move for noise."""
    clock = Selection(tau=None, share=0.1, delay=0)
    for i in range(200):
        clock.on_tokens(1, waiting=False, now=0.01 * (i + 1))
    assert not clock.must_move
    for _ in range(20):
        clock.adapt(0.02)
    assert clock.must_move
    beside = Selection(tau=None, share=0.5, delay=16)
    assert (beside.interval, beside.tau) == (16, TAU)
    beside.on_tokens(TAU, waiting=False, now=1)
    assert beside.must_move


@pytest.mark.parametrize(("n_chunks", "interval"), [(1, 1), (128, 1), (129, 2), (2048, 16), (16384, 16)])
def test_where_no_clock_may_decide_the_context_does(n_chunks: int, interval: int) -> None:
    assert steady_interval(n_chunks) == interval
    clock = Selection(tau=None, share=None, delay=0, interval=interval)
    for i in range(20):
        clock.on_tokens(1, waiting=False, now=0.01 * i)
        clock.adapt(1.0)
    clock.load(
        PolicyState(name="", tau=128, since_score=0, since_reselect=0, due=0, pending=[], statistics=ready(None))
    )
    assert clock.interval == interval


class Turning(Counted):
    """Every eighth token of the answer asks for another chunk."""

    fade = 0.02

    def score(self, request: Any) -> Any:
        scores = np.full(request.n_chunks, -2.3, np.float32)
        scores[self.asked(len(request.tokens))] = -0.5
        return scores

    @staticmethod
    def asked(length: int) -> int:
        return 2 + length // 8 % 11 if length > PROMPT and length % 8 == 0 else 0


@pytest.mark.parametrize("pool", [512, 1024])
def test_what_a_token_asks_for_is_there_for_the_next(pool: int) -> None:
    """An answer that turns to eleven places, with no prompt between them, and without a page that comes for nothing."""
    config = KVFlashConfig(pool=pool, deterministic=True)
    one = make_session(FakeEngine(pool, 128), config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=Turning())  # type: ignore[arg-type]
    extend(one, np.arange(PROMPT, dtype=np.int32))
    before = one.paging.page_ins
    for token in range(176):
        asked = Turning.asked(one.length)
        extend(one, np.array([token], np.int32))
        assert asked in one.table.resident_chunks
    assert one.paging.page_ins - before <= 176 // 8
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

    def counted(count: int, **rest: Any) -> bool:
        ticks.append(count)
        return clock(count, **rest)

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
