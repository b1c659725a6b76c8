"""The engine's thread: takes requests one after the other, and tells of each step. Nothing else touches the model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError, ContextFull, KVFlashError, NotFinite
from ..store.swapped import ConversationFolder, SwapStore
from .answer import Answer, Cancelled, DeadlinePassed, PutAside
from .conversations import Conversations
from .messages import (
    CANCELLED,
    CONTEXT,
    DEADLINE,
    INTERNAL,
    INVALID,
    NUMERICAL,
    QUEUE_DEADLINE,
    SHUTDOWN,
    Event,
    Failed,
    Request,
    Usage,
)
from .model import Model
from .queue import Job, RequestQueue
from .slot import Slot

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")

PACE_SHARE = 0.02
"""What the newest request has of the mean: lengths differ, and a hasty mean sends refused clients back too early."""

SWEEP_S = 0.25
"""How often the queue is looked through for requests whose time is up, while another runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """most, most_tokens: of the queue. park_bytes: of conversations in memory."""

    most: int = 256
    most_tokens: int = 1 << 20
    park_bytes: int = 8 << 30


@dataclass(slots=True)
class Totals:
    """Since the start. finished: answers by how they ended. missed: see `Usage`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    missed: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def add(self, usage: Usage, reason: str) -> None:
        """Count a request that has ended."""
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.generated_tokens += usage.generated
        self.missed += usage.missed is not None
        self.finished[reason] = self.finished.get(reason, 0) + 1


class Scheduler:
    """Any thread submits and cancels; events go to the sinks on the engine's thread. on_end: called there with each
    request that has had the slot, what it took and how it ended. clock: seconds.
    """

    def __init__(
        self,
        model: Model,
        *,
        limits: Limits | None = None,
        folder: ConversationFolder | None = None,
        on_end: Callable[[Request, Usage, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = Limits() if limits is None else limits
        self.model = model
        self.waiting = RequestQueue(most=limits.most, most_tokens=limits.most_tokens)
        self.swapped = SwapStore(
            capacity=limits.park_bytes,
            folder=folder,
            write=lambda swapped, place, sync: model.write(swapped, place.path, sync=sync),
            read=lambda place: model.read(place.path),
        )
        self.slot = Slot(model, self.swapped, clock)
        self.conversations = Conversations(model, self.slot, self.swapped, folder)
        self.totals = Totals()
        self.folder = folder
        self._on_end = on_end
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._begun: dict[str, Answer] = {}  # that were put aside
        self._aside: list[Job] = []  # of these, whose readers have enough for now
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._ending = False  # answers that run end too
        self._running: Job | None = None
        self._answer: Answer | None = None
        self.stalls = 0  # answers that were put aside for their readers
        self._swept = 0.0
        self._pace, self._paced = 1.0, 0  # seconds a request, a slowly moving mean of so many
        self._thread = threading.Thread(target=self._run, name="kvflash-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- from any thread

    @property
    def running(self) -> Request | None:
        """Return the request that has the slot."""
        job = self._running
        return None if job is None else job.request

    @property
    def generated(self) -> int:
        """Tokens of answers, that of now included."""
        begun = [self._answer, *self._begun.copy().values()]
        return self.totals.generated_tokens + sum(answer.generated for answer in begun if answer is not None)

    @property
    def put_aside(self) -> int:
        """How many answers wait for their readers."""
        return len(self._aside)

    @property
    def idle(self) -> bool:
        return self._running is None and len(self.waiting) == 0 and not self._aside

    @property
    def retry_after_s(self) -> float:
        """Return the seconds that one request keeps the slot."""
        return max(1.0, self._pace)

    def submit(
        self, request: Request, sink: Callable[[Event], None], *, full: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask for an answer. QueueFull, and nothing happens, if too many wait; KVFlashError after `close`.

        full: while it is true the answer is swapped out, and others have the slot; call `wake` once it is false.
        """
        self.submit_together([(request, sink, full)])

    def submit_together(self, asked: Sequence[tuple[Request, Callable[[Event], None], Callable[[], bool]]]) -> None:
        """All of one client's requests, each with its `sink` and `full`, or none of them. Errors: those of `submit`."""
        if self._stopping:
            raise KVFlashError("the server is shutting down: try again later")
        now = self._clock()
        jobs = {request.id: Job(request=request, sink=sink, full=full, submitted=now) for request, sink, full in asked}
        self._jobs |= jobs
        try:
            self.waiting.put(*jobs.values(), pace=self._pace)
        except KVFlashError:
            for id in jobs:
                del self._jobs[id]
            raise
        self._wake.set()

    def cancel(self, id: str) -> None:
        """Nobody waits for this answer any more. It ends before the next step."""
        job = self._jobs.get(id)
        if job is not None:
            job.cancelled = True
            self._wake.set()

    def wake(self) -> None:
        """Look again at what was put aside."""
        self._wake.set()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do something on the engine's thread, between two requests."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as err:
                future.set_exception(err)

        if self._stopping:
            future.set_exception(KVFlashError("the server is shutting down: try again later"))
            return future
        self._calls.append(run)
        self._wake.set()
        return future

    def end_answers(self) -> None:
        """What runs ends before its next step, with an error that says why."""
        self._ending = True
        self._wake.set()

    def close(self) -> None:
        """End what runs and waits, put every text aside and store it where there is a folder, close the model."""
        self._ending = self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the engine's thread

    def _give_way(self) -> bool:
        """Evict a swapped-out text, as host memory is full. Only this thread may do so."""
        return threading.current_thread() is self._thread and self.swapped.evict()

    def _run(self) -> None:
        self.model.when_full(self._give_way)
        try:
            self.conversations.adopt()
        except Exception:
            logger.exception("the session folder cannot be read")
        while not self._stopping:
            self._wake.clear()
            while self._calls:
                self._calls.popleft()()
            self._sweep()
            job = self.waiting.take()
            if job is not None:
                self._serve(job)
            elif not self._calls and not self._stopping:
                self._wake.wait(1.0)
        self._end()

    def _end(self) -> None:
        for job in [*self.waiting.remove_if(lambda job: True), *self._aside]:
            self._tell(job, Failed(code=SHUTDOWN, message="the server is shutting down: try again later"))
        while self._calls:
            self._calls.popleft()()
        try:
            self.slot.swap_out()
            self.swapped.close()
        except Exception:
            logger.exception("conversations could not be put aside at the end")
        self.model.close()

    def _serve(self, job: Job) -> None:
        request, self._running = job.request, job
        began = self._clock()
        answer = self._begun.pop(request.id, None)
        if answer is None:
            answer = Answer(job, self.model, self.slot, self._clock, check=lambda: self._check(job))
        self._answer = answer
        try:
            reason, event = self._outcome(job, answer)
        except PutAside:
            self._put_aside(job, answer)
            return
        usage = answer.usage
        try:
            self.slot.settle()
        except Exception:
            logger.exception("the text could not be settled")
            self._forget_text()
        self.totals.add(usage, reason)
        self._paced += 1
        self._pace += max(1 / self._paced, PACE_SHARE) * (self._clock() - began - self._pace)
        self._running = self._answer = None
        self._ended(request, usage, reason)
        self._tell(job, event)

    def _outcome(self, job: Job, answer: Answer) -> tuple[str, Event]:
        """Make an answer. Return how it ended, and its last event. PutAside."""
        request = job.request
        try:
            self._check(job)
            finished = answer.make()
        except Cancelled:
            return _failed(CANCELLED, "the client has left")
        except DeadlinePassed as err:
            return _failed(DEADLINE, str(err))
        except ShuttingDown:
            return _failed(SHUTDOWN, "the server is shutting down: ask again later")
        except ContextFull as err:
            return _failed(CONTEXT, str(err))
        except ConfigError as err:  # pins that the pool cannot hold
            return _failed(INVALID, str(err))
        except KVFlashError as err:
            logger.warning("request %s: %s", request.id, err)
            if not isinstance(err, NotFinite):
                return _failed(INTERNAL, str(err))
            self._forget_text(request)
            return _failed(NUMERICAL, str(err))
        except PutAside:
            raise
        except Exception as err:
            logger.exception("request %s", request.id)
            self._forget_text()
            return _failed(INTERNAL, f"the server failed at this request ({type(err).__name__}): its log says why")
        return finished.reason, finished

    def _put_aside(self, job: Job, answer: Answer) -> None:
        """Its conversation is parked like any other; the job waits for its reader."""
        self._begun[job.request.id], job.begun = answer, True
        self._aside.append(job)  # first: a server that drains looks on
        self._running = self._answer = None
        self.stalls += 1
        try:
            self.slot.swap_out(unfinished=True)
        except Exception:
            logger.exception("the text could not be put aside")
            self._forget_text()

    def _bring_back(self) -> None:
        """Into line again with those whose readers take more, and those that are to end."""
        now = self._clock()
        for job in list(self._aside):
            limit = job.request.timeout_s
            late = limit is not None and now - job.submitted > limit
            if job.cancelled or late or self._ending or not job.full():
                self.waiting.put_first(job)
                self._aside.remove(job)

    def _ended(self, request: Request, usage: Usage, reason: str) -> None:
        if self._on_end is None:
            return
        try:
            self._on_end(request, usage, reason)
        except Exception:
            logger.exception("request %s could not be counted", request.id)

    def _forget_text(self, spoiled: Request | None = None) -> None:
        try:
            self.slot.clear() if spoiled is None else self.slot.lose(spoiled)
        except Exception:
            logger.exception("the text at hand could not be forgotten")

    def _check(self, job: Job) -> None:
        """Between two steps: may this answer go on?"""
        if job.cancelled:
            raise Cancelled
        if self._ending:
            raise ShuttingDown
        now = self._clock()
        limit = job.request.timeout_s
        if limit is not None and now - job.submitted > limit:
            raise DeadlinePassed(f"the answer took longer than {limit:g} s: ask for fewer tokens, or raise --timeout")
        if now - self._swept > SWEEP_S:
            self._sweep()

    def _sweep(self) -> None:
        """Take out who has left the queue, or has waited too long."""
        now = self._swept = self._clock()
        self._bring_back()

        def late(job: Job) -> bool:
            if job.begun:  # it has had a turn: what ends it is told when it has the next
                return False
            limits = [x for x in (job.request.timeout_s, job.request.queue_timeout_s) if x is not None]
            return now - job.submitted > min(limits, default=float("inf"))

        for job in self.waiting.remove_if(lambda job: (job.cancelled and not job.begun) or late(job)):
            code = CANCELLED if job.cancelled else QUEUE_DEADLINE
            said = (
                "the client has left"
                if job.cancelled
                else f"waited {now - job.submitted:.0f} s for its turn: try again later"
            )
            usage = Usage(queue_s=now - job.submitted)
            self.totals.add(usage, code)
            self._ended(job.request, usage, code)
            self._tell(job, Failed(code=code, message=said))

    def _tell(self, job: Job, event: Any) -> None:
        """The last event of a request."""
        self._jobs.pop(job.request.id, None)
        try:
            job.sink(event)
        except Exception:
            logger.exception("request %s: its reader is gone", job.request.id)


def _failed(code: str, message: str) -> tuple[str, Failed]:
    return code, Failed(code=code, message=message)


class ShuttingDown(Exception):
    """Answers that run end now."""
