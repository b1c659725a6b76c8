"""How a `Llama` reads: whether there is memory to see the whole text, and what is said if not."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32s
from ..config import KVFlashConfig
from ..constants import POOL_STEP, round_up
from ..errors import ConfigError, HostMemoryError, UnsupportedError
from ..session.reading import Reading
from ..session.repair import Repair
from ..session.session import Session
from .sizing import address

if TYPE_CHECKING:
    from llama_cpp import Llama

    from ..native.info import DeviceInfo, Layer
    from ..policy.base import Scorer
    from ..session.pool import Pool

logger = logging.getLogger("kvflash_ggml")

SHARE = 3
"""Stages, and what computing larger steps takes, may have one part in so many of the memory that is free."""

HALF = 2


def open_session(llm: Llama, config: KVFlashConfig, pool: Pool, scorer: Scorer | None) -> Session:
    """A session on a pool that reads and answers as it is asked to. See `open_reading`."""
    from ..native.engine import device_memory

    n_ctx = llm.n_ctx()
    free_bytes, _, _ = device_memory(address(llm._model))
    reading = open_reading(config, pool, n_ctx=n_ctx, free_bytes=free_bytes)
    session = Session(pool, config, n_ctx=n_ctx, n_batch=llm.n_batch, scorer=scorer, reading=reading)
    if config.repair is not None and reading.exact:
        session.repair = Repair(config.repair, n_ctx, partial(likeliest, weakref.ref(llm)))
    return session


def likeliest(made: weakref.ref[Llama], count: int) -> Int32s:
    """The likeliest next token after each of the last `count` rows, of which logits are at hand.

    made: weakly, or the session would keep its owner until a garbage collector comes.
    """
    llm = made()
    assert llm is not None
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(count, llm.n_vocab()))
    picks: Int32s = logits.argmax(axis=1).astype(np.int32)
    return picks


def open_reading(config: KVFlashConfig, pool: Pool, *, n_ctx: int, free_bytes: int) -> Reading:
    """Make the stages that a configuration asks for, or that "auto" finds room for.

    free_bytes: of the device, beside everything else. What was asked for and cannot be had is an error:
    UnsupportedError, HostMemoryError, or ConfigError for stages that are no larger than the pool, and for repair where
    nothing is kept to go back to.
    """
    if pool.n_slots >= n_ctx:
        return Reading(why="the pool holds the whole context")
    if config.reading == "pool":
        return Reading(why="asked for")
    info = pool.engine.info
    if config.repair is not None and config.checkpoints == 0 and (info.recurrent or info.n_swa > 0):
        raise ConfigError(f"repair={config.repair} goes back in the text, for which this model needs checkpoints >= 1")
    required = config.reading == "exact" or config.answer != "pool" or config.repair is not None
    slots, why = stage_slots(
        config.stage,
        n_ctx=n_ctx,
        free_bytes=free_bytes,
        slot_bytes=slot_bytes(pool.engine.layers, pool.engine.info.devices, pool.n_ubatch),
    )
    if slots <= pool.n_slots:
        text = f"stages of {slots} tokens see no more than the pool of {pool.n_slots}: {why}"
        if required:
            raise ConfigError(f"{text}; free device memory, or use a smaller pool or reading='pool'")
        return Reading(why=text)
    try:
        pool.make_stages(slots)
    except (UnsupportedError, HostMemoryError) as err:
        if required:
            raise
        logger.warning("prompts are read with what is in the pool in view: %s", err)
        return Reading(why=str(err))
    return Reading(exact=True, answers_exactly=config.answer != "pool", why=why)


def stage_slots(asked: int | None, *, n_ctx: int, free_bytes: int, slot_bytes: int) -> tuple[int, str]:
    """Tokens that stages hold, and why so many: the whole context, or what fits the share of what is free."""
    most = round_up(n_ctx, POOL_STEP)
    if asked is not None:
        return min(most, round_up(asked, POOL_STEP)), f"{asked} asked for"
    fitting = max(0, free_bytes) // SHARE // slot_bytes // POOL_STEP * POOL_STEP
    if fitting >= most:
        return most, "the whole context"
    return fitting, f"{free_bytes / SHARE / 2**20:,.0f} MiB for it, at {slot_bytes / 1024:.1f} KiB a token"


def slot_bytes(layers: Sequence[Layer], devices: Sequence[DeviceInfo], n_ubatch: int) -> int:
    """Bytes that one more token in the stages takes on the devices: K and V of a layer of each shape, twice where the
    next layer is copied meanwhile, and its column of the mask."""
    shapes = {(layer.device, layer.k_row, layer.v_row) for layer in layers}
    rows = sum((2 if devices[device].overlaps else 1) * (k_row + v_row) for device, k_row, v_row in shapes)
    return rows + HALF * n_ubatch
