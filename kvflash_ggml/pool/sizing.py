"""How large a pool "auto" means. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import POOL_STEP, KVFlashConfig, round_up

SPEED_CAP = 16_384
"""Tokens. Beyond this, attention over the pool costs more time than a larger pool gains in recall."""

COMPUTE_RESERVE = 3 << 29
"""Bytes left for compute buffers: 1.5 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """slots: the pool. n_ctx: the context it serves. why: the arithmetic, for the banner."""

    slots: int
    n_ctx: int
    why: str


def resolve(config: KVFlashConfig, *, n_ctx: int, free_bytes: int, slot_bytes: int) -> PoolSize:
    """The pool for a context of `n_ctx` tokens on a device with `free_bytes` free, at `slot_bytes` a token.

    "auto" takes half of what is free beyond the reserve, at most SPEED_CAP tokens. A pool is a multiple of POOL_STEP,
    never above the context and never below the minimum of the protections.
    """
    ceiling = round_up(n_ctx, POOL_STEP)
    if config.pool == "auto":
        usable = max(0, free_bytes - COMPUTE_RESERVE) // 2
        slots = min(usable // slot_bytes, SPEED_CAP)
        why = f"auto: half of {usable * 2 / 2**30:.1f} GiB free at {slot_bytes / 1024:.1f} KiB a token"
    else:
        slots = config.pool
        why = "as asked"
    slots = round_up(slots, POOL_STEP)
    if slots < config.minimum_pool:
        slots = config.minimum_pool
        why = f"{why}, raised to the minimum of {config.sinks} sink + {config.tail} tail + 2 chunks"
    if slots >= ceiling:
        slots = ceiling
        why = f"{why}, which is the whole context"
    return PoolSize(slots=slots, n_ctx=ceiling, why=why)
