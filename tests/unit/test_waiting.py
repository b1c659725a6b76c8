"""Requests that wait."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter

import pytest
from support.served import request

from kvflash_ggml.batching.waiting import Job, Places, QueueFull, Waiting


def job(size: int = 4, **more: object) -> Job:
    return Job(request=request(range(size), **more), sink=lambda event: None, submitted=0.0)


def put(waiting: Waiting, *jobs: Job) -> None:
    for one in jobs:
        waiting.put(one, room_in=lambda: 3.0)


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


def test_who_comes_again_when_told_finds_room() -> None:
    """Two minutes of three times what can be answered, on a clock of numbers: nine of ten are refused twice at most."""
    dice, pace, places = random.Random(1), 0.5, Places()
    waiting, refused, answered, came = Waiting(most=16, most_tokens=999), Counter[int](), 0, 0.0
    events: list[tuple[float, int]] = []  # when, and who comes; -1: the seat is free
    while (came := came + dice.expovariate(3 / pace)) < 120:
        events.append((came, len(events)))
    count = len(events)
    heapq.heapify(events)
    heapq.heappush(events, (0.0, -1))
    while answered < count:
        now, who = heapq.heappop(events)
        if who < 0:
            answered += waiting.take() is not None
            heapq.heappush(events, (now + dice.expovariate(1 / pace), -1))
            continue
        try:
            waiting.put(job(1), room_in=lambda now=now: places.book(now, pace))
        except QueueFull as err:
            refused[who] += 1
            heapq.heappush(events, (now + math.ceil(err.retry_after_s), who))
    assert max(refused.values()) > 2
    assert sum(refused[who] <= 2 for who in range(count)) >= 0.9 * count
