"""Generates one answer: prepares the steps that compute its tokens, and draws the tokens."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp

from ..errors import KVFlashError, SnapshotError
from ..sequence import prefill, together
from ..sequence.sequence import Sequence
from ..sequence.step import EVERY, LAST, Step
from ..speculation.draft import ROOT, Draft, chain
from ..speculation.tree import Rows
from ..speculation.tree import rows as arranged
from .reader import Reader

if TYPE_CHECKING:
    from ..speculation.loop import Speculator


@dataclass(slots=True)
class Verified:
    """A draft whose rows one step verifies. node: the newest accepted one. path: all accepted ones, in order.

    filled: there is no draft, and copies of the root only fill a step, see `Generation.level`. picks: the
    likeliest token after each row, where nothing else decides. child: the draft's node for the token that was drawn
    last; None where the draft was wrong.
    """

    draft: Draft
    rows: Rows
    speculator: Speculator
    filled: bool = False
    node: int = ROOT
    path: list[int] = field(default_factory=list)
    picks: list[int] | None = None
    child: int | None = None

    def end(self) -> None:
        """Tell the speculator which rows of the draft were accepted."""
        if self.filled:
            self.speculator.plain(len(self.rows), len(self.path))
        else:
            self.speculator.verified(self.path, len(self.rows), stopped=self.child is not None)


@dataclass(slots=True)
class Pending:
    """A step of an answer that may be computed with steps of other texts before the answer goes on.

    verified: the draft whose rows it has. reads: it reads a prompt. computed: it was, in `seconds`, with so many rows
    `beside` it, and `error` is what went wrong. Otherwise the answer computes it alone when it goes on.
    """

    answer: Generation
    sequence: Sequence
    step: Step
    verified: Verified | None = None
    reads: bool = False
    computed: bool = False
    seconds: float = 0.0
    beside: int = 0
    error: Exception | None = None

    @property
    def alone(self) -> bool:
        """Whether the step must be computed alone: it streams, or verifies a tree."""
        return self.step.view is not None or self.step.branches is not None

    @property
    def more(self) -> bool:
        """Whether another token can be drawn from the step, after the newest one."""
        return self.verified is not None and self.verified.child is not None

    @property
    def rows(self) -> int:
        return len(self.step.tokens)

    @property
    def failed(self) -> bool:
        """Whether no token can be drawn from the step."""
        return not self.computed or self.error is not None

    def finish(self) -> None:
        """Compute the step alone unless it was computed. Raise what went wrong with it."""
        if not self.computed:
            (self.error,) = together.compute([(self.sequence, self.step)])
            self.computed = True
        if self.error is not None:
            raise self.error


class Generation:
    """An answer: `accept` draws a token, `advance` prepares the step that computes it, `compute` does that step.

    After each token the text is what it would be without drafts: it ends before that token. pos: where the first token
    of the answer is drawn. sample: draws after a position. stopping: upstream's.
    """

    def __init__(
        self,
        reader: Reader,
        pos: int,
        *,
        sample: Callable[[int], int],
        stopping: llama_cpp.StoppingCriteriaList | None,
    ) -> None:
        self._reader = reader
        self._pos = pos
        self._sample = sample
        self._stopping = stopping
        self._token = 0  # the newest that was drawn
        self._likeliest: int | None = None  # the next one, if it is known already
        self._verified: Verified | None = None

    # --- the prompt

    def read(
        self, tokens: list[int], checkpoint: int | None, *, going_on: bool, shares: bool
    ) -> Iterator[Pending | None]:
        """Read the prompt. The next token can be drawn then.

        shares: a scheduler computes steps of several answers. A prompt that takes only one step yields None, so that
        other prompts can begin, and then its step.
        """
        reader = self._reader
        alone = not shares or going_on or checkpoint is not None or reader.on_logits is not None
        if not alone and prefill.may_share(reader.pooled, len(tokens)):
            yield None
            shared = reader.prepare_prompt(tokens)
            if shared is not None:
                pending = Pending(self, reader.pooled, shared.step, reads=True)
                yield pending
                self.compute(pending.step, pending)
                if pending.error is None:  # else the text was read again
                    shared.finish()
                return
        reader.evaluate(tokens, checkpoint=checkpoint, prompt=not going_on)

    # --- what is drawn

    def accept(self) -> int | None:
        """Draw the next token of the answer; None where a stopping criterion ends it."""
        if self._verified is not None:
            return self._accept_row(self._verified)
        reader, llm, pos = self._reader, self._reader.llm, self._pos
        if llm._logits_all and reader.sequence is not None and reader.logits_at(pos) is None:
            # several steps have read what was sent, and only the last one's logits are at hand
            reader.put_logits(pos, llm.scores[pos])
        known, self._likeliest = self._likeliest, None
        self._token = self._sample(pos) if known is None else known
        self._pos = pos + 1
        if reader.speculator is not None:
            reader.speculator.plain()
        if self._stopping is not None and self._stopping(llm._input_ids[: pos + 1], reader.logits_row(pos)):
            return None
        return self._token

    def _accept_row(self, verified: Verified) -> int | None:
        """Draw the next token where the step has verified a draft. The row before it becomes text."""
        reader, llm = self._reader, self._reader.llm
        row = verified.rows.of(verified.node)
        reader.keep(row)
        self._token = self._sample(llm.n_tokens - 1) if verified.picks is None else verified.picks[row]
        verified.child = verified.draft.child(verified.node, self._token)
        if self._stopping is not None and self._stopping(llm._input_ids, reader.logits_row(llm.n_tokens - 1)):
            verified.end()
            return None
        verified.speculator.pause()
        return self._token

    def leave(self) -> None:
        """End the answer: the caller wants no more tokens."""
        if self._verified is not None:
            self._verified.end()

    # --- what is computed

    def advance(self, sent: abc.Sequence[int] | None = None) -> Step | None:
        """Go on with the token that was drawn, and those that were sent after it.

        Returns a step to be computed; None where the next token can be drawn already.
        """
        reader, token, verified = self._reader, self._token, self._verified
        if verified is not None:
            if self._goes_on(verified, sent):
                return None
        elif not sent and self._pos < reader.llm.n_tokens:
            if token == reader.llm._input_ids[self._pos]:
                return None  # it is in the memory already
            reader.forget(self._pos)
        if sent or reader.sequence is None:
            self._evaluate([token, *(sent or ())])
            return None
        speculator = reader.speculator
        if speculator is not None and not reader.sequence.engine.closed:
            draft = speculator.propose(reader.sequence, token)
            if draft is not None:
                return self._prepare_draft(speculator, token, draft)
        self._pos = reader.llm.n_tokens
        return self._prepare(token)

    def pending(self, step: Step) -> Pending:
        """Return a step of `advance` as one that a scheduler may compute with steps of other answers."""
        if self._reader.speculator is not None:
            self._reader.speculator.pause()
        return Pending(self, self._reader.pooled, step, self._verified)

    def level(self, pending: Pending, rows: int) -> bool:
        """Prepare a step anew that is not computed yet, with `rows` rows: its draft, then copies of its root.

        The copies are rolled back like rejected drafts. Returns False, and changes nothing, where there is no room for
        them, nothing could roll back, or the rows would stream: such a step is computed alone.
        """
        reader, sequence, verified = self._reader, pending.sequence, self._verified
        speculator = reader.speculator
        if speculator is None or rows > min(sequence.room_ahead, sequence.engine.info.rs_planes + 1):
            return False
        root, draft = int(pending.step.tokens[0]), chain([], "") if verified is None else verified.draft
        draft = draft.first(rows - 1).padded(rows - 1, root)
        try:
            step = sequence.prepare_drafts(arranged(root, draft).tokens, None)
        except KVFlashError:
            return False
        if step.view is not None:  # one token fits the pool as it lies; more rows evict a chunk
            return False
        if verified is not None:
            speculator.cut(rows - 1)
        filled = verified is None or verified.filled or rows == 1
        self._verified = pending.verified = Verified(draft, arranged(root, draft), speculator, filled)
        pending.step = step
        return True

    def compute(self, step: Step, pending: Pending | None = None) -> None:
        """Compute a step of `advance`, or go on with one that was `pending` and computed with others.

        Where a draft cannot be verified, its root is evaluated alone.
        """
        reader, sequence, verified = self._reader, self._reader.pooled, self._verified
        try:
            if pending is None:
                sequence.finish(step)
            else:
                if reader.speculator is not None:
                    reader.speculator.resume(pending.seconds, pending.beside)
                pending.finish()
                step = pending.step
                self._likeliest = step.likeliest[-1] if reader.greedy and verified is None else None
        except KVFlashError as err:
            if verified is not None:
                self._refuse(verified, err)
                return
            reader.requires_eval = True
            if isinstance(err, SnapshotError):
                reader.read_again(err, step.start, step.tokens)
            elif pending is not None and pending.beside and sequence.length < step.start:
                # a step of several failed, and recurrent state has gone back further
                reader.read_again(err, step.start, step.tokens, kept=sequence.length)
            else:
                raise
        except BaseException:
            reader.requires_eval = True
            raise
        if verified is not None and reader.greedy:
            verified.picks = step.likeliest or sequence.engine.argmax(range(len(verified.rows))).tolist()

    def _prepare(self, token: int) -> Step | None:
        """Prepare the step of one token. None if the text had to be prefilled again, with the token."""
        reader, sequence = self._reader, self._reader.pooled
        tokens, known = reader.admit([token]), None
        try:
            if sequence.engine.closed:
                sequence.check_open()
            sequence.settle()
            if sequence.length != reader.llm.n_tokens:
                reader.catch_up()
            known = sequence.length
            return sequence.prepare_answer(tokens, EVERY if reader.llm._logits_all else LAST, reader.after_step)
        except BaseException as err:
            reader.requires_eval = True
            if not isinstance(err, SnapshotError):
                raise
            reader.read_again(err, known, tokens)
        return None

    def _prepare_draft(self, speculator: Speculator, token: int, draft: Draft) -> Step | None:
        """Prepare the step of a token and the draft after it. None if the token was evaluated alone."""
        reader, sequence = self._reader, self._reader.pooled
        rows = arranged(token, draft)
        self._verified = Verified(draft, rows, speculator)
        try:
            reader.catch_up()
            return sequence.prepare_drafts(rows.tokens, None if draft.is_chain else rows.branches)
        except KVFlashError as err:
            self._refuse(self._verified, err)
        return None

    def _refuse(self, verified: Verified, why: KVFlashError) -> None:
        """Evaluate the root of a draft alone, since the draft cannot be verified."""
        self._verified = None
        verified.speculator.refused(why)
        # which reads again what is lost, and fails where this would fail without drafts
        self._reader.evaluate(verified.rows.tokens[:1].tolist())
        self._pos = self._reader.llm.n_tokens - 1

    def _goes_on(self, verified: Verified, sent: abc.Sequence[int] | None) -> bool:
        """Report whether the newest token is the next row of the draft. If not, end the draft."""
        reader, sequence = self._reader, self._reader.pooled
        verified.speculator.resume()
        # somebody may have settled them, or set n_tokens
        if not sent and verified.child is not None and sequence.ahead and sequence.length == reader.llm.n_tokens:
            verified.node = verified.child
            verified.path.append(verified.node)
            return True
        sequence.settle()
        verified.end()
        self._verified = None
        return False

    def _evaluate(self, pending: list[int]) -> None:
        """Evaluate tokens at once. Where logits are kept of all of them, the token after each is drawn, as upstream
        does it. Without a pool drafts are in the memory with them, and cut off again.
        """
        reader, start = self._reader, self._reader.llm.n_tokens
        every = len(pending) == 1 or reader.llm._logits_all
        drafts = self._stock_drafts(pending[0]) if reader.sequence is None and len(pending) == 1 else []
        reader.evaluate([*pending, *drafts])
        self._pos = start if every else start + len(pending) - 1

    def _stock_drafts(self, token: int) -> list[int]:
        """Return what upstream's `draft_model` proposes after a token, as far as there is room."""
        llm = self._reader.llm
        if llm.draft_model is None:
            return []
        room = min(llm._n_ctx - llm.n_tokens, llm.context_params.n_ubatch or llm.n_batch) - 1
        if room <= 0:
            return []
        llm.input_ids[llm.n_tokens] = token
        return [int(draft) for draft in llm.draft_model(llm.input_ids[: llm.n_tokens + 1])[:room]]


def limited(llm: Any, completion: Iterator[Any], most: int | None, *, echoes: bool) -> Iterator[Any]:
    """Yield a completion of a Llama, and tell it how many tokens `generate` is asked for, and what `_scores` serve."""
    llm.kvflash_most, llm._echoes = most if most and most > 0 else None, echoes
    try:
        yield from completion
    finally:
        llm.kvflash_most, llm._echoes = None, False
