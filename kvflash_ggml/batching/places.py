"""When those who are refused find room, and what is kept of it for them."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

SLACK = 1.25
"""Others come meanwhile, who have been told nothing: more time than the seat needs for each that was refused."""

LONGEST_S = 3600.0

GRACE_S = 3.0
"""How late somebody may be: clients round a time up, and the network takes its part."""

KEPT_FOR = 4.0
"""A place that becomes free so many requests before somebody is due is kept for him."""

TWINS = 4
"""Requests that are alike may be of several clients: so many more than wait already are told times of their own."""

MAX_REMEMBERED = 1 << 14
"""Places that are known. Beyond, who is refused is told a time that nobody remembers."""

SHARE_STEP = 0.05
"""What the newest that has come, or has not, counts in the share of those who do."""


@dataclass(order=True, slots=True)
class _Place:
    """due: when whoever was told of it may come. size: with how many requests at once. gone: it has come, or is not
    awaited any more.
    """

    due: float
    who: Hashable = field(compare=False)
    key: Hashable = field(compare=False)
    size: int = field(compare=False)
    gone: bool = field(compare=False, default=False)


class Places:
    """Tell each refused request a time of its own, so that they do not all come at once. Not for several threads.

    In a simulation of a minute with three times what can be answered, no obedient client is refused more than twice. If
    each is told what waits times the pace, with jitter, 62 % are (4 % and 26 % by `kvflash-bench overload`).

    A request that comes too early is told the same time again, and delays nobody. Keys take turns, as in the queue, so
    that a key which asks for much waits for itself. Clients that never come again count by the share that came lately.
    who: tells a request that comes again from others. Times are in seconds of one clock that does not go back.
    """

    def __init__(self) -> None:
        self._ahead: list[_Place] = []  # a heap
        self._expected: deque[_Place] = deque()  # due, and not yet given up
        self._told: dict[Hashable, list[_Place]] = {}  # of each: ahead, or expected
        self._line: Counter[Hashable] = Counter()  # of each key: how many are ahead
        self._share = 1.0
        self._largest = 1

    def book(self, who: Hashable, key: Hashable, now: float, pace: float, *, size: int = 1, alike: int = 0) -> float:
        """In how many seconds to come again, where one request is taken every `pace` seconds. size: how many come at
        once. alike: how many wait.
        """
        self._advance(now)
        told = self._told.get(who, [])
        if len(told) >= alike + TWINS:
            told.append(told.pop(0))
            return max(told[-1].due - now, 0.0)
        mine = self._line[key]
        before = sum(min(count, mine + 1) for other, count in self._line.items() if other != key) + mine
        place = _Place(now + min(SLACK * pace * (size + self._share * before), LONGEST_S), who, key, size)
        if len(self._ahead) >= MAX_REMEMBERED:
            return place.due - now
        self._largest = max(self._largest, size)
        told.append(place)
        self._told[who] = told
        heapq.heappush(self._ahead, place)
        self._line[key] += size
        return place.due - now

    def came(self, who: Hashable, now: float) -> bool:
        """Somebody asks: was it told to come about now?"""
        self._advance(now)
        place = next((one for one in self._told.get(who, ()) if one.due <= now), None)
        if place is None:
            return False
        self._give_up(place)
        self._share += SHARE_STEP * (1 - self._share)
        return True

    def found(self, who: Hashable) -> None:
        """Somebody who was not expected has found room: it does not come again, if it was told to."""
        place = next(iter(self._told.get(who, ())), None)
        if place is not None:
            self._leave_line(place)
            self._give_up(place)

    def expected(self, now: float, pace: float, *, but: Hashable) -> int:
        """How many others will probably come before the seat has taken KEPT_FOR more, of those who were told to."""
        self._advance(now)
        late = sum(one.size for one in self._expected if not one.gone and one.who != but)
        return round(self._share * (late + self._due_soon(now, pace, but)))

    def _due_soon(self, now: float, pace: float, but: Hashable) -> int:
        """How many others of those ahead, each for so much longer as it comes with more; looks only at what is due
        before that of the largest, and what is next to it in the heap.
        """
        count, places = 0, [0]
        until = now + (KEPT_FOR + self._largest - 1) * pace
        while places:
            i = places.pop()
            if i < len(self._ahead) and self._ahead[i].due <= until:
                place = self._ahead[i]
                if not place.gone and place.who != but and place.due <= now + (KEPT_FOR + place.size - 1) * pace:
                    count += place.size
                places += (2 * i + 1, 2 * i + 2)
        return count

    def clear(self) -> None:
        """Nobody waits any more: there is room at once, whatever those were told who have not come again."""
        self._ahead.clear()
        self._expected.clear()
        self._told.clear()
        self._line.clear()
        self._largest = 1

    def _advance(self, now: float) -> None:
        while self._ahead and self._ahead[0].due <= now:
            place = heapq.heappop(self._ahead)
            if not place.gone:
                self._leave_line(place)
                self._expected.append(place)
        while self._expected and (self._expected[0].gone or self._expected[0].due + GRACE_S < now):
            place = self._expected.popleft()
            if not place.gone:
                self._give_up(place)
                self._share -= SHARE_STEP * self._share

    def _leave_line(self, place: _Place) -> None:
        self._line[place.key] -= place.size
        if not self._line[place.key]:
            del self._line[place.key]

    def _give_up(self, place: _Place) -> None:
        place.gone = True
        told = [one for one in self._told.pop(place.who) if one is not place]
        if told:
            self._told[place.who] = told
