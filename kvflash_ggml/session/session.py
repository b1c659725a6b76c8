"""A text on a pool whose resident set follows what is asked: prompts, generation, and what a policy has to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from ..arrays import Int32s
from ..config import KVFlashConfig
from ..constants import CHUNK
from ..errors import CLOSED, ContextFull, KVFlashError
from ..logs import Progress
from ..native.streamed import NOBODY, Asked
from ..pool.branches import Branches
from ..state.session import Limits, PolicyState, SessionState
from ..trace.events import Events
from . import restore
from .pool import Pool
from .question import AskedText, Before
from .reading import POOL, Loss, Reading
from .repair import Repair, mend
from .scoring import Scoring
from .selection import TAU
from .step import EVERY, LAST, AfterStep, Output

if TYPE_CHECKING:
    from ..policy.base import Scorer


class Session(AskedText):
    """n_ctx: logical limit. n_batch: how stock llama.cpp would split a prompt, together with the pool's n_ubatch; kept,
    so that a pool that holds the whole context computes the same bits. scorer: who stays resident, None for pure
    recency. reading: what a step sees; the pool has stages if that is more than what is in it.
    """

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
        query_rows = None if scorer is None else scorer.query_rows
        super().__init__(pool, config, n_ctx=n_ctx, events=Events(scorer), query_rows=query_rows)
        self.n_batch = n_batch
        self.n_ubatch = pool.n_ubatch
        self.reading = reading
        self.repair: Repair | None = None
        self.loss = Loss()
        if self.bounded and scorer is not None:
            tau = config.tau or (TAU if config.deterministic else None)
            n_chunks = -(-n_ctx // CHUNK)
            self.scoring = Scoring(self.engine, self.store, scorer, self.queries, tau=tau, n_chunks=n_chunks)

    @property
    def policy(self) -> str:
        """The name of the policy at work."""
        if not self.bounded:
            return "none needed"
        return "lru" if self.scoring is None else self.scoring.scorer.name

    @property
    def index_bytes(self) -> int:
        """Bytes that the policy's statistics take for a whole context."""
        return 0 if self.scoring is None else self.scoring.scorer.index_bytes

    def limits(self, n_vocab: int) -> Limits:
        """What a session can be that is loaded here."""
        return Limits(n_ctx=self.n_ctx, n_vocab=n_vocab, queries=self.queries.size)

    @property
    def blank_policy(self) -> PolicyState | None:
        """The state of a policy that has not scored yet."""
        return None if self.scoring is None else self.scoring.blank_state()

    @property
    def page_ins(self) -> int:
        return self.paging.page_ins

    @property
    def page_outs(self) -> int:
        return self.paging.page_outs

    # --- extend

    def extend(
        self,
        tokens: Int32s,
        *,
        output_all: bool = False,
        after: AfterStep | None = None,
        progress: Progress | None = None,
        checkpoint: int | None = None,
        prompt: bool = False,
    ) -> None:
        """Evaluate tokens after those read so far: one as part of an answer, several as a prompt.

        Logits of the last are kept, or of all with `output_all`. after(start, count) runs after each step, while the
        logits of its `count` tokens are at hand. checkpoint: a position within a prompt at which to keep what is not
        pooled, to go back to. prompt: a single token is of one too. progress(done, total) runs after each step of
        a prompt, and may not change the text. On DecodeError and the other errors of this package the steps that were
        done stay done: `length` tells how far.
        """
        self._begin(len(tokens))
        if not len(tokens):  # the text goes on as it is
            self.loss = Loss()
            return
        exact, found = self.reading.exact, None
        if self.scoring is not None and not exact and (prompt or len(tokens) > 1):
            found = self._in_one_step(self.scoring.findings.at(self.length, tokens))
        if len(tokens) == 1 and found is None and not (prompt and exact):
            self._generate_step(tokens, EVERY if output_all else LAST, after)
            self._repair(after)
            return
        self._forget_scores()
        self.loss = Loss()
        done, total = 0, len(tokens)
        if found is not None:
            self._ask_again(found, output_all=output_all, after=after)
            self.loss.add_read(total, self._share_seen(self.length - total, total))
            if self.repair is not None:
                self.repair.start = self.length
            if progress is not None:
                progress(total, total)
            return
        before: Before | None = None
        seen_whole = exact and self.length + total <= self.sight.tokens
        last = total - (0 if exact else self._question_size(total))
        score = self.scoring is not None and self.config.reselect_prefill and not seen_whole
        while done < total:
            batch_end = total if done >= last else min(last, (done // self.n_batch + 1) * self.n_batch)
            count = min(self.n_ubatch, batch_end - done, self.table.room(self.length, spare=score and done < last))
            start = self.length
            if checkpoint is not None and done < last and start < checkpoint < start + count:
                count = checkpoint - start
            with self.salvage.told():
                self.checkpoints.before_step(start, wanted=done + count == total or start == checkpoint)
            if self.scoring is not None:
                self._take(self.scoring.take_overlapped())
            if done >= last:
                before = Before.of(self)
            asked = self._asks(start + count) if exact and done + count == total else NOBODY
            output = Output(every=output_all, last=done + count == batch_end, asked=asked)
            with nullcontext() if self.scoring is None else self.scoring.before_seals(asked):
                self.evaluate(tokens[done : done + count], output, after, stream=exact)
                self.loss.add_read(count, self._share_seen(start, count))
                done += count
                if self.repair is not None:
                    self.repair.start = self.length
                if score or (done == total and self.scoring is not None):
                    self._request_scores(rows=None if done == total else 1, asked=asked, start=start)
            if progress is not None:
                progress(done, total)
                if self.length != start + count:
                    raise KVFlashError("the text was changed by the progress callback while it was read: read it again")
        if before is not None:
            self._reread_question(tokens[last:], before, output_all=output_all, after=after)
        elif exact and self.scoring is not None:
            self._take(self.scoring.take())  # the answer begins with what the prompt's end asks for
            if not self.sees_everything:
                self.loss.ranked, self.loss.ranked_why = self.scoring.masses.told

    @property
    def room_ahead(self) -> int:
        """How many tokens can be verified at once. A streamed step is computed as a whole."""
        return min(self.places_ahead, self.n_ubatch if self.reading.answers_exactly else len(self.engine.token))

    @property
    def places_ahead(self) -> int:
        """How many positions these can take: they leave a query of the text to score by, if but one is of it."""
        room = min(self.table.room(self.length), self.n_ctx - self.length)
        return min(room, self.queries.ring) if self.scoring is not None and self.queries.ring else room

    @property
    def branch_room(self) -> int:
        """The same for trees; 0 where a step can verify none.

        A window or recurrent state has no branches, and a stage shows rows in order.
        """
        return self.places_ahead if self.engine.info.branches and not self.reading.answers_exactly else 0

    def verify(self, tokens: Int32s, branches: Branches | None = None, after: AfterStep | None = None) -> None:
        """Evaluate tokens ahead of the text, in one step that keeps the logits of each of them.

        They fit the step and `room_ahead`, as does the room of a tree. `keep` says which of them are of the text, from
        then on in `length`, and whatever changes the text next settles them: until then nothing of them is saved or
        scored, and the others have never been. after: of the steps of a repair that is due before, as in `extend`.
        """
        room = len(tokens) if branches is None else branches.room
        self._begin(room)
        self._repair(after)
        self._generate_step(tokens, EVERY, None, ahead=room, branches=branches)

    def begin_sketch(self, room: int) -> None:
        """Rows for so many tokens follow, which see what is in the pool and are not to stay: see `Sketch`."""
        self._begin(room)
        self._take_ready()

    def accept(self, after: AfterStep | None = None) -> None:
        """Those of the tokens that were verified are of the text which were kept. after: as in `verify`."""
        self.unfinished.settle()
        if self.ahead:
            self.settle()
            self._repair(after)

    def rewind_to(self, length: int) -> None:
        """Forget tokens from `length` on, evaluating again whatever the memory could not keep."""
        again = self.ids[:length].copy()
        left = self.truncate(length)
        if left < length:
            self.extend(again[left:])

    def prefix_to_keep(self, shared: int, prompt: Int32s) -> int:
        """How much of a known prefix to keep for a prompt.

        Less than `shared` where its end has been read before, or where queries of its newest tokens have been
        overwritten by those of a text that is cut off: they are computed again, so that the question takes part in
        scoring as a whole.
        """
        total, rows = len(prompt), self.queries.rows
        if self.scoring is not None and not self.reading.exact:
            found = self._in_one_step(self.scoring.findings.within(shared, prompt))
            if found is not None and self.truncates_to(found.start) == found.start:
                return found.start
        valid_from = self.queries.valid_after(min(shared, self.length), self.length)
        if self.scoring is None or total <= self.pool.n_slots or valid_from <= total - rows:
            return shared
        return max(0, min(shared, total - rows))

    def close(self, outlived: Callable[[], ExitStack] = ExitStack) -> None:
        """Wait for all work and free everything. On a thread that scores or copies, where a garbage collector may run,
        that comes behind what it does, and what `outlived` gives comes after that.
        """
        workers = [*self.checkpoints.workers, *(() if self.scoring is None else self.scoring.workers)]
        here = next((worker for worker in workers if worker.is_here), None)
        if here is None:
            self._close()
        else:
            here.finish(self._close, outlived())

    def _close(self) -> None:
        self.engine.synchronize()
        if self.scoring is not None:
            self.scoring.close()
        super().close()
        self.pool.close()

    def check_open(self) -> None:
        """KVFlashError for a model that was closed."""
        if self.engine.closed:
            raise KVFlashError(CLOSED)

    def _begin(self, count: int) -> None:
        self.check_open()
        self.settle()
        if self.length + count > self.n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.length + count}) exceed context window of {self.n_ctx}"
                f" (the pool holds {self.pool.n_slots} of them at a time)"
            )

    def _share_seen(self, start: int, count: int) -> float:
        """Of the text before `start`, how much did a step of `count` tokens see that has just been done?"""
        if self.whole[start]:
            return 1.0
        seen = self.table.resident * CHUNK - count if self.view is None else self.view.tokens
        return seen / start

    def _repair(self, after: AfterStep | None) -> None:
        """Read the newest tokens again with the whole text in view, where it is time."""
        if self.repair is not None and not self.ahead and self.repair.is_due(self.length):
            mend(self, self.repair, self.loss, after)

    # --- relevance

    def _generate_step(
        self,
        tokens: Int32s,
        output: Output,
        after: AfterStep | None,
        *,
        ahead: int = 0,
        branches: Branches | None = None,
    ) -> None:
        """One step of generation: the fast path. ahead: its tokens are not of the text yet."""
        start, repair = self.length, self.repair
        if repair is not None and start == repair.start:
            with self.salvage.told():
                self.checkpoints.before_step(start, wanted=True)
        self.checkpoints.before_answer()
        self._take_ready()
        try:
            self.evaluate(
                tokens, output, after, generated=True, ahead=ahead, branches=branches,
                stream=self.reading.answers_exactly,
            )  # fmt: skip
            if repair is not None and branches is None:
                repair.generated(start, len(tokens))
        finally:
            if not ahead:
                self._generated(self.length - start)

    def _take_ready(self) -> None:
        """Go by the scores that are due, if there are any."""
        if self.scoring is not None and self.scoring.is_ready:
            self._take(self.scoring.take(), sparingly=True)

    def _generated(self, count: int) -> None:
        """So many tokens are of the text now; fewer than none after a step that failed and took some along."""
        if count > 0:
            self.loss.add_generated(count, whole=self.whole.item(self.length - 1))
        if count > 0 and self.scoring is not None and self.scoring.on_tokens(count) and not self.table.unsaved:
            self._request_scores(rows=1)

    def _asks(self, end: int) -> Asked:
        """What the last step of a prompt, which ends at `end`, computes on its way if it is streamed."""
        return NOBODY if self.scoring is None else self.scoring.ask(end, end - self.queries.valid_from)

    def _request_scores(self, *, rows: int | None, asked: Asked = NOBODY, start: int = 0) -> None:
        """Score the chunks against the newest `rows` queries, or all: asked, of a newest step that began at `start`."""
        assert self.scoring is not None
        head = max(0, self.length - 1) // CHUNK
        protected = frozenset(self.table.protected(head, head))
        known = self.length - self.queries.valid_from
        seen = () if self.view is None else (*self.view.chunks, *range(start // CHUNK, self.length // CHUNK))
        what = self.tokens, self.length // CHUNK, protected
        self.scoring.request(*what, rows=rows, known=known, asked=asked, seen=seen)

    def _forget_scores(self) -> None:
        """A new request: nothing that was scored for the last one may steer it."""
        self.ranking, self.rebuild = None, False
        self.events.reset()
        if self.scoring is not None:
            self.scoring.restart()

    def _sealed(self, chunks: Sequence[int]) -> None:
        if self.scoring is not None:
            self.scoring.sealed(chunks)

    def _truncated(self, length: int) -> None:
        super()._truncated(length)
        if self.repair is not None:
            self.repair.truncated(length)
        if self.scoring is not None:
            self.scoring.truncate(length)

    # --- state

    def state(self, length: int | None = None, *, drafts: bool = True) -> SessionState:
        """The session as it is, or cut to its first `length` tokens, to be loaded later. See `restore.state`."""
        saved = restore.state(self, length, drafts=drafts)
        if self.repair is not None and saved.length == self.length:
            saved.repaired = self.repair.start
        return saved

    def kept_state(self) -> SessionState:
        """What is left of it without its devices, to be loaded on others. See `restore.kept_state`."""
        return restore.kept_state(self)

    def load(self, saved: SessionState, then: Callable[[SessionState], None] | None = None) -> None:
        """Replace everything by a saved session of this heap. See `restore.load`."""
        restore.load(self, saved, then)
        if self.repair is not None and saved.repaired is not None:
            self.repair.start = saved.repaired

    def policy_state(self, cut: int | None = None) -> PolicyState | None:
        if self.scoring is None:
            return None
        if cut is None:
            return self.scoring.state(self.length // CHUNK)
        blank = self.scoring.blank_state()
        blank.found = self.scoring.findings.state()
        return blank.before(cut)

    def load_policy(self, saved: PolicyState | None) -> None:
        if self.repair is not None:
            self.repair.start = self.length
        if saved is None or self.scoring is None or saved.name != self.scoring.scorer.name:
            self.ranking = None  # in the units of another policy, or of none
        if self.scoring is not None:
            self.scoring.load(saved, self.tokens)
