"""A sequence: a text that is computed on a pool, with its tokens, its KV, and the steps that extend or cut it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..config import KVFlashConfig
from ..constants import CHUNK
from ..errors import ConfigError, ContextFull, DeviceLost, HostMemoryError, NotFinite
from ..host.store import HostStore
from ..pool.masks import Branches, View, everything_is_resident
from ..pool.page_table import PageTable, PageTableState
from ..pool.plan import NO_MOVES, Plan
from ..trace.events import Events
from .checkpoints import Checkpoints, Recovery
from .draft_rows import DraftRows, gather, goes_back
from .paging import Paging
from .pool import Pool
from .query_ring import QueryRing
from .reading import POOL, AttentionSpan, Reading, ReadStats
from .relevance import Relevance
from .scoring import Scoring
from .step import EVERY, NO_LOGITS, AfterStep, Follower, Logits, Output, Step, Unfinished

if TYPE_CHECKING:
    from ..policy.base import Scorer
    from ..state.session import SessionLimits

logger = logging.getLogger("kvflash_ggml")

MOST_AGAIN = 4
"""Tokens of an answer that a step computes again. Where scores come later than that, other tokens need other chunks."""


class Sequence:
    """A text on a pool. A step of it either commits completely or leaves no trace.

    seq: its sequence of the context, which no other text has. n_ctx: most tokens. n_batch: with the pool's n_ubatch,
    how stock llama.cpp would split a prompt, so that a pool that holds the whole context computes the same bits.
    scorer: decides which chunks stay resident; None for pure recency. reading: the attention span of its steps; the
    pool has layer buffers if that is more than the pool.

    whole: [n_ctx], tokens that have seen the whole text before them. logits: the positions whose logits are available.
    draft_rows: rows written behind the text, until they are settled. streamed_steps: steps that saw more than the pool.
    view: of the newest step. follower: is told of every change of the text. stats: of the newest request. unchecked: it
    is not known yet whether the newest step computed finite values. spoiled: it did not, and what the text had in the
    engine is gone: it has to be reset.
    """

    follower: Follower | None = None

    def __init__(
        self, pool: Pool, config: KVFlashConfig, *, seq: int, n_ctx: int, n_batch: int,
        scorer: Scorer | None = None, reading: Reading = POOL,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.seq = seq
        self.engine = engine = pool.engine
        self.config = config
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_ubatch = pool.n_ubatch
        self.reading = reading
        self.stats = ReadStats()
        self.bounded = pool.share < n_ctx
        if self.bounded and engine.info.v_trans:
            raise ConfigError("a pool smaller than the context needs flash attention: without it V cannot be paged")
        self.ids = np.zeros(n_ctx, np.int32)
        self.whole = np.zeros(n_ctx, np.bool_)
        self.logits = NO_LOGITS
        self.store = HostStore(pool.heap)
        pool.join(self, seq)
        ends = {"sinks": config.sinks, "tail": config.tail_of(pool.share)}
        self.table = PageTable(pool.shares[seq], self.store, **ends, bounded=self.bounded)
        self.span = AttentionSpan(pool, self.table, first=seq * pool.share // CHUNK, bounded=self.bounded)
        self.mask = pool.make_mask()
        self.queries = QueryRing(engine, seq, None if scorer is None else scorer.query_rows)
        self.events = Events(scorer)
        self.scoring = self._open_scoring(scorer)
        """Runs the policy; None where recency alone decides which chunks stay."""
        self.relevance = Relevance(self.table, self.queries, self.events, self.scoring)
        self.paging = Paging(engine, seq, self.table, self.mask, self.store, self.ids, self.relevance.sealed)
        self.unfinished = Unfinished()
        self.checkpoints = Checkpoints(engine, seq, max_count=config.checkpoints, n_ctx=n_ctx)
        self.recovery = Recovery(engine, self.table, self.store, self.checkpoints)
        self.streamed_steps = 0
        self.view: View | None = None
        self._told_of_memory = False
        self.draft_rows: DraftRows | None = None
        self.unchecked = self.spoiled = False
        for lo, hi in self.config.pins:
            self.table.pin_range(lo, hi)

    def _open_scoring(self, scorer: Scorer | None) -> Scoring | None:
        if not self.bounded or scorer is None:
            return None
        most, pool, config = -(-self.n_ctx // CHUNK), self.pool, self.config
        return Scoring(
            self.engine, self.store, scorer, self.queries, tau=config.tau, n_chunks=most, slots=pool.share,
            steady=config.same_bits, together=lambda: pool.decoding, room=lambda: pool.index_room(self.seq),
        )  # fmt: skip

    # --- what it is

    @property
    def length(self) -> int:
        """Tokens evaluated so far, accepted draft rows included."""
        rows = self.draft_rows
        return self.table.layout.length if rows is None else rows.start + rows.kept

    @property
    def tokens(self) -> Int32s:
        """The tokens whose KV is in the pool or on the host, shape [length]."""
        return self.ids[: self.length]

    @property
    def ahead(self) -> int:
        """Draft rows that wait to be settled."""
        return 0 if self.draft_rows is None else len(self.draft_rows.tokens)

    @property
    def sees_everything(self) -> bool:
        """Whether all of the text is in the pool."""
        return not self.bounded or everything_is_resident(self.table.layout, self.length)

    @property
    def policy(self) -> str:
        """The name of the policy in use."""
        recency = "lru" if self.bounded else "none needed"
        return recency if self.scoring is None else self.scoring.scorer.name

    def limits(self, n_vocab: int) -> SessionLimits:
        """Return the largest session that can be loaded here."""
        from ..state.session import SessionLimits  # here: most texts are never saved

        return SessionLimits(n_ctx=self.n_ctx, n_vocab=n_vocab, queries=self.queries.size)

    # --- prompts and answers

    def begin(self, count: int) -> None:
        """Settle unfinished changes, before `count` tokens follow. ContextFull if there is no room for them.

        KVFlashError for a closed model.
        """
        self.engine.check_open()
        self.settle()
        if self.length + count > self.n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.length + count}) exceed context window of {self.n_ctx}"
                f" (the pool holds {self.pool.share} of them at a time)"
            )

    def prepare_answer(
        self, tokens: Int32s, output: Output, after: AfterStep | None = None, *,
        ahead: int = 0, branches: Branches | None = None,
    ) -> Step:  # fmt: skip
        """Prepare a step of an answer; see `prepare`. `begin` has made room for it, and `finish` computes it."""
        self.checkpoints.restored = None  # no step of a prompt follows the restored text
        scoring = self.scoring
        if scoring is not None and scoring.pending and scoring.is_ready:
            count = scoring.selection.since_asked
            self.relevance.take_ready()
            if not ahead and self.relevance.asks_for_more():
                tokens = self._again(count, tokens)
        return self.prepare(
            tokens, output, after, generated=True, ahead=ahead, branches=branches, stream=self.reading.answers_exactly
        )

    def _again(self, count: int, tokens: Int32s) -> Int32s:
        """Return the newest `count` tokens and these, if their step can compute them again, with the chunks that the
        first of them asked for.

        They are dropped as rejected drafts then. `length` counts them all the while, and settling computes them.
        Without this, a list's key of one token, which asks for its value, never sees it. Recurrent state and windows of
        a restored text cannot roll back.
        """
        info, pool, length = self.engine.info, self.pool, self.length
        fixed = info.recurrent or info.n_swa or self.reading.answers_exactly
        if fixed or pool.padding is not None or self.follower is not None or count > MOST_AGAIN:
            return tokens
        count = min(count, length % CHUNK)  # the chunk before is sealed
        start = length - count
        lost = self.ids[start:length].copy()
        if not count or self.whole[start:length].any() or lost.min() < 0:  # a row of an image needs a step of its own
            return tokens
        if count + len(tokens) > pool.n_ubatch // len(pool.texts):  # a step has rows of all texts
            return tokens
        rows = DraftRows(start, lost, count, None, streamed=False, lost=True)
        self.unfinished.work = partial(self._take_rows, rows, self.queries.order)
        self.unfinished.settle()
        return np.concatenate([lost, tokens])

    def finish(self, step: Step) -> None:
        """Compute a step of an answer, and count its tokens."""
        before = self.length  # with tokens that are lost, which have been counted
        try:
            self.compute(step)
        finally:
            if not step.ahead and self.length > before:  # not after a step that failed
                self.count_generated(self.length - before)

    def count_generated(self, count: int) -> None:
        """Count the newest `count` tokens as generated, and score the chunks when it is time."""
        self.stats.generated += count
        if self.whole.item(self.length - 1):
            self.stats.generated_whole += count
        scoring = self.scoring
        if scoring is None:
            return
        if scoring.clock is not None:
            scoring.on_time(count)
        due = scoring.selection.on_tokens(count, waiting=len(scoring.pending))
        if due and not self.table.unsaved:
            if self.relevance.matters(self.length):
                self.relevance.request(self.tokens, self.view, rows=1, beside=self.pool.beside)
            else:
                self.relevance.fade()

    # --- one step

    def prepare(
        self, tokens: Int32s, output: Output, after: AfterStep | None = None, *,
        generated: bool = False, ahead: int = 0, branches: Branches | None = None,
        self_draft: bool = False, stream: bool = False, places: PageTableState | None = None,
    ) -> Step:  # fmt: skip
        """Prepare a step of tokens that fit one: its slots, its moves and its attention span. The text stays as it is.

        after: called once the text has the tokens, and again if that was interrupted. generated: the tokens are of an
        answer. ahead: the tokens are draft rows, which `keep` accepts; there is room for so many, and others can follow
        before the text is settled. branches: the rows of a tree, which cannot stream. self_draft: none of the rows is
        accepted. stream: the tokens see all of the text that the layer buffers can hold, not only the pool; there must
        be layer buffers. places: where the chunks before the tokens are to lie.

        Raises PoolExhausted, HostMemoryError where sealed chunks find no room on the host, and NotFinite for a text
        that is `spoiled`.
        """
        if self.spoiled:
            raise NotFinite(f"the text of sequence {self.seq} has values that are not finite: reset, and read it again")
        self.paging.save_sealed()
        before = self.draft_rows
        if before is None or before.lost:
            before = None
            start = self.table.layout.length
            plan = self.table.reserve(
                start, max(ahead, len(tokens)), self.relevance.ranking, self.relevance.rebuild, places
            )
        else:
            plan, start = Plan(self.table.layout, NO_MOVES), before.start + len(before.tokens)
            assert start + len(tokens) <= before.start + before.room
            assert not (stream and len(before.tokens)), "draft rows are in the pool only"
        view, whole = self.span.of(plan, start, len(tokens), self.relevance.ranking, stream=stream)
        span = self.seq, start, tokens, output, plan, self.mask, self.queries
        step = Step(*span, view, whole, after, generated, ahead, branches, before)
        info = self.engine.info
        if ahead and before is None and info.recurrent and (self_draft or len(tokens) - 1 > info.rs_planes):
            step.state = self.pool.device_states.keep(self.seq)  # the memory rolls back over fewer rows by itself
        return step

    def compute(self, step: Step) -> None:
        """Run a prepared step and commit it. After an error the text has all of its tokens, or none."""
        self.unfinished.work = partial(self._end, step)  # from here on an interrupt commits or undoes the step
        try:
            if step.plan.moves is not NO_MOVES or self.events.scores is not None:
                self.apply(step)
            if step.view is None or not self._stream(step):  # `run`, without a call at each token
                self.pool.run([step])
            self.commit(step)
        except BaseException as err:
            self.fail(step, err)
            raise

    def run(self, step: Step) -> None:
        """Run a prepared step alone, whose moves are made: through the layer buffers if it sees more than the pool."""
        if step.view is None or not self._stream(step):
            self.pool.run([step])

    def apply(self, step: Step) -> None:
        """Make the moves of a prepared step. `commit` follows, after `Pool.run`, or `fail`."""
        moves, events = step.plan.moves, self.events
        self.unfinished.work = partial(self._end, step)
        if moves is not NO_MOVES:
            step.wait = self.paging.apply(moves, step.start)
        if events.scores is not None or (events.observer is not None and moves):
            resident, recalled = step.plan.layout.resident_chunks, [chunk for chunk, _ in moves.recall]
            events.changed(step.start + len(step.tokens), resident, recalled, generating=step.generated)

    def fail(self, step: Step, why: BaseException) -> None:
        """Commit a step that an error ended: it counts if it was computed, or leaves no trace."""
        if isinstance(why, DeviceLost):
            self.recovery.tell(why)
        if isinstance(why, Exception):
            self.relevance.rebuild = False  # otherwise each step would fail to recall the same chunk
        self.commit(step)

    def commit(self, step: Step) -> None:
        """Make a step count: the text has its tokens, or none of them if it was not computed. It can be repeated."""
        self.unfinished.settle()
        if step.codes != [0]:
            return
        if step.after is not None:
            step.after(step.start, len(step.tokens))
        if not step.ahead:
            self.paging.save_sealed()

    def evaluate(self, tokens: Int32s, output: Output, after: AfterStep | None = None, *, stream: bool = False) -> None:
        """Prepare a step and compute it."""
        self.compute(self.prepare(tokens, output, after, stream=stream))

    def _stream(self, step: Step) -> bool:
        """Run a step that sees page images. False where there is no memory for them: the step then sees the pool."""
        start, n = step.start, len(step.tokens)
        assert step.view is not None
        try:
            seen = step.view, step.plan.layout, self.pool.stage_mask, start, n, step.output.wanted
            with self.paging.streamed(*seen, mutual=self.pool.is_span(step.tokens)) as step.streamed:
                self.pool.run([step])
        except HostMemoryError as err:
            if step.codes:
                raise
            if not self._told_of_memory:  # log it once, not at each step
                self._told_of_memory = True
                logger.warning("from token %d on steps see the pool only: %s", start, err)
            step.view, step.streamed = None, None
            step.whole = self.span.of(step.plan, start, n, None, stream=False)[1]
            return False
        self.streamed_steps += 1
        self._told_of_memory = False
        return True

    def _end(self, step: Step) -> None:
        """Take the result of a step over, or undo the step. It can be repeated after an interrupt."""
        if step.codes != [0]:
            if not self.engine.is_lost:  # after a loss nothing can be undone, and the host's images stay
                self._undo(step)
            return
        start, tokens, before, n = step.start, step.tokens, step.before, len(step.tokens)
        if step.branches is None:
            self.ids[start : start + n] = tokens
        self.whole[start : start + n] = step.whole
        self.view = step.view
        self.unchecked = True
        self.relevance.rebuild = False
        if step.branches is not None:
            self.logits = NO_LOGITS  # of the path, once rows are accepted
        elif step.output.every:
            self.logits = Logits(start, n, step.first)
        else:
            row = -1 if self.engine.info.n_seq == 1 else step.first + n - 1
            self.logits = Logits(start + n - 1, 1, row) if step.output.last else NO_LOGITS
        if not step.ahead:
            self.table.commit(step.plan)
            self.draft_rows = None  # it has computed the rows that were lost
        elif before is None:
            room, streamed = max(step.ahead, n), step.view is not None
            self.draft_rows = DraftRows(start, tokens, room, step.state, streamed, branches=step.branches)
            self.table.commit_ahead(step.plan)
        else:
            joined = np.concatenate([before.tokens, tokens])
            self.draft_rows = replace(before, tokens=joined, streamed=step.view is not None)
        if self.follower is not None:
            self.follower.evaluated(start, tokens, ahead=bool(step.ahead))

    def _undo(self, step: Step) -> None:
        """Undo a step that was not computed."""
        if step.codes:
            self.logits, self.unchecked = NO_LOGITS, True
        if step.before is not None:
            self._take_rows(replace(step.before, path=()), self.queries.order)
        else:
            self._undo_moves(step)
        if step.codes:
            self.engine.zero_unused()  # the rows that it has written

    def _undo_moves(self, step: Step) -> None:
        self.paging.undo(step.plan.moves)
        self.mask.truncate()
        length = self.table.layout.length  # without tokens that are lost
        if step.codes:
            self.queries.valid_from = length  # the failed step may have captured some
        if not self.engine.truncate(length, seq=self.seq):  # recurrent state, or within an image
            whole = self.engine.whole(length, seq=self.seq)
            cut = partial(self._cut, whole, direct=whole < length)
            self.unfinished.work = cut
            cut()
        self.events.truncated(length, self.table.resident_chunks)

    # --- values that are not finite

    def is_finite(self) -> bool | None:
        """Return whether the newest step has computed finite values; None if its logits are not available.

        A value that is not finite spoils the logits of all tokens that see it. Waits for the compute, once a step.
        """
        if self.spoiled:
            return False
        if not self.unchecked:
            return True
        logits = self.logits
        row = logits.row(logits.start + logits.count - 1)  # it sees the others
        if row is None:
            return None
        try:
            self.engine.argmax([row])
        except NotFinite:
            return False
        self.unchecked = False
        return True

    def give_up(self) -> None:
        """Drop what the text has in the engine if it is not finite, before a step of another text can read it.

        The text is `spoiled` then. It can be repeated.
        """
        if self.spoiled or self.is_finite() is not False:
            return
        logger.warning("sequence %d has computed values that are not finite: its text is dropped", self.seq)
        self.spoiled, self.logits, self.draft_rows = True, NO_LOGITS, None
        self.engine.clear(seq=self.seq)
        self.engine.zero_unused()

    # --- its share of the pool

    def shrink(self, max_blocks: int) -> None:
        """Evict the chunks with the lowest scores until the text has `max_blocks` blocks at most. Protected ones stay.

        No step may be prepared. Raises DeviceLost as `settle` does.
        """
        self.settle()
        self.unfinished.work = partial(self._shrink, max_blocks)
        self.unfinished.settle()

    def _shrink(self, max_blocks: int) -> None:
        """Shrink once. It can be repeated after an interrupt."""
        plan = self.table.shrink(max_blocks, self.relevance.ranking)
        self.engine.wait(self.paging.apply(plan.moves, self.length))  # another text may write to the blocks next
        self.table.commit(plan)
        self.events.truncated(self.length, self.table.resident_chunks)

    # --- draft rows

    @property
    def room_ahead(self) -> int:
        """Tokens that one step can verify. A streamed step is computed as a whole."""
        return min(self.draft_places, self.n_ubatch if self.reading.answers_exactly else len(self.engine.token))

    @property
    def draft_places(self) -> int:
        """Most lookahead positions. At least one captured query stays valid even if all draft rows but one are
        rejected.
        """
        room = min(self.table.room(self.length), self.n_ctx - self.length)
        return min(room, self.queries.ring) if self.scoring is not None and self.queries.ring else room

    @property
    def branch_room(self) -> int:
        """Most lookahead positions of a tree; 0 where a step can verify none.

        A window or recurrent state has no branches, and a layer buffer shows rows in order.
        """
        return self.draft_places if self.engine.info.branches and not self.reading.answers_exactly else 0

    def prepare_drafts(self, tokens: Int32s, branches: Branches | None) -> Step:
        """Prepare a step that verifies draft rows and keeps the logits of each of them. `finish` computes it.

        The tokens fit the step and `room_ahead`, and so does the room of a tree. `keep` accepts rows, which `length`
        then counts. The next change of the text settles them. Until then no draft row is saved or scored, and rejected
        rows leave no trace.
        """
        room = len(tokens) if branches is None else branches.room
        self.begin(room)
        return self.prepare_answer(tokens, EVERY, ahead=room, branches=branches)

    def keep(self, row: int) -> None:
        """Accept one more draft row: `length` counts it, and settling keeps it.

        It is the next row of a chain, or a child of the last accepted row of a tree.
        """
        rows = self.draft_rows
        assert rows is not None
        self.ids[self.length] = rows.tokens[row]
        self.draft_rows = rows = rows.with_row(row)
        if rows.branches is not None:
            self.logits = Logits(rows.start, rows.kept, path=rows.path)

    def settle(self) -> None:
        """Complete or undo what an interrupt left half done. Every change of the text begins with this.

        Accepted draft rows join the text, and rejected ones leave no trace. Where recurrent state cannot roll back to
        the accepted rows, they are evaluated again. DeviceLost, and no change, where a server no longer answers.
        """
        rows = self.draft_rows
        if self.engine.is_lost:  # checked before each token
            self.recovery.check()
        if self.unfinished.work is not None:
            self.unfinished.settle()
        if self.draft_rows is not None:
            self._settle_rows(self.draft_rows, self.draft_rows.kept)
        if rows is not None and rows.kept and not rows.lost:  # lost tokens have been counted
            self.count_generated(rows.kept)

    def _settle_rows(self, rows: DraftRows, kept: int) -> None:
        again = rows.lost or (0 < kept < len(rows.tokens) and rows.state is not None)
        taken = replace(rows, path=(), lost=False) if again else rows
        self.unfinished.work = partial(self._take_rows, taken, self.queries.order)
        self.unfinished.settle()
        if again:
            self.evaluate(rows.tokens[:kept], EVERY, stream=rows.streamed)
        elif self.bounded:
            self.paging.save()

    def _take_rows(self, rows: DraftRows, order: npt.NDArray[np.intp]) -> None:
        """Take the accepted draft rows over and drop the others. It can be repeated after an interrupt.

        Tokens of the text that are lost then stay to be computed again. order: of the captured queries before.
        """
        length, written = rows.start + rows.kept, rows.start + rows.room
        if rows.branches is not None and rows.kept:
            gather(self.engine, self.table.layout, self.queries, rows, rows.branches, order)
        if length < written:
            if not goes_back(self.engine, self.seq, self.pool.device_states, rows, length):
                self.draft_rows = None
                self._cut(length, direct=False)
                return
            self.mask.truncate()
        plan = self.table.accept(length)
        self.engine.wait(self.paging.apply(plan.moves, length))  # no step follows to wait for them
        self.queries.valid_from = self.queries.valid_after(length, written)
        self.logits = self.logits.before(length)
        self.table.commit(plan)
        self.draft_rows = replace(rows, path=tuple(range(rows.room))) if rows.lost else None
        if self.follower is not None:
            self.follower.settled(rows.path)

    # --- cut

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on, in the pool and on the host. Returns the length that is left.

        That is `length` itself, or the beginning of an image whose rows share a position with it. If recurrent state or
        a sliding window cannot roll back so far, it is the nearest checkpoint before it, or 0. Nothing is evaluated
        here. ConfigError for a negative length.
        """
        if length < 0:
            raise ConfigError(f"a text cannot be cut to {length} tokens: to forget all of it, cut to 0")
        self.settle()
        if self.spoiled:
            self.reset()
        if length >= self.length:
            return self.length
        length = self.engine.whole(length, seq=self.seq)
        self.unfinished.work = partial(self._cut, length, direct=self.can_truncate(length))
        self.settle()
        return self.length

    def _cut(self, length: int, *, direct: bool) -> None:
        """Forget tokens from `length` on. It can be repeated after an interrupt.

        direct: no checkpoint has to be restored for it.
        """
        finite = self.is_finite()
        if not (direct and self.engine.truncate(length, seq=self.seq)):
            length = self.checkpoints.rewind_to(length)
        self.logits = NO_LOGITS
        self.queries.valid_from = self.queries.valid_after(length, self.length)
        plan = self.table.truncate(length)
        self.engine.wait(self.paging.apply(plan.moves, length))  # no step follows to wait for them
        self.table.commit(plan)
        self.checkpoints.truncate(length)
        self.mask.truncate()
        if not finite:
            self.engine.zero_unused()
        self._truncated(length)
        self.events.truncated(length, self.table.resident_chunks)

    def can_truncate(self, length: int) -> bool:
        """Return whether `truncate` would leave exactly `length` tokens. Recurrent state rolls back within a step at
        most.
        """
        if self.spoiled or length in (0, self.length):
            return length == 0 or not self.spoiled
        window = self.engine.info.n_swa  # a token at `length` needs it in memory
        if not self.engine.can_truncate(length, seq=self.seq):
            return False
        return window == 0 or self.engine.window_start(seq=self.seq) <= max(0, length - window)

    def truncates_to(self, length: int) -> int:
        """Return the length that `truncate` would leave."""
        if self.spoiled:
            return 0
        if length >= self.length:
            return self.length
        length = self.engine.whole(length, seq=self.seq)
        return length if self.can_truncate(length) else self.checkpoints.nearest(length)

    def reset(self) -> None:
        """Forget everything but the settings."""
        self.unfinished.work = self.clear
        self.unfinished.settle()

    def clear(self, empty: Callable[[], None] | None = None) -> None:
        """Do the work of `reset`, with `empty` in place of clearing the engine's memory. It can be repeated after an
        interrupt.
        """
        if not self.is_finite():
            self.spoiled = True  # until its rows are zeroed
        self.logits = NO_LOGITS
        self.draft_rows = None
        (empty or partial(self.engine.clear, seq=self.seq))()
        self.paging.clear()
        self.table.reset()
        self.mask.reset()
        self.queries.valid_from = 0
        self.checkpoints.truncate(0)
        for lo, hi in self.config.pins:
            self.table.pin_range(lo, hi)
        if self.spoiled:
            self.engine.zero_unused()
        self.spoiled = self.unchecked = False
        self._truncated(0)
        self.events.reset()
        self.events.truncated(0, ())

    def pin_range(self, lo: int, hi: int) -> None:
        """Keep the chunks of tokens [lo, hi) resident from the next step on."""
        self.unfinished.settle()
        self.table.pin_range(lo, hi)

    def _truncated(self, length: int) -> None:
        """Tell the follower and the policy that the text has `length` tokens left. It can be repeated."""
        if self.follower is not None:
            self.follower.truncated(length)
        self.relevance.truncated(length)

    # --- close

    def close(self, outlived: Callable[[], ExitStack] = ExitStack) -> None:
        """Wait for all work and free everything. On a thread that scores or copies, where a garbage collector may run,
        the work of that thread comes first, and the callbacks that `outlived` returns come last.
        """
        workers = [*self.checkpoints.copies.workers, *(() if self.scoring is None else self.scoring.workers)]
        here = next((worker for worker in workers if worker.is_here), None)
        if here is None:
            self._close()
        else:
            here.finish(self._close, outlived())

    def _close(self) -> None:
        self.engine.synchronize()
        if self.scoring is not None:
            self.scoring.close()
        self.draft_rows, self.logits = None, NO_LOGITS
        self.checkpoints.copies.close()
        self.paging.clear()
        self.table.reset()
        self.pool.leave(self.seq)
