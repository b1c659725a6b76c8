"""One sequence on a pool: the tokens read so far, where their KV lives, and the steps that extend or cut them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .checkpoints import Checkpoints
from .config import CHUNK, KVFlashConfig
from .errors import ConfigError, ContextFull, KVFlashError, StateError
from .pool.blocks import Blocks
from .pool.masks import AlibiMask, SlotMask
from .pool.pager import ABSENT, Moves, Pager
from .pool.store import HostStore
from .reselect import Reselector
from .watch import Watch

if TYPE_CHECKING:
    from .native.engine import Engine
    from .policy.base import Scorer

logger = logging.getLogger("kvflash_ggml")

Int32s = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]
AfterStep = Callable[[int, int], None]

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
        self.length = 0
        self.ids = np.zeros(n_ctx, np.int32)
        self.bounded = info.n_slots < n_ctx
        if self.bounded and info.v_trans:
            raise ConfigError("a pool smaller than the context needs flash attention: without it V cannot be paged")

        blocks = Blocks(info.n_slots // CHUNK, block_order)
        self.pager = Pager(blocks, sinks=config.sinks, tail=config.tail, bounded=self.bounded)
        self.mask = (AlibiMask if info.alibi else SlotMask)(info.n_slots, n_ubatch, f32=info.mask_f32)
        self.store = HostStore(engine, info.page_bytes, limit=config.host_limit, spill=config.spill)
        engine.use_mask(self.mask.rows)
        self._pin()

        self.page_ins = 0
        self.page_outs = 0
        self._unsaved: list[int] = []  # sealed chunks whose bytes are on the device only
        self._wait = 0  # the transfer that frees the blocks the next step writes to
        self._queries_from = 0  # captured queries of earlier tokens are not of this text
        self._checkpoints = Checkpoints(engine, most=config.checkpoints, n_ctx=n_ctx)
        self.watch = Watch(scorer)
        self._reselector: Reselector | None = None
        if self.bounded and scorer is not None:
            self._reselector = Reselector(engine, self.store, scorer, tau=config.tau, n_chunks=-(-n_ctx // CHUNK))

    @property
    def tokens(self) -> Int32s:
        """The tokens whose KV is in the pool or on the host, shape [length]."""
        return self.ids[: self.length]

    @property
    def policy(self) -> str:
        """The name of the policy at work."""
        if not self.bounded:
            return "none needed"
        return "lru" if self._reselector is None else self._reselector.scorer.name

    @property
    def index_bytes(self) -> int:
        """Bytes that the policy's statistics take for a whole context."""
        return 0 if self._reselector is None else self._reselector.scorer.index_bytes

    # --- extend

    def extend(
        self,
        tokens: Int32s,
        *,
        output_all: bool = False,
        generated: bool = False,
        after: AfterStep | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Evaluate tokens after those read so far. Logits of the last are kept, or of all with `output_all`.

        generated: the tokens are the model's own (one, or drafts to verify that fit one step), not a prompt.

        after(start, count) runs after each step, while the logits of its `count` tokens are at hand.
        progress(done, total) runs after each step of a prompt. On DecodeError and the other errors of this package the
        steps that were done stay done: `length` tells how far.
        """
        if self.engine.closed:
            raise KVFlashError("this model is closed: make a new Llama")
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
        look = self._reselector is not None and self.config.reselect_prefill
        while done < total:
            batch_end = total if done >= last else min(last, (done // self.n_batch + 1) * self.n_batch)
            count = min(self.n_ubatch, batch_end - done, self.pager.room(self.length, spare=look and done < last))
            self._checkpoints.before_step(self.length, last=done + count == total)
            start = self.length
            reselect = self._use_look(hidden=True)
            self._step(
                tokens[done : done + count],
                output_all=output_all,
                output_last=done + count == batch_end,
                reselect=reselect,
            )
            done += count
            if look or (done == total and self._reselector is not None):
                self._look(rows=None if done == total else 1)
            if after is not None:
                after(start, count)
            if progress is not None:
                progress(done, total)
        if last < total:
            self._replay(tokens[last:], output_all=output_all, after=after)

    def _step(
        self, tokens: Int32s, *, output_all: bool, output_last: bool, reselect: bool = False, generated: bool = False
    ) -> None:
        engine, start, n = self.engine, self.length, len(tokens)
        if self._unsaved:
            self._save()
        try:
            moves = self.pager.reserve(start, n, reselect=reselect)
            self._apply(moves)
            if self.watch.looked or (moves and self.watch.observer is not None):
                recalled = [chunk for chunk, _ in moves.recall]
                self.watch.changed(start + n, self.pager.resident_chunks, recalled, generating=generated)
            slots = self.pager.slots(start, engine.slot[:n])
            self.mask.fill(start, slots)
            engine.token[:n] = tokens
            engine.pos[:n] = np.arange(start, start + n) if n > 1 else start
            engine.output[:n] = output_all
            engine.output[n - 1] = output_all or output_last
            engine.step(n, self._wait)
        except BaseException:
            self._undo_step()
            raise
        self._wait = 0
        self.ids[start : start + n] = tokens
        self.length += n
        sealed = self.pager.commit(n)
        if sealed and self.bounded:
            self._unsaved.extend(sealed)
            self._save()

    # --- relevance

    def _generate_step(self, tokens: Int32s, *, output_all: bool, after: AfterStep | None) -> None:
        """One step of generation: the fast path."""
        start, chooser = self.length, self._reselector
        reselect = chooser is not None and chooser.ready and self._use_look(only_if_worth=True)
        self._step(tokens, output_all=output_all, output_last=True, reselect=reselect, generated=True)
        if chooser is not None and chooser.tick():
            self._look(rows=1)
        if after is not None:
            after(start, len(tokens))

    def _replay_size(self, total: int) -> int:
        """How many of the prompt's last tokens are evaluated twice: first to see what they ask for, then with it."""
        info = self.engine.info
        pageable = self._reselector is not None and self.length + total > info.n_slots
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
        self.pager.scores = scores
        self._step(tokens, output_all=output_all, output_last=True, reselect=True)
        if after is not None:
            after(start, len(tokens))

    def _look(self, *, rows: int | None) -> None:
        """Score the chunks against the newest `rows` queries, or all that are kept: a question is read as a whole."""
        assert self._reselector is not None
        head = max(0, self.length - 1) // CHUNK
        kept = frozenset(self.pager.protected(head, head))
        known = self.length - self._queries_from
        self._reselector.look(self.tokens, self.length // CHUNK, kept, rows=rows, known=known)

    def _use_look(self, *, only_if_worth: bool = False, hidden: bool = False) -> bool:
        """Take over the scores of the last look. True if the resident set should be rebuilt from them."""
        if self._reselector is None:
            return False
        scores = self._reselector.take_hidden() if hidden else self._reselector.take()
        if scores is None:
            return False
        self.pager.scores = scores
        self.watch.look(scores)
        if only_if_worth:
            return self._reselector.worth(scores, *self.pager.unprotected())
        return True

    def _forget_scores(self) -> None:
        """A new request: nothing that was scored for the last one may steer it."""
        self.pager.scores = None
        self.watch.forget()
        if self._reselector is not None:
            self._reselector.forget()

    # --- moves

    def _apply(self, moves: Moves) -> None:
        """Do what the pager has decided."""
        if not moves:
            return
        for chunk, block in moves.evict:
            self.engine.clear_cells(block * CHUNK, CHUNK)
            self.mask.clear(block)
            self._wait = max(self._wait, self.store.ticket(chunk))
        for chunk in moves.drop:
            self.store.drop(chunk)
        if moves.recall:
            self._recall(moves.recall)
        for chunk, block in moves.fresh:
            self.mask.place(block, chunk)

    def _save(self) -> None:
        """Copy the chunks sealed since the last time to the host, behind the compute."""
        for chunk in self._unsaved:
            self.store.drop(chunk)  # an image from before a truncation
        for chunks in self.store.fitting(self._unsaved):
            with self.store.lock:  # or the scoring thread could spill an image that is not written yet
                images = self.store.allocate(chunks)
                ticket = self.engine.page_out([self.pager.chunks[chunk].block for chunk in chunks], images)
                for chunk in chunks:
                    self.store.written(chunk, ticket)
            self.page_outs += len(chunks)
            for chunk in chunks:
                self.pager.saved(chunk)
            self._unsaved = self._unsaved[len(chunks) :]
            if self._reselector is not None:
                self._reselector.sealed(chunks)

    def _recall(self, pages: list[tuple[int, int]]) -> None:
        try:
            self._fill(pages)
        except BaseException:
            for chunk, block in pages:
                self.engine.clear_cells(block * CHUNK, CHUNK)
                self.mask.clear(block)
                self.pager.recall_failed(chunk)
            raise
        self.page_ins += len(pages)

    def _fill(self, pages: list[tuple[int, int]]) -> None:
        """Copy page images into their blocks, ahead of the next compute."""
        for group in self.store.fitting(pages):
            with self.store.lock:  # or the scoring thread could spill an image that is being read
                images = [self.store.fetch(chunk) for chunk, _ in group]
                ticket = self.engine.page_in([block for _, block in group], images)
                for chunk, _ in group:
                    self.store.written(chunk, ticket)  # the image must outlive the transfer that reads it
            for chunk, block in group:
                lo = chunk * CHUNK
                self.engine.set_cells(block * CHUNK, lo, self.ids[lo : min(lo + CHUNK, self.length)])
                self.mask.place(block, chunk)

    def _undo_step(self) -> None:
        """A step has failed: what was reserved for it is given back. Everything before it stays, if the memory can."""
        if not self.engine.truncate(self.length):
            self.length = self._checkpoints.restore(self.length)
        self._queries_from = self.length  # it may have captured some before it failed
        self._apply(self.pager.truncate(self.length))
        self.mask.rewind()
        self.watch.cut(self.length, self.pager.resident_chunks)

    # --- cut

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on, on both tiers. Returns the length that is left.

        That is `length` itself, unless recurrent state or a sliding window cannot go back so far: then it is the
        nearest checkpoint before it, or 0. Nothing is evaluated here.
        """
        if length >= self.length:
            return self.length
        if not self._window_reaches(length) or not self.engine.truncate(length):
            length = self._checkpoints.restore(length)
        self._apply(self.pager.truncate(length))
        self._queries_from = self._known_from(length)
        self.length = length
        self._unsaved = [chunk for chunk in self._unsaved if chunk < length // CHUNK]
        self._checkpoints.forget(after=length)
        self._cut_scores(length)
        self.mask.rewind()
        self.watch.cut(length, self.pager.resident_chunks)
        return length

    def can_truncate(self, length: int) -> bool:
        """Would `truncate` leave exactly `length` tokens? Recurrent state can only stay or go as a whole."""
        return length in (0, self.length) or (not self.engine.info.recurrent and self._window_reaches(length))

    def rewind(self, length: int) -> None:
        """Forget tokens from `length` on, evaluating again whatever the memory could not keep."""
        again = self.ids[:length].copy()
        left = self.truncate(length)
        if left < length:
            self.extend(again[left:])

    def reset(self) -> None:
        """Forget everything but the settings."""
        self.engine.clear()
        self.store.clear()
        self.pager.reset()
        self.mask.reset()
        self.length = 0
        self._queries_from = 0
        self._unsaved.clear()
        self._checkpoints.forget(after=0)
        self._cut_scores(0)
        self._pin()
        self.watch.forget()
        self.watch.cut(0, ())

    def reusable(self, shared: int, total: int) -> int:
        """How much of a known prefix to keep for a prompt of `total` tokens: its end is asked about as a whole.

        Less than `shared` where queries of the newest tokens have been overwritten by those of a text that is cut off.
        """
        rows = self.engine.info.query_rows
        known_from = self._known_from(min(shared, self.length))
        if self._reselector is None or total <= self.engine.info.n_slots or known_from <= total - rows:
            return shared
        return max(0, min(shared, total - rows))

    def _known_from(self, length: int) -> int:
        """The first token whose query is still kept once the text has been cut to `length`."""
        if length >= self.length:
            return self._queries_from
        # newer tokens have taken the place of older queries
        return min(length, max(self._queries_from, self.length - self.engine.info.query_rows))

    # --- save and restore

    def restore(self, tokens: Int32s, pages: Sequence[bytes], blocks: Sequence[int], state: bytes) -> None:
        """Replace everything by a text of `tokens`, its page images, their blocks (ABSENT: host only) and the state."""
        before = self.engine.get_state()
        try:
            self.engine.set_state(state)
        except StateError:
            self.engine.set_state(before)
            raise
        self.reset()
        self.length = self._queries_from = len(tokens)
        self.ids[: self.length] = tokens
        try:
            self.pager.adopt(self.length, blocks)
            for c, page in enumerate(pages):
                (address,) = self.store.allocate([c])
                self.engine.view(address, len(page))[:] = page
            self._fill([(c, block) for c, block in enumerate(blocks) if block != ABSENT])
            for c, chunk in enumerate(self.pager.chunks):
                if not chunk.on_host:
                    self.store.drop(c)
            self.engine.set_state(state)
            if self._reselector is not None:
                self._reselector.sealed(range(self.length // CHUNK))
            self.watch.cut(self.length, self.pager.resident_chunks)
        except BaseException:
            self.reset()
            raise

    def _cut_scores(self, length: int) -> None:
        self.pager.scores = None
        if self._reselector is not None:
            self._reselector.cut(length // CHUNK)

    def close(self) -> None:
        self.engine.synchronize()
        if self._reselector is not None:
            self._reselector.close()
        self.store.close()
        self.engine.close()

    def pin_range(self, lo: int, hi: int) -> None:
        """Keep the chunks of tokens [lo, hi) resident from the next step on."""
        self.pager.pin_range(lo, hi)

    def _pin(self) -> None:
        for lo, hi in self.config.pins:
            self.pager.pin_range(lo, hi)

    def _window_reaches(self, length: int) -> bool:
        """Do the sliding-window layers still hold the window that a token at `length` looks at?"""
        window = self.engine.info.n_swa
        return window == 0 or length == 0 or self.engine.window_start <= max(0, length - window)
