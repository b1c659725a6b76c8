"""`Llama`: a drop-in for `llama_cpp.Llama` whose KV cache can live in a pool of fixed size."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_tokenizer import LlamaTokenizer

from .. import modelfile, policy
from ..arrays import common_prefix
from ..calibration.finder import HeadFinder, open_finder
from ..config import KVFlashConfig
from ..drafter import model as drafter
from ..errors import ContextFull, KVFlashError, SnapshotError
from ..native import engine as native
from ..native import library
from ..policy.base import Scorer
from ..policy.drafter import NAME as DRAFTER
from ..session.pool import Pool
from . import parameters, sizing
from .bias import with_bias
from .context import PagedContext
from .reading import open_session
from .sizing import PoolSize
from .state import SavingLlama
from .stats import PoolStats
from .tokenizer import IncrementalTokenizer
from .turns import Turns, changing, in_turn, writing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import Keywords

logger = logging.getLogger("kvflash_ggml")


class Llama(SavingLlama):
    """`llama_cpp.Llama` with a bounded KV cache. Every upstream keyword and method works as there.

    kvflash: None for a stock cache; for a pool a number of tokens, a size in bytes as "2G", or "auto"; or a
        KVFlashConfig.
    kvflash_policy, kvflash_drafter, kvflash_tau, kvflash_calibrate, kvflash_deterministic, kvflash_reading,
        kvflash_stage, kvflash_answer, kvflash_repair, kvflash_pins, kvflash_spill, kvflash_host_limit: fields of
        KVFlashConfig, by keyword.
    kvflash_cache: a prefix cache, or the folder of one with default settings; the same as `set_cache`.
    kvflash_progress: called as (tokens evaluated, tokens to evaluate) while a prompt is read.

    `n_ctx` stays the logical context: it decides the positional encoding and the limits. The pool is separate. With a
    pool, n_ctx is the length the model was trained for if it is not given, and flash attention is on. Sliding-window
    layers keep only their window then (swa_full=False, where stock's default keeps everything: Gemma's logits are
    bitwise those of a stock model with swa_full=False).

    With a pool, draft_model= does not imply logits_all: for logprobs give it. Drafts are part of the text once they
    have been sampled.

    Several threads may use one object: a call waits for the other's to end, or for its stream's next piece. It holds
    one text: a stream that is advanced after another call has changed that raises KVFlashError.

    Raises TypeError for an unknown keyword that begins with kvflash; other unknown ones are ignored with a warning.
    """

    def __init__(self, model_path: str, **keywords: Unpack[Keywords]) -> None:
        self._stack = contextlib.ExitStack()  # upstream's close() needs it even when nothing has been opened
        modelfile.check(Path(model_path))
        request = parameters.read(dict(keywords), parameters.defaults)
        self._config = request.config
        self._session = None
        self._size: PoolSize | None = None
        self._turns = Turns()
        self.kvflash_progress = request.progress
        self._scorer: Scorer | None = None
        self._finder: HeadFinder | None = None
        self._drafter: Path | None = None
        if self._config is not None:
            if self._config.policy == DRAFTER:
                self._drafter = drafter.find(model_path, self._config.drafter)
            else:
                self._scorer = policy.resolve(self._config.policy)
        settings = request.upstream
        library.ensure_gpu_offload(settings.get("n_gpu_layers", 0))

        logits_all = settings.pop("logits_all", False)
        if self._config is None:
            logits_all = logits_all or settings.get("draft_model") is not None
        self._pickled_tokenizer = settings.get("tokenizer")
        with contextlib.ExitStack() as self._pool_requests:
            # upstream would allocate n_ctx rows of logits at once; here they grow with use
            super().__init__(model_path, logits_all=False, **settings)
        self._logits_all = logits_all
        self.input_ids = np.zeros(self._n_ctx, np.intc)
        self._replace_batch()
        if self._size is not None:
            self._open_session(self._size)
        if request.cache is not None:
            self.set_cache(request.cache)

    __init__.__signature__ = parameters.signature()  # type: ignore[attr-defined]

    # --- construction

    @property
    def tokenizer_(self) -> Any:
        return self._tokenizer

    @tokenizer_.setter
    def tokenizer_(self, tokenizer: Any) -> None:
        # upstream sets this between loading the model and making the context: the moment to size the pool
        if isinstance(tokenizer, LlamaTokenizer):
            tokenizer = IncrementalTokenizer(tokenizer, self._model.token_bos)
        self._tokenizer = tokenizer
        if self._config is not None:
            self._size = self._size_pool(self._config)
            rows = self._scorer.query_rows if self._scorer is not None else 0
            rows = rows if self._size.slots < self._size.n_ctx else 0
            self._pool_requests.enter_context(native.pool_request(self._size.slots, rows))

    def _size_pool(self, config: KVFlashConfig) -> PoolSize:
        reserved = drafter.reserve_bytes(self._drafter) if self._drafter is not None else 0
        return sizing.fit(config, self._model, self.context_params, reserved=reserved)

    def _open_session(self, size: PoolSize) -> None:
        assert self._config is not None
        n_ubatch = min(self.context_params.n_ubatch or self.n_batch, self.n_batch)  # 0 is upstream's "as n_batch"
        if self._drafter is not None:
            self._scorer = drafter.make_scorer(self, self._drafter, idle=size.slots - 2 * n_ubatch)
        engine = native.Engine(ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0, n_ubatch)
        config = self._config
        pool = Pool(engine, n_ubatch=n_ubatch, host_limit=config.host_limit, spill=config.spill)
        self._session = open_session(self, config, pool, self._scorer)
        # with the context's own, which a garbage collector may close before it closes this
        self._ctx._exit_stack.callback(self._session.close)
        self._open_snapshots(self._session)
        self._finder = open_finder(self, self._session, self._scorer)
        if self._finder is not None:
            self._ctx._exit_stack.callback(self._finder.close)
        self._ctx = PagedContext(self._ctx, self._session)
        assert self.kvflash is not None
        if self.verbose:
            logger.warning(self.kvflash.banner())
        else:
            logger.info(self.kvflash.banner())

    def _replace_batch(self) -> None:
        """Upstream's batch has room for n_ctx sequences a token: gigabytes of address space at long contexts."""
        self._batch.close()
        self._batch = internals.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=self.verbose)
        self._stack.callback(self._batch.close)

    @property
    def kvflash(self) -> PoolStats | None:
        """The live state of the pool, or None without one."""
        if self._session is None or self._size is None:
            return None
        return PoolStats(self._session, self._size, self._finder, swa_full=self.context_params.swa_full)

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
        if self._logits_all:
            self._grow_scores(self.n_tokens + len(tokens))
        if self._session is None:
            super().eval(tokens)
            return
        data = np.asarray(tokens, np.int32)
        progress = self.kvflash_progress if len(data) > 1 else None
        extend = partial(self._session.extend, output_all=self._logits_all, after=self._after_step, progress=progress)
        known: int | None = None
        try:
            try:
                self._catch_up(self._session)
                known = self._session.length
                extend(data, checkpoint=checkpoint, prompt=prompt)
            except SnapshotError as err:
                # a chunk that was restored lazily is lost, so what was read with it cannot go on
                logger.warning("%s: the whole text is read again", err)
                self._discard_lost()
                text = np.concatenate([self.input_ids[: self.n_tokens if known is None else known], data])
                self._session.reset()
                extend(text)
        except BaseException:
            self._requires_eval = True  # the last step that was done may have kept no logits
            raise

    def _verify(self, tokens: Sequence[int]) -> None:
        """Evaluate a token and what is drafted after it. With a pool, drafts are of the text once they are accepted."""
        if self._session is None:
            self._evaluate(tokens)
            return
        try:
            self._catch_up(self._session)
            if self._logits_all:
                self._grow_scores(self.n_tokens + len(tokens))
            self._session.verify(np.asarray(tokens, np.int32), after=self._after_step)
        except SnapshotError:
            self._evaluate(tokens[:1])  # which reads again what is lost

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

    sample = in_turn(SavingLlama.sample)
    embed = changing(llama_cpp.Llama.embed)

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
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue the prompt, with upstream's contract: prefix reuse, `send`, drafts."""
        self._sampler = self._init_sampler(
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
        if self._finder is not None and not self._deterministic:
            self._finder.settle()
        self._accept_drafts()
        pending = list(tokens)
        if reset:
            pending = pending[self._reuse_prefix(pending) :]
        sample_idx = self.n_tokens + len(pending) - 1
        self._evaluate(pending, checkpoint=self._branch(tokens) if reset else None, prompt=True)
        try:
            self._keep_prefix()
            while True:
                while sample_idx < self.n_tokens:
                    token = self.sample(idx=sample_idx)
                    sample_idx += 1
                    self._accepted = sample_idx
                    if stopping_criteria is not None and stopping_criteria(
                        self._input_ids[:sample_idx], self._logits_row(sample_idx - 1)
                    ):
                        return
                    sent = yield token
                    pending = [token, *(sent or ())]
                    if sent:
                        self._accept_drafts()  # what is sent follows the token, in place of the drafts
                        if not self._logits_all:
                            sample_idx = self.n_tokens + len(pending) - 1  # of those before it no logits are kept
                    if sample_idx < self.n_tokens and token != self._input_ids[sample_idx]:
                        self._reject_drafts(sample_idx)
                        break
                drafts = self._draft(pending) if len(pending) == 1 else []
                if drafts:
                    self._verify([*pending, *drafts])
                else:
                    self._evaluate(pending)
        finally:
            self._accept_drafts()
            self._keep_prefix()
            if self._finder is not None and self._session is not None and self._session.outgrown:
                self._finder.start()

    @property
    def _deterministic(self) -> bool:
        return self._config is not None and self._config.deterministic

    def _reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Cut the memory to the longest prefix it shares with `tokens`; how many tokens need no evaluation."""
        if self._deterministic:
            self.reset()
        if self._prefixes is not None:
            self._restore_prefix(self._prefixes, np.asarray(tokens, np.int32))
        shared = common_prefix(self._input_ids, np.asarray(tokens, np.intc))
        if shared == len(tokens) == self.n_tokens and self._logits_at_hand:
            return shared  # the logits of the last token are at hand
        if shared == len(tokens):
            shared -= 1  # one token has to be evaluated for its logits
        if self._session is not None:
            shared = self._session.prefix_to_keep(shared, len(tokens))
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

    def _reject_drafts(self, length: int) -> None:
        if self._session is not None and self._session.ahead:
            self._accept_drafts()
            return
        left = self._cut(length)
        self.n_tokens = length
        self._requires_eval = True
        if left < length and self._session is None:
            again = self.input_ids[:length].tolist()
            self.reset()
            self.eval(again)

    def _draft(self, pending: Sequence[int]) -> list[int]:
        """Tokens the draft model proposes after `pending`: as many as one step can verify."""
        if self.draft_model is None:
            return []
        start = self.n_tokens + len(pending)
        room = min(self._n_ctx - start, (self.context_params.n_ubatch or self.n_batch) - len(pending))
        if self._session is not None:
            room = min(room, self._session.room_ahead - len(pending))
        if room <= 0:
            return []
        self.input_ids[self.n_tokens : start] = pending
        return [int(token) for token in self.draft_model(self.input_ids[:start])[:room]]

    def _create_completion(  # type: ignore[override]  # the keywords between are upstream's and only passed on
        self,
        prompt: str | list[int],
        *,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        logit_bias: dict[int, float] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        if self._model.model is None:
            raise KVFlashError("this model is closed: make a new Llama")
        if logit_bias:
            logits_processor = with_bias(logits_processor, logit_bias)
        completion: Any = super()._create_completion(prompt, logits_processor=logits_processor, **kwargs)
        return self._turns.pieces(completion) if kwargs.get("stream") else self._turns.whole(completion)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["logits_all"] = self._logits_all and (self.draft_model is None or self._session is not None)
        state["tokenizer"] = self._pickled_tokenizer
        state["kvflash"] = self._config
        return state
