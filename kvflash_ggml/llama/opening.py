"""Opens the pool of a `Llama`, and exchanges it for another one while the text stays.

llm: the Llama, which imports this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from .. import policy
from ..calibration.finder import open_finder
from ..config import KVFlashConfig
from ..drafter import model as drafter
from ..errors import ConfigError, DoesNotFit, KVFlashError
from ..native import engine as native
from ..placement import sizing
from ..placement.sizing import PoolSize, with_steps
from ..sequence.pool import Pool
from ..sequence.sequence import Sequence
from ..state.session import SessionState
from .call_lock import CallLock
from .context import PagedContext, take_closing
from .drafting import Drafting
from .reader import Reader
from .reading import open_sequence
from .saving import Saver

if TYPE_CHECKING:
    from ..spec.loop import Speculator

logger = logging.getLogger("kvflash_ggml")


def open_pool(llm: Any, size: PoolSize, beside: Pool | None = None) -> None:
    """Open the pool of a Llama's context, with its scorer and its drafters. beside: see `Pool`."""
    assert llm._config is not None
    n_ubatch = llm.context_params.n_ubatch or llm.context_params.n_batch  # 0 is upstream's "as n_batch"
    if llm._drafter is not None:
        llm._scorer = drafter.make_scorer(llm, llm._drafter, idle=size.slots - 2 * n_ubatch)
    engine = native.Engine(ctypes.cast(llm._ctx.ctx, ctypes.c_void_p).value or 0, max(n_ubatch, llm._room.rows))
    llm._ctx._exit_stack.callback(engine.close)  # should anything of what follows fail
    drafting, stack = Drafting(), llm._ctx._exit_stack
    if llm._room.rows:
        from .speculating import open_drafting  # here, as below: it imports every drafter

        drafting = open_drafting(llm, llm._config, llm._found, engine, llm._room.rows, stack)
    llm._drafting = drafting.counting_on(llm._reader.speculator)  # of a pool of another size
    config = llm._config
    sizing.warn_if_tight(engine.info.devices, n_ubatch)
    mapped = llm.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
    limit = sizing.image_limit(config, sizing.address(llm._model), size, engine.info.page_bytes, mapped=mapped)
    pool = Pool(
        engine,
        n_ubatch=n_ubatch,
        host_limit=limit,
        spill=config.spill,
        beside=beside,
        fixed_rows=config.deterministic_batch,
    )
    sequence = open_sequence(llm, config, pool, llm._scorer)
    context = llm._ctx
    _open_text(llm, sequence)
    llm._reader.speculator = sequence.follower = speculator_of(llm, llm._reader, config, llm._drafting)
    llm._finder = open_finder(llm, sequence, llm._scorer)
    if llm._finder is not None:
        context._exit_stack.callback(llm._finder.close)
    assert llm.kvflash is not None
    if llm.verbose:
        logger.warning(llm.kvflash.banner())
    else:
        logger.info(llm.kvflash.banner())


def speculator_of(
    llm: Any, reader: Reader, config: KVFlashConfig, drafting: Drafting, first: Speculator | None = None
) -> Speculator | None:
    """What drafts for a model; None if nothing does. As `speculating.make_speculator`, which it calls."""
    if llm.draft_model is None and not drafting.drafters and first is None and config.answer != "lossless":
        return None
    from .speculating import make_speculator  # here: it imports every drafter

    return make_speculator(llm, reader, config, drafting, first)


def allow_several(params: Any, sequences: int, *, n_batch: int, n_ubatch: int) -> None:
    """Set the number of sequences of a context to be made. ConfigError if a step has fewer rows."""
    rows = min(n_batch, n_ubatch or n_batch)
    if rows < sequences:
        raise ConfigError(
            f"n_ubatch = {rows} rows of a step for {sequences} sequences: give at least {sequences}, or fewer sequences"
        )
    params.n_seq_max, params.kv_unified = sequences, True


def with_sequences(llm: Any, config: KVFlashConfig) -> KVFlashConfig:
    """Set the sequences of the context to be made. Return the config, with a number in place of "auto"."""
    if config.parallel == "auto":
        params = with_steps(llm._model, llm.context_params, **llm._steps)
        alone = llm._size_pool(replace(config, parallel=1, deterministic_batch=False))
        config = replace(config, parallel=sizing.sequences_for(config, llm._model, params, alone.slots))
    if config.sequences > 1:
        allow_several(llm.context_params, config.sequences, **llm._steps)
    return config


def _open_text(llm: Any, sequence: Sequence) -> None:
    """Let a Llama hold the text of a sequence."""
    llm._reader.sequence = sequence
    # with the context's own, which a garbage collector may close before it closes this
    llm._ctx._exit_stack.callback(sequence.close, partial(take_closing, llm._ctx))
    llm._saver.open(llm, sequence.engine)
    llm._ctx = PagedContext(llm._ctx, sequence)


def open_beside(llm: Any, seq: int) -> Any:
    """Return a Llama on the same model, context and pool, which holds the text of another sequence.

    It is closed with the first one, and has its settings. Its text drafts for itself if the first one's does.
    """
    first, config = llm._reader.sequence, llm._config
    made = object.__new__(type(llm))
    vars(made).update(vars(llm))
    made._stack, made._call_lock = contextlib.ExitStack(), CallLock()
    made.input_ids, made.n_tokens = np.zeros_like(llm.input_ids), 0
    made._reader = Reader(made)
    made._saver = Saver(made._reader)
    made._scorer = policy.resolve(config.policy)
    _open_text(made, open_sequence(made, config, first.pool, made._scorer, seq=seq, reading=first.reading))
    speculator = speculator_of(made, made._reader, config, llm._drafting, llm._reader.speculator)
    if speculator is not None:
        from ..spec.loop import ANOTHER

        speculator.lend(ANOTHER)
    made._reader.speculator = made._reader.sequence.follower = speculator
    if made._finder is not None:
        made._finder.settle(made._reader.sequence)
    if llm._reader.prefixes is not None:
        made._saver.use(llm._reader.prefixes.cache)
    return made


def make_context(llm: Any, size: PoolSize) -> internals.LlamaContext:
    """Make a second context on the model. DoesNotFit if llama.cpp cannot make it."""
    with llm._pool_request(size):
        try:
            context = internals.LlamaContext(model=llm._model, params=llm.context_params, verbose=llm.verbose)
        except ValueError as err:
            pool, there = llm._reader.pooled.pool, ctypes.cast(llm._ctx.ctx, ctypes.c_void_p).value or 0
            devices = pool.engine.info.devices
            raise sizing.no_room_beside(llm._model, there, devices, size, pool.n_slots) from err
    llm._stack.enter_context(contextlib.closing(context))
    if llm._lora_adapter is not None:
        adapters: Any = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(llm._lora_adapter)
        scales = (ctypes.c_float * 1)(llm.lora_scale)
        llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, scales)
    return context


def resize(llm: Any, tokens: int) -> int:
    """See `Llama.resize_pool`."""
    config, old = llm._config, llm._reader.sequence
    if config is None or old is None:
        raise KVFlashError("there is no pool that could have another size: make the Llama with kvflash=")
    old.check_open()
    if config.sequences > 1:
        raise ConfigError(f"a pool that {config.parallel} sequences share keeps its size: make a new Llama")
    if not isinstance(config.policy, str):
        raise ConfigError(f"policy={config.policy!r} serves one pool: name a policy, or make a new Llama")
    config = replace(config, pool=tokens, pool_bytes=None)
    size = sizing.fit(config, llm._model, llm.context_params)
    if size.slots == old.pool.n_slots:
        return size.slots
    cache = None if llm._reader.prefixes is None else llm._reader.prefixes.cache
    llm._saver.keep_prefix()
    saved = llm._saver.saved(None)
    try:
        try:
            exchange(llm, config, size, saved)
        except DoesNotFit as err:
            exchange_in_two(llm, config, size, saved, err)
    finally:
        saved.release()
        if cache is not None and llm._reader.prefixes is None:
            llm.set_cache(cache)
    return size.slots


def exchange(llm: Any, config: KVFlashConfig, size: PoolSize, saved: SessionState | None) -> None:
    """Replace the pool by another one, which continues `saved`; without it the text is unknown.

    Nothing has changed after an error.
    """
    old = llm._reader.sequence
    assert old is not None
    before, closing = dict(vars(llm)), llm._ctx
    try:
        llm._config, llm._size = config, size
        if llm._drafter is None:
            llm._scorer = policy.resolve(config.policy)
        llm._ctx = make_context(llm, size)
        reader = Reader(llm)
        reader.speculator = llm._reader.speculator
        llm._reader, llm._saver = reader, Saver(reader)
        open_pool(llm, size, beside=old.pool)
        reader.pooled.events.observer = old.events.observer
        reader.pooled.pool.take_images(old.pool)
        if saved is not None:
            llm._saver.go_on_from(saved.share())
    except BaseException:
        made, sequence = llm._ctx, llm._reader.sequence
        vars(llm).update(before)
        if sequence is not None and not old.pool.owns_images:
            old.pool.take_images(sequence.pool)
        if made is not closing:
            made.close()
        raise
    closing.close()


def exchange_in_two(llm: Any, config: KVFlashConfig, size: PoolSize, saved: SessionState, why: DoesNotFit) -> None:
    """Replace the pool by way of the smallest one. Raise `why` where that is not smaller than both."""
    assert llm._config is not None
    assert llm._size is not None
    before = llm._config, llm._size
    least = replace(size, slots=min(config.minimum_pool, size.n_ctx))
    if least.slots >= min(size.slots, llm._size.slots):
        raise why
    old = llm._reader.sequence
    try:
        exchange(llm, replace(config, pool=least.slots), least, None)
        exchange(llm, config, size, saved)
    except BaseException as err:
        if llm._reader.sequence is old:
            raise (why if isinstance(err, DoesNotFit) else err) from None
        try:
            exchange(llm, *before, saved)
        except DoesNotFit:
            llm._saver.go_on_from(saved.share())
        raise
