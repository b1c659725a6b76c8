"""How a `Llama` reads: whether there is memory to see the whole text, and what is said if not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import KVFlashConfig
from ..constants import POOL_STEP, round_up
from ..errors import ConfigError, HostMemoryError, UnsupportedError
from ..session.reading import Reading

if TYPE_CHECKING:
    from ..native.info import DeviceInfo, Layer
    from ..session.pool import Pool

logger = logging.getLogger("kvflash_ggml")

SHARE = 3
"""Stages, and what computing larger steps takes, may have one part in so many of the memory that is free."""

HALF = 2


def open_reading(config: KVFlashConfig, pool: Pool, *, n_ctx: int, free_bytes: int) -> Reading:
    """Make the stages that a configuration asks for, or that "auto" finds room for.

    free_bytes: of the device, beside everything else. What was asked for and cannot be had is an error:
    UnsupportedError, HostMemoryError, or ConfigError for stages that are no larger than the pool.
    """
    if pool.n_slots >= n_ctx:
        return Reading(why="the pool holds the whole context")
    if config.reading == "pool":
        return Reading(why="asked for")
    required = config.reading == "exact" or config.answer == "exact" or config.repair is not None
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
    return Reading(exact=True, answers_exactly=config.answer == "exact", why=why)


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
    rows = sum((2 if devices[device].asynchronous else 1) * (k_row + v_row) for device, k_row, v_row in shapes)
    return rows + HALF * n_ubatch
