"""One sequence on a pool: the tokens read so far, where their KV lives, and the steps that extend or cut them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32s
from ..config import KVFlashConfig
from ..constants import CHUNK
from ..errors import ConfigError, ContextFull, KVFlashError
from ..host.heap import PageHeap
from ..pool.allocator import Blocks
from ..pool.masks import AlibiMask, SlotMask
from ..pool.page_table import Pager
from ..state.session import Limits, SavedPolicy, SavedSession
from ..trace.events import Watch
from . import restore
from .checkpoints import Checkpoints
from .paging import Paging
from .reselect import TAU, Reselector
from .step import AfterStep, Output, evaluate
from .unfinished import Unfinished

if TYPE_CHECKING:
    from ..native.engine import Engine
    from ..policy.base import Scorer

logger = logging.getLogger("kvflash_ggml")

Progress = Callable[[int, int], None]

REPLAY = 64
"""Tokens at the end of a prompt that are taken for its question."""


class Session:
    """Everything between the tokens and the engine.

    engine: on a context with a pool. n_ctx: logical limit. n_batch, n_ubatch: how stock llama.cpp would split a prompt;
    kept, so that a pool that holds the whole context computes the same bits. scorer: who stays resident, None for pure
    recency. block_order: placement, for tests.
    """

    def __init__(
        self,
        engine: Engine,
        config: KVFlashConfig,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        scorer: Scorer | None = None,
        block_order: Sequence[int] | None = None,
    ) -> None:
        info = engine.info
        self.engine = engine
        self.config = config
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_ubatch = n_ubatch
        self.has_logits = False  # of the last token
        self.ids = np.zeros(n_ctx, np.int32)
        self.bounded = info.n_slots < n_ctx
        if self.bounded and info.v_trans:
            raise ConfigError("a pool smaller than the context needs flash attention: without it V cannot be paged")

        blocks = Blocks(info.n_slots // CHUNK, block_order)
        self.pager = Pager(blocks, sinks=config.sinks, tail=config.tail, bounded=self.bounded)
        self.mask = (AlibiMask if info.alibi else SlotMask)(info.n_slots, n_ubatch, f32=info.mask_f32)
        heap = PageHeap(engine, info.page_bytes, limit=config.host_limit, spill=config.spill)
        self.paging = Paging(engine, self.pager, self.mask, heap, self.ids, self._indexed)
        self.store = self.paging.store
        engine.use_mask(self.mask.rows)
        self._pin()

        self.queries_from = 0  # captured queries of earlier tokens are not of this text
        self.reselect_due = False  # the scores of a look have been taken over, and no step has acted on them yet
        self.unfinished = Unfinished()
        self.checkpoints = Checkpoints(engine, most=config.checkpoints, n_ctx=n_ctx)
        self.watch = Watch(scorer)
        self.reselector: Reselector | None = None
        if self.bounded and scorer is not None:
            tau = config.tau or (TAU if config.deterministic else None)
            self.reselector = Reselector(engine, self.store, scorer, tau=tau, n_chunks=-(-n_ctx // CHUNK))

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.pager.length

    @property
    def tokens(self) -> Int32s:
        """The tokens whose KV is in the pool or on the host, shape [length]."""
        return self.ids[: self.length]

    @property
    def outgrown(self) -> bool:
        """Has the text become longer than the pool?"""
        return self.length > self.engine.info.n_slots

    @property
    def page_ins(self) -> int:
        return self.paging.page_ins

    @property
    def page_outs(self) -> int:
        return self.paging.page_outs

    @property
    def policy(self) -> str:
        """The name of the policy at work."""
        if not self.bounded:
            return "none needed"
        return "lru" if self.reselector is None else self.reselector.scorer.name

    @property
    def index_bytes(self) -> int:
        """Bytes that the policy's statistics take for a whole context."""
        return 0 if self.reselector is None else self.reselector.scorer.index_bytes

    # --- extend

    def extend(
        self,
        tokens: Int32s,
        *,
        output_all: bool = False,
        generated: bool = False,
        after: AfterStep | None = None,
        progress: Progress | None = None,
        checkpoint: int | None = None,
    ) -> None:
        """Evaluate tokens after those read so far. Logits of the last are kept, or of all with `output_all`.

        generated: the tokens are the model's own (one, or drafts to verify that fit one step), not a prompt.

        after(start, count) runs after each step, while the logits of its `count` tokens are at hand.
        checkpoint: a position within a prompt at which to keep what is not pooled, to go back to.
        progress(done, total) runs after each step of a prompt, and may not change the text. On DecodeError and the
        other errors of this package the steps that were done stay done: `length` tells how far.
        """
        if self.engine.closed:
            raise KVFlashError("this model is closed: make a new Llama")
        self.settle()
        if self.length + len(tokens) > self.n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.length + len(tokens)}) exceed context window of {self.n_ctx}"
                f" (the pool holds {self.engine.info.n_slots} of them at a time)"
            )
        if generated or len(tokens) == 1:
            self._generate_step(tokens, output_all=output_all, after=after)
            return
        self._forget_scores()
        done, total = 0, len(tokens)
        last = total - self._replay_size(total)
        look = self.reselector is not None and self.config.reselect_prefill
        while done < total:
            batch_end = total if done >= last else min(last, (done // self.n_batch + 1) * self.n_batch)
            count = min(self.n_ubatch, batch_end - done, self.pager.room(self.length, spare=look and done < last))
            start = self.length
            if checkpoint is not None and done < last and start < checkpoint < start + count:
                count = checkpoint - start
            self.checkpoints.before_step(start, wanted=done + count == total or start == checkpoint)
            self._use_look(hidden=True)
            output = Output(every=output_all, last=done + count == batch_end)
            evaluate(self, tokens[done : done + count], output, after)
            done += count
            if look or (done == total and self.reselector is not None):
                self._look(rows=None if done == total else 1)
            if progress is not None:
                progress(done, total)
                if self.length != start + count:
                    raise KVFlashError("the text was changed by the progress callback while it was read: read it again")
        if last < total:
            self._replay(tokens[last:], output_all=output_all, after=after)

    # --- relevance

    def _generate_step(self, tokens: Int32s, *, output_all: bool, after: AfterStep | None) -> None:
        """One step of generation: the fast path."""
        start, chooser = self.length, self.reselector
        if chooser is not None and chooser.ready:
            self._use_look(only_if_worth=True)
        try:
            evaluate(self, tokens, Output(every=output_all, last=True), after, generated=True)
        finally:
            done = self.length > start
            if done and chooser is not None and chooser.tick() and not self.pager.unsaved:
                self._look(rows=1)

    def _replay_size(self, total: int) -> int:
        """How many of the prompt's last tokens are evaluated twice: first to see what they ask for, then with it."""
        info = self.engine.info
        pageable = self.reselector is not None and self.length + total > info.n_slots
        can_go_back = self.config.checkpoints > 0 or not (info.recurrent or info.n_swa > 0)
        return min(REPLAY, self.n_ubatch, total) if pageable and can_go_back else 0

    def _replay(self, tokens: Int32s, *, output_all: bool, after: AfterStep | None) -> None:
        """Recall what the end of the prompt asks for, and evaluate it again, so that its logits have seen it."""
        start = self.length - len(tokens)
        if not self._use_look():
            return
        if not self.pager.would_recall(start):
            self.watch.changed(self.length, self.pager.resident_chunks, generating=False)
            return
        scores = self.pager.scores
        left = self.truncate(start)
        assert left == start, "a checkpoint is taken before the last step of a prompt"
        self.pager.scores, self.reselect_due = scores, True
        evaluate(self, tokens, Output(every=output_all, last=True), after)

    def _look(self, *, rows: int | None) -> None:
        """Score the chunks against the newest `rows` queries, or all that are kept: a question is read as a whole."""
        assert self.reselector is not None
        head = max(0, self.length - 1) // CHUNK
        kept = frozenset(self.pager.protected(head, head))
        known = self.length - self.queries_from
        self.reselector.look(self.tokens, self.length // CHUNK, kept, rows=rows, known=known)

    def _use_look(self, *, only_if_worth: bool = False, hidden: bool = False) -> bool:
        """Take over the scores of the last look. True if the next step is to rebuild the resident set from them."""
        if self.reselector is None:
            return False
        scores = self.reselector.take_hidden() if hidden else self.reselector.take()
        if scores is None:
            return False
        self.pager.scores = scores
        self.reselect_due = not only_if_worth or self.reselector.worth(scores, *self.pager.unprotected())
        self.watch.look(scores)
        return self.reselect_due

    def _forget_scores(self) -> None:
        """A new request: nothing that was scored for the last one may steer it."""
        self.pager.scores, self.reselect_due = None, False
        self.watch.forget()
        if self.reselector is not None:
            self.reselector.forget()

    def _indexed(self, chunks: Sequence[int]) -> None:
        """Images of sealed chunks are on the host: the policy may read their keys."""
        if self.reselector is not None:
            self.reselector.sealed(chunks)

    def settle(self) -> None:
        """Complete or take back what an interrupt has left half done: so begins everything that changes the text."""
        self.unfinished.settle()

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
        self.unfinished.begin(partial(self.cut_to, length, direct=self.can_truncate(length)))
        self.settle()
        return self.length

    def cut_to(self, length: int, *, direct: bool) -> None:
        """direct: nothing has to be restored for it. Can be done again wherever it was interrupted."""
        if not (direct and self.engine.truncate(length)):
            length = self.checkpoints.restore(length)
        self.has_logits = False
        self.queries_from = self.known_from(length)
        plan = self.pager.truncate(length)
        self.paging.apply(plan.moves, length)
        self.pager.commit(plan)
        self.checkpoints.forget(after=length)
        self.mask.rewind()
        self._cut_scores(length)
        self.watch.cut(length, self.pager.resident_chunks)

    def can_truncate(self, length: int) -> bool:
        """Would `truncate` leave exactly `length` tokens? Recurrent state can only stay or go as a whole."""
        return length in (0, self.length) or (not self.engine.info.recurrent and self._window_reaches(length))

    def left_after(self, length: int) -> int:
        """What `truncate` would leave."""
        if length >= self.length or (not self.engine.info.recurrent and self._window_reaches(length)):
            return min(length, self.length)
        return self.checkpoints.nearest(length)

    def rewind(self, length: int) -> None:
        """Forget tokens from `length` on, evaluating again whatever the memory could not keep."""
        again = self.ids[:length].copy()
        left = self.truncate(length)
        if left < length:
            self.extend(again[left:])

    def reset(self) -> None:
        """Forget everything but the settings."""
        self.unfinished.begin(self.clear)
        self.settle()

    def clear(self) -> None:
        """What `reset` does. Can be done again wherever it was interrupted."""
        self.has_logits = False
        self.engine.clear()
        self.paging.clear()
        self.pager.reset()
        self.mask.reset()
        self.queries_from = 0
        self.checkpoints.forget(after=0)
        self._pin()
        self._cut_scores(0)
        self.watch.forget()
        self.watch.cut(0, ())

    def reusable(self, shared: int, total: int) -> int:
        """How much of a known prefix to keep for a prompt of `total` tokens: its end is asked about as a whole.

        Less than `shared` where queries of the newest tokens have been overwritten by those of a text that is cut off.
        """
        rows = self.engine.info.query_rows
        known_from = self.known_from(min(shared, self.length))
        if self.reselector is None or total <= self.engine.info.n_slots or known_from <= total - rows:
            return shared
        return max(0, min(shared, total - rows))

    def known_from(self, length: int) -> int:
        """The first token whose query is still kept once the text has been cut to `length`."""
        if length >= self.length:
            return self.queries_from
        # newer tokens have taken the place of older queries
        return min(length, max(self.queries_from, self.length - self.engine.info.query_rows))

    # --- save and restore

    def freeze(self, length: int | None = None) -> SavedSession:
        """The session as it is, or cut to its first `length` tokens, to be restored later. See `restore.freeze`."""
        return restore.freeze(self, length)

    def restore(self, saved: SavedSession, then: Callable[[SavedSession], None] | None = None) -> None:
        """Replace everything by a frozen session of this heap. See `restore.restore`."""
        restore.restore(self, saved, then)

    def limits(self, n_vocab: int) -> Limits:
        """What a session can be that is restored here."""
        return Limits(n_ctx=self.n_ctx, n_vocab=n_vocab, queries=restore.query_size(self))

    @property
    def fresh_policy(self) -> SavedPolicy | None:
        """The clock of a policy that has not looked yet."""
        return None if self.reselector is None else self.reselector.fresh()

    def _cut_scores(self, length: int) -> None:
        self.pager.scores, self.reselect_due = None, False
        if self.reselector is not None:
            self.reselector.cut(length // CHUNK)

    def close(self) -> None:
        self.engine.synchronize()
        if self.reselector is not None:
            self.reselector.close()
        self.paging.close()
        self.engine.close()

    def pin_range(self, lo: int, hi: int) -> None:
        """Keep the chunks of tokens [lo, hi) resident from the next step on."""
        self.settle()
        self.pager.pin_range(lo, hi)

    def _pin(self) -> None:
        for lo, hi in self.config.pins:
            self.pager.pin_range(lo, hi)

    def _window_reaches(self, length: int) -> bool:
        """Do the sliding-window layers still hold the window that a token at `length` looks at?"""
        window = self.engine.info.n_swa
        return window == 0 or length == 0 or self.engine.window_start <= max(0, length - window)
