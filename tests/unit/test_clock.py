"""How often chunks are scored beside a device: by the clock, in a share of the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvflash_ggml.sequence.clock import MAX_INTERVAL, Clock
from kvflash_ggml.sequence.selection import Selection


def test_the_interval_follows_the_cost_of_scoring() -> None:
    clock = Clock(0.1)
    assert clock.interval == 16
    for i in range(100):
        clock.on_tokens(1, 0.01 * (i + 1))
    for _ in range(20):
        clock.on_score(10.0)
    assert clock.interval == MAX_INTERVAL
    for _ in range(20):
        clock.on_score(0.0)
    assert clock.interval == 16


@pytest.mark.parametrize(("seconds", "interval"), [(0.0002, 16), (0.017, 32), (0.05, 64), (0.3, 512)])
def test_scores_take_their_share_of_the_time_and_no_more(seconds: float, interval: int) -> None:
    clock = Clock(0.1)
    for i in range(100):
        clock.on_tokens(1, 0.01 * (i + 1))
        clock.on_score(seconds)
    assert clock.interval == interval


def decoded(takes: Callable[[int], float], tokens: int = 2000, delay: int = 16) -> tuple[int, float]:
    """Return the interval in the end, and the seconds of a token since the middle, where a step takes a second and a
    score what `takes` says at a token.
    """
    clock, selection = Clock(0.5, 0.25), Selection(tau=None, delay=delay)
    selection.interval = clock.at_least(1)
    now = free = middle = 0.0
    pending: list[float] = []
    for token in range(tokens):
        if pending and selection.is_due:
            waited = max(0.0, pending.pop(0) - now)
            selection.used()
            clock.waited(waited)
            now += waited
        now += 1.0
        clock.on_tokens(1, now)
        if selection.on_tokens(1, waiting=len(pending)):
            free = max(now, free) + takes(token)
            pending.append(free)
            clock.on_score(takes(token))
            selection.interval = clock.interval
        middle = now if token == tokens // 2 else middle
    return selection.interval, (now - middle) / (tokens - tokens // 2 - 1)


@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.2, 1.4, 2.0, 3.0, 5.0, 10.0, 30.0])
def test_an_answer_waits_for_its_scores_for_a_fifth_of_its_time_at_most(seconds: float) -> None:
    """The wait was taken for a token's own time: then scores of any length were made at every fourth token."""
    interval, token = decoded(lambda token: seconds)
    assert token < 1.27
    assert (interval == 1) is (seconds <= 1.25)
    _, slower = decoded(lambda token: min(seconds, 0.3 + token / 200))
    assert slower < 1.27


def test_a_score_that_was_slow_once_changes_nothing() -> None:
    clock = Clock(0.1)
    for i in range(100):
        clock.on_tokens(1, 0.01 * (i + 1))
        clock.on_score(1.0 if i % 3 == 0 else 0.0002)
    assert clock.interval == 16


def test_the_time_between_two_answers_is_no_token() -> None:
    clock = Clock(0.1)
    for i in range(10):
        clock.on_tokens(1, 0.01 * (i + 1))
    clock.restart()
    clock.on_tokens(1, 1000.0)
    for _ in range(10):
        clock.on_score(0.05)
    assert clock.interval == 64


def test_scores_of_a_prompt_say_nothing_about_an_answer() -> None:
    """A chat of long prompts and short answers."""
    clock = Clock(0.1)
    for turn in range(20):
        clock.restart()
        for _ in range(8):
            clock.on_score(10.0)
        for i in range(3):
            clock.on_tokens(1, turn + 0.01 * (i + 1))
            clock.on_score(0.0002)
    assert clock.interval == 16


def test_what_the_clock_has_found_is_kept_where_the_cost_changes() -> None:
    clock = Clock(0.1)
    assert clock.at_least(1) == 1
    for i in range(100):
        clock.on_tokens(1, 0.01 * (i + 1))
        clock.on_score(0.0015)
    assert clock.interval == 2
    assert clock.at_least(3) == 6
    assert clock.at_least(1) == 2
    assert clock.at_least(MAX_INTERVAL - 1) == MAX_INTERVAL
    assert clock.at_least(1) == 2
    for _ in range(20):
        clock.on_score(0.0)
    assert clock.interval == 1
    assert clock.at_least(5000) == MAX_INTERVAL
