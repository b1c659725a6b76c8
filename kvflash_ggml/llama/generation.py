"""How a `Llama` reads and writes: steps of the session, prefix reuse, and the loop that yields tokens."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import LlamaGrammar

from ..arrays import Int32s, Int64s, common_prefix
from ..calibration.finder import HeadFinder
from ..chat.values import Grammar
from ..config import KVFlashConfig
from ..errors import ConfigError, ContextFull, KVFlashError, NotFinite, SnapshotError
from ..logs import Progress
from ..pool.masks import Branches
from ..sequence import prefill
from ..spec.draft import ROOT, Draft
from ..spec.loop import Speculator
from ..spec.tree import Rows
from ..spec.tree import rows as arranged
from .call_lock import changing, locked, writing
from .grammar import put_into
from .state import SavingLlama

logger = logging.getLogger("kvflash_ggml")

Stopping = llama_cpp.StoppingCriteriaList | None
Tokens = Generator[int, Sequence[int] | None, list[int] | None]
"""Yields tokens, can be sent some that follow; returns what is to be evaluated next, None where the text ends."""


class GeneratingLlama(SavingLlama):
    """The part of `Llama` that evaluates and generates."""

    _config: KVFlashConfig | None
    _finder: HeadFinder | None = None
    _speculator: Speculator | None = None
    _greedy: bool = False  # the running answer takes the likeliest token, and nothing else changes it
    kvflash_progress: Progress | None = None
    kvflash_most: int | None = None
    """Tokens that the next call of `generate` is asked for at most, if that is known: no more of them are drafted."""
    kvflash_sampler: Any = None
    """Of an answer that the next call of `generate` goes on with: a single token that it is given has been drawn."""

    # --- evaluation

    @changing
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` read so far. ContextFull, and nothing evaluated, if they do not fit."""
        self._evaluate(tokens)

    def _evaluate(self, tokens: Sequence[int], *, checkpoint: int | None = None, prompt: bool = False) -> None:
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.n_tokens + len(tokens)}) exceed context window of {self._n_ctx}"
            )
        data = self._known(tokens)
        if self._logits_all:
            self._grow_scores(self.n_tokens + len(tokens))
        if self._session is None:
            super().eval(tokens)
            return
        progress = self.kvflash_progress if len(data) > 1 else None
        session, logits, step = self._session, self._logits_all, self._after_step
        read = partial(prefill.extend, session, output_all=logits, after=step, progress=progress)
        known: int | None = None
        try:
            try:
                self._catch_up(self._session)
                known = self._session.length
                read(data, checkpoint=checkpoint, prompt=prompt)
            except SnapshotError as err:
                # a chunk that was restored lazily is lost, so what was read with it cannot go on
                logger.warning("%s: the whole text is read again", err)
                self._discard_lost()
                text = np.concatenate([self.input_ids[: self.n_tokens if known is None else known], data])
                lost = self._session.stats
                self._session.reset()
                read(text)
                if len(data) == 1 and not prompt:  # of the same answer
                    lost.add_generated(1, whole=bool(self._session.whole[len(text) - 1]))
                    self._session.stats = lost
        except BaseException:
            self._requires_eval = True  # the last step that was done may have kept no logits
            raise

    def _known(self, tokens: Sequence[int] | Int64s, at_hand: int = 0) -> Int32s:
        """The tokens as an array. ConfigError for one that the model does not have, TypeError for what is no number.

        at_hand: so many of them are not read. An image that a chat handler has evaluated has places without tokens.
        """
        if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < self._n_vocab:
            return np.array(tokens, np.int32)  # each step of an answer comes here, and the rest takes microseconds
        ids = _numbers(tokens)
        strange = np.flatnonzero((ids[at_hand:] < 0) | (ids[at_hand:] >= self._n_vocab))
        if len(strange):
            at = at_hand + strange[0]
            raise ConfigError(f"token {ids[at]} at {at} of {len(ids)}: this model has 0 to {self._n_vocab - 1}")
        return ids.astype(np.int32)

    def _verify(self, rows: Rows, branches: Branches | None) -> bool:
        """Evaluate the newest token and what is drafted after it, in one step. False: the token alone."""
        session, speculator = self._session, self._speculator
        assert session is not None
        assert speculator is not None
        try:
            self._catch_up(session)
            session.verify(rows.tokens, branches, self._after_step)
        except KVFlashError as err:
            speculator.refused(err)
            # which reads again what is lost, and fails where this would fail without drafts
            self._evaluate(rows.tokens[:1].tolist())
            return False
        return True

    def _keep(self, row: int) -> None:
        """One more of the rows that are verified is of the text."""
        session, pos = self._session, self.n_tokens
        assert session is not None
        if self._logits_all:
            self._grow_scores(pos + 1)
            logits = self._ctx.get_logits_ith(row)
            self.scores[pos] = np.ctypeslib.as_array(logits, shape=(self._n_vocab,))
        session.keep(row)
        self.input_ids[pos] = session.ids[pos]
        self.n_tokens = pos + 1
        self._requires_eval = False

    def _after_step(self, start: int, count: int) -> None:
        assert self._session is not None
        self.input_ids[start : start + count] = self._session.ids[start : start + count]
        if self._logits_all:
            logits = np.ctypeslib.as_array(self._ctx.get_logits(), shape=(count, self._n_vocab))
            self.scores[start : start + count] = logits
        self.n_tokens = start + count
        self._requires_eval = False

    @changing
    def reset(self) -> None:
        """Forget the text. Settings and pins stay."""
        if self._session is None:
            super().reset()  # type: ignore[no-untyped-call]
            return
        self.n_tokens = 0
        self._requires_eval = True
        self._session.reset()

    # --- generation

    sample = locked(SavingLlama.sample)
    embed = changing(llama_cpp.Llama.embed)

    def _init_sampler(  # type: ignore[override]
        self, *, grammar: LlamaGrammar | Grammar | None = None, **settings: Any
    ) -> Any:
        if not isinstance(grammar, Grammar):
            return super()._init_sampler(grammar=grammar, **settings)
        sampler = super()._init_sampler(**settings)
        put_into(sampler, self._model.vocab, grammar)
        return sampler

    @writing
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        stopping_criteria: llama_cpp.StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | Grammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue the prompt, with upstream's contract: prefix reuse, `send`, drafts."""
        given = _numbers(tokens)  # once: a long list takes milliseconds
        ids = self._known(given, common_prefix(self._input_ids, given))  # before any of the text at hand is cut off
        if len(tokens) == 0 and (reset or self.n_tokens == 0):
            raise ConfigError("the prompt has no tokens, and this model puts none before it: give it at least one")
        going_on, self.kvflash_sampler = self.kvflash_sampler, None
        self._sampler = going_on or self._init_sampler(
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            temp=temp,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            tfs_z=tfs_z,
            mirostat_mode=mirostat_mode,
            mirostat_eta=mirostat_eta,
            mirostat_tau=mirostat_tau,
            penalize_nl=penalize_nl,
            logits_processor=logits_processor,
            grammar=grammar,
        )
        neutral = (repeat_penalty, frequency_penalty, presence_penalty) == (1.0, 0.0, 0.0)
        inherited = "sample" not in vars(self) and type(self).sample is GeneratingLlama.sample
        self._greedy = temp == 0.0 and neutral and inherited and logits_processor is None and grammar is None
        if self._session is not None:
            self._session.check_open()
            self._session.settle()
        if self._finder is not None and not self._deterministic:
            self._finder.settle()
        if self._speculator is not None:
            most, self.kvflash_most = self.kvflash_most, None
            self._speculator.begin(len(tokens) if reset else self.n_tokens + len(tokens), most)
        prompt = list(tokens)
        if reset:
            prompt = prompt[self._reuse_prefix(ids) :]
        newest = self.n_tokens + len(prompt) - 1
        with nullcontext() if self._finder is None else self._finder.behind():
            self._evaluate(prompt, checkpoint=self._branch(tokens) if reset else None, prompt=going_on is None)
            try:
                self._keep_prefix()
                pending = yield from self._sampled(newest, stopping_criteria)
                while pending is not None:
                    pending = yield from self._step(pending, stopping_criteria)
            except NotFinite:
                self.reset()  # it is not kept for later
                raise
            finally:
                self._keep_prefix()
                if self._session is not None and not self._session.engine.closed:
                    self._session.settle()
                    if self._finder is not None and self._session.length > self._session.pool.n_slots:
                        self._finder.start()

    def _step(self, pending: list[int], stopping: Stopping) -> Tokens:
        """Evaluate tokens, perhaps with drafts, and go on from them."""
        draft = self._propose(pending) if len(pending) == 1 else None
        if draft is not None:
            return (yield from self._verified(pending[0], draft, stopping))
        start = self.n_tokens
        # where logits are kept of all of them, what follows each is sampled, as upstream does
        first = start if len(pending) == 1 or self._logits_all else start + len(pending) - 1
        self._evaluate([*pending, *self._stock_drafts(pending)])
        return (yield from self._sampled(first, stopping))

    def _sampled(self, pos: int, stopping: Stopping) -> Tokens:
        """What follows the token at `pos`, and those after it as long as they are in the memory already."""
        while True:
            if self._session is not None and self._logits_all and self._logits_at(pos) is None:
                # several steps have read what was sent, and only the last one's logits are at hand
                self._put_logits(self._session, pos, self.scores[pos])
            token = self.sample(idx=pos)
            pos += 1
            if self._speculator is not None:
                self._speculator.plain()
            if stopping is not None and stopping(self._input_ids[:pos], self._logits_row(pos - 1)):
                return None
            sent = yield token
            if pos >= self.n_tokens or sent:
                return [token, *(sent or ())]
            if token != self._input_ids[pos]:
                self._forget(pos)
                return [token]

    def _verified(self, root: int, draft: Draft, stopping: Stopping) -> Tokens:
        """The text goes on with `root`, and with what is drafted as far as that is what is sampled.

        At each yield the text is what it would be without drafts: it ends before the token that is yielded.
        """
        session, speculator, node = self._session, self._speculator, ROOT
        path: list[int] = []
        assert session is not None
        assert speculator is not None
        rows = arranged(root, draft)
        if not self._verify(rows, None if draft.is_chain else rows.branches):
            return (yield from self._sampled(self.n_tokens - 1, stopping))
        picks = session.engine.argmax(range(len(rows))).tolist() if self._greedy else None
        while True:
            row = rows.of(node)
            self._keep(row)
            token = self.sample(idx=self.n_tokens - 1) if picks is None else picks[row]
            child = draft.child(node, token)
            if stopping is not None and stopping(self._input_ids, self._logits_row(self.n_tokens - 1)):
                speculator.verified(path, len(rows), stopped=child is not None)
                return None
            speculator.pause()
            try:
                sent = yield token
            except GeneratorExit:
                speculator.verified(path, len(rows), stopped=child is not None)
                raise
            speculator.resume()
            # somebody may have settled them, or set n_tokens
            if sent or child is None or not session.ahead or session.length != self.n_tokens:
                session.accept(after=self._after_step)
                speculator.verified(path, len(rows), stopped=child is not None)
                return [token, *(sent or ())]
            node = child
            path.append(node)

    @property
    def _deterministic(self) -> bool:
        return self._config is not None and self._config.deterministic

    def _reuse_prefix(self, tokens: Int32s) -> int:
        """Cut the memory to the longest prefix it shares with `tokens`; how many tokens need no evaluation."""
        if self._deterministic:
            self.reset()
        if self._prefixes is not None:
            self._restore_prefix(self._prefixes, tokens)
        shared = common_prefix(self._input_ids, tokens)
        if shared == len(tokens) == self.n_tokens and self._logits_at_hand:
            return shared  # the logits of the last token are at hand
        if shared == len(tokens):
            shared -= 1  # one token has to be evaluated for its logits
        if self._session is not None:
            shared = prefill.prefix_to_keep(self._session, shared, tokens)
        left = self._cut(shared) if shared > 0 else 0
        if left == 0:
            self.reset()
        elif self.verbose:
            logger.info("%d tokens of the prompt are known, %d to evaluate", left, len(tokens) - left)
        self.n_tokens = left
        self._requires_eval = True
        return left

    def _cut(self, length: int) -> int:
        """Forget tokens from `length` on; how many are left, which is less if the memory cannot go back just so far."""
        if self._session is not None:
            return self._session.truncate(min(length, self._session.length))
        return length if self._ctx.kv_cache_seq_rm(-1, length, -1) else 0

    def _likeliest(self) -> int:
        """The likeliest token after the last row of the newest step."""
        assert self._session is not None
        return int(self._session.engine.argmax([-1])[0])

    def _forget(self, length: int) -> None:
        left = self._cut(length)
        self.n_tokens = length
        self._requires_eval = True
        if left < length and self._session is None:
            again = self.input_ids[:length].tolist()
            self.reset()
            self.eval(again)

    def _stock_drafts(self, pending: Sequence[int]) -> list[int]:
        """Without a pool drafts are in the memory at once, and cut off again, as upstream does it."""
        if self._session is not None or self.draft_model is None or len(pending) != 1:
            return []
        room = min(self._n_ctx - self.n_tokens, self.context_params.n_ubatch or self.n_batch) - 1
        if room <= 0:
            return []
        self.input_ids[self.n_tokens] = pending[0]
        return [int(token) for token in self.draft_model(self.input_ids[: self.n_tokens + 1])[:room]]

    def _propose(self, pending: Sequence[int]) -> Draft | None:
        """What may follow the newest token, no more than one step can verify."""
        session, speculator = self._session, self._speculator
        if session is None or speculator is None or session.engine.closed:
            return None
        return speculator.propose(session, pending[0])


def _numbers(tokens: Sequence[int] | Int64s) -> Int64s:
    """TypeError for what is no whole number: nothing is rounded."""
    return (
        np.asarray(tokens).astype(np.int64, casting="same_kind", copy=False) if len(tokens) else np.empty(0, np.int64)
    )
