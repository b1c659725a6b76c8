"""Reads for a `Llama`: evaluates tokens, and keeps the fields of upstream's class and the sequence in step."""

from __future__ import annotations

import logging
import math
import weakref
from collections import abc
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import Llama as Stock  # bound here: `install` puts our class in its place

from ..arrays import Int32s, Int64s, numbers
from ..constants import CHUNK
from ..errors import CLOSED, ConfigError, ContextFull, KVFlashError, NotFinite, SnapshotError
from ..sequence import prefill
from ..sequence.sequence import Sequence
from ..sequence.step import NO_LOGITS, Logits
from ..state.session import SessionState
from .hints import SlowPrompt

if TYPE_CHECKING:
    from ..speculation.loop import Speculator
    from ..store.prefixes import Prefixes

logger = logging.getLogger("kvflash_ggml")

PromptEnd = tuple[Int32s, npt.NDArray[np.single]]
"""A prompt that was read, and the logits [n_vocab] of its last token."""

OnLogits = abc.Callable[[int, npt.NDArray[np.single]], None]
"""Called with a position and the logits [count, n_vocab] of the tokens from there on. The next step overwrites them."""


class Reader:
    """The text of one `Llama`: `n_tokens`, `input_ids` and `scores` as upstream has them, and their memory.

    llm: weakly, since it owns this. sequence: the text on its pool; None without a pool. requires_eval: the logits of
    the newest token are not at hand, without a pool. speculator: what drafts; None where nobody does. prefixes: texts
    that are kept for later; None without such a cache. greedy: the running answer takes the likeliest token, and
    nothing else changes it. previewing: the text is a preview's, which stands in for another one. on_logits: is given
    the logits of each step of a prompt, with the position of the first. end: the newest prompt, and its last logits.
    """

    def __init__(self, llm: Stock) -> None:
        self.llm: Any = weakref.proxy(llm)
        self.sequence: Sequence | None = None
        self.requires_eval = False
        self.speculator: Speculator | None = None
        self.prefixes: Prefixes | None = None
        self.greedy = False
        self.previewing = False
        self._slow = SlowPrompt()
        self.on_logits: OnLogits | None = None
        self.end: PromptEnd | None = None

    @property
    def output_all(self) -> bool:
        """Whether the steps of a prompt compute the logits of all their tokens."""
        return self.llm._logits_all or self.on_logits is not None

    @property
    def pooled(self) -> Sequence:
        """The sequence, for callers that know there is a pool."""
        assert self.sequence is not None
        return self.sequence

    # --- evaluation

    def evaluate(self, tokens: abc.Sequence[int], *, checkpoint: int | None = None, prompt: bool = False) -> None:
        """Evaluate tokens after the `n_tokens` read so far. ContextFull, and nothing evaluated, if they do not fit.

        The other arguments are those of `prefill.extend`.
        """
        sequence, data = self.sequence, self.admit(tokens)
        if sequence is None:
            Stock.eval(self.llm, tokens)
            return
        known: int | None = None
        try:
            try:
                self.catch_up()
                known = sequence.length
                self._extend(data, len(data), checkpoint=checkpoint, prompt=prompt)
            except SnapshotError as err:
                self.read_again(err, known, data, prompt=prompt)
        except BaseException:
            self.requires_eval = True  # the last step that was done may have kept no logits
            raise

    def _extend(self, tokens: Int32s, count: int, *, checkpoint: int | None = None, prompt: bool = False) -> None:
        """Evaluate tokens, `count` of which were asked for. Progress is reported of more than one."""
        prefill.extend(
            self.pooled,
            tokens,
            output_all=self.output_all,
            after=self.after_step,
            progress=(self.llm.kvflash_progress or self._slow.begin()) if count > 1 else None,
            checkpoint=checkpoint,
            prompt=prompt,
        )

    def prepare_prompt(self, tokens: abc.Sequence[int]) -> prefill.Prefill | None:
        """Prepare the one step of a prompt, to be computed with other prompts; None where it must be evaluated."""
        data, llm = self.admit(tokens), self.llm
        self.catch_up()
        self.pooled.begin(len(data))
        progress = llm.kvflash_progress if len(data) > 1 else None
        prompt = prefill.Prefill(self.pooled, data, self.output_all, self.after_step, progress, None)
        return prompt if prompt.prepare() else None

    def read_again(
        self, why: Exception, known: int | None, data: Int32s, *, prompt: bool = False, kept: int = 0
    ) -> None:
        """Prefill the text again from token `kept` on, and `data` after it: a page image or state was lost.

        known: tokens that were read before `data`, None for all of `n_tokens`.
        """
        sequence, llm = self.pooled, self.llm
        what = f"the text from token {kept} on" if kept else "the whole text"
        logger.warning("%s: %s is read again", why, what)
        if self.prefixes is not None:
            self.prefixes.discard_lost()  # or it would be restored again
        text = np.concatenate([llm.input_ids[: llm.n_tokens if known is None else known], data])
        before = sequence.stats
        if not kept:
            sequence.reset()
        self._extend(text[kept:], len(data))
        if len(data) == 1 and not prompt:  # of the same answer
            before.generated += 1
            before.generated_whole += bool(sequence.whole[len(text) - 1])
            sequence.stats = before

    def admit(self, tokens: abc.Sequence[int]) -> Int32s:
        """Return the tokens as an array, and make room for their logits. ContextFull, or as `known`."""
        llm = self.llm
        if llm.n_tokens + len(tokens) > llm._n_ctx:
            raise ContextFull(f"Requested tokens ({llm.n_tokens + len(tokens)}) exceed context window of {llm._n_ctx}")
        if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < llm._n_vocab:
            data = np.array(tokens, np.int32)  # each step of an answer comes here, and the rest takes microseconds
        else:
            data = self.known(tokens)
        if llm._logits_all:
            self.grow_scores(llm.n_tokens + len(tokens))
        return data

    def known(self, tokens: abc.Sequence[int] | Int64s, at_hand: int = 0) -> Int32s:
        """Return the tokens as an array. ConfigError for one that the model does not have, TypeError for no number.

        at_hand: this many leading tokens are known and not checked. Without a pool, an image that a chat handler has
        evaluated has places without tokens. With one its rows have negative numbers, see `MediaRows`.
        """
        ids, n_vocab = numbers(tokens), self.llm._n_vocab
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
        sequence, llm = self.pooled, self.llm
        if not 0 <= llm.n_tokens <= llm._n_ctx:
            raise ConfigError(f"n_tokens = {llm.n_tokens} must be from 0 to n_ctx = {llm._n_ctx}")
        sequence.settle()
        if llm.n_tokens < sequence.length:
            prefill.rewind_to(sequence, llm.n_tokens)
        elif llm.n_tokens > sequence.length:
            prefill.extend(sequence, llm.input_ids[sequence.length : llm.n_tokens].astype(np.int32))

    def after_step(self, start: int, count: int) -> None:
        """Copy what a step of the sequence has computed to the fields of the Llama."""
        sequence, llm = self.pooled, self.llm
        llm.input_ids[start : start + count] = sequence.ids[start : start + count]
        if llm._logits_all or self.on_logits is not None:  # without a call: every token comes here
            logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(sequence.logits.first), shape=(count, llm._n_vocab))
            if llm._logits_all:
                llm.scores[start : start + count] = logits
            if self.on_logits is not None:
                self.on_logits(start, logits)
        llm.n_tokens = start + count
        self.requires_eval = False

    def keep(self, row: int) -> None:
        """Accept one more draft row."""
        sequence, llm = self.pooled, self.llm
        pos = llm.n_tokens
        sequence.keep(row)
        if llm._logits_all:
            self.grow_scores(pos + 1)
            logits = llm._ctx.get_logits_ith(sequence.logits.row(pos))
            llm.scores[pos] = np.ctypeslib.as_array(logits, shape=(llm._n_vocab,))
        llm.input_ids[pos] = sequence.ids[pos]
        llm.n_tokens = pos + 1
        self.requires_eval = False

    # --- cuts

    def reset(self) -> None:
        """Forget the text. Settings and pins stay."""
        if self.sequence is None:
            Stock.reset(self.llm)
            return
        self.llm.n_tokens = 0
        self.requires_eval = True
        self.sequence.reset()

    def cut(self, length: int) -> int:
        """Cut the text to `length` tokens; return how many are left. They are fewer if memory must go back further."""
        if self.sequence is not None:
            return self.sequence.truncate(min(length, self.sequence.length))
        return length if self.llm._ctx.kv_cache_seq_rm(-1, length, -1) else 0

    def forget(self, length: int) -> None:
        """Cut the text to `length` tokens, and prefill again what memory could not keep."""
        left = self.cut(length)
        self.llm.n_tokens = length
        self.requires_eval = True
        if left < length and self.sequence is None:
            again = self.llm.input_ids[:length].tolist()
            self.llm.reset()
            self.llm.eval(again)

    def follow(self, saved: SessionState) -> None:
        """Copy a session that the sequence has loaded to the fields of the Llama."""
        llm = self.llm
        llm.n_tokens = 0  # interrupted here, no text is known, or all of one: never a mixture
        llm.input_ids[: saved.length] = saved.tokens
        llm.n_tokens = saved.length
        if saved.logits is not None:
            self.put_logits(llm.n_tokens - 1, saved.logits)
        if llm._logits_all:
            self.grow_scores(llm.n_tokens)
            llm.scores[: llm.n_tokens] = np.nan
            if saved.logits is not None:
                llm.scores[llm.n_tokens - 1] = saved.logits

    # --- logits

    @property
    def logits_at_hand(self) -> bool:
        """Whether a token that follows the text can be sampled."""
        if self.sequence is None:
            return not self.requires_eval
        return self.logits_at(self.llm.n_tokens - 1) is not None

    def logits_at(self, pos: int) -> int | None:
        """Return the row of the newest step with the logits of a position; None if they were not kept."""
        sequence, n_tokens = self.sequence, int(self.llm.n_tokens)
        if sequence is None:
            return pos - n_tokens
        return sequence.logits.row(pos) if sequence.length == n_tokens else None

    def logits_row(self, pos: int) -> npt.NDArray[np.single]:
        """Return the logits at `pos` [n_vocab]. KVFlashError unless the newest step has kept them."""
        at = self.logits_at(pos)
        row = None if at is None else self.llm._ctx.get_logits_ith(at)
        if not row:
            raise self._no_logits(pos)
        return np.ctypeslib.as_array(row, shape=(self.llm._n_vocab,))

    def _no_logits(self, pos: int) -> KVFlashError:
        n_tokens = self.llm.n_tokens
        if self.sequence is not None and self.sequence.engine.closed:
            return KVFlashError(CLOSED)
        if n_tokens == 0:
            return KVFlashError("nothing has been read that a token could follow: eval a text first")
        return KVFlashError(
            f"no logits are kept of position {pos} of {n_tokens}: it was not evaluated last (by another "
            f"generator of the same model, perhaps), or logits_all=True is needed"
        )

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
            self.end = self.llm._input_ids.copy(), self.logits_row(self.llm.n_tokens - 1).copy()

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
        self.llm.n_tokens = len(tokens)
        self.put_logits(len(tokens) - 1, end[1])
        return True

    def sample(self, pos: int, *args: Any, **kwargs: Any) -> int:
        """Draw the token after `pos` as upstream does. KVFlashError where its logits are not at hand, which would end
        the process, and NotFinite where they are no numbers.
        """
        at, llm = self.logits_at(pos), self.llm
        row = None if at is None else llm._ctx.get_logits_ith(at)
        if at is None or not row:
            raise self._no_logits(pos)
        kwargs["idx"] = llm.n_tokens + at  # it takes n_tokens off again
        began = perf_counter()
        token = int(Stock.sample(llm, *args, **kwargs))
        llm.kvflash_sampled_s = perf_counter() - began
        if not math.isfinite(row[token]):
            raise NotFinite(f"the logits after token {pos} are not finite: reset, and read the text again")
        return token

    def grow_scores(self, rows: int) -> None:
        """Make room for the logits of this many tokens."""
        llm = self.llm
        if rows > len(llm.scores):
            grown = np.empty((min(llm._n_ctx, max(rows, 2 * len(llm.scores))), llm._n_vocab), np.single)
            grown[: len(llm.scores)] = llm.scores
            llm.scores = grown
