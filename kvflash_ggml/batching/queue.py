"""Requests that wait: bounded by number and by tokens, in turns by key."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from ..errors import KVFlashError
from .messages import Event, Request

# --- when clients that were refused find room


SLACK = 1.25
"""Others come meanwhile, who have been told nothing: more time than the slot needs for each that was refused."""

LONGEST_S = 3600.0

GRACE_S = 3.0
"""How late somebody may be: clients round a time up, and the network takes its part."""

KEPT_FOR = 4.0
"""A place that becomes free so many requests before somebody is due is kept for him."""

TWINS = 4
"""Requests that are alike may be of several clients: so many more than wait already are told times of their own."""

MAX_REMEMBERED = 1 << 14
"""Retry slots that are known. Beyond, who is refused is told a time that nobody remembers."""

SHARE_STEP = 0.05
"""What the newest that has come, or has not, counts in the share of those who do."""


@dataclass(order=True, slots=True)
class _RetrySlot:
    """due: when whoever was told of it may come. size: with how many requests at once. gone: it has come, or is not
    awaited any more.
    """

    due: float
    who: Hashable = field(compare=False)
    key: Hashable = field(compare=False)
    size: int = field(compare=False)
    gone: bool = field(compare=False, default=False)


class RetrySlots:
    """Tell each refused request a time of its own, so that they do not all come at once. Not for several threads.

    In a simulation of a minute with three times what can be answered, no obedient client is refused more than twice. If
    each is told what waits times the pace, with jitter, 62 % are (4 % and 26 % by `kvflash-bench overload`).

    A request that comes too early is told the same time again, and delays nobody. Keys take turns, as in the queue, so
    that a key which asks for much waits for itself. Clients that never come again count by the share that came lately.
    who: tells a request that comes again from others. Times are in seconds of one clock that does not go back.
    """

    def __init__(self) -> None:
        self._ahead: list[_RetrySlot] = []  # a heap
        self._expected: deque[_RetrySlot] = deque()  # due, and not yet given up
        self._booked: dict[Hashable, list[_RetrySlot]] = {}  # of each: ahead, or expected
        self._line: Counter[Hashable] = Counter()  # of each key: how many are ahead
        self._share = 1.0
        self._largest = 1

    def book(self, who: Hashable, key: Hashable, now: float, pace: float, *, size: int = 1, alike: int = 0) -> float:
        """In how many seconds to come again, where one request is taken every `pace` seconds. size: how many come at
        once. alike: how many wait.
        """
        self._advance(now)
        booked = self._booked.get(who, [])
        if len(booked) >= alike + TWINS:
            booked.append(booked.pop(0))
            return max(booked[-1].due - now, 0.0)
        mine = self._line[key]
        before = sum(min(count, mine + 1) for other, count in self._line.items() if other != key) + mine
        place = _RetrySlot(now + min(SLACK * pace * (size + self._share * before), LONGEST_S), who, key, size)
        if len(self._ahead) >= MAX_REMEMBERED:
            return place.due - now
        self._largest = max(self._largest, size)
        booked.append(place)
        self._booked[who] = booked
        heapq.heappush(self._ahead, place)
        self._line[key] += size
        return place.due - now

    def came(self, who: Hashable, now: float) -> bool:
        """Somebody asks: was it told to come about now?"""
        self._advance(now)
        place = next((one for one in self._booked.get(who, ()) if one.due <= now), None)
        if place is None:
            return False
        self._give_up(place)
        self._share += SHARE_STEP * (1 - self._share)
        return True

    def found(self, who: Hashable) -> None:
        """Somebody who was not expected has found room: it does not come again, if it was told to."""
        place = next(iter(self._booked.get(who, ())), None)
        if place is not None:
            self._leave_line(place)
            self._give_up(place)

    def expected(self, now: float, pace: float, *, but: Hashable) -> int:
        """How many others will probably come before the slot has taken KEPT_FOR more, of those who were told to."""
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
        self._booked.clear()
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

    def _leave_line(self, place: _RetrySlot) -> None:
        self._line[place.key] -= place.size
        if not self._line[place.key]:
            del self._line[place.key]

    def _give_up(self, place: _RetrySlot) -> None:
        place.gone = True
        booked = [one for one in self._booked.pop(place.who) if one is not place]
        if booked:
            self._booked[place.who] = booked


# --- the queue


class QueueFull(KVFlashError):
    """No more requests can wait. retry_after_s: when one may find room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way. sink: gets its events, on the engine's thread. full: has its reader enough for now?
    submitted: in seconds of the clock. begun: has it had a turn, and was put aside? behind: of a reading that follows
    a preview, the identifier of the conversation. who: the same if it comes again.
    fetching: is its text on its way from the store that servers share? None if nobody has looked there yet.
    """

    request: Request
    sink: Callable[[Event], None]
    full: Callable[[], bool] = lambda: False
    submitted: float
    cancelled: bool = False
    begun: bool = False
    fetching: Callable[[], bool] | None = None
    behind: str = ""
    who: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.who = self.request.key, hash(self.request.tokens.tobytes())

    def late(self, now: float, *, queued: bool = False) -> bool:
        """Return whether its time is up; queued: or the time in which it must have its first turn."""
        limits = self.request.timeout_s, self.request.queue_timeout_s if queued else None
        return any(limit is not None and now - self.submitted > limit for limit in limits)


class RequestQueue:
    """Any thread puts and removes; the engine's takes. Higher priorities first, then keys in turn, then in order.

    tokens: of the prompts that wait.
    """

    def __init__(self, *, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._lanes: dict[tuple[int, str], deque[Job]] = {}
        self._places = RetrySlots()
        self._alike: Counter[Hashable] = Counter()
        self.tokens = 0
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def never(self, sizes: Sequence[int]) -> str | None:
        """Why requests of so many tokens each can never wait together, however empty the queue is; None if they can."""
        instead = "ask for fewer at once, or start the server with a larger"
        if len(sizes) > max(self._most, 1):
            return f"{len(sizes)} answers in one request, and {self._most} may wait: {instead} --max-queue"
        if len(sizes) > 1 and sum(sizes) > self._most_tokens:
            return (
                f"{len(sizes)} answers in one request with {sum(sizes)} tokens of prompts, and {self._most_tokens} may "
                f"wait: {instead} --max-queued-tokens"
            )
        return None

    def put(self, *jobs: Job, pace: float) -> None:
        """All of them, of one client. QueueFull, and nothing has changed, if there is no room, or what there is is kept
        for those who were told to come now. A request never waits behind an empty queue's bound: one that is alone is
        taken, however long it is. pace: seconds that a request has the slot.
        """
        first, size = jobs[0], sum(len(job.request.tokens) for job in jobs)
        who, now = first.who, first.submitted
        with self._lock:
            awaited = self._places.came(who, now)
            kept = 0 if awaited else min(self._places.expected(now, pace, but=who), self._most // 2)
            full = self._full(len(jobs), size, kept)
            if full is not None:
                key, alike = first.request.key, self._alike[who]
                raise QueueFull(full, self._places.book(who, key, now, pace, size=len(jobs), alike=alike))
            if not awaited:
                self._places.found(who)
            for job in jobs:
                lane = (job.request.priority, job.request.key)
                self._lanes.setdefault(lane, deque()).append(job)
                self._count_in(job)

    def _full(self, more: int, size: int, kept: int) -> str | None:
        """Why there is no room for so many, of so many tokens, so many places being kept; None if there is."""
        later, count, tokens = "try again later, or start the server with a larger", self._count, self.tokens
        if count + more + kept > self._most:
            others = f" and {kept} more were told to come now" if kept else ""
            return f"{count} requests wait{others}, and {self._most} may: {later} --max-queue"
        if count and tokens + size > self._most_tokens:
            return (
                f"{tokens} tokens of prompts wait, with {size} more they would pass {self._most_tokens}: "
                f"{later} --max-queued-tokens"
            )
        return None

    def put_first(self, job: Job) -> None:
        """One that had been taken: it comes before all others of its key, and needs no room."""
        lane = (job.request.priority, job.request.key)
        with self._lock:
            self._lanes.setdefault(lane, deque()).appendleft(job)
            self._count_in(job)

    def take(self, fits: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The next one that fits, of the highest priority that waits; None if there is none. If nobody waits, there is
        room for everybody at once.
        """
        with self._lock:
            if not self._lanes:
                self._places.clear()
            highest = max((priority for priority, _ in self._lanes), default=0)
            for lane in [lane for lane in self._lanes if lane[0] == highest]:
                job = next(filter(fits, self._lanes[lane]), None)
                if job is not None:
                    jobs = self._lanes.pop(lane)
                    jobs.remove(job)
                    if jobs:
                        self._lanes[lane] = jobs  # behind the other keys
                    self._forget(job)
                    return job
            return None

    def remove_if(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        """Take out all that are not wanted any more."""
        with self._lock:
            gone = [job for jobs in self._lanes.values() for job in jobs if unwanted(job)]
            for job in gone:
                lane = (job.request.priority, job.request.key)
                self._lanes[lane].remove(job)
                if not self._lanes[lane]:
                    del self._lanes[lane]
                self._forget(job)
            return gone

    def _count_in(self, job: Job) -> None:
        self.tokens += len(job.request.tokens)
        self._count += 1
        self._alike[job.who] += 1

    def _forget(self, job: Job) -> None:
        self.tokens -= len(job.request.tokens)
        self._count -= 1
        self._alike[job.who] -= 1
        if not self._alike[job.who]:
            del self._alike[job.who]
