"""Scores of the chunks: runs a scorer, which may be anybody's, for a sequence.

Scoring runs on a thread of its own while the device decodes, or at once where the device computes on the caller's
thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays import Floats, Int32s
from ..constants import CHUNK
from ..errors import HostMemoryError
from ..native.streamed import NO_MASSES, MassRequest
from ..policy.base import (
    Costed,
    Indexed,
    Lasting,
    Masses,
    Pairs,
    ReadsAlong,
    Resumable,
    Scorer,
    ScoreRequest,
    Selective,
)
from ..pool.residency import Chunks, Ranking, few_moves
from ..state.statistics import Replay, Statistics
from ..threads import Worker, done
from .device_index import Ahead, Room, There, no_room
from .keys import HostKeys, most_threads
from .query_ring import QueryCopy, QueryRing
from .scores import AttentionScores, check_scores
from .selection import USUAL, Selection

if TYPE_CHECKING:
    from ..host.image import PageImage
    from ..host.store import HostStore
    from ..native.engine import PagedEngine
    from ..state.session import PolicyState
    from .clock import Clock

MARGIN = 0.1
"""How much better than a resident chunk an evicted one must be for pages to move before tau, in the units of the scores
(natural logarithms of attention for the default policy). 0.3 lost more on plain text, and 0 moved a third more.
"""

ASKS = -1.0
"""Score of an evicted chunk from which a token is computed again with it. Plain text seldom has so much."""

MOVED_SHARE = 1 / 8
"""Share of the blocks that may change their chunk before tau. The chunk that is asked for is among the best few. The
others would have to move again when the next token asks for something else.
"""

MIN_MOVES = 4

DELAY = USUAL
"""Tokens between a request for scores and their use, at most, on devices that compute beside the host. It is half of
the interval where that is shorter: WORKER_SHARE leaves a score so much time.
"""

WORK_SHARE = 0.06
"""Multiplications of scores for one of the steps, where the CPU computes all of a step and waits for the scores.

A multiplication of a score takes 1.3 times as long, so that is 8 % of the time. With it, a model of 135M parameters is
scored at every token of a text of 6,000.
"""

WORKER_SHARE = 0.5
"""Share of the time that the worker may be busy, where scoring runs beside the device's compute."""

WAIT = 0.25
"""How much of the tokens between two scores a lone answer may wait for one: so a fifth of its time.

Where none waited, a model of 0.5B parameters on an H200 was right less often (docs/policies.md).
"""

DEVICE_RATE = 300
"""Multiplications of a device's step for one of a score. A score that costs more than that is not made at every token.

On an H200 with 16 cores a score of 140 million took 4.8 ms, and a step of 27 billion 11.8: so the worker is busy for
about a quarter of the time. At 128K tokens each score delays a step by 2 to 3 ms.
"""

DEVICE_STEP = 5_000_000_000
"""Multiplications in the time that a device takes for a step of the smallest model: it begins hundreds of kernels."""

MIXED_SHARE = 0.08
"""As WORKER_SHARE, where the CPU computes a part of each step, for a scorer without an `overhead` of its own."""

MIXED_THREADS = 4
"""Where the CPU computes a part of each step, scoring beside it gets one in this many of its threads."""

MOST_HELD = 0.05
"""Seconds that a score waits for the next step at most. There may be none: the answer may be complete."""

MAX_FOUND = 8
"""Replays that are kept of a text."""


class Look(NamedTuple):
    """The scores of one request, and the index rows that a device has since."""

    scores: Floats | None
    there: There | None = None


def most_moves(blocks: int) -> int:
    """Return how many chunks of a pool of `blocks` may move before tau."""
    return max(MIN_MOVES, int(MOVED_SHARE * blocks))


class Scoring:
    """Runs a scorer, and keeps its scores until they are used.

    tau: see `Selection`. With None scores have their share: where the CPU computes the steps, WORK_SHARE of the
    multiplications of a step that attends to `slots` slots; beside a device as many as it has time for, and a clock
    makes that fewer. steady: no clock says how often chunks are scored. n_chunks: of the longest text. together:
    returns how many texts decode together now. room: see `HostKeys`. pending: scores not used yet. passes: how often
    chunks were scored, in `seconds` in all.
    """

    def __init__(
        self, engine: PagedEngine, store: HostStore, scorer: Scorer, ring: QueryRing, *, tau: int | None, n_chunks: int,
        slots: int, steady: bool = False, together: Callable[[], int] = lambda: 1, room: Callable[[], Room] = no_room,
    ) -> None:  # fmt: skip
        info = engine.info
        beside = info.asynchronous
        free = beside and not info.host_compute
        share = WORKER_SHARE if free else getattr(scorer, "overhead", MIXED_SHARE)
        threads = max(1, info.n_threads // MIXED_THREADS) if beside and not free else most_threads(idle=free)
        # Devices that work on several steps at once must not be waited for: scores are used so many steps later, which
        # the placement alone decides, so that equal ones give equal answers.
        self._behind = max(1, sum(device.overlaps for device in info.devices)) if beside else 0
        self._idle = free  # the host, beside a step
        self.scorer = scorer
        self._lasting = scorer if isinstance(scorer, Lasting) else None  # once: this check is slow
        self._together = together
        self.selection = Selection(tau=tau, delay=DELAY if beside else 0)
        self.clock: Clock | None = None
        if beside and tau is None and not steady:
            from .clock import Clock  # here: it measures what runs beside a device

            self.clock = Clock(share, WAIT if free else 0.0)
        self._costed = scorer if tau is None and isinstance(scorer, Costed) else None
        self._step_work = engine.info.step_work + slots * sum(x.n_head * (x.head_k + x.head_v) for x in engine.layers)
        self._n_chunks, self._texts = 0, 1
        self.replays = Replays()
        self.passes = 0
        self.seconds = 0.0
        self._engine = engine
        self._store = store
        self._ring = ring
        # what grows with the text: attention scores of a streamed step, and what a device computes for a request
        self._rooms: list[Floats] = [np.empty(0, np.float32)] * (self._behind + 3)
        self.masses = AttentionScores(engine, scorer, ring, self._masses_room)
        self._worker = Worker("kvflash-score") if beside else None
        self._addresses: list[int] = []
        self._buffers: list[Floats] = []
        self._keys = HostKeys(engine, store, threads=threads, room=room)
        self.pending: deque[Future[Look]] = deque()
        self._begin = Event()  # once it is set, the newest score runs
        self._failed: Exception | None = None
        self._later: list[tuple[int, PageImage]] | None = None
        try:
            self._buffers += [self._buffer(ring.ring_size) for _ in range(self._behind + 2)]
            scorer.open(self._keys, n_chunks)
            self._measure_rows()
            self._pace(0)
        except BaseException:
            self._free()
            raise

    def _measure_rows(self) -> None:
        """Note the size of the scorer's index rows, which depends on its heads."""
        if isinstance(self.scorer, Indexed):
            self._keys.device.row_bytes = self._engine.index_size(self.scorer.units)

    def _pace(self, n_chunks: int) -> None:
        """Choose the tokens between two scores of a text with `n_chunks` sealed chunks, by what a score costs."""
        self._n_chunks, self._texts = n_chunks, self._together()
        if self._costed is None:
            return
        work, step = self._costed.work(self._keys.device.on_host(n_chunks)), WORK_SHARE * self._step_work
        if self._worker is not None:
            work *= self._engine.info.n_seq if self.clock is None else self._texts
            step = (self._step_work + DEVICE_STEP) / DEVICE_RATE
        interval = max(1, math.ceil(work / step))
        self.selection.interval = interval if self.clock is None else self.clock.at_least(interval)

    @property
    def is_ready(self) -> bool:
        """Whether to use the scores of the oldest request now."""
        return bool(self.pending) and self.selection.is_due

    # --- what happens to the text

    def on_time(self, count: int) -> None:
        """Tell the clock, which must be there, of generated tokens, and pace scores by the texts of now."""
        assert self.clock is not None
        self.clock.on_tokens(count, time.perf_counter())
        if self._together() != self._texts:
            self._pace(self._n_chunks)

    def sealed(self, chunks: Sequence[int]) -> None:
        if chunks:
            self._pace(chunks[-1] + 1)
        for chunk in chunks:
            work = chunk, self._store.page(chunk)
            if self._later is None:
                self._run(self._seal, *work)
            else:
                self._later.append(work)

    @contextmanager
    def before_seals(self, wanted: MassRequest) -> Iterator[None]:
        """Delay the scorer's `seal` calls until a step that computes attention scores has been scored: its chunks need
        no index for that.
        """
        self._later = None if wanted is NO_MASSES else []
        try:
            yield
        finally:
            later, self._later = self._later or [], None
            for work in later:
                self._run(self._seal, *work)

    def _seal(self, chunk: int, page: PageImage) -> None:
        try:
            self.scorer.seal(chunk)
        except Exception as err:
            if page in self._store.pages():  # otherwise the text was cut meanwhile
                self._failed = self._failed or err

    def truncate(self, length: int) -> None:
        """Forget tokens from `length` on."""
        self.restart()
        self.replays.truncate(length)
        self._keys.device.cut(length // CHUNK)
        self._run(self._keys.truncate, length // CHUNK)
        self._run(self.scorer.truncate, length // CHUNK)
        self._pace(length // CHUNK)

    def restart(self) -> None:
        """Drop unused scores, which belong to an earlier text."""
        self._begin.set()
        wait(self.pending)  # results and errors are of no use now
        self.pending.clear()
        self.selection.restart()
        if self.clock is not None:
            self.clock.restart()

    def use(self, heads: Pairs) -> None:
        """Let a selective scorer use only these heads from the next score on. Replays, which other heads found, are
        dropped.
        """
        self.replays.load(())
        self._begin.set()
        self._run(self._use, heads).result()  # what a score costs depends on them
        self._measure_rows()
        self._pace(self._n_chunks)

    def _use(self, heads: Pairs) -> None:
        if isinstance(self.scorer, Selective):
            self._keys.truncate(0)
            self._keys.device.renew()
            try:
                self.scorer.use(heads)
            except Exception as err:
                self._failed = self._failed or err

    # --- scores

    def request(
        self,
        tokens: Int32s,
        n_chunks: int,
        protected: frozenset[int],
        *,
        rows: int | None = None,
        captured: int | None = None,
        wanted: MassRequest = NO_MASSES,
        seen: Sequence[int] = (),
        beside: list[Event] | None = None,
    ) -> None:
        """Score the chunks against the newest `rows` queries, beside the compute; by default against all that are kept.

        captured: how many of the newest tokens have captured queries, None for all that are kept. wanted: the request
        to the newest step, whose layer buffers held the chunks `seen`. beside: takes an event, to be set when the next
        step has been submitted, where the host has no part in it. Before that the thread that scores would keep the
        next step waiting for the interpreter.
        """
        self.passes += 1
        count = self._rows(len(tokens), rows, captured)
        which = self.passes % len(self._buffers)
        copy, captured_in = (self._buffers[which], self._ring.order), self._ring.rows_of(len(tokens), count)
        later, masses = self.masses.read(wanted, seen)
        begin_ahead = self._keys.device.begin
        ahead = begin_ahead(captured_in, n_chunks, partial(self._room, which)) if masses is None else None
        ticket = self._engine.read_queries(copy[0], np.sort(captured_in)) if count else 0
        what = max(ticket, later), copy, tokens.copy(), n_chunks, protected, count, masses, ahead
        begin = self._wait_with(beside) if beside is not None and self._idle else None
        self.pending.append(self._run(self._score, begin, *what))

    def _wait_with(self, beside: list[Event]) -> Event:
        """Return a new event that the next score waits for, in the place of the last one."""
        self._begin.set()
        self._begin = begin = Event()
        beside.append(begin)
        return begin

    def ask(self, end: int, captured: int) -> MassRequest:
        """Return the request to a streamed step that ends a prompt: the text has `end` tokens then. captured: see
        `request`.
        """
        return self.masses.ask(end, end // CHUNK, self._rows(end, None, captured))

    def _rows(self, length: int, rows: int | None, captured: int | None) -> int:
        limits = [self.scorer.query_rows, length if captured is None else captured]
        return min(limits if rows is None else [rows, *limits])

    def take(self) -> Floats | None:
        """Return the newest scores, waiting for them if need be; None if there are none."""
        self._raise_failure()
        self._begin.set()
        scores = None
        while self.pending:
            scores = self._take_oldest()
        return scores

    def _take_oldest(self) -> Floats | None:
        scores, there = self.pending.popleft().result()
        if there is not None:
            self._keys.device.known = there
        return scores

    def take_due(self) -> Floats | None:
        """Return the newest scores that are due, waiting for them if need be; None if there are none."""
        self._raise_failure()
        scores, began = None, time.perf_counter()
        while self.is_ready:
            if len(self.pending) == 1:
                self._begin.set()  # it is the newest, and no step has followed
            scores = self._take_oldest()
            self.selection.used()
        if self.clock is not None:
            self.clock.waited(time.perf_counter() - began)
        return scores

    def _raise_failure(self) -> None:
        """Raise the failure of a `seal`, once: a chunk without statistics would be scored at random."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def take_overlapped(self) -> Floats | None:
        """While a prompt is read: return the oldest finished scores, if the device need not wait for them.

        Where devices compute beside the host, the scores are as many steps old as there are devices: they were computed
        while these ran.
        """
        self._raise_failure()
        if len(self.pending) <= self._behind:
            return None
        return self._take_oldest()

    def lasting(self, scores: Floats, before: Floats | None) -> Floats:
        """Return the elementwise maximum of `scores` and the decayed `before`.

        So chunks that the prompt asked for are not evicted after one token: a score during an answer uses its newest
        token only.
        """
        if before is None or self._lasting is None:
            return scores
        lasting: Floats = scores.copy()
        faded = self.faded(before[: len(scores)].astype(scores.dtype))  # a snapshot keeps more digits
        lasting[: len(faded)] = np.maximum(scores[: len(faded)], faded)
        return lasting

    def faded(self, scores: Ranking) -> Ranking:
        """Return the scores as they are an interval later."""
        return scores if self._lasting is None else scores - self._lasting.fade * self.selection.interval

    def sparing(self, scores: Floats, resident: Chunks, evicted: Chunks, blocks: int) -> tuple[Floats, bool]:
        """Return the scores of an answer to use, and whether pages move: at tau all, before it a few that clearly
        pay.
        """
        if self.selection.must_move:
            self.selection.moved()
            return scores, True
        few = few_moves(scores, resident, evicted, margin=MARGIN, max_moves=most_moves(blocks))
        return (scores, False) if few is None else (few, True)

    # --- save and restore

    def state(self, n_chunks: int) -> PolicyState:
        """Return the clock, the pending scores, and the statistics of the first chunks. Waits for the scores."""
        self._begin.set()
        pending = [future.result().scores for future in self.pending]
        statistics = done(self._run(self._statistics, n_chunks).result())
        reader = self._run(self.scorer.reader_state).result() if isinstance(self.scorer, ReadsAlong) else None
        self._raise_failure()
        saved = self.blank_state()
        saved.pending, saved.statistics, saved.reader = pending, statistics, reader
        saved.found = self.replays.state()
        self.selection.write(saved)
        return saved

    def _statistics(self, n_chunks: int) -> Statistics | None:
        if not isinstance(self.scorer, Resumable):
            return None
        return Statistics(self.scorer.layout.name, self.scorer.dump(n_chunks))

    def _load(self, statistics: Statistics) -> bool:
        """Load statistics. False if their layout is not the scorer's, which may just have changed."""
        if not isinstance(self.scorer, Resumable) or self.scorer.layout != statistics.layout:
            return False
        self.scorer.load(statistics.rows)
        return True

    def blank_state(self) -> PolicyState:
        """Return the state before the first score, without statistics."""
        from ..state.session import PolicyState  # here: most texts are never saved

        return PolicyState(
            name=self.scorer.name,
            since_score=0,
            since_reselect=0,
            due=0,
            pending=[],
            statistics=done(None),
        )

    def load(self, saved: PolicyState | None, tokens: Int32s) -> None:
        """Continue from a saved state. After another policy the keys are read again."""
        n_chunks = len(tokens) // CHUNK
        self._pace(n_chunks)
        if saved is None or saved.name != self.scorer.name:
            self.sealed(range(n_chunks))
            return
        if saved.reader is not None and isinstance(self.scorer, ReadsAlong):
            self._run(self.scorer.load_reader, saved.reader, tokens.copy()).result()
        statistics = saved.statistics.result()
        taken = statistics is not None and self._run(self._load, statistics).result()
        if not taken:
            self.sealed(range(n_chunks))
        self.selection.load(saved)
        self.replays.load(saved.found if taken or statistics is None else ())  # otherwise other heads found them
        self.pending.extend(done(Look(scores)) for scores in saved.pending)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers whose threads score."""
        return () if self._worker is None else (self._worker,)

    def close(self) -> None:
        self.restart()
        if self._worker is not None:
            self._worker.close()
        self.scorer.close()
        self._free()

    def _free(self) -> None:
        self._buffers.clear()
        self._rooms.clear()
        while self._addresses:
            self._engine.free(self._addresses.pop())

    def _score(
        self,
        begin: Event | None,
        ticket: int,
        copy: QueryCopy,
        tokens: Int32s,
        n_chunks: int,
        protected: frozenset[int],
        rows: int,
        masses: Masses | None,
        ahead: Ahead | None,
    ) -> Look:
        if begin is not None:
            begin.wait(MOST_HELD)
        self._engine.wait(ticket)
        began = time.perf_counter()
        masses = self.masses.still_wanted(masses, n_chunks, rows)
        place = *copy, len(tokens), rows
        queries = self._ring.newest(*place) if masses is None else self._ring.newest_of(*place, masses.heads)
        request = ScoreRequest(
            tokens=tokens, n_chunks=n_chunks, rows=rows, queries=queries, protected=protected, masses=masses
        )
        self._keys.ahead = ahead
        try:
            scores = check_scores(self.scorer, self.scorer.score(request), n_chunks, queries, masses)
        finally:
            self._keys.ahead = None
        taken = time.perf_counter() - began
        self.seconds += taken
        if self.clock is not None:
            self.clock.on_score(taken, self._together())
            self.selection.interval = self.clock.interval
        return Look(scores, self._keys.device.there)

    def _buffer(self, count: int) -> Floats:
        """Return page-locked room for so many floats, so that reading them from a device delays nothing."""
        size = count * 4
        if size == 0:
            return np.empty(0, np.float32)
        address = self._engine.alloc(size)
        if not address:
            raise HostMemoryError(f"could not get {size} bytes of host memory for what scores need: free memory")
        self._addresses.append(address)
        return np.frombuffer(self._engine.view(address, size), np.float32)

    def _room(self, which: int, count: int) -> Floats:
        """Return page-locked room for so many floats, which are used before others are put there."""
        if count > len(self._rooms[which]):
            old, self._rooms[which] = self._rooms[which], np.empty(0, np.float32)
            if len(old):
                self._run(self._release, old.ctypes.data)  # behind scores that use it
            self._rooms[which] = self._buffer(count + count // 4)  # the text grows
        return self._rooms[which][:count]

    def _masses_room(self, count: int) -> Floats:
        """Return room for so many attention scores: page-locked if it can be."""
        try:
            return self._room(-1, count)
        except HostMemoryError:
            return np.empty(count, np.float32)

    def _release(self, address: int) -> None:
        self._addresses.remove(address)
        self._engine.free(address)

    def _run(self, work: Callable[..., object], *args: object) -> Future:  # type: ignore[type-arg]
        """Run work on the worker, or at once where the device computes on the caller's thread."""
        if self._worker is not None:
            return self._worker.submit(work, *args)
        return done(work(*args))


class Replays:
    """The known prompt endings of one text. Each is valid as long as nothing before its step changes."""

    def __init__(self) -> None:
        self._replays: tuple[Replay, ...] = ()

    def keep(self, found: Replay) -> None:
        """Add the newest replay."""
        others = [one for one in self._replays if not _asks(one, found.start, found.tokens)]
        self._replays = (*others, found)[-MAX_FOUND:]

    def at(self, start: int, tokens: Int32s) -> Replay | None:
        """Return the replay of a prompt that ended with these tokens after a text of `start` tokens."""
        return next((one for one in self._replays if _asks(one, start, tokens)), None)

    def within(self, shared: int, prompt: Int32s) -> Replay | None:
        """Return the replay of a prompt whose first `shared` tokens are those of the text."""
        return next(
            (one for one in self._replays if one.start <= shared and _asks(one, one.start, prompt[one.start :])), None
        )

    def truncate(self, length: int) -> None:
        """Cut the text to `length` tokens. It can be repeated."""
        self._replays = tuple(one for one in self._replays if one.start <= length)

    def state(self) -> Sequence[Replay]:
        """Return all replays, to be loaded later."""
        return self._replays

    def load(self, found: Sequence[Replay]) -> None:
        """Take over the replays of a restored text, or the newest of them."""
        self._replays = tuple(found[-MAX_FOUND:])


def _asks(one: Replay, start: int, tokens: Int32s) -> bool:
    return one.start == start and np.array_equal(one.tokens, tokens)
