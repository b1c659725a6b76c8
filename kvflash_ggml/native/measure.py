"""Measures what a model and a context would take before they are made. Sizes are bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import EngineError, NotMade
from ._kvf import ffi, lib
from .sizes import LayerSizes, Measure, Needs
from .status import check, reason, value


@contextmanager
def sketch(path: str | os.PathLike[str], params: ctypes.Structure) -> Iterator[int]:
    """Yield the address of a model without its data: weights have places and sizes, and none is read.

    params: llama_model_params. NotMade if the file is no model that llama.cpp can load.
    """
    out = ffi.new("void **")
    try:
        model = value(lib.kvf_sketch_init(os.fsencode(path), _pointer(params), out), out)
    except EngineError as err:
        raise NotMade(
            f"Failed to load model from file: {os.fspath(path)}: {err}. kvflash-convert inspect tells what it is"
        ) from None
    try:
        yield int(ffi.cast("uintptr_t", model))
    finally:
        lib.kvf_sketch_free(model)


def measure(model: int, params: ctypes.Structure, *, cells: int, query_rows: int = 0) -> Measure:
    """Return what a context of the llama_model at this address would take, with a pool of `cells` slots, 0 for stock.

    params: llama_context_params. The model may be loaded or a sketch, and nothing else may use it meanwhile. No request
    of `pool_request` is left. UnsupportedModelError if the model cannot have a pool, or not so many sequences in one.
    NotMade if there can be no such context.
    """
    devices: Any = ffi.new("kvf_need[]", lib.kvf_model_n_devices(_address(model)))
    layers: Any = ffi.new("kvf_layer_need[]", lib.kvf_model_n_layers(_address(model)))
    status = lib.kvf_measure(
        _address(model), _pointer(params), cells, query_rows, devices, len(devices), layers, len(layers)
    )
    if status == lib.KVF_STATUS_ARGUMENT:
        raise NotMade(f"no context can be made with these settings: {reason()}")
    check(status)
    step = 0 if params.swa_full else params.n_ubatch  # llama.cpp adds it to a window
    sizes = tuple(
        LayerSizes(
            k_row=x.k_values, v_row=x.v_values, window=x.cells and x.cells - step, state=x.state, query=x.query,
            heads=x.n_head, heads_kv=x.n_head_kv,
        )
        for x in layers
    )  # fmt: skip
    return Measure(n_ubatch=params.n_ubatch, pool=cells, devices=_read_needs(devices), layers=sizes)


def taken(context: int, model: int) -> tuple[Needs, ...]:
    """Return what the llama_context at this address takes, with its model, whose address is the other one."""
    devices: Any = ffi.new("kvf_need[]", lib.kvf_model_n_devices(_address(model)))
    check(lib.kvf_context_needs(_address(context), devices, len(devices)))
    return _read_needs(devices)


def _read_needs(raw: Any) -> tuple[Needs, ...]:
    return tuple(
        Needs(device=_text(x.device), weights=x.model, kv=x.context, compute=x.compute, queries=x.queries) for x in raw
    )


def _address(model: int) -> Any:
    return ffi.cast("void *", model)


def _pointer(params: ctypes.Structure) -> Any:
    return ffi.cast("void *", ctypes.addressof(params))


def _text(raw: Any) -> str:
    return str(ffi.string(raw).decode("utf-8", "replace"))
