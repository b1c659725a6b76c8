"""How large a pool a model gets."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..config import KVFlashConfig
from ..constants import POOL_STEP, SPEED_CAP, round_up

COMPUTE_RESERVE = 3 << 29
"""Bytes left for compute buffers: 1.5 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """slots: the pool. n_ctx: the context it serves. why: the arithmetic, for the banner."""

    slots: int
    n_ctx: int
    why: str


def fit(config: KVFlashConfig, model: Any, params: Any, *, reserved: int = 0) -> PoolSize:
    """The pool for a llama_cpp LlamaModel and llama_context_params. UnsupportedModelError if it cannot run in one.

    reserved: bytes of device memory that something else will take.
    """
    from ..native import engine as native  # here, as below: the arithmetic needs no library

    free, _, _ = native.device_memory(address(model))
    n_ctx = params.n_ctx or model.n_ctx_train()
    return resolve(config, n_ctx=n_ctx, free_bytes=free - reserved, slot_bytes=slot_size(model, params))


def slot_size(model: Any, params: Any) -> int:
    """Bytes that one token takes in the pool. UnsupportedModelError if the model cannot run in one."""
    from ..native import engine as native

    return native.probe(
        address(model),
        type_k=params.type_k,
        type_v=params.type_v,
        offload=params.offload_kqv,
        arch=model.metadata().get("general.architecture", "unknown"),
    )


def resolve(config: KVFlashConfig, *, n_ctx: int, free_bytes: int, slot_bytes: int) -> PoolSize:
    """The pool for a context of `n_ctx` tokens on a device with `free_bytes` free, at `slot_bytes` a token.

    "auto" takes half of what is free beyond the reserve, at most SPEED_CAP tokens. A pool is a multiple of POOL_STEP,
    rounded down where bytes were asked for, never above the context and never below the minimum of the protections.
    """
    ceiling = round_up(n_ctx, POOL_STEP)
    if config.pool_bytes is not None:
        slots = config.pool_bytes // slot_bytes // POOL_STEP * POOL_STEP
        why = f"{config.pool_bytes / 2**20:,.0f} MiB asked for, at {slot_bytes / 1024:.1f} KiB a token"
    elif config.pool == "auto":
        usable = max(0, free_bytes - COMPUTE_RESERVE) // 2
        slots = round_up(min(usable // slot_bytes, SPEED_CAP), POOL_STEP)
        why = f"auto: half of {usable * 2 / 2**30:.1f} GiB free at {slot_bytes / 1024:.1f} KiB a token"
    else:
        slots = round_up(config.pool, POOL_STEP)
        why = f"{config.pool} asked for"
    if slots < config.minimum_pool:
        slots = config.minimum_pool
        why = f"{why}, raised to the minimum of {config.sinks} sink + {config.tail} tail + 2 chunks"
    if slots >= ceiling:
        slots = ceiling
        why = f"{why}, which is the whole context"
    return PoolSize(slots=slots, n_ctx=ceiling, why=why)


def address(model: Any) -> int:
    return ctypes.cast(model.model, ctypes.c_void_p).value or 0
