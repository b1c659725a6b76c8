"""Requests that wait: bounded by number and by tokens, in turns by key."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from ..errors import KVFlashError
from .messages import Event, Request
from .places import Places


class QueueFull(KVFlashError):
    """No more requests can wait. retry_after_s: when one may find room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way. sink: gets its events, on the engine's thread. full: has its reader enough for now?
    submitted: in seconds of the clock. begun: has it had a turn, and was put aside? who: the same if it comes again.
    """

    request: Request
    sink: Callable[[Event], None]
    full: Callable[[], bool] = lambda: False
    submitted: float
    cancelled: bool = False
    begun: bool = False
    who: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.who = self.request.key, hash(self.request.tokens.tobytes())


class Waiting:
    """Any thread puts and removes; the engine's takes. Higher priorities first, then keys in turn, then in order."""

    def __init__(self, *, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._lanes: dict[tuple[int, str], deque[Job]] = {}
        self._places = Places()
        self._alike: Counter[Hashable] = Counter()
        self._tokens = 0
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

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
        taken, however long it is. pace: seconds that a request has the seat.
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
        later, count, tokens = "try again later, or start the server with a larger", self._count, self._tokens
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

    def take(self) -> Job | None:
        """The next one, None if nobody waits: then there is room for everybody at once."""
        with self._lock:
            if not self._lanes:
                self._places.clear()
                return None
            most = max(priority for priority, _ in self._lanes)
            lane = next(lane for lane in self._lanes if lane[0] == most)
            jobs = self._lanes.pop(lane)
            job = jobs.popleft()
            if jobs:
                self._lanes[lane] = jobs  # behind the other keys
            self._forget(job)
            return job

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
        self._tokens += len(job.request.tokens)
        self._count += 1
        self._alike[job.who] += 1

    def _forget(self, job: Job) -> None:
        self._tokens -= len(job.request.tokens)
        self._count -= 1
        self._alike[job.who] -= 1
        if not self._alike[job.who]:
            del self._alike[job.who]
