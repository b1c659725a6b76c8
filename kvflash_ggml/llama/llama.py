"""`Llama`: a drop-in for `llama_cpp.Llama` whose KV cache can live in a pool of fixed size."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals
from llama_cpp.llama_tokenizer import LlamaTokenizer

from .. import policy, remote
from ..calibration.finder import open_finder
from ..config import KVFlashConfig
from ..drafter import model as drafter
from ..errors import ConfigError, DoesNotFit, KVFlashError
from ..gguf import purpose
from ..native import engine as native
from ..native import library
from ..native import remote as servers
from ..placement import devices, memory, sizing
from ..placement.predict import copied
from ..placement.sizing import PoolSize
from ..policy.base import Scorer
from ..sequence.pool import Pool
from ..spec.find import Found
from ..state.session import SessionState
from . import fitting, parameters
from .bias import with_bias
from .call_lock import CallLock, changing
from .chatting import ChattingLlama
from .context import Closed, PagedContext, check_adapter, take_closing
from .reading import open_session
from .speculating import device_bytes, loads_head, make_speculator, open_drafting, room, search
from .stats import PoolStats
from .tokenizer import IncrementalTokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..placement.sizes import Placement
    from .keywords import Keywords

logger = logging.getLogger("kvflash_ggml")

HALVINGS = 2
"""How often a pool that "auto" has sized gets half as large where no context can be made with it."""

_REDIRECTING = threading.RLock()
"""Held by upstream's constructor, which redirects the process's stdout and stderr with `verbose=False`. If two
overlapped, one would restore a stream that the other has redirected.
"""

NOT_MADE = ("Failed to create llama_context", "Failed to load model")
"""What upstream says then, and where there is no room for the weights."""


class Llama(ChattingLlama):
    """`llama_cpp.Llama` with a bounded KV cache. Every upstream keyword and method works as there.

    kvflash: None for a stock cache; for a pool a number of tokens, a size in bytes as "2G", or "auto"; or a
        KVFlashConfig.
    kvflash_policy, kvflash_drafter, kvflash_tau, kvflash_calibrate, kvflash_deterministic, kvflash_reading,
        kvflash_stage, kvflash_answer, kvflash_repair, kvflash_spec, kvflash_pins, kvflash_spill, kvflash_host_limit:
        fields of KVFlashConfig, by keyword.
    kvflash_cache: a prefix cache, or the folder of one with default settings; the same as `set_cache`.
    kvflash_progress: called as (tokens evaluated, tokens to evaluate) while a prompt is read.
    rpc: servers whose devices are used before those of this machine, as ["host:port"] or "host:port,host:port"; all
        layers are offloaded then unless n_gpu_layers is given. rpc_trust: also servers that are neither on this machine
        nor in a private network. Whoever reaches a server controls its machine: docs/devices.md.
    device: names of the devices that hold layers, in their order, as "CUDA0"; "none" for none.
    override_tensor: (regular expression, device); the first that is found in a tensor's name says where it goes.
    n_cpu_moe: so many layers have their experts in host memory: those that lie there as a whole, then the first of each
        device, in turn.
    fit: True, or a Fit with settings, to fit the model to the devices before it is loaded: what is not given of
        n_gpu_layers, tensor_split, n_cpu_moe, n_ubatch and n_batch, type_k and type_v, use_mmap, and the size of a pool
        that is "auto". What is given stays as it is. `placement` says what was decided. DoesNotFit if nothing fits.

    `n_ctx` stays the logical context: it decides the positional encoding and the limits. The pool is separate. With a
    pool, n_ctx is the length the model was trained for if it is not given, and flash attention is on. Sliding-window
    layers keep only their window then (swa_full=False, where stock's default keeps everything: Gemma's logits are
    bitwise those of a stock model with swa_full=False).

    use_extra_bufts: False keeps weights as the file has them, instead of packed for the CPU's kernels: slower where
        there are such kernels, and the way around one that computes wrongly (`kvflash-run doctor` looks).
    draft_model: as upstream; with a pool also the GGUF file of a drafter. It does not imply logits_all with a pool: for
    logprobs give it. Drafts are part of the text once they have been sampled.

    Several threads may use one object: a call waits for the other's to end, or for its stream's next piece. It holds
    one text: a stream that is advanced after another call has changed that raises KVFlashError.

    Raises TypeError for an unknown keyword that begins with kvflash; other unknown ones are ignored with a warning;
    RemoteError for a server that cannot be used. One that is lost later is DeviceLost.
    """

    def __init__(self, model_path: str, **keywords: Unpack[Keywords]) -> None:
        self._stack = contextlib.ExitStack()  # close() needs these even when nothing has been opened
        self._call_lock = CallLock()
        request = parameters.read(dict(keywords), parameters.defaults)
        purpose.check_model(Path(model_path), vocab_only=request.upstream.get("vocab_only", False))
        if (adapter := request.upstream.get("lora_path")) is not None:
            check_adapter(adapter)
        self._config = request.config
        self._weights = request.weights
        self._session = None
        self._size: PoolSize | None = None
        self.kvflash_progress = request.progress
        self._scorer: Scorer | None = None
        self._drafter: Path | None = None
        self._found: tuple[Found, ...] = ()
        if self._config is not None:
            self._drafter = fitting.reader(model_path, self._config)
            if self._config.drafter is not None:
                drafter.check(self._config.drafter)
            if self._drafter is None:
                self._scorer = policy.resolve(self._config.policy)
            self._found = search(Path(model_path), self._config.spec)
        self._rpc = {"rpc": list(request.rpc) or None, "rpc_trust": request.rpc_trust}
        endpoints = remote.find_all(request.rpc, trust=request.rpc_trust)
        if not endpoints:
            layers = request.upstream.get("n_gpu_layers", 0)
            library.ensure_gpu_offload(layers, installed=llama_cpp.Llama is Llama)
        self.placement: Placement | None = None
        if request.fit is not None:
            with servers.connected(endpoints):
                request, self.placement = fitting.fit(
                    model_path, request, fitting.beside(model_path, request), endpoints
                )
            self._config = request.config
        settings = request.upstream
        self._own_template = settings.get("chat_format") is None and settings.get("chat_handler") is None
        self._placement = request.placement

        logits_all = settings.pop("logits_all", False)
        if self._config is None:
            logits_all = logits_all or settings.get("draft_model") is not None
        self._draft_model = settings.get("draft_model")
        self._steps = {
            name: settings.get(name, parameters.UPSTREAM_PARAMETERS[name].default) for name in ("n_batch", "n_ubatch")
        }
        self._pickled_tokenizer = settings.get("tokenizer")
        self._free_before: dict[str, int] = {}
        self._other_split = partial(fitting.other_split, model_path, request, endpoints)
        with servers.connected(endpoints):
            self._device_arrays = devices.place(model_path, request.placement, settings, endpoints)
            self._load(model_path, request, endpoints)
            self._stack.enter_context(servers.connected(endpoints))
        self._logits_all = logits_all
        self.input_ids = np.zeros(self._n_ctx, np.intc)
        self._replace_batch()
        if request.n_batch is not None:
            self.n_batch = min(self._n_ctx, request.n_batch)
        if self._size is not None:
            self._open_session(self._size)
        if request.cache is not None:
            self.set_cache(request.cache)

    __init__.__signature__ = parameters.signature()  # type: ignore[attr-defined]

    # --- construction

    def _load(self, model_path: str, request: parameters.Request, endpoints: Sequence[remote.Endpoint]) -> None:
        """Upstream's constructor. A pool that "auto" has sized gets smaller until a context can be made with it."""
        for self._halvings in range(HALVINGS + 1):
            try:
                with _REDIRECTING, contextlib.ExitStack() as self._pool_requests:
                    # upstream would allocate n_ctx rows of logits at once; here they grow with use
                    super().__init__(model_path, logits_all=False, **request.upstream)
                return
            except ValueError as err:
                if not str(err).startswith(NOT_MADE):
                    raise
                self._stack.close()
                if self._size is None or self._size.tight is None:
                    better = fitting.why_not(model_path, request, endpoints)
                    if better is None or (self._config is None and not isinstance(better, ValueError)):
                        raise  # without a pool what upstream raises stays a ValueError
                    raise better from err
        assert self._size is not None
        raise fitting.does_not_fit(model_path, request, self._size, endpoints)

    @property
    def model_params(self) -> Any:
        """llama_cpp's `llama_model_params` that the weights were loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        # upstream sets this before loading the model
        params.load_mtp = loads_head(self._found)
        if self._device_arrays is not None:
            params.devices = self._device_arrays.devices
            params.tensor_buft_overrides = self._device_arrays.overrides
        for name, value in self._weights.items():
            setattr(params, name, value)
        self._model_params = params
        if self._config is not None and params.n_gpu_layers != 0:
            self._free_before = {device.name: device.free for device in memory.devices()}

    @property
    def tokenizer_(self) -> Any:
        """The tokenizer; upstream's interface, with a cache for texts that grow at their end."""
        return self._tokenizer

    @tokenizer_.setter
    def tokenizer_(self, tokenizer: Any) -> None:
        # upstream sets this between loading the model and making the context: the moment to size the pool
        if isinstance(tokenizer, LlamaTokenizer):
            spells = llama_cpp.llama_vocab_type(self._model.vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
            tokenizer = IncrementalTokenizer(
                tokenizer, self._model.token_bos, n_vocab=self._model.n_vocab(), spells=spells
            )
        self._tokenizer = tokenizer
        if self._config is not None:
            self._room = room(self, self._config, self._draft_model, **self._steps)
            self.context_params.n_rs_seq = self._room.planes
            self._size = self._size_pool(self._config)
            self._pool_requests.enter_context(self._pool_request(self._size))

    def _query_rows(self) -> int:
        """Queries that are captured, if the pool is smaller than the context."""
        rows = self._scorer.query_rows if self._scorer is not None else 0
        return rows + (self._room.queries if rows else 0)

    def _pool_request(self, size: PoolSize) -> contextlib.AbstractContextManager[None]:
        return native.pool_request(size.slots, self._query_rows() if size.slots < size.n_ctx else 0)

    def _reserved(self) -> int:
        """Device memory that drafting models take, which are loaded later."""
        scores = drafter.reserve_bytes(self._drafter) if self._drafter is not None else 0
        return scores + device_bytes(self._found)

    def _size_pool(self, config: KVFlashConfig) -> PoolSize:
        # as upstream will set them when it knows how long the context is
        n_ctx = self.context_params.n_ctx or self._model.n_ctx_train()
        n_batch = min(n_ctx, self._steps["n_batch"])
        size = sizing.fit(
            config,
            self._model,
            copied(self.context_params, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=min(n_batch, self._steps["n_ubatch"])),
            query_rows=self._query_rows(),
            reserved=self._reserved() + self._room.kept_bytes,
            mapped=self.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP,
            before=self._free_before,
        )
        if self.placement is not None:
            return replace(size, why=self.placement.why)
        if size.uneven:
            size = replace(size, why=size.why + self._other_split(size))
        return sizing.halved(size, self._halvings, minimum=config.minimum_pool)

    def _open_session(self, size: PoolSize, beside: Pool | None = None) -> None:
        assert self._config is not None
        n_ubatch = self.context_params.n_ubatch or self.context_params.n_batch  # 0 is upstream's "as n_batch"
        if self._drafter is not None:
            self._scorer = drafter.make_scorer(self, self._drafter, idle=size.slots - 2 * n_ubatch)
        engine = native.Engine(ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0, max(n_ubatch, self._room.rows))
        self._ctx._exit_stack.callback(engine.close)  # should anything of what follows fail
        drafting = open_drafting(self, self._config.spec, self._found, engine, self._room.rows, self._ctx._exit_stack)
        self._drafting = drafting.counting_on(self._speculator)  # of a pool of another size
        config = self._config
        sizing.warn_if_tight(engine.info.devices, n_ubatch)
        mapped = self.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
        limit = sizing.image_limit(config, sizing.address(self._model), size, engine.info.page_bytes, mapped=mapped)
        pool = Pool(engine, n_ubatch=n_ubatch, host_limit=limit, spill=config.spill, beside=beside)
        self._session = open_session(self, config, pool, self._scorer)
        # with the context's own, which a garbage collector may close before it closes this
        self._ctx._exit_stack.callback(self._session.close, partial(take_closing, self._ctx))
        self._speculator = self._session.follower = make_speculator(self, config, self._drafting)
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

    # --- another size of the pool

    @changing
    def resize_pool(self, tokens: int) -> int:
        """Give the pool another size, in tokens; the text and its memory stay. Returns how many slots there are then.

        Page images stay on the host and nothing is read again: what follows is what a session of that pool answers
        that has loaded this text. The new pool is made beside the old one; where there is no room for both, the
        smallest pool takes the old one's place first. A prefix cache keeps what is in its folder.

        Raises DoesNotFit where there is no room for that either, ConfigError for a size that cannot work or a policy
        that is an object, which cannot serve two pools: nothing has changed then, as after any other error. Only where
        others take the memory meanwhile the smallest pool stays, with the text.
        """
        config, old = self._config, self._session
        if config is None or old is None:
            raise KVFlashError("there is no pool that could have another size: make the Llama with kvflash=")
        old.check_open()
        if not isinstance(config.policy, str):
            raise ConfigError(f"policy={config.policy!r} serves one pool: name a policy, or make a new Llama")
        config = replace(config, pool=tokens, pool_bytes=None)
        size = sizing.fit(config, self._model, self.context_params)
        if size.slots == old.pool.n_slots:
            return size.slots
        cache = None if self._prefixes is None else self._prefixes.cache
        self._keep_prefix()
        saved = self._saved(None)
        try:
            try:
                self._exchange(config, size, saved)
            except DoesNotFit as err:
                self._exchange_in_two(config, size, saved, err)
        finally:
            saved.release()
            if cache is not None and self._prefixes is None:
                self.set_cache(cache)
        return size.slots

    def _exchange_in_two(self, config: KVFlashConfig, size: PoolSize, saved: SessionState, why: DoesNotFit) -> None:
        """By way of the smallest pool. Raises `why` where that would not be between the two."""
        assert self._config is not None
        assert self._size is not None
        before = self._config, self._size
        least = replace(size, slots=min(config.minimum_pool, size.n_ctx))
        if least.slots >= min(size.slots, self._size.slots):
            raise why
        old = self._session
        try:
            self._exchange(replace(config, pool=least.slots), least, None)
            self._exchange(config, size, saved)
        except BaseException as err:
            if self._session is old:
                raise (why if isinstance(err, DoesNotFit) else err) from None
            try:
                self._exchange(*before, saved)
            except DoesNotFit:
                self._go_on_from(saved.share())
            raise

    def _exchange(self, config: KVFlashConfig, size: PoolSize, saved: SessionState | None) -> None:
        """Another pool in the place of the session's, which goes on from `saved`; without it the text is unknown.

        Nothing has changed after an error.
        """
        old = self._session
        assert old is not None
        before, closing = dict(vars(self)), self._ctx
        try:
            self._config, self._size = config, size
            if self._drafter is None:
                self._scorer = policy.resolve(config.policy)
            self._ctx = self._make_context(size)
            self._prefixes = None
            self._open_session(size, beside=old.pool)
            assert self._session is not None
            self._session.events.observer = old.events.observer
            self._session.pool.take_images(old.pool)
            if saved is not None:
                self._go_on_from(saved.share())
        except BaseException:
            made, session = self._ctx, self._session
            vars(self).update(before)
            if session is not None and not old.pool.owns_images:
                old.pool.take_images(session.pool)
            if made is not closing:
                made.close()
            raise
        closing.close()

    def _make_context(self, size: PoolSize) -> internals.LlamaContext:
        """A second context on the model. DoesNotFit if llama.cpp cannot make it."""
        assert self._session is not None
        with self._pool_request(size):
            try:
                context = internals.LlamaContext(model=self._model, params=self.context_params, verbose=self.verbose)
            except ValueError as err:
                pool, there = self._session.pool, ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0
                devices = pool.engine.info.devices
                raise sizing.no_room_beside(self._model, there, devices, size, pool.n_slots) from err
        self._stack.enter_context(contextlib.closing(context))
        if self._lora_adapter is not None:
            adapters: Any = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._lora_adapter)  # type: ignore[misc]
            scales = (ctypes.c_float * 1)(self.lora_scale)
            llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, scales)
        return context

    @property
    def draft_model(self) -> Any:
        """Upstream's: a function from a text to tokens that may follow it, or None. It can be set at any time."""
        return self._draft_model

    @draft_model.setter
    def draft_model(self, model: Any) -> None:
        self._draft_model = model
        if self._session is not None and self._config is not None:
            if self._speculator is not None:
                self._drafting = self._drafting.after(self._speculator)
            self._speculator = self._session.follower = make_speculator(self, self._config, self._drafting)

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
        return PoolStats(
            self._session, self._size, self._finder, self._speculator, swa_full=self.context_params.swa_full
        )

    def _create_completion(  # type: ignore[override]  # the keywords between are upstream's and only passed on
        self,
        prompt: str | list[int],
        *,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        logit_bias: dict[int, float] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        if logit_bias:
            logits_processor = with_bias(logits_processor, logit_bias)
        completion: Any = super()._create_completion(prompt, logits_processor=logits_processor, **kwargs)
        completion = self._limited(completion, kwargs.get("max_tokens"))
        return self._call_lock.pieces(completion) if kwargs.get("stream") else self._call_lock.whole(completion)

    def _limited(self, completion: Iterator[Any], most: int | None) -> Iterator[Any]:
        """A completion whose `generate` knows how much it is asked for."""
        self.kvflash_most = most if most and most > 0 else None
        try:
            yield from completion
        finally:
            self.kvflash_most = None

    def close(self) -> None:
        """Free the model, once the call that computes with it has ended. Later ones raise KVFlashError."""
        with self._call_lock.lock:
            try:
                self._call_lock.close()
            finally:
                super().close()
                closed: Any = Closed()
                self._ctx = self._model = self._tokenizer = closed

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["logits_all"] = self._logits_all and (self.draft_model is None or self._session is not None)
        state["tokenizer"] = self._pickled_tokenizer
        state["kvflash"] = self._config
        return state | self._rpc | self._placement.keywords() | self._weights
