"""Requests that wait: bounded by number and by tokens, in turns by key, and those that have had a turn by turns too."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ..errors import KVFlashError
from .messages import Event, Request

LONGEST_S = 3600.0
"""The latest time that a refused client is told."""

JITTER = 0.5
"""A refused client is told a time that is longer or shorter by up to this share, so that not all come at once."""


class QueueFull(KVFlashError):
    """No more requests can wait. retry_after_s: when one may find room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way. sink: gets its events, on the engine's thread. full: has its reader enough for now?
    submitted: in seconds of the clock. begun: has it had a turn, and was put aside? behind: of a reading that follows
    a preview, the identifier of the conversation.
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

    def late(self, now: float, *, queued: bool = False) -> bool:
        """Return whether its time is up; queued: or the time in which it must have its first turn."""
        limits = self.request.timeout_s, self.request.queue_timeout_s if queued else None
        return any(limit is not None and now - self.submitted > limit for limit in limits)


class RequestQueue:
    """Any thread puts and removes; the engine's takes. Higher priorities first, then keys in turn, then in order.

    Of one priority, a request that has had no turn comes before those that have. Where both wait, they alternate.

    most, most_tokens: bounds of the requests that wait, and of the tokens of their prompts. random: a number from 0 to
    1, for the times that refused clients are told. tokens: of the prompts that wait.
    """

    def __init__(self, *, most: int, most_tokens: int, random: Callable[[], float] = random.random) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._random = random
        self._lanes: dict[tuple[int, str], deque[Job]] = {}
        self.tokens = 0
        self._count = 0
        self._begun = False  # the next one is one that has had a turn
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def never(self, sizes: Sequence[int]) -> str | None:
        """Tell why requests of so many tokens each can never wait together; None if they can."""
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
        """Queue the requests of one client: all of them, or QueueFull and none.

        A prompt that is longer than `most_tokens` is queued where nobody waits. pace: seconds that a request has a
        slot. The time that QueueFull names is the pace times the requests that wait, with jitter.
        """
        size = sum(len(job.request.tokens) for job in jobs)
        with self._lock:
            full = self._full(len(jobs), size)
            if full is not None:
                jitter = 1 + JITTER * (2 * self._random() - 1)
                raise QueueFull(full, min(pace * max(self._count, 1) * jitter, LONGEST_S))
            for job in jobs:
                lane = (job.request.priority, job.request.key)
                self._lanes.setdefault(lane, deque()).append(job)
                self._count_in(job)

    def _full(self, more: int, size: int) -> str | None:
        """Return why there is no room for `more` requests with `size` tokens together; None if there is."""
        later, count, tokens = "try again later, or start the server with a larger", self._count, self.tokens
        if count + more > self._most:
            return f"{count} requests wait, and {self._most} may: {later} --max-queue"
        if count and tokens + size > self._most_tokens:
            return (
                f"{tokens} tokens of prompts wait, with {size} more they would pass {self._most_tokens}: "
                f"{later} --max-queued-tokens"
            )
        return None

    def put_first(self, job: Job) -> None:
        """Put one back that had been taken: it comes before all others of its key, and needs no room."""
        self._put_back(job, deque.appendleft)

    def put_last(self, job: Job) -> None:
        """Put one back that had been taken: it comes behind all others of its key, and needs no room."""
        self._put_back(job, deque.append)

    def _put_back(self, job: Job, add: Callable[[deque[Job], Job], None]) -> None:
        lane = (job.request.priority, job.request.key)
        with self._lock:
            add(self._lanes.setdefault(lane, deque()), job)
            self._count_in(job)

    def take(self, fits: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """Return the next request that fits, of the highest priority that waits; None if there is none."""
        with self._lock:
            highest = max((priority for priority, _ in self._lanes), default=0)
            lanes = [lane for lane in self._lanes if lane[0] == highest]
            for begun, lane in product((self._begun, not self._begun), lanes):
                job = next((job for job in self._lanes[lane] if job.begun == begun and fits(job)), None)
                if job is not None:
                    self._begun = not begun
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

    def _forget(self, job: Job) -> None:
        self.tokens -= len(job.request.tokens)
        self._count -= 1
