"""Requests that wait: bounded by number and by tokens, in turns by key."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KVFlashError
from .messages import Event, Request


class QueueFull(KVFlashError):
    """No more requests can wait. retry_after_s: when one may find room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way. sink: gets its events, on the engine's thread. full: has its reader enough for now?
    submitted: in seconds of the clock. begun: has it had a turn, and was put aside?
    """

    request: Request
    sink: Callable[[Event], None]
    full: Callable[[], bool] = lambda: False
    submitted: float
    cancelled: bool = False
    begun: bool = False


LONGEST_S = 3600.0
SLACK = 1.25
"""Others come meanwhile, who have been told nothing: more time than the seat needs for each that was refused."""


class Places:
    """When those who are refused find room: each is told a time of its own, so that they do not all come at once."""

    def __init__(self) -> None:
        self._last = 0.0

    def book(self, now: float, pace: float) -> float:
        """In how many seconds to come again, where one request is taken every `pace` seconds."""
        self._last = min(max(now, self._last) + SLACK * pace, now + LONGEST_S)
        return self._last - now

    def clear(self) -> None:
        """Nobody waits any more: there is room at once, whatever those were told who have not come again."""
        self._last = 0.0


class Waiting:
    """Any thread puts and removes; the engine's takes. Higher priorities first, then keys in turn, then in order."""

    def __init__(self, *, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._lanes: dict[tuple[int, str], deque[Job]] = {}
        self._tokens = 0
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    def put(self, job: Job, *, room_in: Callable[[], float]) -> None:
        """QueueFull, and nothing has changed, if there is no room; `room_in` says when there is. A request never waits
        behind an empty queue's bound: one that is alone is taken, however long it is.
        """
        size = len(job.request.tokens)
        with self._lock:
            if self._count >= self._most:
                raise QueueFull(
                    f"{self._count} requests wait, and {self._most} may: try again later, or start the server with a "
                    f"larger --max-queue",
                    room_in(),
                )
            if self._count and self._tokens + size > self._most_tokens:
                raise QueueFull(
                    f"{self._tokens} tokens of prompts wait, with {size} more they would pass {self._most_tokens}: try "
                    f"again later, or start the server with a larger --max-queued-tokens",
                    room_in(),
                )
            lane = (job.request.priority, job.request.key)
            self._lanes.setdefault(lane, deque()).append(job)
            self._tokens += size
            self._count += 1

    def put_first(self, job: Job) -> None:
        """One that had been taken: it comes before all others of its key, and needs no room."""
        lane = (job.request.priority, job.request.key)
        with self._lock:
            self._lanes.setdefault(lane, deque()).appendleft(job)
            self._tokens += len(job.request.tokens)
            self._count += 1

    def take(self) -> Job | None:
        """The next one, None if nobody waits."""
        with self._lock:
            if not self._lanes:
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

    def _forget(self, job: Job) -> None:
        self._tokens -= len(job.request.tokens)
        self._count -= 1
