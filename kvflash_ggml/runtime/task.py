"""One request: the steps of its prompt, then the steps that compute its tokens, which it draws."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays import Int32s
from ..errors import ConfigError, KVFlashError, NotFinite, SnapshotError
from ..logs import Progress
from ..sequence import prefill, together
from ..sequence.step import EVERY, LAST, Step
from .hints import SharedCores
from .saving import Saver
from .text import OnLogits

if TYPE_CHECKING:
    from ..sequence.sequence import Sequence
    from ..speculation.draft import Draft
    from ..speculation.loop import Speculator, Verified

Stopping = Callable[[Any, Any], bool]

STANDS = 0.3
"""In an answer "auto" a draft token of the pool stays if the whole text finds it at least so likely, as a share of the
likeliest token. Where pools of two models lost a value it was 0.46 at most, in 26 of 28 cases below 0.14.
"""

Pieces = Generator["Pending | None"]
"""Steps to be computed, and None where steps of other requests may come."""


@dataclass(slots=True)
class Pending:
    """A step of an answer that may be computed with steps of other texts before the answer goes on.

    verified: the draft whose rows it has. reads: it reads a prompt; piece: or one part of several. computed: it was, in
    `seconds`, with so many rows `beside` it, and `error` is what went wrong. Otherwise the answer computes it alone
    when it goes on.
    """

    task: Task
    sequence: Sequence
    step: Step
    verified: Verified | None = None
    reads: bool = False
    piece: bool = False
    computed: bool = False
    seconds: float = 0.0
    beside: int = 0
    error: Exception | None = None

    @property
    def alone(self) -> bool:
        """Whether the step must be computed alone: it streams, verifies a tree, or is one of several of a prompt."""
        return self.piece or self.step.view is not None or self.step.branches is not None

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
            self.computed = True
            if self.piece:
                prefill.compute(self.sequence, self.step)
                return
            (self.error,) = together.compute([(self.sequence, self.step)])
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """What a task is asked for.

    tokens: of the prompt, which takes the place of the text; follows: they come after the text instead. sampler: draws
    the tokens. sample: called with a position, returns the token after it; None for the sampler's. greedy: that is the
    likeliest one, and nothing else changes it. stopping: upstream's. drawn: the prompt's only token is one of an answer
    that was put aside. most: tokens that are drawn, if that is known. branch: where to keep what is not pooled, because
    other texts go on differently from there; None for where the prefix cache knows of some.

    reading, answer: how the prompt is read, and what generated tokens see; None for the model's. drafts: whether drafts
    are verified. cached: whether the prefix cache is used. progress: called as (done, total) behind each step of the
    prompt. on_logits: see `Text`. together: steps can be computed with steps of other texts.
    """

    tokens: Int32s
    sampler: Any
    follows: bool = False
    sample: Callable[[int], int] | None = None
    greedy: bool = False
    stopping: Stopping | None = None
    drawn: bool = False
    most: int | None = None
    branch: int | None = None
    reading: str | None = None
    answer: str | None = None
    drafts: bool = True
    cached: bool = True
    progress: Progress | None = None
    on_logits: OnLogits | None = None
    together: bool = False


class Task:
    """One request on a text. After each token the text is what it would be without drafts.

    reads: the prompt is read in steps of its own, or the text is read again: nothing can be drawn before the last one.
    """

    def __init__(self, saver: Saver, request: TaskRequest) -> None:
        self._saver = saver
        self._text = text = saver.text
        self._request = request
        self._sample = request.sample or text.draw
        self._pos = 0  # the next token is drawn after it
        self._token = 0  # the newest that was drawn
        self._likeliest: int | None = None  # the next one, if it is known already
        self._verified: Verified | None = None
        self._trusted = ""  # the drafter whose tokens stay unless the whole text finds them unlikely
        self._piece: Pending | None = None  # the step that is computed next, of several of a prompt
        self.reads = False

    def steps(self) -> Generator[int | Pending | None, abc.Sequence[int] | None]:
        """Yield the tokens of the answer. Tokens that are sent in come after the one that was yielded.

        Yields each step of the prompt before it is computed too, and with `together` each step of the answer. It is
        computed when the caller goes on, unless it was. None: steps of other requests may come first, or their prompts
        be read.
        """
        request, text = self._request, self._text
        saver, finder, cores = self._saver, text.model.finder, SharedCores(text.model.n_threads)
        tokens, sequence = request.tokens, text.sequence
        text.sampler, text.greedy = request.sampler, request.greedy
        if sequence is not None:
            sequence.engine.check_open()
            sequence.settle()
        if finder is not None and sequence is not None and not sequence.config.same_bits:
            finder.settle(sequence)
        self._trusted = self._find_trusted()
        with self._as_asked(), nullcontext() if finder is None else finder.behind():
            if text.speculator is not None:
                text.speculator.begin(len(tokens) + (text.n_tokens if request.follows else 0), request.most)
            began, place = cores.begin(), None
            if not request.follows:
                tokens = tokens[saver.reuse_prefix(tokens) :]
                place = saver.branch(request.tokens, request.branch)
            self._pos = text.n_tokens + len(tokens) - 1
            yield from self._read(tokens, place)
            text.on_logits = None
            if not request.follows and sequence is not None:
                text.keep_end()
            try:
                saver.keep_prefix()
                while (token := self._accept()) is not None:
                    try:
                        sent = yield token
                    except GeneratorExit:
                        if self._verified is not None:
                            self._verified.end()
                        raise
                    step = self._advance(sent)
                    if isinstance(step, Step):
                        pending = None
                        if request.together:
                            pending = self._pending(step)
                            yield pending
                        step = self._compute(step, pending)
                    if step is not None:
                        yield from self._pieces(step)
            except NotFinite:
                text.reset()  # it is not kept for later
                raise
            finally:
                saver.keep_prefix()
                if sequence is not None and not sequence.engine.closed:
                    sequence.settle()
                    if sequence.engine.info.host_compute:
                        cores.end(began)
                    if finder is not None and sequence.length > sequence.pool.share:
                        finder.start()

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        """Override, for this request, how its prompt is read, what its tokens see, and what is drafted and kept.

        What is known of the prompt stays as it was read. ConfigError for what the model was not opened for.
        """
        text, request = self._text, self._request
        for name, value, possible in (
            ("reading", request.reading, text.readings),
            ("answer", request.answer, text.answers),
        ):
            if value is not None and value not in possible:
                here = f"{name} can be {' or '.join(possible)} here, not {value!r}"
                raise ConfigError(f"{here}: make the model with kvflash_{name}={value!r}")
        sequence, speculator, prefixes = text.sequence, text.speculator, text.prefixes
        before = None if sequence is None else sequence.reading
        if sequence is not None and sequence.pool.stage_slots > 0:
            exact = sequence.reading.exact if request.reading is None else request.reading == "exact"
            whole = sequence.reading.answers_exactly if request.answer is None else request.answer != "pool"
            sequence.reading = replace(sequence.reading, exact=exact, answers_exactly=whole)
        text.on_logits = request.on_logits
        if not request.drafts:
            text.speculator = None
        if not request.cached:
            text.prefixes = None
        try:
            yield
        finally:
            text.on_logits = None
            if not request.drafts:
                text.speculator = speculator
            if not request.cached:
                text.prefixes = prefixes
            if sequence is not None and before is not None:
                sequence.reading = before

    def _find_trusted(self) -> str:
        """Return the drafter whose tokens may stay where the whole text would draw others: the pool's, or nobody's."""
        request, sequence = self._request, self._text.sequence
        if sequence is None or (request.answer or sequence.config.answer) != "auto" or request.sample is not None:
            return ""
        from .pool_drafter import NAME  # here: most answers have no drafts
        from .samplers import can_take

        return NAME if request.greedy or can_take(request.sampler) else ""

    # --- the prompt

    def _read(self, tokens: Int32s, checkpoint: int | None) -> Pieces:
        """Read the prompt. The next token can be drawn then."""
        text, request = self._text, self._request
        alone = request.drawn or checkpoint is not None or text.on_logits is not None
        if request.together and not alone and prefill.may_share(text.pooled, len(tokens)):
            yield None
            shared = text.prepare_prompt(tokens, request.progress)
            if shared is not None:
                pending = Pending(self, text.pooled, shared.step, reads=True)
                yield pending
                again = self._compute(pending.step, pending)
                if again is None:
                    shared.finish()
                else:
                    yield from self._pieces(again)
                return
        reading = text.read(tokens, checkpoint=checkpoint, prompt=not request.drawn, progress=request.progress)
        # where nothing is read, the logits are at hand until the next step
        yield from self._pieces(reading, waits=len(tokens) > 0)

    def _pieces(self, reading: prefill.Pieces, *, waits: bool = True) -> Pieces:
        """Yield the steps of a reading. waits: and None before the first one."""
        self.reads = True
        try:
            if waits:
                yield None
            with closing(prefill.computed(reading, self._finish_piece)) as steps:
                for step in steps:
                    self._piece = None if step is None else Pending(self, self._text.pooled, step, None, True, True)
                    yield self._piece
        finally:
            self.reads, self._piece = False, None

    def _finish_piece(self, step: Step) -> None:
        assert self._piece is not None
        self._piece.finish()

    # --- what is drawn

    def _accept(self) -> int | None:
        """Draw the next token of the answer; None where a stopping criterion ends it."""
        if self._verified is not None:
            return self._accept_row(self._verified)
        text, pos, stopping = self._text, self._pos, self._request.stopping
        if text.model.logits_all and text.sequence is not None and text.logits_at(pos) is None:
            # several steps have read what was sent, and only the last one's logits are at hand
            text.put_logits(pos, text.scores[pos])
        known, self._likeliest = self._likeliest, None
        self._token = self._sample(pos) if known is None else known
        self._pos = pos + 1
        if text.speculator is not None:
            text.speculator.plain()
        if stopping is not None and stopping(text.ids[: pos + 1], text.logits_row(pos)):
            return None
        return self._token

    def _accept_row(self, verified: Verified) -> int | None:
        """Draw the next token where the step has verified a draft. The row before it becomes text."""
        text, stopping = self._text, self._request.stopping
        row = verified.rows.of(verified.node)
        text.keep(row)
        self._token = self._draw_row(verified, row)
        verified.child = verified.draft.child(verified.node, self._token)
        if stopping is not None and stopping(text.ids, text.logits_row(text.n_tokens - 1)):
            verified.end()
            return None
        verified.speculator.pause()
        return self._token

    def _draw_row(self, verified: Verified, row: int) -> int:
        """Return the token after a row: what the pool has drafted, where that may stay, or what is drawn."""
        text, drafted = self._text, verified.next_of(self._trusted) if self._trusted else None
        likeliest = None if verified.picks is None else verified.picks[row]
        if drafted is not None and drafted != likeliest and text.finds_likely(drafted, STANDS):
            if likeliest is None:
                from .samplers import take  # here, as above

                take(text.sampler, drafted)
            return drafted
        token = self._sample(text.n_tokens - 1) if likeliest is None else likeliest
        if drafted not in (None, token):
            verified.speculator.replaced()
        return token

    # --- what is computed

    def _advance(self, sent: abc.Sequence[int] | None = None) -> Step | prefill.Pieces | None:
        """Go on with the token that was drawn, and those that were sent after it.

        Returns a step to be computed, or several; None where the next token can be drawn already.
        """
        text, token, verified = self._text, self._token, self._verified
        if verified is not None:
            if self._goes_on(verified, sent):
                return None
        elif not sent and self._pos < text.n_tokens:
            if token == text.ids[self._pos]:
                return None  # it is in the memory already
            text.forget(self._pos)
        if sent or text.sequence is None:
            return self._evaluate([token, *(sent or ())])
        speculator = text.speculator
        if speculator is not None and not text.sequence.engine.closed:
            draft = speculator.propose(text.sequence, token)
            if draft is not None:
                return self._prepare_draft(speculator, token, draft)
        self._pos = text.n_tokens
        return self._prepare(token)

    def _pending(self, step: Step) -> Pending:
        """Return a step of `_advance` as one that a scheduler may compute with steps of other answers."""
        if self._text.speculator is not None:
            self._text.speculator.pause()
        return Pending(self, self._text.pooled, step, self._verified)

    def level(self, pending: Pending, rows: int) -> bool:
        """Prepare a step anew that is not computed yet, with `rows` rows: its draft, then copies of its root.

        The copies are rolled back like rejected drafts. Returns False, and changes nothing, where there is no room for
        them, nothing could roll back, or the rows would stream: such a step is computed alone.
        """
        text, sequence, verified = self._text, pending.sequence, self._verified
        speculator = text.speculator
        if speculator is None or rows > min(sequence.room_ahead, sequence.engine.info.rs_planes + 1):
            return False
        levelled = speculator.levelled(int(pending.step.tokens[0]), verified, rows)
        try:
            step = sequence.prepare_drafts(levelled.rows.tokens, None)
        except KVFlashError:
            return False
        if step.view is not None:  # one token fits the pool as it lies; more rows evict a chunk
            return False
        if verified is not None:
            speculator.cut(rows - 1)
        self._verified = pending.verified = levelled
        pending.step = step
        return True

    def _compute(self, step: Step, pending: Pending | None) -> prefill.Pieces | None:
        """Compute a step of `_advance`, or go on with one that was `pending` and computed with others.

        Returns what must be read then: the root alone of a draft that cannot be verified, or the text again.
        """
        text, sequence, verified = self._text, self._text.sequence, self._verified
        assert sequence is not None
        try:
            if pending is None:
                sequence.finish(step)
            else:
                if text.speculator is not None:
                    text.speculator.resume(pending.seconds, pending.beside)
                pending.finish()
                step = pending.step
                self._likeliest = step.likeliest[-1] if text.greedy and verified is None else None
        except KVFlashError as err:
            if verified is not None:
                return self._refuse(verified, err)
            text.requires_eval = True
            kept = 0
            if not isinstance(err, SnapshotError):
                if pending is None or not pending.beside or sequence.length >= step.start:
                    raise
                kept = sequence.length  # a step of several failed, and recurrent state has gone back further
            return text.read_again(err, step.start, step.tokens, kept=kept, progress=self._request.progress)
        except BaseException:
            text.requires_eval = True
            raise
        if verified is not None and text.greedy:
            verified.picks = step.likeliest or sequence.engine.argmax(range(len(verified.rows))).tolist()
        return None

    def _prepare(self, token: int) -> Step | prefill.Pieces:
        """Prepare the step of one token, or to prefill the text again, with the token."""
        text, sequence = self._text, self._text.sequence
        assert sequence is not None
        tokens, known = text.admit([token]), None
        try:
            if sequence.engine.closed:
                sequence.engine.check_open()
            sequence.settle()
            if sequence.length != text.n_tokens:
                text.catch_up()
            known = sequence.length
            return sequence.prepare_answer(tokens, EVERY if text.model.logits_all else LAST, text.after_step)
        except BaseException as err:
            text.requires_eval = True
            if not isinstance(err, SnapshotError):
                raise
            return text.read_again(err, known, tokens, progress=self._request.progress)

    def _prepare_draft(self, speculator: Speculator, token: int, draft: Draft) -> Step | prefill.Pieces:
        """Prepare the step of a token and the draft after it, or to read the token alone."""
        text, sequence = self._text, self._text.pooled
        self._verified = verified = speculator.arranged(token, draft)
        try:
            text.catch_up()
            return sequence.prepare_drafts(verified.rows.tokens, None if draft.is_chain else verified.rows.branches)
        except KVFlashError as err:
            return self._refuse(verified, err)

    def _refuse(self, verified: Verified, why: KVFlashError) -> prefill.Pieces:
        """Return how to read the root of a draft alone, since the draft cannot be verified."""
        self._verified = None
        verified.speculator.refused(why)
        self._pos = self._text.n_tokens
        # which reads again what is lost, and fails where this would fail without drafts
        return self._text.read(verified.rows.tokens[:1].tolist(), progress=self._request.progress)

    def _goes_on(self, verified: Verified, sent: abc.Sequence[int] | None) -> bool:
        """Report whether the newest token is the next row of the draft. If not, end the draft."""
        text, sequence = self._text, self._text.pooled
        verified.speculator.resume()
        # somebody may have settled them, or set n_tokens
        if not sent and verified.child is not None and sequence.ahead and sequence.length == text.n_tokens:
            verified.node = verified.child
            verified.path.append(verified.node)
            return True
        sequence.settle()
        verified.end()
        self._verified = None
        return False

    def _evaluate(self, tokens: list[int]) -> prefill.Pieces:
        """Return how to read tokens. Where logits are kept of all of them, the token after each is drawn, as upstream
        does it. Without a pool drafts are in the memory with them, and cut off again.
        """
        text, start = self._text, self._text.n_tokens
        every = len(tokens) == 1 or text.model.logits_all
        drafts = text.stock_drafts(tokens[0]) if text.sequence is None and len(tokens) == 1 else []
        self._pos = start if every else start + len(tokens) - 1
        return text.read([*tokens, *drafts], progress=self._request.progress)
