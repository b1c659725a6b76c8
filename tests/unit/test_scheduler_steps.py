"""Steps of prompts beside other answers: what comes between two of them, and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.fake_model import STEP, FakeModel, FakeStep, FakeTask
from support.served import Asked, ask, request

from kvflash_ggml.arrays import Int32s
from kvflash_ggml.batching.messages import Event, Failed, Finished, Piece
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.errors import ConfigError


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 122, n).tolist()


def models(first: FakeModel) -> list[FakeModel]:
    return [first, *first.beside]


def test_a_prompt_with_little_left_begins_beside_a_shorter_one_like_it() -> None:
    """A conversation goes on while its first prompt is read elsewhere, which would give it less than it has."""
    model, beginning = FakeModel(parallel=3, reply=lambda prompt: b"and so on"), text(150)
    scheduler, asked = Scheduler(model), list[Asked]()

    def come() -> None:
        if len(asked) == 2:
            asked.append(ask(scheduler, [*known, *text(20, 2)], 5))

    scheduler.start()
    try:
        known = [*beginning, *text(300, 1)]
        assert isinstance(ask(scheduler, known, 5).wait(), Finished)
        for one in models(model):
            one.on_step = come
        asked += [ask(scheduler, beginning, 5)] * 2
        for one in asked:
            assert isinstance(one.wait(10), Finished)
        assert len(asked) == 3
    finally:
        scheduler.close()


class AsksTwice(FakeTask):
    """A prompt whose end is computed once more, in the step behind its last one."""

    def pieces(self, tokens: Int32s, known: int) -> Iterator[FakeStep | None]:
        yield from super().pieces(tokens, known)
        yield from self.waits(FakeStep(self.model, True, reads=True))


@pytest.mark.parametrize("most", range(1, 8))
def test_the_pool_is_not_dealt_before_the_last_step_of_a_prompt(most: int) -> None:
    """Which is prepared as soon as the one before it is computed. Another answer ends then."""
    model, pending = FakeModel(parallel=2, reply=lambda prompt: b"an answer of its own", task=AsksTwice), list[bool]()
    scheduler, deal = Scheduler(model, clock=lambda: 0.0), model.deal

    def dealt(answered: Any) -> None:
        pending.append(any(one.pending for one in models(model)))
        deal(answered)

    model.deal = dealt  # type: ignore[method-assign]
    asked = [ask(scheduler, text(10), most), ask(scheduler, text(4 * STEP, 1), 9)]
    scheduler.start()
    try:
        assert [isinstance(one.wait(), Finished) for one in asked] == [True, True]
    finally:
        scheduler.close()
    assert len(pending) >= 2
    assert not any(pending)


def paced(model: FakeModel) -> tuple[Scheduler, list[int]]:
    """A scheduler with a target that no step of more than 99 tokens keeps. Returns the tokens of each step of
    a prompt too.
    """
    now, steps = [0.0], list[int]()
    scheduler = Scheduler(model, limits=Limits(itl_target=0.1), clock=lambda: now[0])

    def step(at: int) -> None:
        one = models(model)[at]
        now[0] += 0.001 * one.rows
        if one.rows > 1:
            steps.append(one.rows)

    for at, one in enumerate(models(model)):
        one.on_step = lambda at=at: step(at)  # type: ignore[misc]
    return scheduler, steps


def test_a_prompt_that_ends_early_says_nothing_about_the_pace() -> None:
    """Its client leaves: no step was computed, which would be a fast one of all that was read before."""
    model = FakeModel(parallel=3, n_ctx=16384, most=4096, reply=lambda prompt: b"abc" * 999)
    scheduler, steps = paced(model)
    asked = [ask(scheduler, text(10), 2000), ask(scheduler, text(9000, 1), 5)]

    def leave() -> None:
        stepped()
        if steps[-1] == STEP:
            scheduler.cancel(asked[1].request.id)

    stepped, model.beside[0].on_step = model.beside[0].on_step, leave
    scheduler.start()
    try:
        end = asked[1].wait()
        assert isinstance(end, Failed)
        before = len(steps)
        assert isinstance(ask(scheduler, text(900, 2), 5).wait(), Finished)
        assert steps[before] == STEP
    finally:
        scheduler.close()


def test_a_prompt_of_one_step_is_no_longer_than_the_pace_has_it() -> None:
    """It would keep the streams beside it waiting as much as a step of a long prompt does."""
    model = FakeModel(parallel=3, n_ctx=16384, most=4096, short=500, reply=lambda prompt: b"abc" * 999)
    scheduler, steps = paced(model)
    asked = [ask(scheduler, text(10), 2000), ask(scheduler, text(9000, 1), 5)]
    scheduler.start()
    try:
        assert isinstance(asked[1].wait(), Finished)
        before = len(steps)
        assert isinstance(ask(scheduler, text(400, 2), 5).wait(), Finished)
        assert sum(steps[before:]) == 400
        assert max(steps[before:]) < 2 * STEP
    finally:
        scheduler.close()


def test_an_answer_leaves_its_text_before_that_is_forgotten() -> None:
    """Its last steps settle the text: nothing of it may be left to settle when the next one begins."""
    order = list[str]()

    class Told(FakeTask):
        def steps(self) -> Iterator[int | FakeStep | None]:  # type: ignore[override]
            try:
                yield from super().steps()
            finally:
                order.append("left")

    model = FakeModel(parallel=2, reply=lambda prompt: b"an answer of its own", task=Told)
    scheduler, reset = Scheduler(model), model.reset

    def forget() -> None:
        order.append("forgotten")
        reset()

    asked = Asked(request(text(10), 9))

    def sink(event: Event) -> None:
        asked.inbox.put(event)
        if isinstance(event, Piece) and asked.inbox.qsize() == 4:
            model.reset = forget  # type: ignore[method-assign]
            raise RuntimeError("no reader")

    scheduler.submit(asked.request, sink)
    scheduler.start()
    try:
        end = asked.wait()
        assert isinstance(end, Failed)
        assert order[:2] == ["left", "forgotten"]
    finally:
        scheduler.close()


def test_a_request_that_cannot_begin_leaves_nothing_to_the_next() -> None:
    """What a model keeps of a request ends with it."""
    model, ended = FakeModel(), list[bool]()
    scheduler, begin, end_of = Scheduler(model), model.begin, model.ended

    def refuse(*args: Any, **more: Any) -> FakeTask:
        model.begin = begin  # type: ignore[method-assign]
        raise ConfigError("the grammar has no root")

    def count() -> None:
        ended.append(True)
        end_of()

    model.begin, model.ended = refuse, count  # type: ignore[method-assign]
    scheduler.start()
    try:
        assert isinstance(ask(scheduler, text(10), 5).wait(), Failed)
        assert len(ended) == 1
        assert isinstance(ask(scheduler, text(10), 5).wait(), Finished)
        assert len(ended) == 2
    finally:
        scheduler.close()
