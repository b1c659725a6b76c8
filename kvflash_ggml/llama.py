"""`Llama`: a drop-in for `llama_cpp.Llama` whose KV cache can live in a pool of fixed size."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals as internals
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_tokenizer import LlamaTokenizer

from . import drafter, parameters, policy
from .config import KVFlashConfig
from .context import PagedContext
from .errors import ContextFull, KVFlashError
from .native import engine as native
from .native import library
from .policy.base import Scorer
from .policy.drafter import NAME as DRAFTER
from .policy.drafter import DrafterScorer
from .pool.sizing import PoolSize, resolve
from .saved import SavedSession
from .session import Progress, Session
from .snapshot import fingerprint
from .snapshot import stock as stock_state
from .snapshot.keeper import Keeper
from .tokenizer import IncrementalTokenizer
from .view import PoolView

logger = logging.getLogger("kvflash_ggml")


class Llama(llama_cpp.Llama):
    """`llama_cpp.Llama` with a bounded KV cache. Every upstream keyword and method works as there.

    kvflash: None for a stock cache; a number of tokens or "auto" for a pool of that size; or a KVFlashConfig.
    kvflash_policy, kvflash_drafter, kvflash_tau, kvflash_pins, kvflash_spill, kvflash_host_limit: fields of
        KVFlashConfig, by keyword.
    kvflash_progress: called as (tokens evaluated, tokens to evaluate) while a prompt is read.

    `n_ctx` stays the logical context: it decides the positional encoding and the limits. The pool is separate. With a
    pool, flash attention is on and sliding-window layers keep only their window, unless asked otherwise.
    """

    def __init__(
        self,
        model_path: str,
        *,
        kvflash: parameters.KVFlash = None,
        kvflash_policy: str | Scorer | None = None,
        kvflash_drafter: str | Path | None = None,
        kvflash_tau: int | None = None,
        kvflash_pins: Sequence[tuple[int, int]] | None = None,
        kvflash_spill: str | Path | None = None,
        kvflash_host_limit: int | None = None,
        kvflash_progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # upstream's close() needs it even when nothing has been opened
        unknown = set(kwargs) - parameters.UPSTREAM_KEYWORDS - parameters.STRAY_KEYWORDS
        if unknown:
            raise TypeError(f"Llama() got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        fields = {
            "policy": kvflash_policy,
            "drafter": Path(kvflash_drafter) if kvflash_drafter is not None else None,
            "tau": kvflash_tau,
            "pins": tuple(kvflash_pins) if kvflash_pins is not None else None,
            "spill": Path(kvflash_spill) if kvflash_spill is not None else None,
            "host_limit": kvflash_host_limit,
        }
        self._config = parameters.merge(kvflash, {name: value for name, value in fields.items() if value is not None})
        self._session: Session | None = None
        self._keeper: Keeper | None = None
        self._size: PoolSize | None = None
        self.kvflash_progress = kvflash_progress
        if self._config is not None:
            self._config = parameters.check_features(self._config, kwargs)
        self._scorer: Scorer | None = None
        self._drafter: Path | None = None
        if self._config is not None:
            if self._config.policy == DRAFTER:
                self._drafter = drafter.find(model_path, self._config.drafter)
            else:
                self._scorer = policy.resolve(self._config.policy)
            kwargs["flash_attn"] = True
            kwargs.setdefault("swa_full", False)
        library.ensure_gpu_offload(kwargs.get("n_gpu_layers", 0))

        logits_all = kwargs.pop("logits_all", False) or kwargs.get("draft_model") is not None
        self._pickled_tokenizer = kwargs.get("tokenizer")
        try:
            # upstream would allocate n_ctx rows of logits at once; here they grow with use
            super().__init__(model_path, logits_all=False, **kwargs)
        finally:
            native.set_pool(0)
        self._logits_all = logits_all
        self.input_ids = np.zeros(self._n_ctx, np.intc)
        self._replace_batch()
        if self._size is not None:
            self._open_session(self._size)

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
            native.set_pool(self._size.slots, rows if self._size.slots < self._size.n_ctx else 0)

    def _size_pool(self, config: KVFlashConfig) -> PoolSize:
        model = ctypes.cast(self._model.model, ctypes.c_void_p).value
        params = self.context_params
        slot_bytes = native.probe(
            model or 0,
            type_k=params.type_k,
            type_v=params.type_v,
            offload=params.offload_kqv,
            arch=self._model.metadata().get("general.architecture", "unknown"),
        )
        free, _, _ = native.device_memory(model or 0)
        if self._drafter is not None:
            free -= drafter.reserve_bytes(self._drafter)
        n_ctx = params.n_ctx or self._model.n_ctx_train()
        return resolve(config, n_ctx=n_ctx, free_bytes=free, slot_bytes=slot_bytes)

    def _open_session(self, size: PoolSize) -> None:
        assert self._config is not None
        n_ubatch = min(self.context_params.n_ubatch, self.n_batch)
        if self._drafter is not None:
            self._scorer = self._make_drafter_scorer(self._drafter, idle=size.slots - 2 * n_ubatch)
        engine = native.Engine(ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0, n_ubatch)
        self._session = Session(
            engine, self._config, n_ctx=self._n_ctx, n_batch=self.n_batch, n_ubatch=n_ubatch, scorer=self._scorer
        )
        this = weakref.ref(self)  # not to keep itself alive
        self._keeper = Keeper(
            self._session, fingerprint=lambda: fingerprint.of_llama(this(), engine), n_vocab=self.n_vocab()
        )
        # with the context's own, which a garbage collector may close before it closes this
        self._ctx._exit_stack.callback(self._session.close)
        self._ctx._exit_stack.callback(self._keeper.close)
        self._ctx = PagedContext(self._ctx, self._session)
        assert self.kvflash is not None
        if self.verbose:
            logger.warning(self.kvflash.banner())
        else:
            logger.info(self.kvflash.banner())

    def _make_drafter_scorer(self, path: Path, *, idle: int) -> Scorer:
        load = partial(
            drafter.load,
            path,
            beside=self._model,
            n_ctx=self._n_ctx,
            offload=self.model_params.n_gpu_layers != 0,
            settings=self.context_params,
        )
        return DrafterScorer(load, source=str(path), idle=idle)

    def _replace_batch(self) -> None:
        """Upstream's batch has room for n_ctx sequences a token: gigabytes of address space at long contexts."""
        self._batch.close()
        self._batch = internals.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=self.verbose)
        self._stack.callback(self._batch.close)

    @property
    def kvflash(self) -> PoolView | None:
        """The live state of the pool, or None without one."""
        if self._session is None or self._size is None:
            return None
        return PoolView(self._session, self._size)

    # --- evaluation

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` read so far. ContextFull, and nothing evaluated, if they do not fit."""
        self._evaluate(tokens, generated=False)

    def _evaluate(self, tokens: Sequence[int], *, generated: bool) -> None:
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise ContextFull(
                f"Requested tokens ({self.n_tokens + len(tokens)}) exceed context window of {self._n_ctx}"
            )
        if self._logits_all:
            self._grow_scores(self.n_tokens + len(tokens))
        if self._session is None:
            super().eval(tokens)
            return
        self._catch_up(self._session)
        data = np.asarray(tokens, np.int32)
        progress = self.kvflash_progress if len(data) > 1 else None
        try:
            self._session.extend(
                data,
                output_all=self._logits_all,
                generated=generated,
                after=self._after_step,
                progress=progress,
            )
        except BaseException:
            self._requires_eval = True  # the last step that was done may have kept no logits
            raise

    def _catch_up(self, session: Session) -> None:
        """Bring the session to `n_tokens`, which inherited methods and users may have set."""
        if self.n_tokens < session.length:
            session.rewind(self.n_tokens)
        elif self.n_tokens > session.length:
            session.extend(self.input_ids[session.length : self.n_tokens].astype(np.int32))

    def _after_step(self, start: int, count: int) -> None:
        assert self._session is not None
        self.input_ids[start : start + count] = self._session.ids[start : start + count]
        if self._logits_all:
            logits = np.ctypeslib.as_array(self._ctx.get_logits(), shape=(count, self._n_vocab))
            self.scores[start : start + count] = logits
        self.n_tokens = start + count
        self._requires_eval = False

    def _grow_scores(self, rows: int) -> None:
        if rows > len(self.scores):
            grown = np.empty((min(self._n_ctx, max(rows, 2 * len(self.scores))), self._n_vocab), np.single)
            grown[: len(self.scores)] = self.scores
            self.scores = grown

    def reset(self) -> None:
        """Forget the text. Settings and pins stay."""
        super_reset = self._session is None
        if super_reset:
            super().reset()  # type: ignore[no-untyped-call]
            return
        assert self._session is not None
        self.n_tokens = 0
        self._requires_eval = True
        self._session.reset()

    # --- generation

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
        pending = list(tokens)
        if reset:
            pending = pending[self._reuse_prefix(pending) :]
        sample_idx = self.n_tokens + len(pending) - 1
        generated = False
        while True:
            self._evaluate(pending, generated=generated)
            while sample_idx < self.n_tokens:
                token = self.sample(idx=sample_idx)
                sample_idx += 1
                if stopping_criteria is not None and stopping_criteria(
                    self._input_ids[:sample_idx], self._logits_row(sample_idx - 1)
                ):
                    return
                sent = yield token
                generated = not sent
                pending = [token, *(sent or ())]
                if sent and not self._logits_all:
                    sample_idx = self.n_tokens + len(pending) - 1  # of those before it no logits are kept
                if sample_idx < self.n_tokens and token != self._input_ids[sample_idx]:
                    self._reject_drafts(sample_idx)
                    break
            pending += self._draft(pending)

    def _reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Cut the memory to the longest prefix it shares with `tokens`; how many tokens need no evaluation."""
        known = self._input_ids
        n = min(len(known), len(tokens))
        differs = np.flatnonzero(known[:n] != np.asarray(tokens[:n], np.intc))
        shared = int(differs[0]) if len(differs) else n
        if shared == len(tokens) == self.n_tokens and not self._requires_eval:
            return shared  # the logits of the last token are at hand
        if shared == len(tokens):
            shared -= 1  # one token has to be evaluated for its logits
        if self._session is not None:
            shared = self._session.reusable(shared, len(tokens))
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
        room = min(self._n_ctx - start, self.context_params.n_ubatch - len(pending))
        if self._session is not None:
            room = min(room, self._session.pager.room(self._session.length) - len(pending))
        if room <= 0:
            return []
        self.input_ids[self.n_tokens : start] = pending
        return [int(token) for token in self.draft_model(self.input_ids[:start])[:room]]

    def _logits_row(self, pos: int) -> npt.NDArray[np.single]:
        """Logits of the token at `pos`, which must be among those evaluated last."""
        row = self._ctx.get_logits_ith(pos - self.n_tokens)
        return np.ctypeslib.as_array(row, shape=(self._n_vocab,))

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
        # upstream loses both when given both
        if logit_bias:
            bias = {int(token): float(value) for token, value in logit_bias.items()}
            logits_processor = llama_cpp.LogitsProcessorList([*(logits_processor or ()), _bias_processor(bias)])
        completion: Iterator[Any] = super()._create_completion(prompt, logits_processor=logits_processor, **kwargs)
        return completion

    # --- states

    def save_snapshot(
        self, path: str | Path, *, length: int | None = None, compress: bool = False, wait: bool = True
    ) -> Future[int]:
        """Write the text and its memory to a file, from which this or another process goes on bit for bit.

        length: only the first tokens, None for all. With recurrent state or a sliding window it must be a position that
        has a checkpoint. compress: with Zstandard. wait: False returns as soon as what only the device holds has been
        copied; the file is written behind the decode, and is there when the future is done. Its result is the size in
        bytes.

        A file that is there is replaced as a whole, or stays as it was. Raises SnapshotError.
        """
        keeper = self._snapshots()
        done = keeper.save(self._freeze(length), Path(path), compress=compress)
        if wait:
            done.result()
        return done

    def load_snapshot(self, path: str | Path) -> int:
        """Go on from a file that `save_snapshot` has written; how many tokens it holds.

        Page images are read when they are needed, so the file must stay readable; it may be replaced or deleted.
        Raises SnapshotMismatch for another model, SnapshotError for a file that is damaged, ContextFull: nothing has
        changed then.
        """
        saved = self._snapshots().load(Path(path))
        self._thaw(saved)
        return self.n_tokens

    def save_state(self) -> llama_cpp.LlamaState:
        """The text and its memory. Logits of all tokens are carried only with `logits_all`."""
        data = stock_state.read(self._ctx.ctx) if self._session is None else self._snapshots().dump(self._freeze(None))
        rows = self.n_tokens if self._logits_all else 0
        return llama_cpp.LlamaState(
            scores=self.scores[:rows].copy(),
            input_ids=self._input_ids.copy(),
            n_tokens=self.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Return to a saved state of the same model and settings. SnapshotError, and no change, if it does not fit."""
        if state.n_tokens > self._n_ctx:
            raise ContextFull(
                f"Requested tokens ({state.n_tokens}) exceed context window of {self._n_ctx}: the state is longer"
            )
        if self._session is None:
            stock_state.write(self._ctx.ctx, state.llama_state)
            self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
            self.n_tokens = state.n_tokens
            self._requires_eval = True
        else:
            self._thaw(self._snapshots().load(state.llama_state))
        self._seed = state.seed
        if self._logits_all:
            self._grow_scores(self.n_tokens)
            self.scores[: len(state.scores)] = state.scores

    def _snapshots(self) -> Keeper:
        if self._keeper is None:
            raise KVFlashError("snapshots are of a paged session: make the Llama with kvflash=, or use save_state")
        return self._keeper

    def _freeze(self, length: int | None) -> SavedSession:
        assert self._session is not None
        self._catch_up(self._session)
        saved = self._session.freeze(length)
        saved.seed = self._seed
        if length in (None, self.n_tokens) and not self._requires_eval and self.n_tokens:
            saved.logits = self._logits_row(self.n_tokens - 1).copy()
        return saved

    def _thaw(self, saved: SavedSession) -> None:
        """Go on from a saved session, and release it."""
        assert self._session is not None
        try:
            self._session.restore(saved)
        finally:
            saved.release()
        self.input_ids[: saved.length] = saved.tokens
        self.n_tokens = saved.length
        self._seed = saved.seed
        self._requires_eval = saved.logits is None
        if saved.logits is not None:
            self._session.engine.set_logits(saved.logits)
        if self._logits_all:
            self._grow_scores(self.n_tokens)
            if saved.logits is not None:
                self.scores[self.n_tokens - 1] = saved.logits

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["logits_all"] = self._logits_all and self.draft_model is None
        state["tokenizer"] = self._pickled_tokenizer
        state["kvflash"] = self._config
        return state


def install() -> None:
    """Make `llama_cpp.Llama` this class, for programs whose import cannot be changed."""
    llama_cpp.Llama = Llama  # type: ignore[misc]


def _bias_processor(bias: dict[int, float]) -> Any:
    def add_bias(input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        biased: npt.NDArray[np.single] = scores.copy()
        for token, value in bias.items():
            biased[token] += value
        return biased

    return add_bias
