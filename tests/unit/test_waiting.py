"""Requests that wait."""

from __future__ import annotations

import pytest
from support.served import request

from kvflash_ggml.batching.waiting import Job, QueueFull, Waiting


def job(size: int = 4, **more: object) -> Job:
    return Job(request=request(range(size), **more), sink=lambda event: None, submitted=0.0)


def put(waiting: Waiting, *jobs: Job) -> None:
    for one in jobs:
        waiting.put(one, retry_after_s=3.0)


def test_in_order_of_arrival() -> None:
    waiting, jobs = Waiting(most=9, most_tokens=99), [job() for _ in range(3)]
    put(waiting, *jobs)
    assert [waiting.take() for _ in range(4)] == [*jobs, None]


def test_keys_take_turns() -> None:
    waiting = Waiting(most=9, most_tokens=99)
    a, b = [job(key="a") for _ in range(3)], [job(key="b") for _ in range(2)]
    put(waiting, *a, *b)
    assert [waiting.take() for _ in range(5)] == [a[0], b[0], a[1], b[1], a[2]]


def test_higher_priorities_first() -> None:
    waiting = Waiting(most=9, most_tokens=99)
    low, usual, high = job(priority=-1), job(), job(priority=2)
    put(waiting, low, usual, high)
    assert [waiting.take() for _ in range(3)] == [high, usual, low]


def test_too_many() -> None:
    waiting = Waiting(most=2, most_tokens=99)
    put(waiting, job(), job())
    with pytest.raises(QueueFull, match="2 requests wait, and 2 may") as err:
        put(waiting, job())
    assert err.value.retry_after_s == 3.0
    assert len(waiting) == 2


def test_too_many_tokens() -> None:
    waiting = Waiting(most=9, most_tokens=10)
    put(waiting, job(8))
    with pytest.raises(QueueFull, match="with 3 more they would pass 10"):
        put(waiting, job(3))
    put(waiting, job(2))
    assert waiting.tokens == 10


def test_one_alone_may_be_as_long_as_it_likes() -> None:
    waiting = Waiting(most=9, most_tokens=10)
    put(waiting, job(50))
    assert len(waiting) == 1


def test_who_leaves_makes_room() -> None:
    waiting = Waiting(most=2, most_tokens=99)
    stays, leaves = job(), job(key="b")
    put(waiting, stays, leaves)
    assert waiting.remove_if(lambda one: one is leaves) == [leaves]
    put(waiting, job())
    assert waiting.tokens == 8
    assert waiting.take() is stays
