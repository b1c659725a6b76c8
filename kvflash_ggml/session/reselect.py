"""When to look at the text, and what to do with what is seen: the clock and the worker between a scorer and a session.

Scoring runs on a worker thread while the device decodes. A look is taken at one step and used a fixed number of steps
later, so that, with a fixed tau, what is computed never depends on how fast a thread was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..constants import CHUNK
from ..errors import HostMemoryError
from ..policy.base import Look, Pairs, Reading, Resumable, Scorer, Selective
from ..state.session import SavedPolicy, Statistics, done
from .keys import HostKeys
from .scores import check_scores

if TYPE_CHECKING:
    from ..host.store import HostStore
    from ..native.engine import Engine

LOOKS_PER_TAU = 4
"""A look between two reselections moves pages only if an evicted chunk is clearly better than a resident one."""

CLEARLY = 1.0
"""By how much, in the units of the scores (natural logarithms of attention for the default policy)."""

LAG = 16
"""Steps between a look and its use, on devices that compute beside the host."""

OVERHEAD = 0.02
"""Share of the decode time that looking may take when tau adapts, for a scorer that names no `overhead` of its own.

It counts where looking holds the decode up: on devices that compute on the caller's thread."""

DUTY = 0.5
"""Share of the time that the worker may be busy, where looking runs beside the device's compute."""

MOST_PENDING = 2
"""Looks under way at once."""

TAU = 64
"""Tokens between two reselections, before tau adapts."""

MOST_TAU = 4096


class Reselector:
    """Feeds a scorer and decides when its scores are asked for.

    tau: tokens between two reselections while generating, or None to adapt to what a look costs.
    """

    def __init__(self, engine: Engine, store: HostStore, scorer: Scorer, *, tau: int | None, n_chunks: int) -> None:
        self.scorer = scorer
        self.looks = 0
        self.seconds = 0.0  # spent scoring
        self._engine = engine
        self._store = store
        self._fixed_tau = tau
        self._budget: float = DUTY if engine.info.asynchronous else getattr(scorer, "overhead", OVERHEAD)
        self.tau = tau or TAU
        self._keys = HostKeys(engine, store)
        self._worker = ThreadPoolExecutor(1, "kvflash-score") if engine.info.asynchronous else None
        self._lag = LAG if self._worker else 0
        self._ring = [np.empty(shape, np.float32) for shape in engine.query_shapes]
        self._addresses: list[int] = []
        self._buffers = [self._buffer() for _ in range(MOST_PENDING + 1)]
        self._pending: deque[Future[Floats | None]] = deque()
        self._failed: Exception | None = None
        self._due = 0
        self._since_look = 0
        self._since_reselect = 0
        self._step_seconds = 0.0
        self._last_step = 0.0
        scorer.open(self._keys, n_chunks)

    # --- what happens to the text

    def sealed(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._run(self._seal, chunk)

    def _seal(self, chunk: int) -> None:
        try:
            self.scorer.seal(chunk)
        except Exception as err:
            if chunk in self._store:  # else the text was cut while this was waiting
                self._failed = self._failed or err

    def cut(self, n_chunks: int) -> None:
        self.forget()
        self._run(self.scorer.cut, n_chunks)

    def forget(self) -> None:
        """Drop looks that have not been used: they belong to a text that is gone."""
        wait(self._pending)  # what they found, or why they failed, is of no use now
        self._pending.clear()
        self._since_look = self._since_reselect = 0
        self._last_step = 0.0

    def use(self, heads: Pairs) -> None:
        """From the next look on a scorer that can ask some heads only asks these."""
        self._run(self._use, heads)

    def _use(self, heads: Pairs) -> None:
        if isinstance(self.scorer, Selective):
            try:
                self.scorer.use(heads)
            except Exception as err:
                self._failed = self._failed or err

    # --- looks

    def look(
        self,
        tokens: npt.NDArray[np.int32],
        n_chunks: int,
        kept: frozenset[int],
        *,
        rows: int | None = None,
        known: int | None = None,
    ) -> None:
        """Score the chunks against the newest `rows` queries, beside the compute; by default against all that are kept.

        known: how many of the newest tokens have their queries captured, None for all that are kept.
        """
        self.looks += 1
        limits = [self.scorer.query_rows, len(tokens) if known is None else known]
        wanted = min(limits if rows is None else [rows, *limits])
        buffer = self._buffers[self.looks % len(self._buffers)]
        ticket = self._engine.read_queries(buffer) if self.scorer.query_rows else 0
        newest = np.arange(len(tokens) - wanted, len(tokens))
        self._pending.append(self._run(self._score, ticket, buffer, tokens.copy(), n_chunks, kept, newest))

    def take(self) -> Floats | None:
        """The scores of the last look, waiting for them if need be; None if there are none."""
        self._raise_failure()
        scores = None
        while self._pending:
            scores = self._pending.popleft().result()
        return scores

    def _raise_failure(self) -> None:
        """A chunk without statistics would be scored at random: say so, once, to whoever asks next."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def take_hidden(self) -> Floats | None:
        """While a prompt is read: the scores of a look that can be had without holding the device up.

        Where the device computes beside the host that is the last look but one, scored while the step after it runs.
        """
        self._raise_failure()
        if len(self._pending) < (MOST_PENDING if self._worker else 1):
            return None
        return self._pending.popleft().result()

    def tick(self) -> bool:
        """One token has been generated: is it time to look?"""
        now = time.perf_counter()
        if self._last_step:
            self._step_seconds += 0.1 * (now - self._last_step - self._step_seconds)
        self._last_step = now
        self._since_look += 1
        self._since_reselect += 1
        if self._pending:
            self._due -= 1
            return False
        if self._since_look < max(1, self.tau // LOOKS_PER_TAU):
            return False
        self._since_look = 0
        self._due = self._lag
        return True

    @property
    def ready(self) -> bool:
        """Is it time to use the last look?"""
        return bool(self._pending) and self._due <= 0

    def worth(self, scores: Floats, resident: Sequence[int], evicted: Sequence[int]) -> bool:
        """Should pages move? At tau they do; before, only for a chunk clearly better than the worst resident."""
        if self._since_reselect < self.tau:
            inside = [c for c in resident if c < len(scores)]
            outside = [c for c in evicted if c < len(scores)]
            if not inside or not outside or scores[outside].max() - scores[inside].min() < CLEARLY:
                return False
        self._since_reselect = 0
        return True

    # --- save and restore

    def freeze(self, n_chunks: int) -> SavedPolicy:
        """The clock, the looks that are under way, and the statistics of the first chunks. Waits for the looks."""
        looks = [future.result() for future in self._pending]
        statistics = done(self._run(self._statistics, n_chunks).result())
        reader = self._run(self.scorer.freeze).result() if isinstance(self.scorer, Reading) else None
        self._raise_failure()
        return SavedPolicy(
            name=self.scorer.name,
            tau=self.tau,
            since_look=self._since_look,
            since_reselect=self._since_reselect,
            due=self._due,
            looks=looks,
            statistics=statistics,
            reader=reader,
        )

    def _statistics(self, n_chunks: int) -> Statistics | None:
        if not isinstance(self.scorer, Resumable):
            return None
        return Statistics(self.scorer.layout.name, self.scorer.dump(n_chunks))

    def _load(self, known: Statistics) -> bool:
        """Take statistics over, unless they are of another layout than the scorer's, which may just have changed."""
        if not isinstance(self.scorer, Resumable) or self.scorer.layout != known.layout:
            return False
        self.scorer.load(known.rows)
        return True

    def fresh(self) -> SavedPolicy:
        """The state of one that has not looked yet, without statistics."""
        return SavedPolicy(
            name=self.scorer.name, tau=self.tau, since_look=0, since_reselect=0, due=0, looks=[], statistics=done(None)
        )

    def adopt(self, saved: SavedPolicy | None, tokens: npt.NDArray[np.int32]) -> None:
        """Go on from there. What another policy knew is of no use: then the keys are read again."""
        n_chunks = len(tokens) // CHUNK
        if saved is None or saved.name != self.scorer.name:
            self.sealed(range(n_chunks))
            return
        if saved.reader is not None and isinstance(self.scorer, Reading):
            self._run(self.scorer.adopt, saved.reader, tokens.copy()).result()
        known = saved.statistics.result()
        if known is None or not self._run(self._load, known).result():
            self.sealed(range(n_chunks))
        if self._fixed_tau is None:
            self.tau = saved.tau
        self._since_look = saved.since_look
        self._since_reselect = saved.since_reselect
        self._due = saved.due
        self._pending.extend(done(scores) for scores in saved.looks)

    def close(self) -> None:
        self.forget()
        if self._worker is not None:
            self._worker.shutdown()
        self.scorer.close()
        self._buffers.clear()
        for address in self._addresses:
            self._engine.free(address)

    def _score(
        self,
        ticket: int,
        buffer: Floats,
        tokens: npt.NDArray[np.int32],
        n_chunks: int,
        kept: frozenset[int],
        newest: npt.NDArray[np.intp],
    ) -> Floats | None:
        self._engine.wait(ticket)
        began = time.perf_counter()
        look = Look(tokens=tokens, n_chunks=n_chunks, rows=len(newest), queries=self._rows(buffer, newest), kept=kept)
        scores = check_scores(self.scorer, self.scorer.score(look), n_chunks)
        self._adapt(time.perf_counter() - began)
        return scores

    def _buffer(self) -> Floats:
        """Page-locked room for the queries of all layers, so that reading them holds nobody up."""
        count = sum(x.size for x in self._ring)
        if count == 0:
            return np.empty(0, np.float32)
        address = self._engine.alloc(count * 4)
        if not address:
            raise HostMemoryError(f"could not get {count * 4} bytes of host memory for queries: free memory")
        self._addresses.append(address)
        return np.frombuffer(self._engine.view(address, count * 4), np.float32)

    def _rows(self, buffer: Floats, positions: npt.NDArray[np.intp]) -> Floats:
        """The queries of these positions, out of the ring of each layer, flat."""
        parts, at = [], 0
        for ring in self._ring:
            layer = buffer[at : at + ring.size].reshape(ring.shape)
            parts.append(layer[positions % max(1, len(layer))].reshape(-1))
            at += ring.size
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _adapt(self, seconds: float) -> None:
        """Double or halve tau until looking takes about its share of the decode time."""
        self.seconds += seconds
        if self._fixed_tau is not None or not self._step_seconds:
            return
        share = seconds * LOOKS_PER_TAU / (self.tau * self._step_seconds)
        if share > self._budget and self.tau < MOST_TAU:
            self.tau *= 2
        elif share < self._budget / 4 and self.tau > TAU:
            self.tau //= 2

    def _run(self, work: Callable[..., object], *args: object) -> Future:  # type: ignore[type-arg]
        """On the worker, or at once where the device computes on the caller's thread."""
        if self._worker is not None:
            return self._worker.submit(work, *args)
        return done(work(*args))
