"""How large a pool a loaded model gets."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from .config import POOL_STEP, KVFlashConfig
from .native import engine as native
from .pool.sizing import PoolSize, resolve


def fit(config: KVFlashConfig, model: Any, params: Any, *, reserved: int = 0) -> PoolSize:
    """The pool for a llama_cpp LlamaModel and llama_context_params. UnsupportedModelError if it cannot run in one.

    reserved: bytes of device memory that something else will take.
    """
    address = ctypes.cast(model.model, ctypes.c_void_p).value or 0
    slot_bytes = slot_size(model, params)
    free, _, _ = native.device_memory(address)
    asked = ""
    if config.pool_bytes is not None:
        slots = config.pool_bytes // slot_bytes // POOL_STEP * POOL_STEP
        asked = f"{config.pool_bytes / 2**20:,.0f} MiB asked for, at {slot_bytes / 1024:.1f} KiB a token"
        config = replace(config, pool=max(slots, 1), pool_bytes=None)
    elif config.pool != "auto":
        asked = f"{config.pool} asked for"
    n_ctx = params.n_ctx or model.n_ctx_train()
    size = resolve(config, n_ctx=n_ctx, free_bytes=free - reserved, slot_bytes=slot_bytes)
    return replace(size, why=size.why.replace("as asked", asked, 1))


def slot_size(model: Any, params: Any) -> int:
    """Bytes that one token takes in the pool. UnsupportedModelError if the model cannot run in one."""
    return native.probe(
        ctypes.cast(model.model, ctypes.c_void_p).value or 0,
        type_k=params.type_k,
        type_v=params.type_v,
        offload=params.offload_kqv,
        arch=model.metadata().get("general.architecture", "unknown"),
    )
