"""Opens the pool of a `Llama`.

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

from .. import policy
from ..calibration.finder import open_finder
from ..config import KVFlashConfig
from ..constants import POOL_STEP, SPEED_CAP, round_up
from ..drafter import model as drafter
from ..errors import ConfigError
from ..native import engine as native
from ..placement import sizing
from ..placement.sizing import PoolSize, with_steps
from ..sequence.pool import Pool
from ..sequence.sequence import Sequence
from .call_lock import CallLock
from .context import PagedContext, take_closing
from .drafting import Drafting
from .reader import Reader
from .reading import open_sequence
from .saving import Saver

if TYPE_CHECKING:
    from ..speculation.loop import Speculator

logger = logging.getLogger("kvflash_ggml")


def open_pool(llm: Any, size: PoolSize) -> None:
    """Open the pool of a Llama's context, with its scorer and its drafters."""
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
    llm._drafting = drafting
    config = llm._config
    sizing.warn_if_tight(engine.info.devices, n_ubatch)
    mapped = llm.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
    limit = sizing.image_limit(config, sizing.address(llm._model), size, engine.info.page_bytes, mapped=mapped)
    pool = Pool(
        engine,
        n_ubatch=n_ubatch,
        host_limit=limit,
        spill=config.spill,
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


def with_sequences(llm: Any, config: KVFlashConfig) -> tuple[KVFlashConfig, str]:
    """Set the sequences of the context to be made. Return the config with a number in place of "auto", and why that is
    one sequence; empty if it is not.
    """
    alone = ""
    if config.parallel == "auto":
        params = with_steps(llm._model, llm.context_params, **llm._steps)
        size = llm._size_pool(replace(config, parallel=1, deterministic_batch=False))
        slots = size.slots
        if not size.bounded and config.pool_bytes is None:  # several contexts may fill more
            slots = SPEED_CAP if config.pool == "auto" else round_up(config.pool, POOL_STEP)
        count, alone = (
            sizing.sequences_for(config, llm._model, params, slots, query_rows=llm._query_rows())
            if llm._draft_model is None
            else (1, "draft_model serves one")
        )
        config = replace(config, parallel=count, deterministic_batch=config.deterministic_batch and count > 1)
    if config.sequences > 1:
        allow_several(llm.context_params, config.sequences, **llm._steps)
    return config, alone


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
        from ..speculation.loop import ANOTHER

        speculator.lend(ANOTHER)
    made._reader.speculator = made._reader.sequence.follower = speculator
    if made._finder is not None:
        made._finder.settle(made._reader.sequence)
    if llm._reader.prefixes is not None:
        made._saver.use(llm._reader.prefixes.cache)
    return made
