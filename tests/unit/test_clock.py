"""How often chunks are scored beside a device: by the clock, in a share of the time."""

from __future__ import annotations

import pytest

from kvflash_ggml.sequence.clock import MAX_INTERVAL, Clock


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
