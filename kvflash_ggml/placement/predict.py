"""Predicts where a file goes if it is loaded, by a load without its data."""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import llama_cpp

from ..config import Fit
from ..constants import KV_TYPES, POOL_STEP, round_up
from ..errors import ConfigError
from ..native import measure as native
from ..native import weights
from ..native.devices import ModelArrays, finds
from ..native.sizes import Measure
from . import memory
from .layout import Compute
from .plan import fit, plan
from .search import pool_range
from .sizes import Device, ModelSizes, Placement, PlacementRequest
from .sizing import copied

ALL_LAYERS = 0x7FFFFFFF

_OUTPUT = "output.weight"

QUANTISED = KV_TYPES["q8_0"]

Overrides = Sequence[tuple[str, str]]
"""(pattern, device): a weight whose name matches goes there, by the first pattern that does."""


def predict(
    path: str | os.PathLike[str],
    model_params: Any,
    context_params: Any,
    make_request: Callable[[ModelSizes, tuple[Device, ...]], PlacementRequest],
    *,
    device: Sequence[str] | None = None,
    overrides: Overrides = (),
    reserved: int = 0,
) -> tuple[Placement, tuple[Device, ...]]:
    """Place a request and confirm that by a measure. Return the placement and the devices. Reads no byte of a weight.

    model_params: llama_model_params, of which the devices count. context_params: llama_context_params, for what a
    request does not name; n_ctx may be 0. make_request: returns the request for a model of these sizes on these
    devices. device, overrides: the user's own, or those of connected servers and of this machine. reserved: bytes that
    something else will take of the first device. ConfigError for a file that is no model, or a name that is no
    device's, UnsupportedModelError for a model that cannot have the pool that is asked for, DoesNotFit.
    """
    layers = ALL_LAYERS if model_params.n_gpu_layers else 0
    with _sketch(path, model_params, layers, None, ModelArrays(device, overrides)) as model:
        sizes, devices = sizes_of(model, context_params, overrides=overrides), memory.of_model(model)
        request = make_request(sizes, devices)
        _check_names(request.fit, devices)
        first = next((x for x in devices if memory.usable(x)), devices[-1])
        request = replace(request, extra={first.name: reserved})
        params = copied(context_params, n_ctx=request.n_ctx)
        measures = [_measure(model, params, request, *shape) for shape in _shapes(request)]

    def exact(placement: Placement) -> Measure:
        types = {"type_k": KV_TYPES[placement.type_k], "type_v": KV_TYPES[placement.type_v]}
        arrays = ModelArrays(device, placement.overrides)
        with _sketch(path, model_params, placement.n_gpu_layers, placement.tensor_split, arrays) as again:
            return _measure(again, copied(params, **types), request, placement.n_ubatch, placement.pool)

    return fit(sizes, devices, request, measures, exact), devices


def imagine(
    path: str | os.PathLike[str],
    model_params: Any,
    context_params: Any,
    make_request: Callable[[ModelSizes, tuple[Device, ...]], PlacementRequest],
    machine: tuple[Device, ...],
    *,
    overrides: Overrides = (),
    reserved: int = 0,
) -> Placement:
    """Place a request on devices that this machine need not have, the host last. Nothing confirms the estimate.

    Compute buffers are measured on this machine's CPU, and every device is taken to need as much.
    """
    _check_holders(overrides, machine)
    plain = copied(model_params, use_extra_bufts=False)  # weights that are packed for this CPU take more
    with _sketch(path, plain, 0, None, ModelArrays((), ())) as model:
        sizes = sizes_of(model, context_params, overrides=overrides)
        if not any(weight.name == _OUTPUT for weight in weights.of_model(model)):  # tied: a device gets a copy
            sizes = replace(sizes, output=sizes.output + sizes.embedding)
        request = make_request(sizes, machine)
        _check_names(request.fit, machine)
        request = replace(request, extra={machine[0].name: reserved})
        params = copied(context_params, n_ctx=request.n_ctx)
        measures = [_measure(model, params, request, *shape) for shape in _shapes(request)]
    spread = [
        replace(one, offloaded=True, devices=tuple(replace(one.devices[-1], device=x.name) for x in machine))
        for one in measures
    ]
    return plan(sizes, machine, request, Compute(spread))


def _check_holders(overrides: Overrides, machine: Sequence[Device]) -> None:
    names = [device.name for device in machine]
    for pattern, where in overrides:
        if where not in names:
            raise ConfigError(f"override_tensor={pattern}={where}: {where!r} is none of {', '.join(names)}")


@contextmanager
def _sketch(
    path: str | os.PathLike[str],
    params: Any,
    n_gpu_layers: int,
    split: Sequence[float] | None,
    arrays: ModelArrays,
) -> Iterator[int]:
    """Load a model without its data, with weights where the arguments say, and yield its address.

    The load reads `arrays` and the split by their addresses, so that this frame has to keep them until it ends.
    """
    shares = (ctypes.c_float * llama_cpp.LLAMA_MAX_DEVICES)(*(split or ()))
    changed = copied(
        params,
        n_gpu_layers=ALL_LAYERS if n_gpu_layers < 0 else n_gpu_layers,
        devices=arrays.devices or None,
        tensor_buft_overrides=arrays.overrides or None,
        tensor_split=None if split is None else shares,
    )
    with native.sketch(path, changed) as model:
        yield model


def _check_names(fit: Fit, devices: Sequence[Device]) -> None:
    names = [device.name for device in devices]
    margins = fit.margin if isinstance(fit.margin, Mapping) else {}
    for name in (*fit.free, *margins):
        if name not in names:
            raise ConfigError(f"fit: {name!r} is no device of this model: it has {', '.join(names)}")


def _shapes(request: PlacementRequest) -> list[tuple[int, int]]:
    """Return steps and pools that say how compute buffers grow."""
    least, most = pool_range(request)
    ubatches = (request.n_ubatch,) if request.n_ubatch is not None else (512, 2048)
    return [(n_ubatch, pool) for n_ubatch in ubatches for pool in sorted({least, most})]


def _measure(model: int, params: Any, request: PlacementRequest, n_ubatch: int, pool: int) -> Measure:
    """Measure with a pool of so many slots. A full cache counts as a pool of as many."""
    whole = pool >= round_up(request.n_ctx, POOL_STEP)
    changed = copied(params, n_ubatch=n_ubatch, n_batch=max(n_ubatch, params.n_batch))
    cells = 0 if request.pool is None else pool
    found = native.measure(model, changed, cells=cells, query_rows=0 if whole else request.query_rows)
    host = len(found.devices) - 1
    offloaded = all(x.device != host or x.kind == weights.EMBEDDING for x in weights.of_model(model))
    return replace(found, pool=pool, offloaded=offloaded)


def sizes_of(model: int, params: Any, *, overrides: Overrides = ()) -> ModelSizes:
    """Read sizes of layers, output and embedding of the llama_model at this address, which may be without its data.

    params: llama_context_params, of which n_ctx, n_batch, n_ubatch and types count. overrides: the user's own, with
    which the model was loaded.
    """
    found = native.measure(model, params, cells=0)
    host = len(found.devices) - 1
    dense: defaultdict[int, int] = defaultdict(int)
    experts: defaultdict[int, int] = defaultdict(int)
    fixed: defaultdict[str, int] = defaultdict(int)
    output = embedding = 0
    for x in weights.of_model(model):
        device = next((device for pattern, device in overrides if finds(pattern, x.name)), None)
        if device is not None:
            fixed[device] += x.size
        elif x.layer >= 0:
            (experts if x.kind == weights.EXPERTS else dense)[x.layer] += x.size
        elif x.kind == weights.EMBEDDING or (x.kind != weights.OUTPUT and x.device == host > 0):
            embedding += x.size
        else:
            output += x.size
    return ModelSizes(
        layers=tuple(replace(x, dense=dense[i], experts=experts[i]) for i, x in enumerate(found.layers)),
        output=output,
        embedding=embedding,
        fixed=dict(fixed),
        work=weights.work(model),
        quantizable=_quantizable(model, params),
        n_ctx_train=llama_cpp.llama_model_n_ctx_train(model),
    )


def _quantizable(model: int, params: Any) -> bool:
    try:
        native.measure(model, copied(params, type_k=QUANTISED, type_v=QUANTISED), cells=0)
    except ConfigError:
        return False
    return True
