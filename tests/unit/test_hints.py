"""What is logged once, where a user would wonder: a slow prompt, and cores that others use too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Thread

import pytest

from kvflash_ggml.logs import warn_once
from kvflash_ggml.runtime.hints import PATIENCE_S, SharedCores, SlowPrompt

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def unsaid() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def read(slow: SlowPrompt, now: list[float], *steps: tuple[float, int], total: int = 1000) -> None:
    """Read a prompt. steps: seconds, and tokens that are read then."""
    report = slow.begin()
    for seconds, done in steps:
        now[0] += seconds
        if report is not None:
            report(done, total)


def test_a_slow_prompt_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [50.0]
    slow = SlowPrompt(lambda: now[0])
    read(slow, now, (PATIENCE_S - 1, 200), (2, 400), (9, 600), (1, 1000))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING, "shown on stderr where nobody has set up logging"
    assert "400 of 1,000 tokens in 6 s" in record.getMessage()
    assert slow.begin() is None
    read(slow, now, (60, 500))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("steps", [[(1.0, 500), (1.0, 1000)], [(60.0, 1000)]], ids=["quick", "over when it is late"])
def test_nothing_is_told_of_prompts_that_end(steps: list[tuple[float, int]], caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    slow = SlowPrompt(lambda: now[0])
    for _ in range(9):  # each has its own time
        read(slow, now, *steps)
    assert not caplog.records
    assert slow.begin() is not None


def worked(threads: int, ran: float, waited: float, *, known: bool = True) -> None:
    """One request, with these seconds of its thread."""
    times = iter([(7, 9), (7 + int(ran * SECOND), 9 + int(waited * SECOND))])
    cores = SharedCores(threads, lambda: next(times) if known else None)
    cores.end(cores.begin())


def test_cores_that_others_use_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        worked(2, ran=2, waited=2)
    (record,) = caplog.records
    assert "2 threads wait for each other" in record.getMessage()
    assert "OMP_WAIT_POLICY=passive" in record.getMessage()


@pytest.mark.parametrize(
    ("threads", "ran", "waited", "known"),
    [(1, 2, 2, True), (2, 2, 0.5, True), (2, 0.2, 1, True), (2, 2, 2, False)],
    ids=["alone", "waited little", "too short to tell", "nothing tells"],
)
def test_other_work_is_not_told(
    threads: int, ran: float, waited: float, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worked(threads, ran, waited, known=known)
    assert not caplog.records


def test_times_of_two_threads_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([(0, 0), (9 * SECOND, 9 * SECOND)])
    cores = SharedCores(2, lambda: next(times))
    began = cores.begin()
    thread = Thread(target=cores.end, args=(began,))
    thread.start()
    thread.join()
    assert not caplog.records
