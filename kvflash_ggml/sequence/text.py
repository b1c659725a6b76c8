"""A text on a pool: its tokens, where their KV lives, and the steps that extend or cut it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..config import KVFlashConfig
from ..constants import CHUNK
from ..errors import ConfigError, DeviceLost, HostMemoryError
from ..host.store import HostStore
from ..pool.branches import Branches
from ..pool.page_table import PageTable, PageTableState
from ..pool.plan import NO_MOVES, Moves, Plan
from ..pool.view import View, everything_is_resident
from ..trace.events import Events
from .checkpoints import Checkpoints
from .device_states import SavedState
from .draft_rows import DraftRows, gather, goes_back, place
from .paging import Paging
from .pool import Pool
from .query_ring import QueryRing
from .reading import POOL, Reading, ReadStats, Repair
from .recovery import Recovery, Unfinished
from .relevance import Relevance
from .scoring import Scoring
from .selection import TAU
from .step import EVERY, NO_LOGITS, AfterStep, AttentionSpan, Follower, Logits, Output, Step

if TYPE_CHECKING:
    from ..policy.base import Scorer

logger = logging.getLogger("kvflash_ggml")


class Text:
    """Between tokens and the engine: each step is computed and counts, or it has never been.

    n_ctx: tokens at most. n_batch: how stock llama.cpp would split a prompt, together with the pool's n_ubatch; kept,
    so that a pool that holds the whole context computes the same bits. scorer: who stays resident, None for pure
    recency. reading: what a step sees; the pool has stages if that is more than what is in it.

    whole: [n_ctx], tokens that have seen the whole text before them. logits: of which positions they are at hand.
    streamed_steps: steps that saw more than the pool. view: of the newest step. follower: who is told of what becomes
    of the text. loss: of the newest request. repair: None where answers are not read again.
    """

    follower: Follower | None = None

    def __init__(
        self,
        pool: Pool,
        config: KVFlashConfig,
        *,
        n_ctx: int,
        n_batch: int,
        scorer: Scorer | None = None,
        reading: Reading = POOL,
    ) -> None:
        self.pool = pool
        self.engine = engine = pool.engine
        self.config = config
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_ubatch = pool.n_ubatch
        self.reading = reading
        self.repair: Repair | None = None
        self.loss = ReadStats()
        self.bounded = pool.n_slots < n_ctx
        if self.bounded and engine.info.v_trans:
            raise ConfigError("a pool smaller than the context needs flash attention: without it V cannot be paged")
        self.ids = np.zeros(n_ctx, np.int32)
        self.whole = np.zeros(n_ctx, np.bool_)
        self.logits = NO_LOGITS
        self.store = HostStore(pool.heap)
        self.table = PageTable(pool.blocks, self.store, sinks=config.sinks, tail=config.tail, bounded=self.bounded)
        self.span = AttentionSpan(pool, self.table, bounded=self.bounded)
        self.mask = pool.make_mask()
        self.queries = QueryRing(engine, None if scorer is None else scorer.query_rows)
        self.events = Events(scorer)
        self.relevance = Relevance(self.table, self.queries, self.events, self._open_scoring(scorer))
        self.paging = Paging(engine, self.table, self.mask, self.store, self.ids, self.relevance.sealed)
        self.unfinished = Unfinished()
        self.checkpoints = Checkpoints(engine, most=config.checkpoints, n_ctx=n_ctx)
        self.recovery = Recovery(engine, self.table, self.store, self.checkpoints)
        self.streamed_steps = 0
        self.view: View | None = None
        self._told_of_memory = False
        self._ahead: DraftRows | None = None
        self._pin()

    def _open_scoring(self, scorer: Scorer | None) -> Scoring | None:
        if not self.bounded or scorer is None:
            return None
        tau = self.config.tau or (TAU if self.config.deterministic else None)
        return Scoring(self.engine, self.store, scorer, self.queries, tau=tau, n_chunks=-(-self.n_ctx // CHUNK))

    @property
    def scoring(self) -> Scoring | None:
        """What feeds the policy; None where recency alone decides who stays."""
        return self.relevance.scoring

    @property
    def length(self) -> int:
        """Tokens read so far, with those of the rows ahead that count."""
        return self.table.layout.length if self._ahead is None else self._ahead.start + self._ahead.kept

    @property
    def tokens(self) -> Int32s:
        """The tokens whose KV is in the pool or on the host, shape [length]."""
        return self.ids[: self.length]

    @property
    def outgrown(self) -> bool:
        """Has the text become longer than the pool?"""
        return self.length > self.pool.n_slots

    @property
    def ahead(self) -> int:
        """Rows that were written ahead of the text, and wait to be settled."""
        return 0 if self._ahead is None else len(self._ahead.tokens)

    @property
    def sees_everything(self) -> bool:
        """Is all of the text in the pool?"""
        return not self.bounded or everything_is_resident(self.table.layout, self.length)

    def settle(self) -> None:
        """Complete or take back what an interrupt has left half done: so begins everything that changes the text.
        DeviceLost, and no change, where a server does not answer any more.

        Of the rows ahead of the text those that were kept are of it then; the others have never been. Where recurrent
        state cannot go back to them, those that were kept are read once more.
        """
        kept = 0 if self._ahead is None else self._ahead.kept
        self.recovery.check()
        self.unfinished.settle()
        ahead = self._ahead
        if ahead is not None:  # asked before each token
            again = 0 < kept < len(ahead.tokens) and ahead.state is not None
            taken = replace(ahead, path=()) if again else ahead
            self.unfinished.begin(partial(self._accept, taken, self.queries.order))
            self.unfinished.settle()
            if again:
                self.evaluate(ahead.tokens[:kept], EVERY, stream=ahead.streamed)
            elif self.bounded:
                self.paging.save()
        if kept:
            self.count_generated(kept)

    def keep(self, row: int) -> None:
        """One row ahead more is of the text: `length` counts it, and whatever settles the rows keeps it.
        It is the next one of a chain, or of a tree a child of the last one."""
        ahead = self._ahead
        assert ahead is not None
        self.ids[self.length] = ahead.tokens[row]
        self._ahead = ahead = ahead.with_row(row)
        if ahead.branches is not None:
            self.logits = Logits(ahead.start, ahead.kept, path=ahead.path)

    # --- steps

    def evaluate(
        self,
        tokens: Int32s,
        output: Output,
        after: AfterStep | None = None,
        *,
        generated: bool = False,
        ahead: int = 0,
        branches: Branches | None = None,
        sketch: bool = False,
        stream: bool = False,
        places: PageTableState | None = None,
    ) -> None:
        """Read tokens that fit one step. Whatever goes wrong, the text has all of them then, or none.

        after is called once the text has them, and again if that was interrupted. ahead: they are not of the text
        before `keep` says which of them are; there is room for so many rows then, and others can follow before the text
        is settled. branches: how they lie if they are a tree, which cannot stream. sketch: none of them will be.
        stream: they see all of the text that the stages can hold, not only what is in the pool; there must be stages.
        places: where the chunks before them are to lie.
        """
        if self.bounded:
            self.paging.save()
        before = self._ahead
        if before is None:
            start = self.table.length
            plan = self.table.reserve(
                start, max(ahead, len(tokens)), self.relevance.ranking, self.relevance.rebuild, places
            )
        else:
            plan, start = Plan(self.table.layout, NO_MOVES), before.start + len(before.tokens)
            assert start + len(tokens) <= before.start + before.room
            assert not (stream and len(before.tokens)), "rows ahead of the text are in the pool only"
        seen = self.span.of(plan, start, len(tokens), self.relevance.ranking, stream=stream)
        step = Step(start, tokens, output, plan, ahead, branches, *seen)
        needed = ahead and before is None and self._needs_state(len(tokens), sketch=sketch)
        state = self.pool.device_states.keep() if needed else None
        self.unfinished.begin(partial(self._end, step, before, state))
        try:
            self._run(step, generated=generated)
            self._follow(step, after)
        except BaseException as err:
            if isinstance(err, DeviceLost):
                self.recovery.tell(err)
            if isinstance(err, Exception):
                self.relevance.rebuild = False  # or what cannot be recalled would be asked for at every step
            self._follow(step, after)
            raise

    def _needs_state(self, count: int, *, sketch: bool) -> bool:
        """Must the recurrent state be kept to forget all but one of `count` rows, or all of a sketch?"""
        info = self.engine.info
        return info.recurrent and (sketch or count - 1 > info.rs_planes)

    def _run(self, step: Step, *, generated: bool) -> None:
        engine, events, plan = self.engine, self.events, step.plan
        start, n = step.start, len(step.tokens)
        wait = self.paging.apply(plan.moves, start)
        if events.scored or (events.observer is not None and plan.moves):
            recalled = [chunk for chunk, _ in plan.moves.recall]
            events.changed(start + n, plan.layout.resident_chunks, recalled, generating=generated)
        slots = place(engine, self.queries, step)
        engine.token[:n] = step.tokens
        engine.output[:n] = step.output.every
        engine.output[n - 1] = step.output.every or step.output.last
        if step.view is not None:
            try:
                seen = step.view, plan.layout, self.pool.stage_mask, start, n, step.output.asked
                with self.paging.streamed(*seen) as streamed:
                    engine.step(n, wait, step.codes, streamed)
                self.streamed_steps += 1
                self._told_of_memory = False
                return
            except HostMemoryError as err:
                if step.codes:
                    raise
                if not self._told_of_memory:  # once, not at each step
                    self._told_of_memory = True
                    logger.warning("from token %d on what is in the pool is in view: %s", start, err)
                step.view, step.whole = None, self.span.of(plan, start, n, None, stream=False)[1]
        if step.branches is None:
            self.mask.fill(start, slots)
        else:
            self.mask.fill_tree(start, slots, step.branches.parent)
        engine.step(n, wait, step.codes)

    def _follow(self, step: Step, after: AfterStep | None) -> None:
        """A step is over: what has to follow it if it is done, which can be done again."""
        self.unfinished.settle()
        if not step.computed:
            return
        if after is not None:
            after(step.start, len(step.tokens))
        if self.bounded and not step.ahead:
            self.paging.save()

    def _end(self, step: Step, before: DraftRows | None, state: SavedState | None) -> None:
        """A step that was computed counts, also if it was interrupted then; of another one nothing stays.

        before: rows ahead of the text that it follows.
        """
        if step.computed:
            n = len(step.tokens)
            if step.branches is None:
                self.ids[step.start : step.start + n] = step.tokens
            self.whole[step.start : step.start + n] = step.whole
            self.view = step.view
            self.relevance.rebuild = False
            self.logits = step.logits
            if not step.ahead:
                self.table.commit(step.plan)
            elif before is None:
                room, streamed = max(step.ahead, n), step.view is not None
                self._ahead = DraftRows(step.start, step.tokens, room, state, streamed, branches=step.branches)
                self.table.commit_ahead(step.plan)
            else:
                tokens = np.concatenate([before.tokens, step.tokens])
                self._ahead = replace(before, tokens=tokens, streamed=step.view is not None)
            if self.follower is not None:
                self.follower.evaluated(step.start, step.tokens, ahead=bool(step.ahead))
            return
        if self.engine.is_lost:
            return  # there is nothing to bring back, and what the host has stays
        if before is not None:
            self._accept(replace(before, path=()), self.queries.order)
            return
        self.paging.undo(step.plan.moves)
        self.mask.truncate()
        if step.codes:
            self.queries.valid_from = self.length  # it may have captured some before it failed
        if not self.engine.truncate(self.length):  # recurrent state has gone on: an earlier one is known
            cut = partial(self._cut, self.length, direct=False)
            self.unfinished.begin(cut)
            cut()
        self.events.truncated(self.length, self.table.resident_chunks)

    def _accept(self, ahead: DraftRows, order: npt.NDArray[np.intp]) -> None:
        """Can be done again wherever it was interrupted. order: of the captured queries before."""
        length, written = ahead.start + ahead.kept, ahead.start + ahead.room
        if ahead.branches is not None and ahead.kept:
            gather(self.engine, self.table.layout, self.queries, ahead, ahead.branches, order)
        if length < written:
            if not goes_back(self.pool, ahead, length):
                self._ahead = None
                self._cut(length, direct=False)
                return
            self.mask.truncate()
        plan = self.table.accept(length)
        self._apply(plan.moves, length)
        self.queries.valid_from = self.queries.valid_after(length, written)
        self.logits = self.logits.before(length)
        self.table.commit(plan)
        self._ahead = None
        if self.follower is not None:
            self.follower.settled(ahead.path)

    def _apply(self, moves: Moves, length: int) -> None:
        """Moves that no step follows at once."""
        self.engine.wait(self.paging.apply(moves, length))

    # --- cut

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on, on both tiers. Returns the length that is left.

        That is `length` itself, unless recurrent state or a sliding window cannot go back so far: then it is the
        nearest checkpoint before it, or 0. Nothing is evaluated here. ConfigError for a negative length.
        """
        if length < 0:
            raise ConfigError(f"a text cannot be cut to {length} tokens: to forget all of it, cut to 0")
        self.settle()
        if length >= self.length:
            return self.length
        self.unfinished.begin(partial(self._cut, length, direct=self.can_truncate(length)))
        self.settle()
        return self.length

    def _cut(self, length: int, *, direct: bool) -> None:
        """direct: nothing has to be restored for it. Can be done again wherever it was interrupted."""
        if not (direct and self.engine.truncate(length)):
            length = self.checkpoints.rewind_to(length)
        self.logits = NO_LOGITS
        self.queries.valid_from = self.queries.valid_after(length, self.length)
        plan = self.table.truncate(length)
        self._apply(plan.moves, length)
        self.table.commit(plan)
        self.checkpoints.truncate(length)
        self.mask.truncate()
        self._truncated(length)
        self.events.truncated(length, self.table.resident_chunks)

    def can_truncate(self, length: int) -> bool:
        """Would `truncate` leave exactly `length` tokens? Recurrent state goes back within a step at most."""
        return length in (0, self.length) or (self.engine.can_truncate(length) and self._window_reaches(length))

    def truncates_to(self, length: int) -> int:
        """What `truncate` would leave."""
        if length >= self.length or self.can_truncate(length):
            return min(length, self.length)
        return self.checkpoints.nearest(length)

    def reset(self) -> None:
        """Forget everything but the settings."""
        self.unfinished.begin(self.clear)
        self.unfinished.settle()

    def clear(self, empty: Callable[[], None] | None = None) -> None:
        """What `reset` does, `empty` in place of all memory of the engine. Can be done again wherever interrupted."""
        self.logits = NO_LOGITS
        self._ahead = None
        (empty or self.engine.clear)()
        self.paging.clear()
        self.table.reset()
        self.mask.reset()
        self.queries.valid_from = 0
        self.checkpoints.truncate(0)
        self._pin()
        self._truncated(0)
        self.events.reset()
        self.events.truncated(0, ())

    def pin_range(self, lo: int, hi: int) -> None:
        """Keep the chunks of tokens [lo, hi) resident from the next step on."""
        self.unfinished.settle()
        self.table.pin_range(lo, hi)

    # --- what others are told

    def count_generated(self, count: int) -> None:
        """The newest `count` tokens are of an answer."""
        self.loss.add_generated(count, whole=self.whole.item(self.length - 1))
        self.relevance.generated(count, self.tokens, self.view)

    def share_seen(self, start: int, count: int) -> float:
        """Share of the text before `start`, 0 to 1, that the newest step saw, which had `count` tokens."""
        if self.whole[start]:
            return 1.0
        seen = self.table.resident * CHUNK - count if self.view is None else self.view.tokens
        return seen / start

    def _truncated(self, length: int) -> None:
        """The text has been cut to `length` tokens. Can be called again."""
        if self.follower is not None:
            self.follower.truncated(length)
        if self.repair is not None:
            self.repair.truncated(length)
        self.relevance.truncated(length)

    def _pin(self) -> None:
        for lo, hi in self.config.pins:
            self.table.pin_range(lo, hi)

    def _window_reaches(self, length: int) -> bool:
        """Do the sliding-window layers still hold the window that a token at `length` looks at?"""
        window = self.engine.info.n_swa
        return window == 0 or length == 0 or self.engine.window_start <= max(0, length - window)
