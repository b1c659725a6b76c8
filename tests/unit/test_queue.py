"""Requests that wait."""

from __future__ import annotations

import pytest
from support.served import request

from kvflash_ggml.batching.queue import Job, QueueFull, RequestQueue


def job(size: int = 4, **more: object) -> Job:
    return Job(request=request(range(size), **more), sink=lambda event: None, submitted=0.0)


def put(waiting: RequestQueue, *jobs: Job) -> None:
    for one in jobs:
        waiting.put(one, pace=2.0)


def test_in_order_of_arrival() -> None:
    waiting, jobs = RequestQueue(most=9, most_tokens=99), [job() for _ in range(3)]
    put(waiting, *jobs)
    assert [waiting.take() for _ in range(4)] == [*jobs, None]


def test_keys_take_turns() -> None:
    waiting = RequestQueue(most=9, most_tokens=99)
    a, b = [job(key="a") for _ in range(3)], [job(key="b") for _ in range(2)]
    put(waiting, *a, *b)
    assert [waiting.take() for _ in range(5)] == [a[0], b[0], a[1], b[1], a[2]]


def test_higher_priorities_first() -> None:
    waiting = RequestQueue(most=9, most_tokens=99)
    low, usual, high = job(priority=-1), job(), job(priority=2)
    put(waiting, low, usual, high)
    assert [waiting.take() for _ in range(3)] == [high, usual, low]


def test_who_fits_passes_no_higher_priority() -> None:
    waiting = RequestQueue(most=9, most_tokens=99)
    low, long, short = job(1, priority=-1), job(9), job(2, key="other")
    put(waiting, low, long, short)
    few = [waiting.take(lambda one: len(one.request.tokens) < 5) for _ in range(2)]
    assert few == [short, None]
    assert [waiting.take() for _ in range(2)] == [long, low]


def test_too_many() -> None:
    waiting = RequestQueue(most=2, most_tokens=99)
    put(waiting, job(), job())
    with pytest.raises(QueueFull, match="2 requests wait, and 2 may"):
        put(waiting, job())
    assert len(waiting) == 2


def test_too_many_tokens() -> None:
    waiting = RequestQueue(most=9, most_tokens=10)
    put(waiting, job(8))
    with pytest.raises(QueueFull, match="with 3 more they would pass 10"):
        put(waiting, job(3))
    put(waiting, job(2))
    assert waiting.tokens == 10


def test_one_alone_may_be_as_long_as_it_likes() -> None:
    waiting = RequestQueue(most=9, most_tokens=10)
    put(waiting, job(50))
    assert len(waiting) == 1


def test_who_leaves_makes_room() -> None:
    waiting = RequestQueue(most=2, most_tokens=99)
    stays, leaves = job(), job(key="b")
    put(waiting, stays, leaves)
    assert waiting.remove_if(lambda one: one is leaves) == [leaves]
    put(waiting, job())
    assert waiting.tokens == 8
    assert waiting.take() is stays


@pytest.mark.parametrize(("drawn", "told"), [(0.0, 3.0), (0.5, 6.0), (1.0, 9.0)])
def test_who_is_refused_is_told_the_pace_of_all_that_wait_with_jitter(drawn: float, told: float) -> None:
    waiting = RequestQueue(most=3, most_tokens=99, random=lambda: drawn)
    put(waiting, job(), job(), job())
    with pytest.raises(QueueFull) as err:
        put(waiting, job())
    assert err.value.retry_after_s == told


def test_a_refused_client_is_told_an_hour_at_most() -> None:
    waiting = RequestQueue(most=1, most_tokens=99)
    waiting.put(job(), pace=1e6)
    with pytest.raises(QueueFull) as err:
        waiting.put(job(), pace=1e6)
    assert err.value.retry_after_s == 3600
