"""The engine's thread takes requests, and computes a step of all running answers at once. Only it touches the model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import KVFlashError, NotFinite
from ..logs import logged
from ..store.swapped import ConversationFolder, SharedStore, SwapStore
from .answer import ENDS, Answer, Cancelled, DeadlinePassed, ShuttingDown
from .behind import Behind
from .calls import Calls
from .conversations import Conversations
from .messages import (
    CANCELLED,
    DEADLINE,
    INTERNAL,
    NUMERICAL,
    QUEUE_DEADLINE,
    SHUTDOWN,
    Event,
    Failed,
    Finished,
    Request,
    Usage,
)
from .model import ServedText
from .outcomes import Outcomes
from .pace import Pace
from .queue import Job, RequestQueue
from .running import Running
from .schedule import Want, gives_way, groups, passes, schedule
from .slot import Slot, SlotCounts, private_salt

if TYPE_CHECKING:
    from ..runtime.task import Pending

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")

GAPS = 4096
"""Times between two tokens of a stream that are kept; the newest."""

ADDED = ("chunks", "resident", "length", "page_ins", "page_outs")
"""Counters of a text; the others are of the model."""

LONG_PROMPT = 1024
"""A prompt of which so many tokens had to be read is written to a shared store before its answer has ended."""

SWEEP_S = 0.25
"""How often the queue is looked through for requests whose time is up, while another runs."""

LOOK_S = 1.0
"""How often an idle engine looks at what waits for a time. It sleeps where nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """most, most_tokens: of the queue. park_bytes: of conversations in memory. itl_target: see `Pace`."""

    most: int = 256
    most_tokens: int = 1 << 20
    park_bytes: int = 8 << 30
    itl_target: float | None = None


class Scheduler:
    """Any thread submits and cancels; events go to the sinks on the engine's thread. on_end: called there with each
    request that has had a slot, what it took and how it ended. clock: seconds.

    There is a slot for the model's text, and for each text beside it. A request takes the free slot whose text saves
    most of its prompt. `schedule` says who has each step: of a prompt, or of all answers that wait for a token.
    """

    def __init__(
        self,
        model: ServedText,
        *,
        limits: Limits | None = None,
        folder: ConversationFolder | None = None,
        shared: Callable[..., SharedStore] | None = None,
        on_end: Callable[[Request, Usage, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = Limits() if limits is None else limits
        self.model = model
        self.waiting = RequestQueue(most=limits.most, most_tokens=limits.most_tokens)
        self._wake = threading.Event()
        self.swapped: SwapStore
        self.shared: SharedStore | None = None
        memory: dict[str, Any] = {"capacity": limits.park_bytes, "write": model.write, "read": model.read}
        if shared is not None:
            self.swapped = self.shared = shared(
                at_hand=lambda: [slot.conversation for slot in self.slots if slot.conversation is not None],
                wake=self._wake.set,
                clock=clock,
                **memory,
            )
        else:
            self.swapped = SwapStore(folder=folder, **memory)
        self.counts = SlotCounts()
        self.slots: list[Slot] = [Slot(one, self.swapped, self.counts, clock) for one in (model, *model.beside)]
        self.behind = Behind()
        self.conversations = Conversations(self.slots, self.swapped, folder, self.behind)
        self.outcomes = Outcomes(on_end)
        self.folder = folder
        self._clock = clock
        self._begun: dict[str, Answer] = {}  # that were put aside
        self._aside: list[Job] = []  # of these, whose readers have enough for now; the others are in the queue
        self._calls = Calls(self._wake.set)
        self._dealt: list[Running] = []  # to whose texts the pool was dealt
        self._ending = False  # answers that run end too
        self._running: list[Running] = []
        self.stalls = 0  # answers that were put aside, for their readers or for requests that waited
        self._swap_s = 0.0  # what it took to swap the text of one of them out and in again
        self.gaps: deque[float] = deque(maxlen=GAPS)  # seconds between two tokens of an answer
        self._steps = Pace(limits.itl_target, model.prompt_rows)
        self._owed: tuple[float, int] | None = None  # since a step of a prompt: when, and steps of the others
        self._swept = 0.0
        self._thread = threading.Thread(target=self._run, name="kvflash-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- from any thread

    @property
    def running(self) -> list[Request]:
        """Return the requests that have a slot, in the order in which they took it."""
        return [one.job.request for one in self._running.copy() if not one.job.behind]

    @property
    def reading(self) -> list[tuple[Request, tuple[int, int]]]:
        """Return the requests whose prompts are being read, behind a preview too: tokens read, and those to read."""
        running = [(one.job.request, one.answer.reading) for one in self._running.copy()]
        return [(request, read) for request, read in running if read is not None]

    def doing(self, request: Request) -> str:
        """Tell what becomes of a request, in a word or two: "queued", "fetching", "reading 512/2048"."""
        for one in self._running.copy():
            if one.job.request is request:
                read = one.answer.reading
                if read is not None:
                    return f"reading {read[0]}/{read[1]}"
                return "generating" if one.answer.generated else "reading"
        if request.id in self._begun:
            return "parked"
        return "fetching" if any(job.request is request for job in self._aside.copy()) else "queued"

    @property
    def slot(self) -> Slot:
        """Return the slot that was taken last."""
        return self.conversations.slot

    @property
    def generated(self) -> int:
        """Tokens of answers, those that are being made included."""
        begun = [*(one.answer for one in self._running.copy()), *self._begun.copy().values()]
        return self.outcomes.totals.generated_tokens + sum(answer.generated for answer in begun)

    def counters(self) -> Mapping[str, Any]:
        """Return the model's counters, those of its texts added up. From any thread."""
        each = [slot.model.counters() for slot in self.slots]
        return {**each[0], **{name: sum(one[name] for one in each) for name in ADDED}}

    @property
    def put_aside(self) -> int:
        """How many answers wait for their readers."""
        return sum(job.begun for job in self._aside.copy())

    @property
    def idle(self) -> bool:
        return not self.running and len(self.waiting) == 0 and not self._aside

    @property
    def retry_after_s(self) -> float:
        """Return the seconds after which a slot becomes free, on average."""
        return max(1.0, self.outcomes.pace)

    def submit(
        self, request: Request, sink: Callable[[Event], None], *, full: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask for an answer. QueueFull, and nothing happens, if too many wait; KVFlashError after `close` or `fork`.

        full: while it is true the answer is swapped out, and others have the slot; call `wake` once it is false.
        """
        self.submit_together([(request, sink, full)])

    def submit_together(self, requests: Sequence[tuple[Request, Callable[[Event], None], Callable[[], bool]]]) -> None:
        """Submit all of one client's requests, each with its `sink` and `full`, or none. Errors: those of `submit`."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._calls.closed:
            raise KVFlashError(
                f"the thread {self._thread.name!r} does not run in this process: fork() copies no threads, so make the "
                f"model in the child"
            )
        now = self._clock()
        jobs = {one.id: Job(request=one, sink=sink, full=full, submitted=now) for one, sink, full in requests}
        with self._calls.door:
            self._calls.check_open()
            self.outcomes.pending |= jobs
            try:
                self.waiting.put(*jobs.values(), pace=self.outcomes.pace)
            except KVFlashError:
                for id in jobs:
                    del self.outcomes.pending[id]
                raise
        self._wake.set()

    def cancel(self, id: str) -> None:
        """Cancel an answer that nobody waits for any more. It ends before the next step."""
        job = self.outcomes.pending.get(id)
        if job is not None:
            job.cancelled = True
            self._wake.set()

    def wake(self) -> None:
        """Look again at what was put aside."""
        self._wake.set()

    def call(self, work: Callable[[], T], *, looks: bool = False) -> Future[T]:
        """Run work on the engine's thread, between two requests; with several slots, between two steps.

        looks: the work changes nothing, so it is always done between two steps. Other work interrupts a reading behind
        a preview, which costs a second or more on a large text.
        """
        return self._calls.add(work, looks=looks)

    def end_answers(self) -> None:
        """End what runs before its next step, with an error that says why."""
        self._ending = True
        self._wake.set()

    def close(self) -> None:
        """End what runs and waits, put every text aside and store it where there is a folder, close the model."""
        with self._calls.door:
            self._ending = self._calls.closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the engine's thread

    def _give_way(self) -> bool:
        """Evict a swapped-out text, as host memory is full. Only this thread may do so."""
        return threading.current_thread() is self._thread and self.swapped.evict()

    def _run(self) -> None:
        self.model.when_full(self._give_way)
        with logged("the session folder cannot be read"):
            self.conversations.adopt()
        while not self._calls.closed or self._running:
            self._wake.clear()
            self._bring_back()
            self._calls.run(changes=False)
            if self._calls or len(self.waiting):
                self._give_way_to_others()
            self._calls.run(changes=not self._running or len(self.slots) > 1)
            if not self._running:
                self._dealt = []
                self._sweep()
            self._admit()
            if self._running:
                self._turn()
            elif not (self._calls or self._calls.closed):
                job = self.behind.take()
                if job is not None:
                    self._start(job)
                else:  # no event says that a slow reader's time is up, or that a store may be tried again
                    self._wake.wait(LOOK_S if self._aside or self.shared is not None else None)
        self._end()

    def _end(self) -> None:
        for job in [*self.waiting.remove_if(lambda job: True), *self._aside]:
            self._tell(job, Failed(code=SHUTDOWN, message="the server is shutting down: try again later"))
        self._calls.run(changes=True)
        with logged("conversations could not be put aside at the end"):
            for slot in self.slots:
                slot.swap_out()
            self.swapped.close()
        self.model.close()

    # --- answers that run

    def _give_way_to_others(self) -> None:
        """Put back what is read behind a preview: somebody waits. It goes on later from where it is."""
        for one in [one for one in self._running if one.job.behind]:
            try:
                self._leave(one)
            except Exception as err:
                self._finish(one, *self._failure(one, err))
            else:
                self.behind.put_back(one.job)

    def _admit(self) -> None:
        """Give free slots to the requests that wait, and those of answers whose turn is over."""
        while len(self.waiting) and not self._calls.closed:
            leaves = None
            if all(slot.request is not None for slot in self.slots):
                at = gives_way([one.turn for one in self._running])
                if at is None:
                    return
                leaves = self._running[at]
            job = self.waiting.take(partial(self._may_begin, leaves=leaves))
            if job is None:
                return
            if leaves is not None:
                self._give_up_slot(leaves)
            self._start(job)

    def _give_up_slot(self, one: Running) -> None:
        """Swap an answer out whose turn is over; its job waits for another one."""
        try:
            one.answer.put_aside()
        except Exception as err:
            self._finish(one, *self._failure(one, err))
        else:
            self._put_aside(one, self.waiting.put_last)

    def _may_begin(self, job: Job, leaves: Running | None = None) -> bool:
        """Return whether a request begins now: nobody's prompt is being read, or it passes that, and is another text.

        A prompt that begins like one that is being read waits for that, and goes on from its text. leaves: the answer
        that would leave its slot to the request, unless that has a lower priority.
        """
        if leaves is not None and job.request.priority < leaves.job.request.priority:
            return False
        readers = [one for one in self._running if one.reads]
        if not readers:
            return True
        first = max(readers, key=lambda one: one.want.priority)  # the oldest of them
        if job not in first.cached:  # looked up once: many may wait, and many texts begin like theirs
            # of one that has had a turn the whole text is swapped out
            first.cached[job] = len(job.request.tokens) if job.begun else self._cached(job.request)
        cached = first.cached[job]
        want = Want(reads=True, left=len(job.request.tokens) - cached, priority=job.request.priority)
        if not passes(want, first.want, rows=self._steps.shared_rows):
            return False
        return not any(one.slot.will_gain(job.request, cached) for one in readers)

    def _start(self, job: Job) -> bool:
        """Begin with a job, or fetch its text first. What goes wrong with that ends this job alone.

        False for a job that is not read now.
        """
        try:
            if self._fetches(job):
                return False
            self._begin(job)
        except Exception as err:
            logger.error("request %s could not begin", job.request.id, exc_info=err)
            for slot in self.slots:
                slot.request = None if slot.request is job.request else slot.request
            if not job.behind:
                self._refuse(job, *_unexpected(err))
            return False
        return True

    def _fetches(self, job: Job) -> bool:
        """Let a job wait aside while its text is looked for in the store that servers share."""
        request = job.request
        if self.shared is None or job.fetching is not None or job.begun or not request.reuse:
            return False
        job.fetching = self.shared.search(request.tokens, salt=request.salt, cached=self._cached(request))
        if job.fetching is not None:
            self._aside.append(job)
        return job.fetching is not None

    def _cached(self, request: Request) -> int:
        """Return how many tokens of a prompt need not be read: a text has them that is not being read itself."""
        if not request.reuse:
            return 0
        _, length = self.swapped.find(request.tokens, salt=request.salt, name=request.conversation)
        reading = [one.slot for one in self._running if one.reads]
        return max([length, *(slot.gain(request) for slot in self.slots if slot not in reading)])

    def _begin(self, job: Job) -> None:
        request, now = job.request, self._clock()
        # prompts that are to share a step, and whose texts can be copied once they are read
        begun = [one for one in self._running if not (one.reads or one.answer.generated)]
        alike = [one for one in begun if one.slot.will_gain(request)]
        self._round(alike)
        if any(one.reads for one in alike):  # whoever reads in steps of its own, `_may_begin` has asked
            return self.waiting.put_first(job)
        free = [slot for slot in self.slots if slot.request is None]
        # an empty one rather than one whose text somebody may go on with
        slot = max(free, key=lambda slot: (slot.gain(request), slot.conversation is None, -slot.used))
        slot.request, slot.used, self.conversations.slot = request, now, slot
        answer = self._begun.pop(request.id, None)
        if answer is None:
            answer = Answer(job, self._clock)
            answer.gaps, answer.name = self.gaps, self.conversations.unused(job.behind)
            answer.swap_s = self._swap_s
        self._steps.begin()
        beside = [one.slot for one in self._running if not one.reads]
        running = Running(job, answer, slot, now - answer.turns_s)
        self._running.append(running)
        if not self._deal(running):
            return
        try:
            self._check(job)
            slot.model.limit_prompt_steps(self._steps.rows if len(self._running) > 1 else None)
            answer.begin(slot, beside)
        except Exception as err:
            self._finish(running, *self._failure(running, err))
            return
        if job.begun:
            answer.swap_s += self._clock() - now
            self._swap_s = answer.swap_s
        self._advance(running)
        if not running.reads:  # its prompt is read in the next step
            for older in self._running[:-1]:
                older.let += answer.read_yet[1]

    def _deal(self, begins: Running | None = None) -> bool:
        """Deal the pool to the answers that run, unless they have it. False if that ends the one that begins."""
        if len(self.slots) == 1 or self._dealt == self._running:
            return True
        self._dealt = self._running.copy()
        reach = [(one.slot.model, len(one.job.request.tokens) + one.job.request.max_tokens) for one in self._running]
        try:
            self.model.deal(reach)
        except Exception as err:
            if begins is not None:
                self._finish(begins, *self._failure(begins, err))
                return False
            logger.exception("the pool could not be dealt anew")
        return True

    # --- one step

    def _turn(self) -> None:
        """Compute the next step: of a prompt, or of all answers that wait for a token."""
        self._deal()
        chosen = schedule(
            [one.want for one in self._running], rows=self._steps.shared_rows, owed=self._owed is not None
        )
        answers = [self._running[at] for at in chosen]
        if answers[0].reads:
            self._read(answers[0])
            return
        self._round(answers)
        if self._owed is not None:
            since, steps = self._owed
            goes_on = self._steps.goes_on(steps + 1, self._clock() - since)
            self._owed = (since, steps + 1) if goes_on and any(one.reads for one in self._running) else None

    def _read(self, one: Running) -> None:
        """Compute a step of a prompt, and draw the first token behind the last one."""
        others = any(not other.reads for other in self._running)
        olders, began = self._running[: self._running.index(one)], self._clock()
        one.slot.model.limit_prompt_steps(self._steps.rows if others else None)
        self._advance(one)
        while one.pending is not None:  # its end may be computed twice: nothing else comes before a prepared step
            self._draw(one, one.pending)
        done, now = one.answer.read_yet[0], self._clock()
        rows = done - (one.done if done >= one.done else 0)  # or it is read again
        one.done = done
        if one.job.begun:  # its text was lost
            one.answer.swap_s += now - began
        if rows and others:
            self._steps.read(rows, now - began)
            self._owed = now, 0
        for older in olders:
            older.let += rows

    def _round(self, answers: Sequence[Running]) -> None:
        """Compute a step of each of these answers, and draw what follows from it: a token, or more with drafts."""
        for one in answers:
            self._advance(one)
        ready = [(one, one.pending) for one in answers if one.pending is not None]
        if len(ready) < 2:  # each token of a user alone comes here
            for pair in ready:
                self._draw(*pair)
            return
        prompts = [(pair, pair[1].rows) for pair in ready if pair[1].reads and not pair[1].alone]
        several = [(pair, pair[1].rows) for pair in ready if not (pair[1].alone or pair[1].reads)]
        for group in chain(groups(several, self.model.step_rows), groups(prompts, self._steps.shared_rows)):
            if len(group) > 1:
                self.model.compute([step for _, step in group])
            # whoever can draw does so before the next step
            for one, step in sorted(group, key=lambda pair: pair[1].failed):
                self._draw(one, step)
        for one, step in ready:
            if step.alone:
                self._draw(one, step)

    def _draw(self, one: Running, step: Pending) -> None:
        """Let an answer draw the tokens of its step: their logits are at hand until the next one."""
        self._advance(one)
        while step.more and one.pending is None and one in self._running:
            self._advance(one)

    def _advance(self, one: Running) -> None:
        """Let an answer go on to its next step, or the next token."""
        answer = one.answer
        try:
            if one.pending is None:
                self._check(one.job)
            one.pending = answer.advance()
        except Exception as err:
            self._finish(one, *self._failure(one, err))
            return
        if answer.end is not None:
            self._finish(one, answer.end.reason, answer.end)
        elif answer.waits:
            self._put_aside(one, self._aside.append)
        elif self.shared is not None and one.pending is None and answer.generated == 1:
            one.slot.offer(self.shared, answer.usage, least=LONG_PROMPT)

    def _finish(self, one: Running, reason: str, event: Event) -> None:
        usage = one.answer.usage
        try:
            one.answer.close()
            one.slot.settle()
            if self.shared is not None and usage.preview is None:
                one.slot.offer(self.shared, usage)
        except Exception:
            logger.exception("the text could not be settled")
            self._forget_text(one.slot)
        if one.job.behind:
            self._leave(one)
            return
        if isinstance(event, Finished):
            self.behind.forget(one.job.request)  # its own prompt has been read with it
        self.outcomes.took((self._clock() - one.began) / len(self._running))
        self._leave(one)
        self.outcomes.count(one.job.request, usage, reason)
        if usage.preview is not None and isinstance(event, Finished) and one.job.request.reuse:
            self.behind.add(one.job.request, one.answer.conversation, self._clock())
        self._tell(one.job, event)

    def _leave(self, one: Running) -> None:
        one.answer.close()
        if one.job.behind:
            one.slot.interrupt()
        self._running.remove(one)
        one.pending = one.slot.request = None

    def _failure(self, one: Running, err: Exception) -> tuple[str, Event]:
        """Close an answer that did not come to its end. Tell how it ended, and its last event."""
        request = one.job.request
        try:
            one.answer.close()  # before its text may be forgotten
        except Exception as worse:
            err = worse
        for kind, code in ENDS.items():
            if isinstance(err, kind):
                return _failed(code, str(err))
        if isinstance(err, KVFlashError):
            logger.warning("request %s: %s", request.id, err)
            if not isinstance(err, NotFinite):
                return _failed(INTERNAL, str(err))
            self._forget_text(one.slot, request)
            return _failed(NUMERICAL, str(err))
        logger.error("request %s", request.id, exc_info=err)
        self._forget_text(one.slot)
        return _unexpected(err)

    def _put_aside(self, one: Running, wait: Callable[[Job], None]) -> None:
        """Swap the text of an answer out that has left it. wait: puts its job where it waits."""
        job, answer, now = one.job, one.answer, self._clock()
        self._begun[job.request.id], job.begun = answer, True
        answer.turns_s = now - one.began
        wait(job)  # first: a server that drains looks on
        self._leave(one)
        self.stalls += 1
        try:
            one.slot.put_aside(job.request)
        except Exception:
            logger.exception("the text could not be put aside")
            self._forget_text(one.slot)
        answer.swap_s = self._clock() - now

    def _bring_back(self) -> None:
        """Queue the jobs again whose readers take more, whose texts have been fetched, and that are to end."""
        if self.shared is not None:
            self.shared.collect()
        for job in list(self._aside):
            waits = job.full() or (job.fetching is not None and job.fetching())
            if job.cancelled or job.late(self._clock()) or self._ending or not waits:
                self.waiting.put_first(job)
                self._aside.remove(job)

    def _forget_text(self, slot: Slot, spoiled: Request | None = None) -> None:
        with logged("the text at hand could not be forgotten"):
            slot.clear() if spoiled is None else slot.lose(spoiled)

    def _check(self, job: Job) -> None:
        """Raise what ends an answer between two steps, if anything does."""
        if job.cancelled:
            raise Cancelled("the client has left")
        if self._ending:
            raise ShuttingDown("the server is shutting down: ask again later")
        now = self._clock()
        if job.late(now):
            raise DeadlinePassed(_too_late(job))
        if now - self._swept > SWEEP_S:
            self._sweep()

    def _sweep(self) -> None:
        """End the requests in the queue whose clients have left, or that have waited too long."""
        now = self._swept = self._clock()
        self._bring_back()

        for job in self.waiting.remove_if(lambda job: job.cancelled or job.late(now, queued=not job.begun)):
            if job.cancelled:
                ended = _failed(CANCELLED, "the client has left")
            elif job.begun:
                ended = _failed(DEADLINE, _too_late(job))
            else:
                ended = _failed(QUEUE_DEADLINE, f"waited {now - job.submitted:.0f} s for its turn: try again later")
            self._refuse(job, *ended)

    def _refuse(self, job: Job, code: str, failed: Failed) -> None:
        """End a job that has no slot."""
        answer = self._begun.pop(job.request.id, None)
        usage = Usage(queue_s=self._clock() - job.submitted) if answer is None else answer.usage
        self.outcomes.count(job.request, usage, code)
        self._tell(job, failed)

    def _tell(self, job: Job, event: Event) -> None:
        """Send the last event of a request."""
        if job.begun:  # it may have left a text that nobody else may go on from
            salt = private_salt(job.request)
            with logged("a private text could not be forgotten"):
                for one in [one for one in self.swapped if one.salt == salt]:
                    self.swapped.erase(one)
        self.outcomes.tell(job, event)


def _unexpected(err: Exception) -> tuple[str, Failed]:
    return _failed(INTERNAL, f"the server failed at this request ({type(err).__name__}): its log says why")


def _too_late(job: Job) -> str:
    limit = job.request.timeout_s
    return f"the answer took longer than {limit:g} s: ask for fewer tokens, or raise --timeout"


def _failed(code: str, message: str) -> tuple[str, Failed]:
    return code, Failed(code=code, message=message)
