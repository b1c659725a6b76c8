"""Opens the pool of a `Llama`.

llm: the Llama, which imports this file.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp

from .. import policy
from ..calibration.finder import open_finder
from ..config import KVFlashConfig
from ..constants import POOL_STEP, SPEED_CAP, round_up
from ..drafter import model as drafter
from ..errors import ConfigError
from ..native import engine as native
from ..placement import sizing
from ..placement.sizing import PoolSize, with_steps
from ..runtime.saving import Saver
from ..runtime.text import Text
from ..sequence.pool import Pool
from ..sequence.sequence import Sequence
from ..snapshot import fingerprint
from .context import PagedContext, take_closing
from .drafting import Drafting
from .reading import open_sequence

if TYPE_CHECKING:
    from ..speculation.loop import Speculator
    from .stats import PoolStats

logger = logging.getLogger("kvflash_ggml")


def open_pool(llm: Any, size: PoolSize) -> None:
    """Open the pool of a Llama's context, with its scorer and its drafters."""
    config, text, room = llm._config, llm._at_hand, llm._room
    model, stack = text.model, text.model.context._exit_stack
    n_ubatch = llm.context_params.n_ubatch or llm.context_params.n_batch  # 0 is upstream's "as n_batch"
    if llm._drafter is not None:
        llm._scorer = drafter.make_scorer(llm, llm._drafter, idle=size.slots - 2 * n_ubatch)
    scorer = llm._scorer
    engine = native.Engine(ctypes.cast(model.context.ctx, ctypes.c_void_p).value or 0, max(n_ubatch, room.rows))
    stack.callback(engine.close)  # should anything of what follows fail
    drafting = Drafting()
    if room.rows:
        from .speculating import open_drafting  # here, as below: it imports every drafter

        drafting = open_drafting(llm, config, llm._found, engine, room.rows, stack)
    llm._drafting = drafting
    sizing.warn_if_tight(engine.info.devices, n_ubatch)
    mapped = llm.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
    limit = sizing.image_limit(config, sizing.address(model.weights), size, engine.info.page_bytes, mapped=mapped)
    pool = Pool(
        engine,
        n_ubatch=n_ubatch,
        host_limit=limit,
        spill=config.spill,
        fixed_rows=config.deterministic_batch,
    )
    sequence = open_sequence(llm, config, pool, scorer)
    _open_text(llm, llm._saver, sequence)
    llm._ctx = PagedContext(model.context, sequence)
    text.speculator = sequence.follower = speculator_of(llm, text, config, drafting)
    model.finder = open_finder(llm, sequence, scorer)
    if model.finder is not None:
        stack.callback(model.finder.close)
    assert llm.kvflash is not None
    if llm.verbose:
        logger.warning(llm.kvflash.banner())
    else:
        logger.info(llm.kvflash.banner())


def speculator_of(
    llm: Any, text: Text, config: KVFlashConfig, drafting: Drafting, first: Speculator | None = None
) -> Speculator | None:
    """Make what drafts for a model; None if nothing does. As `speculating.make_speculator`, which it calls."""
    if llm.draft_model is None and not drafting.drafters and first is None and config.answer != "lossless":
        return None
    from .speculating import make_speculator  # here: it imports every drafter

    return make_speculator(llm, text, config, drafting, first)


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


def _open_text(llm: Any, saver: Saver, sequence: Sequence) -> None:
    """Let a text of a Llama have the memory of a sequence."""
    saver.text.sequence, context = sequence, saver.text.model.context
    # with the context's own, which a garbage collector may close before it closes this
    context._exit_stack.callback(sequence.close, partial(take_closing, context))
    saver.open(fingerprint.of_llama(llm, sequence.engine))


def open_beside(llm: Any, seq: int) -> Saver:
    """Return the text of another sequence on a Llama's pool, which is closed with it.

    It reads as the first one does, and drafts for itself if that does.
    """
    first, config = llm._at_hand, llm._config
    text = Text()
    text.open(first.model)
    text.seed = first.seed
    own = open_sequence(
        llm, config, first.pooled.pool, policy.resolve(config.policy), seq=seq, reading=first.pooled.reading
    )
    saver = Saver(text)
    _open_text(llm, saver, own)
    text.speculator = own.follower = speculator_of(llm, text, config, llm._drafting, first.speculator)
    if text.speculator is not None:
        from ..speculation.loop import ANOTHER

        text.speculator.lend(ANOTHER)
    if text.model.finder is not None:
        text.model.finder.settle(own)
    if first.prefixes is not None:
        saver.use(first.prefixes.cache)
    return saver


def texts_of(llm: Any) -> list[tuple[Saver, PoolStats]]:
    """Return all texts that a Llama's pool has room for, its own first, each with what tells of it.

    The further ones are opened now. They are closed with the Llama, which nothing else may use meanwhile.
    """
    count = llm._at_hand.pooled.config.sequences
    texts = [llm._saver, *(open_beside(llm, seq) for seq in range(1, count))]
    return [(one, llm._stats_of(one.text)) for one in texts]
