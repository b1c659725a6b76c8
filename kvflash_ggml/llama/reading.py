"""Decides how a `Llama` reads: whether there is memory for steps that see the whole text."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import address
from ..config import Fit, KVFlashConfig
from ..constants import POOL_STEP, round_up
from ..errors import ConfigError, DeviceLimit, HostMemoryError, UnsupportedError
from ..logs import warn_once
from ..placement.buffers import buffer_row, scores_by_index
from ..placement.sizes import HOST
from ..policy.base import Indexed
from ..runtime.model import Model
from ..sequence.reading import Reading
from ..sequence.sequence import Sequence

if TYPE_CHECKING:
    from ..native.info import DeviceInfo, Layer
    from ..policy.base import Scorer
    from ..sequence.pool import Pool

logger = logging.getLogger("kvflash_ggml")

SHARE = 3
"""Layer buffers, and the compute of larger steps, get one third of a device's free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """A device that has layer buffers. free: bytes beside everything else. slot_bytes: of one more token there.

    row: bytes of one token's K or V, whichever has more. bound: of the largest tensor that the device computes on, None
    where nothing bounds it.
    """

    name: str
    free: int
    slot_bytes: int
    row: int
    bound: int | None = None

    @property
    def most(self) -> int | None:
        """The tokens that the largest tensor holds, None where nothing bounds it."""
        return None if self.bound is None else self.bound // self.row // POOL_STEP * POOL_STEP

    @property
    def slots(self) -> int:
        """The tokens that there is room for."""
        room = max(0, self.free) // SHARE // self.slot_bytes // POOL_STEP * POOL_STEP
        return room if self.most is None else min(room, self.most)


def open_sequence(
    model: Model,
    config: KVFlashConfig,
    pool: Pool,
    scorer: Scorer | None,
    *,
    seq: int = 0,
    reading: Reading | None = None,
) -> Sequence:
    """Open a sequence on a pool, which reads and answers as the configuration says.

    reading: how the first text of the pool reads; None for that one. See `open_reading`.
    """
    from ..placement import memory

    if reading is None:
        free = {device.name: device.free for device in memory.of_model(address(model.weights.model))}
        reading = open_reading(config, pool, n_ctx=model.n_ctx, free=free)
    n_batch = model.n_batch
    if reading.exact and n_batch < pool.n_ubatch:
        warn_once(
            f"n_batch={n_batch}: prompts are read {pool.n_ubatch} tokens at a time, as n_ubatch says, because each step"
            " streams the whole text. A smaller n_ubatch takes less memory."
        )
        n_batch = pool.n_ubatch
    return Sequence(pool, config, seq=seq, n_ctx=model.n_ctx, n_batch=n_batch, scorer=scorer, reading=reading)


def open_reading(config: KVFlashConfig, pool: Pool, *, n_ctx: int, free: Mapping[str, int]) -> Reading:
    """Make the layer buffers that a configuration asks for, or that "auto" finds room for.

    free: bytes of each device by name, beside everything else. What was asked for and cannot be had is an error:
    UnsupportedError, HostMemoryError, or ConfigError for stages that are no larger than the pool.
    """
    if pool.share >= n_ctx:
        return Reading(why="the pool holds the whole context")
    if config.reading == "pool":
        return Reading(why="asked for")
    info = pool.engine.info
    required = config.sees_all
    slots, why = stage_slots(
        config.stage, n_ctx=n_ctx, rooms=rooms(pool.engine.layers, info.devices, pool.n_ubatch, free)
    )
    if slots <= pool.share:
        text = f"stages of {slots} tokens see no more than the pool of {pool.share}: {why}"
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


def open_index(model: Model, config: KVFlashConfig, sequence: Sequence) -> None:
    """Make room on the device of all layers for the index rows of all texts, once it is known which heads they are of.

    Where that cannot be, the host scores. A warning says so if it was asked for, or there is no memory for any.
    """
    from ..placement import memory

    scorer, pool = None if sequence.scoring is None else sequence.scoring.scorer, sequence.pool
    size = min(config.index_limit(pool.engine.info.step_work), scorer.index_bytes) if isinstance(scorer, Indexed) else 0
    if not size:
        return
    devices = pool.engine.info.devices
    name = devices[0].name
    gpus = [x for x in memory.of_model(address(model.weights.model)) if x.name == name and x.kind == "gpu"]
    size = min([size, *((x.free - memory.margin(x, Fit())) // config.sequences for x in gpus)])
    try:
        if size <= 0:
            able = len(devices) == 1 and scores_by_index(name)
            why = HostMemoryError if able else UnsupportedError
            raise why(f"{name} has no memory for an index beside its margin")
        pool.make_index(size)
    except (UnsupportedError, HostMemoryError) as err:
        asked = config.index is not None or isinstance(err, HostMemoryError)
        logger.log(logging.WARNING if asked else logging.DEBUG, "chunks are scored on the host: %s", err)


def stage_slots(requested: int | None, *, n_ctx: int, rooms: abc.Sequence[StageRoom]) -> tuple[int, str]:
    """Return the tokens that layer buffers hold, and why: the whole context, or what each device has room for.

    DeviceLimit for a requested size that a device does not compute on.
    """
    limit = round_up(n_ctx, POOL_STEP)
    if requested is not None:
        slots = min(limit, round_up(requested, POOL_STEP))
        for room in rooms:
            if room.bound is not None and room.most is not None and slots > room.most:
                raise DeviceLimit(
                    room.name, f"a layer buffer of {slots:,} tokens", needed=slots * room.row, limit=room.bound,
                    remedy=f"take layer buffers of at most {room.most} tokens (kvflash_stage, --kvflash-stage)",
                )  # fmt: skip
        return slots, f"{requested} asked for"
    tight = min(rooms, key=lambda room: room.slots)
    if tight.slots >= limit:
        return limit, "the whole context"
    if tight.slots == tight.most:
        return tight.slots, f"the largest tensor of {tight.name}"
    size = f"{tight.free / SHARE / 2**20:,.0f} MiB on {tight.name}"
    return tight.slots, f"{size} for it, at {tight.slot_bytes / 1024:.1f} KiB a token"


def rooms(
    layers: abc.Sequence[Layer], devices: abc.Sequence[DeviceInfo], n_ubatch: int, free: Mapping[str, int]
) -> list[StageRoom]:
    """Return the room for layer buffers on each device, and the bytes of one more token there."""
    res = []
    for i, device in enumerate(devices):
        shapes = {(layer.k_row, layer.v_row) for layer in layers if layer.device == i}
        name = HOST if device.mode == "host" else device.name
        row = max(max(shape) for shape in shapes)
        slot_bytes = buffer_row(shapes, n_ubatch, overlaps=device.overlaps)
        res.append(
            StageRoom(name=name, free=free[name], slot_bytes=slot_bytes, row=row, bound=device.largest_bytes or None)
        )
    return res
