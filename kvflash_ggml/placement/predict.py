"""What goes where if a file is loaded, from the file alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from ..constants import KV_TYPES, POOL_STEP, round_up
from ..native.devices import ModelArrays
from . import measure
from .fit import fit
from .measure import Sketch, copied
from .search import pool_range
from .sizes import Device, Measure, ModelSizes, Placement, Request

ALL_LAYERS = 0x7FFFFFFF

MAX_DEVICES = 16
"""That llama.cpp has shares for."""


def predict(
    path: str | os.PathLike[str], model_params: Any, context_params: Any, asked: Callable[[ModelSizes], Request]
) -> tuple[Placement, tuple[Device, ...]]:
    """The placement of a request, confirmed by a measure of it, and the devices. No byte of a weight is read.

    model_params: llama_model_params, of which the devices count. context_params: llama_context_params, for what a
    request does not name; n_ctx may be 0. asked: the request for a model of these sizes. ConfigError for a file that is
    no model, UnsupportedModelError for one that cannot have the pool that is asked for, DoesNotFit.
    """
    layers = ALL_LAYERS if model_params.n_gpu_layers else 0
    with measure.sketch(path, copied(model_params, n_gpu_layers=layers)) as found:
        sizes, devices = found.sizes(context_params), found.devices(context_params)
        request = asked(sizes)
        params = copied(context_params, n_ctx=request.n_ctx)
        measures = [_measure(found, params, request, *shape) for shape in _shapes(request)]

    def exact(placement: Placement) -> Measure:
        # the arrays live until the model has been loaded
        arrays = ModelArrays(None, placement.overrides)
        shares = (ctypes.c_float * MAX_DEVICES)(*(placement.tensor_split or ()))
        changed = copied(
            model_params,
            n_gpu_layers=placement.n_gpu_layers,
            tensor_buft_overrides=arrays.overrides,
            tensor_split=shares,
        )
        types = {"type_k": KV_TYPES[placement.type_k], "type_v": KV_TYPES[placement.type_v]}
        with measure.sketch(path, changed) as again:
            return _measure(again, copied(params, **types), request, placement.n_ubatch, placement.pool)

    return fit(sizes, devices, request, measures, exact), devices


def _shapes(request: Request) -> list[tuple[int, int]]:
    """Steps and pools that say how compute buffers grow."""
    least, most = pool_range(request)
    ubatches = (request.n_ubatch,) if request.n_ubatch is not None else (512, 2048)
    return [(n_ubatch, pool) for n_ubatch in ubatches for pool in sorted({least, most})]


def _measure(found: Sketch, params: Any, request: Request, n_ubatch: int, pool: int) -> Measure:
    whole = pool >= round_up(request.n_ctx, POOL_STEP)
    changed = copied(params, n_ubatch=n_ubatch, n_batch=max(n_ubatch, params.n_batch))
    cells = 0 if request.pool is None else pool
    return found.measure(changed, pool=cells, query_rows=0 if whole else request.query_rows)
