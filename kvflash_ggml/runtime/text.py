"""A text: its tokens and logits, as upstream's class shows them, and the sequence that has its memory."""

from __future__ import annotations

import logging
import math
from collections import abc
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s, Int64s, numbers
from ..constants import CHUNK
from ..errors import CLOSED, ConfigError, ContextFull, KVFlashError, NotFinite, SnapshotError
from ..logs import Progress
from ..sequence import prefill
from ..sequence.step import NO_LOGITS, Logits, Step
from .hints import SlowPrompt
from .model import Model

if TYPE_CHECKING:
    from ..sequence.sequence import Sequence
    from ..speculation.loop import Speculator
    from ..state.session import SessionState
    from ..store.prefixes import Prefixes

logger = logging.getLogger("kvflash_ggml")

PromptEnd = tuple[Int32s, npt.NDArray[np.single]]
"""A prompt that was read, and the logits [n_vocab] of its last token."""

OnLogits = abc.Callable[[int, npt.NDArray[np.single]], None]
"""Called with a position and the logits [count, n_vocab] of the tokens from there on. The next step overwrites them."""


class Unpooled(Protocol):
    """What upstream's class does by itself, see `llama.stock.Stock`."""

    def eval(self, tokens: abc.Sequence[int]) -> None: ...
    def reset(self) -> None: ...
    def sample(self, *args: Any, **kwargs: Any) -> int: ...
    def drafts(self, tokens: Any, room: int) -> list[int]: ...


class Text:
    """One text of a model: its tokens, their logits and their memory, kept in step.

    model: see `open`. n_tokens, input_ids [n_ctx], scores [rows, n_vocab], seed, sampler: upstream's fields. stock:
    what a text without a pool does; None for further texts. sampled_s: seconds that the newest token took to be drawn.
    progress: called as (done, total) behind the steps of prompts.

    sequence: the text on its pool; None without a pool. requires_eval: the logits of the newest token are not at hand,
    without a pool. speculator: what drafts; None where nobody does. prefixes: texts that are kept for later; None
    without such a cache. greedy: the running answer takes the likeliest token, and nothing else changes it. previewing:
    the text is a preview's, which stands in for another one. on_logits: is given the logits of each step of a prompt,
    with the position of the first. end: the newest prompt, and its last logits.
    """

    model: Model

    def __init__(self, stock: Unpooled | None = None) -> None:
        self._stock = stock
        self.n_tokens = 0
        self.input_ids: npt.NDArray[np.intc] = np.empty(0, np.intc)
        self.scores: npt.NDArray[np.single] = np.empty((0, 0), np.single)
        self.seed = 0
        self.sampler: Any = None
        self.sampled_s = 0.0
        self.progress: Progress | None = None
        self.sequence: Sequence | None = None
        self.requires_eval = False
        self.speculator: Speculator | None = None
        self.prefixes: Prefixes | None = None
        self.greedy = False
        self.previewing = False
        self._slow = SlowPrompt()
        self.on_logits: OnLogits | None = None
        self.end: PromptEnd | None = None

    def open(self, model: Model) -> None:
        """Make this a text of a model."""
        self.model = model
        self.input_ids = np.zeros(model.n_ctx, np.intc)
        if not len(self.scores):
            self.scores = np.empty((0, model.n_vocab), np.single)

    def _own(self) -> Unpooled:
        assert self._stock is not None
        return self._stock

    @property
    def ids(self) -> npt.NDArray[np.intc]:
        """The tokens of the text."""
        return self.input_ids[: self.n_tokens]

    @property
    def output_all(self) -> bool:
        """Whether the steps of a prompt compute the logits of all their tokens."""
        return self.model.logits_all or self.on_logits is not None

    @property
    def pooled(self) -> Sequence:
        """The sequence, for callers that know there is a pool."""
        assert self.sequence is not None
        return self.sequence

    @property
    def readings(self) -> tuple[str, ...]:
        """How prompts can be read: "pool", and "exact" where there are stages, or the pool holds all there can be."""
        sequence = self.sequence
        whole = sequence is not None and (sequence.pool.stage_slots > 0 or not sequence.bounded)
        return ("pool", "exact") if whole else ("pool",)

    @property
    def answers(self) -> tuple[str, ...]:
        """What a generated token can see: as `readings`, or "lossless" and "auto" in place of "exact" where the pool
        drafts.
        """
        sequence = self.sequence
        if sequence is None or not sequence.pool.stage_slots:
            return self.readings
        return ("pool", "lossless", "auto") if sequence.config.pool_drafts else ("pool", "exact")

    # --- evaluation

    def evaluate(self, tokens: abc.Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` read so far. ContextFull, and nothing evaluated, if they do not fit."""
        for _ in prefill.computed(self.read(tokens), self.compute):
            pass

    def compute(self, step: Step) -> None:
        """Compute a step of `read`."""
        prefill.compute(self.pooled, step)

    def read(
        self,
        tokens: abc.Sequence[int] | Int32s,
        *,
        checkpoint: int | None = None,
        prompt: bool = False,
        progress: Progress | None = None,
    ) -> prefill.Pieces:
        """Evaluate tokens as `evaluate` does, in steps that the caller computes.

        The other arguments are those of `prefill.pieces`; progress: of several tokens, None for the model's own.
        """
        sequence, data = self.sequence, self.admit(tokens)
        if sequence is None:
            self._own().eval(data.tolist())
            return
        known: int | None = None
        try:
            try:
                self.catch_up()
                known = sequence.length
                yield from self._extend(data, len(data), checkpoint=checkpoint, prompt=prompt, progress=progress)
            except SnapshotError as err:
                yield from self.read_again(err, known, data, prompt=prompt, progress=progress)
        except BaseException:
            self.requires_eval = True  # the last step that was done may have kept no logits
            raise

    def _extend(
        self,
        tokens: Int32s,
        count: int,
        *,
        checkpoint: int | None = None,
        prompt: bool = False,
        progress: Progress | None = None,
    ) -> prefill.Pieces:
        """Evaluate tokens, `count` of which were asked for. Progress is reported of more than one."""
        progress = progress or self.progress
        return prefill.pieces(
            self.pooled,
            tokens,
            output_all=self.output_all,
            after=self.after_step,
            progress=(progress or self._slow.begin()) if count > 1 else None,
            checkpoint=checkpoint,
            prompt=prompt,
        )

    def prepare_prompt(self, tokens: Int32s, progress: Progress | None) -> prefill.Prefill | None:
        """Prepare the one step of a prompt, to be computed with other prompts; None where it must be read."""
        data = self.admit(tokens)
        self.catch_up()
        self.pooled.begin(len(data))
        progress = progress if len(data) > 1 else None
        prompt = prefill.Prefill(self.pooled, data, self.output_all, self.after_step, progress, None)
        return prompt if prompt.prepare() else None

    def read_again(
        self,
        why: Exception,
        known: int | None,
        data: Int32s,
        *,
        prompt: bool = False,
        kept: int = 0,
        progress: Progress | None = None,
    ) -> prefill.Pieces:
        """Prefill the text again from token `kept` on, and `data` after it: a page image or state was lost.

        known: tokens that were read before `data`, None for all of `n_tokens`.
        """
        sequence = self.pooled
        what = f"the text from token {kept} on" if kept else "the whole text"
        logger.warning("%s: %s is read again", why, what)
        if self.prefixes is not None:
            self.prefixes.discard_lost()  # or it would be restored again
        text = np.concatenate([self.input_ids[: self.n_tokens if known is None else known], data])
        before = sequence.stats
        if not kept:
            sequence.reset()
        yield from self._extend(text[kept:], len(data), progress=progress)
        if len(data) == 1 and not prompt:  # of the same answer
            before.generated += 1
            before.generated_whole += bool(sequence.whole[len(text) - 1])
            sequence.stats = before

    def admit(self, tokens: abc.Sequence[int] | Int32s) -> Int32s:
        """Return the tokens as an array, and make room for their logits. ContextFull, or as `known`."""
        if self.n_tokens + len(tokens) > self.model.n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.n_tokens + len(tokens)}) exceed context window of {self.model.n_ctx}"
            )
        if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < self.model.n_vocab:
            data = np.array(tokens, np.int32)  # each step of an answer comes here, and the rest takes microseconds
        else:
            data = self.known(tokens)
        if self.model.logits_all:
            self.grow_scores(self.n_tokens + len(tokens))
        return data

    def known(self, tokens: abc.Sequence[int] | Int32s | Int64s, at_hand: int = 0) -> Int32s:
        """Return the tokens as an array. ConfigError for one that the model does not have, TypeError for no number.

        at_hand: this many leading tokens are known and not checked. Without a pool, an image that a chat handler has
        evaluated has places without tokens. With one its rows have negative numbers, see `MediaRows`.
        """
        ids, n_vocab = numbers(tokens), self.model.n_vocab
        strange = np.flatnonzero((ids[at_hand:] < 0) | (ids[at_hand:] >= n_vocab))
        if len(strange) and self.sequence is not None:
            media = self.sequence.pool.media
            strange = np.array([at for at in strange if ids[at_hand + at] not in media], np.intp)
        if len(strange):
            at = at_hand + strange[0]
            raise ConfigError(f"token {ids[at]} at {at} of {len(ids)}: this model has 0 to {n_vocab - 1}")
        return ids.astype(np.int32)

    def catch_up(self) -> None:
        """Bring the sequence to `n_tokens`, which inherited methods and users may have set."""
        sequence = self.pooled
        if not 0 <= self.n_tokens <= self.model.n_ctx:
            raise ConfigError(f"n_tokens = {self.n_tokens} must be from 0 to n_ctx = {self.model.n_ctx}")
        sequence.settle()
        if self.n_tokens < sequence.length:
            prefill.rewind_to(sequence, self.n_tokens)
        elif self.n_tokens > sequence.length:
            prefill.extend(sequence, self.input_ids[sequence.length : self.n_tokens].astype(np.int32))

    def after_step(self, start: int, count: int) -> None:
        """Take over what a step of the sequence has computed."""
        sequence = self.sequence
        assert sequence is not None
        self.input_ids[start : start + count] = sequence.ids[start : start + count]
        again = start < self.n_tokens < start + count  # these tokens are computed again, and the next ones were drawn
        known = self.n_tokens - start if again else 0
        if self.model.logits_all or self.on_logits is not None:  # without a call: every token comes here
            logits = np.ctypeslib.as_array(
                self.model.context.get_logits_ith(sequence.logits.first), shape=(count, self.model.n_vocab)
            )
            if self.model.logits_all:
                self.scores[start + known : start + count] = logits[known:]
            if self.on_logits is not None:
                self.on_logits(start + known, logits[known:])
        self.n_tokens = start + count
        self.requires_eval = False

    def keep(self, row: int) -> None:
        """Accept one more draft row."""
        sequence = self.pooled
        pos = self.n_tokens
        sequence.keep(row)
        if self.model.logits_all:
            self.grow_scores(pos + 1)
            row_at = sequence.logits.row(pos)
            assert row_at is not None
            logits = self.model.context.get_logits_ith(row_at)
            self.scores[pos] = np.ctypeslib.as_array(logits, shape=(self.model.n_vocab,))
        self.input_ids[pos] = sequence.ids[pos]
        self.n_tokens = pos + 1
        self.requires_eval = False

    # --- cuts

    def reset(self) -> None:
        """Forget the text. Settings and pins stay."""
        if self.sequence is None:
            self._own().reset()
            return
        self.n_tokens = 0
        self.requires_eval = True
        self.sequence.reset()

    def cut(self, length: int) -> int:
        """Cut the text to `length` tokens; return how many are left. They are fewer if memory must go back further."""
        if self.sequence is not None:
            return self.sequence.truncate(min(length, self.sequence.length))
        return length if self.model.context.kv_cache_seq_rm(-1, length, -1) else 0

    def forget(self, length: int) -> None:
        """Cut the text to `length` tokens, and prefill again what memory could not keep."""
        left = self.cut(length)
        self.n_tokens = length
        self.requires_eval = True
        if left < length and self.sequence is None:
            again = self.input_ids[:length].tolist()
            self.reset()
            self.evaluate(again)

    def follow(self, saved: SessionState) -> None:
        """Take over a session that the sequence has loaded."""
        self.n_tokens = 0  # interrupted here, no text is known, or all of one: never a mixture
        self.input_ids[: saved.length] = saved.tokens
        self.n_tokens = saved.length
        if saved.logits is not None:
            self.put_logits(self.n_tokens - 1, saved.logits)
        if self.model.logits_all:
            self.grow_scores(self.n_tokens)
            self.scores[: self.n_tokens] = np.nan
            if saved.logits is not None:
                self.scores[self.n_tokens - 1] = saved.logits

    # --- logits

    @property
    def logits_at_hand(self) -> bool:
        """Whether a token that follows the text can be sampled."""
        if self.sequence is None:
            return not self.requires_eval
        return self.logits_at(self.n_tokens - 1) is not None

    def logits_at(self, pos: int) -> int | None:
        """Return the row of the newest step with the logits of a position; None if they were not kept."""
        sequence, n_tokens = self.sequence, int(self.n_tokens)
        if sequence is None:
            return pos - n_tokens
        return sequence.logits.row(pos) if sequence.length == n_tokens else None

    def logits_row(self, pos: int) -> npt.NDArray[np.single]:
        """Return the logits at `pos` [n_vocab]. KVFlashError unless the newest step has kept them."""
        at = self.logits_at(pos)
        row = None if at is None else self.model.context.get_logits_ith(at)
        if not row:
            raise self._no_logits(pos)
        return np.ctypeslib.as_array(row, shape=(self.model.n_vocab,))

    def _no_logits(self, pos: int) -> KVFlashError:
        n_tokens = self.n_tokens
        if self.sequence is not None and self.sequence.engine.closed:
            return KVFlashError(CLOSED)
        if n_tokens == 0:
            return KVFlashError("nothing has been read that a token could follow: eval a text first")
        return KVFlashError(
            f"no logits are kept of position {pos} of {n_tokens}: it was not evaluated last (by another "
            f"generator of the same model, perhaps), or logits_all=True is needed"
        )

    def finds_likely(self, token: int, share: float) -> bool:
        """Tell whether a token is at least `share` times as likely as the likeliest one, after the newest position."""
        row = self.logits_row(self.n_tokens - 1)
        return math.isfinite(row[token]) and bool(row[token] >= row.max() + math.log(share))

    def put_logits(self, pos: int, row: npt.NDArray[np.single]) -> None:
        """Make `row` [n_vocab] the logits at `pos`; no other logits are available then."""
        sequence = self.pooled
        for text in sequence.pool.texts.values():
            text.give_up()
            text.logits = NO_LOGITS
        sequence.engine.set_logits(row)
        sequence.logits = Logits(pos, 1)

    def keep_end(self) -> None:
        """Keep the logits of the prompt that was just read, for the same prompt if it comes again."""
        if self.logits_at_hand:
            self.end = self.ids.copy(), self.logits_row(self.n_tokens - 1).copy()

    def take_end(self, tokens: Int32s) -> bool:
        """Cut the text to a prompt that it begins with, and put back the logits that this had the first time.

        False, and nothing has changed, if they are not kept, or pages were moved for the prompt: it is read again then.
        """
        sequence, end = self.sequence, self.end
        if sequence is None or end is None or not np.array_equal(end[0], tokens):
            return False
        if len(tokens) > sequence.table.quota * CHUNK or sequence.truncates_to(len(tokens)) != len(tokens):
            return False
        self.cut(len(tokens))
        self.n_tokens = len(tokens)
        self.put_logits(len(tokens) - 1, end[1])
        return True

    def draw(self, pos: int, stock: abc.Callable[[int], int] | None = None) -> int:
        """Draw the token after `pos`. KVFlashError where its logits are not at hand, which would end the process, and
        NotFinite where they are no numbers.

        stock: draws after a row of the newest step; None for the sampler.
        """
        at = self.logits_at(pos)
        row = None if at is None else self.model.context.get_logits_ith(at)
        if at is None or not row:
            raise self._no_logits(pos)
        began = perf_counter()
        token = int(self.sampler.sample(self.model.context, at)) if stock is None else stock(at)
        self.sampled_s = perf_counter() - began
        if not math.isfinite(row[token]):
            raise NotFinite(f"the logits after token {pos} are not finite: reset, and read the text again")
        return token

    def sample(self, pos: int, *args: Any, **kwargs: Any) -> int:
        """Draw the token after `pos` as upstream does. Errors: those of `draw`."""
        # it takes n_tokens off again
        return self.draw(pos, lambda at: self._own().sample(*args, **kwargs, idx=self.n_tokens + at))

    def stock_drafts(self, token: int) -> list[int]:
        """Return what upstream's `draft_model` proposes after a token, as far as there is room."""
        room = min(self.model.n_ctx - self.n_tokens, self.model.n_ubatch) - 1
        if room > 0:
            self.input_ids[self.n_tokens] = token
        return self._own().drafts(self.input_ids[: self.n_tokens + 1], room)

    def grow_scores(self, rows: int) -> None:
        """Make room for the logits of this many tokens."""
        if rows > len(self.scores):
            grown = np.empty((min(self.model.n_ctx, max(rows, 2 * len(self.scores))), self.model.n_vocab), np.single)
            grown[: len(self.scores)] = self.scores
            self.scores = grown
