"""`kvflash-run MODEL --dry-run`: what would go where, and whether it fits. No weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..config import KVFlashConfig
from ..constants import KV_TYPES
from ..errors import DoesNotFit
from .model import gpu_layers
from .options import ModelOptions
from .pool_options import PoolOptions

DOES_NOT_FIT = 3
"""The exit code."""

_STEP = 512
"""llama-cpp-python's, for a batch too."""


def dry_run(path: str, *, loading: ModelOptions, pool: PoolOptions, as_json: bool) -> int:
    """Print the table, or a document. The exit code: 0, or DOES_NOT_FIT."""
    layers = gpu_layers(loading)
    try:
        found = predicted(
            path,
            n_ctx=loading.ctx_size,
            n_gpu_layers=layers,
            n_ubatch=min(loading.ubatch_size or _STEP, loading.batch_size or _STEP),
            types=(loading.cache_type_k or "f16", loading.cache_type_v or "f16"),
            config=pool.config(),
        )
    except DoesNotFit as error:
        if as_json:
            click.echo(json.dumps({"model": path, "fits": False, "error": str(error), "device": error.device}))
        else:
            click.echo(f"does not fit: {error}")
        return DOES_NOT_FIT
    if as_json:
        click.echo(json.dumps({"model": path, "fits": True, **found["document"]}, ensure_ascii=False))
    else:
        click.echo(found["table"])
        click.echo(f"llama.cpp, with a full cache: llama-cli -m {path} {' '.join(found['document']['options'])}")
    return 0


def predicted(
    path: str,
    *,
    n_ctx: int,
    n_gpu_layers: int | None,
    n_ubatch: int,
    types: tuple[str, str],
    config: KVFlashConfig | None,
) -> dict[str, Any]:
    """A placement as text, "table", and as values, "document". Raises DoesNotFit.

    n_ctx: 0 for what the model was trained for. n_gpu_layers: None for what is best. config: None for a full cache.
    """
    import llama_cpp

    from .. import modelfile, policy
    from ..native import library
    from ..placement.predict import ALL_LAYERS, predict
    from ..placement.sizes import ModelSizes, Request
    from ..placement.table import document, table

    library.load()
    modelfile.check(Path(path))
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    model.n_gpu_layers = ALL_LAYERS if n_gpu_layers is None or n_gpu_layers < 0 else n_gpu_layers
    context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, max(_STEP, n_ubatch), n_ubatch
    context.type_k, context.type_v = (KV_TYPES[kind] for kind in types)
    context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context.swa_full = config is None

    def asked(sizes: ModelSizes) -> Request:
        slots: Any = None
        if config is not None:
            token = sum(layer.slot(*types) for layer in sizes.layers if not layer.window)
            slots = config.pool if config.pool_bytes is None else config.pool_bytes // max(1, token)
        return Request(
            n_ctx=n_ctx or sizes.n_ctx_train,
            pool=slots,
            minimum_pool=512 if config is None else config.minimum_pool,
            n_ubatch=n_ubatch,
            type_k=types[0],
            type_v=types[1],
            n_gpu_layers=n_gpu_layers,
            use_mmap=True,
            query_rows=0 if config is None else getattr(policy.resolve(config.policy), "query_rows", 0),
        )

    placement, devices = predict(path, model, context, asked)
    return {"table": table(placement, devices), "document": document(placement, devices)}
