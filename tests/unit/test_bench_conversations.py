"""The bench of conversations: what fails costs no figures of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from support.fake_model import FakeModel

from kvflash_bench import alone, serving
from kvflash_bench.serving import Conversation
from kvflash_ggml.batching.scheduler import Scheduler


@contextmanager
def served(model: FakeModel) -> Iterator[Scheduler]:
    scheduler = Scheduler(model)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def breaks_at(number: int) -> Callable[[], None]:
    steps = iter(range(number + 1))

    def step() -> None:
        if next(steps, None) == number:
            raise RuntimeError("a broken step")

    return step


def some() -> list[Conversation]:
    return [Conversation([[one] * 40, [7] * 5]) for one in (1, 2, 3)]


def test_a_conversation_that_fails_ends_and_others_go_on() -> None:
    playing = some()
    told: list[dict[str, float]] = []
    with served(FakeModel(on_step=breaks_at(7))) as scheduler:  # the first one takes 5
        found = serving.play(scheduler, [*playing, *playing], most=4, tell=told.append)
    assert [len(one.answers) for one in playing] == [2, 0, 2]
    assert (found["begun"], found["requests"], found["failed"]) == (2, 5, 1)
    assert [now["requests"] for now in told] == [1, 3, 4, 5]


def test_time_that_is_up() -> None:
    playing = some()
    with served(FakeModel()) as scheduler:
        found = serving.play(scheduler, playing, most=4, until=0.0)
    assert (found["begun"], found["requests"], found["restore_ms_p50"]) == (0, 0, 0.0)
    assert alone.compare(playing, [Future(), Future(), Future()], until=0.0, tell=lambda now: None)["compared"] == 0


def test_what_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """A run that failed, one with another answer, one that goes further than the server, and one without an end."""
    runs: list[Future[alone.Answers]] = [Future() for _ in range(4)]
    playing = [Conversation([], answers=[(1,), (2,)]) for _ in runs]
    playing[2].answers.pop()
    runs[0].set_exception(RuntimeError("its process has gone"))
    runs[1].set_result([(1,), (3,)])
    runs[2].set_result([(1,), (2,)])
    found = alone.compare(playing, runs, until=0.0, tell=lambda now: None)
    assert found == {"compared": 2, "equal": 1, "answers_compared": 3, "answers_equal": 2, "lone_failed": 1}
    assert "its process has gone" in caplog.text


def test_turns_are_mixed_and_complete() -> None:
    playing = some()
    order = serving.in_turns(playing, seed=1)
    assert order != [one for one in playing for _ in one.said]
    assert all(order.count(one) == 2 for one in playing)
