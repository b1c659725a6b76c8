"""Requests that wait."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter

import pytest
from support.served import request

from kvflash_ggml.batching import queue
from kvflash_ggml.batching.queue import Job, QueueFull, RequestQueue, RetrySlots


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
    with pytest.raises(QueueFull, match="2 requests wait, and 2 may") as err:
        put(waiting, job())
    assert err.value.retry_after_s == 2.5
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


class Crowd:
    """Requests to a queue of 16 whose slot takes one in `pace` seconds, on a clock of numbers."""

    def __init__(self, pace: float = 0.5) -> None:
        self.waiting, self.pace, self._dice = RequestQueue(most=16, most_tokens=10**6), pace, random.Random(1)
        self.refused, self.told, self._waits = Counter[int](), dict[int, list[float]](), set[int]()
        self.sizes = Counter[int]()  # of who asks for several at once
        self._events: list[tuple[float, int, str, bool]] = [(0.0, -1, "", False)]  # -1: the slot is free

    def arrive(self, times: float, seconds: float, *, first: int = 0, key: str = "", returns: bool = True) -> range:
        """So many times what can be answered, for a while. Their numbers."""
        came, who = 0.0, first
        while (came := came + self._dice.expovariate(times / self.pace)) < seconds:
            heapq.heappush(self._events, (came, who, key, returns))
            who += 1
        return range(first, who)

    def ask(self, every: float, who: range) -> None:
        """One of them after the other."""
        for i, one in enumerate(who, 1):
            heapq.heappush(self._events, (i * every, one, "", True))

    def hammer(self, every: float, seconds: float, who: int, key: str = "") -> None:
        """The same request again and again, but while it waits for its answer."""
        for i in range(int(seconds / every)):
            heapq.heappush(self._events, (i * every, who, key, False))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] < until:
            now, who, key, returns = heapq.heappop(self._events)
            if who < 0:
                taken = self.waiting.take()
                self._waits -= set() if taken is None else set(taken.request.tokens.tolist())
                heapq.heappush(self._events, (now + self._dice.expovariate(1 / self.pace), -1, "", False))
                continue
            if who in self._waits:
                continue
            count = max(self.sizes[who], 1)
            asked = [Job(request=request([who], key=key), sink=lambda event: None, submitted=now) for _ in range(count)]
            try:
                self.waiting.put(*asked, pace=self.pace)
                self._waits.add(who)
            except QueueFull as err:
                self.refused[who] += 1
                self.told.setdefault(who, []).append(err.retry_after_s)
                if returns:
                    heapq.heappush(self._events, (now + math.ceil(err.retry_after_s), who, key, True))

    def longest(self, who: range) -> float:
        return max(max(self.told.get(one, [0.0])) for one in who)


def test_who_comes_again_when_told_finds_room() -> None:
    """Two minutes of three times what can be answered: nearly nobody is refused again."""
    crowd = Crowd()
    all_of_them = crowd.arrive(3, 120)
    crowd.run(1000)
    assert max(crowd.refused.values()) > 1
    assert len(crowd.refused) > len(all_of_them) / 2
    assert sum(crowd.refused[who] <= 1 for who in all_of_them) >= 0.95 * len(all_of_them)


def test_who_asks_for_several_at_once_finds_room() -> None:
    """Among those who ask for one each: as many places are kept as come."""
    crowd = Crowd()
    many = range(1000, 1003)
    crowd.sizes.update(dict.fromkeys(many, 6))
    crowd.ask(20.0, many)
    few = crowd.arrive(2, 300)
    crowd.run(1000)
    assert min(crowd.refused[who] for who in many) > 0
    assert max(crowd.refused[who] for who in many) <= 3
    assert sum(crowd.refused[who] <= 2 for who in few) >= 0.95 * len(few)


def test_who_does_not_wait_lengthens_nobodys_time() -> None:
    """Somebody asks for the same thing fifty times a second; others are told what they would be told without him."""
    alone, crowd = Crowd(), Crowd()
    obedient = alone.arrive(3, 100)
    alone.run(1000)
    assert crowd.arrive(3, 100) == obedient
    crowd.hammer(0.02, 100, who=9999)
    crowd.run(1000)
    assert crowd.refused[9999] > 100
    assert crowd.longest(obedient) < 1.1 * alone.longest(obedient), "he has answers too, one after the other"
    assert sum(crowd.refused[who] <= 2 for who in obedient) >= 0.95 * len(obedient)


def test_many_clients_may_ask_for_the_same() -> None:
    waiting, told = RequestQueue(most=16, most_tokens=99), set[float]()
    for i in range(64):
        same = Job(request=request([1]), sink=lambda event: None, submitted=0.0)
        try:
            waiting.put(same, pace=1.0)
        except QueueFull as err:
            assert i >= 16
            told.add(err.retry_after_s)
    assert len(told) == 20


def test_who_never_comes_again_is_not_waited_for() -> None:
    """Ten times what can be answered is asked once and never again: after a while times are short again."""
    crowd = Crowd()
    crowd.arrive(10, 300, first=1000, returns=False)
    crowd.run(200)
    newest = [times[-1] for times in crowd.told.values()][-100:]
    longest = max(max(times) for times in crowd.told.values())
    assert min(newest) < longest / 4


def test_who_asks_for_ever_new_things_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_REMEMBERED", 8)
    known = RetrySlots()
    for who in range(100):
        assert known.book(who, "", 0.0, 1.0) > 0
    assert len(known._booked) == len(known._ahead) == 8
    assert sum(known.came(who, 100.0) for who in range(100)) == 0, "all are late"
    assert not known._booked
    assert not known._line


def test_keys_wait_for_themselves() -> None:
    """One key asks for fifty times what it can have; another is told no more than its own requests need, twice."""
    crowd = Crowd()
    modest = crowd.arrive(0.4, 100, key="modest")
    crowd.arrive(50, 100, first=1000, key="greedy", returns=False)
    crowd.run(100)
    assert crowd.longest(range(1000, 6000)) > 100
    assert crowd.longest(modest) < 20


def test_places_are_kept_for_those_who_were_told_to_come() -> None:
    waiting = RequestQueue(most=2, most_tokens=99)

    def asks(tokens: int, now: float) -> float:
        """0, or when to come again."""
        try:
            waiting.put(Job(request=request([tokens]), sink=lambda event: None, submitted=now), pace=1.0)
        except QueueFull as err:
            return err.retry_after_s
        return 0.0

    assert [asks(1, 0.0), asks(2, 0.0), asks(3, 0.0)] == [0.0, 0.0, 1.25]
    assert waiting.take() is not None
    assert asks(4, 1.3) > 0, "the one place is of the third"
    assert asks(3, 1.4) == 0
    assert waiting.take() is not None
    assert asks(4, 1.5) == 0, "before its time, and nobody else was told to come"
    assert asks(5, 1.5) > 0
    assert waiting.take() is not None
    assert asks(5, 1.6) == 0
    assert waiting.take() is not None
    assert asks(6, 5.0) == 0, "nothing is kept for the fifth, who has come"
