"""A text on a pool whose resident set follows what is asked: prompts, generation, and what a policy has to say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..arrays import Int32s
from ..errors import CLOSED, ContextFull, KVFlashError
from ..logs import Progress
from ..pool.branches import Branches
from ..state.session import Limits, PolicyState, SessionState
from . import restore
from .prefill import Prefill, in_one_step, mend
from .reading import ReadStats
from .step import EVERY, LAST, NO_LOGITS, AfterStep, Output
from .text import Text


class Sequence(Text):
    """A text that is extended by prompts and answers. The arguments are those of `Text`."""

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
            self.loss = ReadStats()
            return
        exact, known = self.reading.exact, None
        if self.scoring is not None and not exact and (prompt or len(tokens) > 1):
            known = in_one_step(self, self.scoring.replays.at(self.length, tokens))
        if len(tokens) == 1 and known is None and not (prompt and exact):
            self._generate_step(tokens, EVERY if output_all else LAST, after)
            self._repair(after)
            return
        read = Prefill(self, tokens, output_all=output_all, after=after, progress=progress, checkpoint=checkpoint)
        read.read(known)

    @property
    def room_ahead(self) -> int:
        """How many tokens can be verified at once. A streamed step is computed as a whole."""
        return min(self.draft_places, self.n_ubatch if self.reading.answers_exactly else len(self.engine.token))

    @property
    def draft_places(self) -> int:
        """How many positions these can take: they leave a query of the text to score by, if but one is of it."""
        room = min(self.table.room(self.length), self.n_ctx - self.length)
        return min(room, self.queries.ring) if self.scoring is not None and self.queries.ring else room

    @property
    def branch_room(self) -> int:
        """The same for trees; 0 where a step can verify none.

        A window or recurrent state has no branches, and a stage shows rows in order.
        """
        return self.draft_places if self.engine.info.branches and not self.reading.answers_exactly else 0

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

    def begin_self_draft(self, room: int) -> None:
        """Rows for so many tokens follow, which see what is in the pool and are not to stay: see `SelfDraft`."""
        self._begin(room)
        self.relevance.take_ready()

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
            found = in_one_step(self, self.scoring.replays.within(shared, prompt))
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
        self._ahead, self.logits = None, NO_LOGITS
        self.checkpoints.close()
        self.paging.clear()
        self.table.close()
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

    def _repair(self, after: AfterStep | None) -> None:
        """Read the newest tokens again with the whole text in view, where it is time."""
        if self.repair is not None and not self.ahead and self.repair.is_due(self.length):
            mend(self, self.repair, self.loss, after)

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
            with self.recovery.told():
                self.checkpoints.before_step(start, wanted=True)
        self.checkpoints.before_answer()
        self.relevance.take_ready()
        try:
            self.evaluate(
                tokens, output, after, generated=True, ahead=ahead, branches=branches,
                stream=self.reading.answers_exactly,
            )  # fmt: skip
            if repair is not None and branches is None:
                repair.generated(start, len(tokens))
        finally:
            if not ahead and self.length > start:  # not after a step that failed
                self.count_generated(self.length - start)

    # --- state

    def state(self, length: int | None = None, *, drafts: bool = True) -> SessionState:
        """The session as it is, or cut to its first `length` tokens, to be loaded later. See `restore.state`."""
        return restore.state(self, length, drafts=drafts)

    def kept_state(self) -> SessionState:
        """What is left of it without its devices, to be loaded on others. See `restore.kept_state`."""
        return restore.kept_state(self)

    def load(self, saved: SessionState, then: Callable[[SessionState], None] | None = None) -> None:
        """Replace everything by a saved session of this heap. See `restore.load`."""
        restore.load(self, saved, then)
