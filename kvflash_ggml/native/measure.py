"""What a model and a context would take, before they are made. Sizes are bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError, NotMade
from ._kvf import ffi, lib
from .status import check, reason, value

DENSE, EXPERTS, EMBEDDING, OUTPUT = range(4)
"""Kinds of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight. size: what it takes of its buffer. layer: -1 for none. kind: DENSE, EXPERTS, EMBEDDING or OUTPUT.

    device: its index among the model's devices, the host's is the last.
    """

    name: str
    size: int
    layer: int
    kind: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What would lie on one device: weights, K and V with recurrent state, compute buffers, captured queries."""

    device: str
    model: int
    context: int
    compute: int
    queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNeed:
    """The memory of one layer. device: the index of the one that holds it.

    k_values, v_values: of one token, over all heads; 0 without a cache of its own. cells: of a cache that is not
    pooled, 0 if it is. state: recurrent, rollback planes with it. query: one captured query, 0 if not pooled.
    heads, heads_kv: of its queries, and of the keys that they read; 0 if not pooled.
    """

    device: int
    k_values: int
    v_values: int
    cells: int
    state: int
    query: int
    heads: int
    heads_kv: int

    @property
    def pooled(self) -> bool:
        return self.k_values > 0 and self.cells == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a context would take. devices: in the model's order, the host last. layers: in theirs."""

    devices: tuple[Need, ...]
    layers: tuple[LayerNeed, ...]


@contextmanager
def sketch(path: str | os.PathLike[str], params: ctypes.Structure) -> Iterator[int]:
    """The address of a model without its data: its weights have places and sizes, and none of them is read.

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


def weights(model: int) -> tuple[Weight, ...]:
    """Of the llama_model at this address, with or without its data."""
    raw: Any = ffi.new("kvf_weight[]", lib.kvf_model_n_weights(_address(model)))
    check(lib.kvf_model_weights(_address(model), raw, len(raw)))
    return tuple(Weight(name=_text(x.name), size=x.size, layer=x.layer, kind=x.kind, device=x.device) for x in raw)


def measure(model: int, params: ctypes.Structure, *, cells: int, query_rows: int = 0) -> Needs:
    """What a context of the llama_model at this address would take, with a pool of `cells` slots, 0 for stock.

    params: llama_context_params. The model may be loaded or a sketch, and nothing else may use it meanwhile. No request
    of `pool_request` is left. UnsupportedModelError if the model cannot have a pool, NotMade if there can be no such
    context.
    """
    devices: Any = ffi.new("kvf_need[]", lib.kvf_model_n_devices(_address(model)))
    layers: Any = ffi.new("kvf_layer_need[]", lib.kvf_model_n_layers(_address(model)))
    status = lib.kvf_measure(
        _address(model), _pointer(params), cells, query_rows, devices, len(devices), layers, len(layers)
    )
    if status == lib.KVF_STATUS_ARGUMENT:
        raise NotMade(f"no context can be made with these settings: {reason()}")
    check(status)
    return Needs(
        devices=_read_needs(devices),
        layers=tuple(
            LayerNeed(
                device=x.device,
                k_values=x.k_values,
                v_values=x.v_values,
                cells=x.cells,
                state=x.state,
                query=x.query,
                heads=x.n_head,
                heads_kv=x.n_head_kv,
            )
            for x in layers
        ),
    )


def taken(context: int, model: int) -> tuple[Need, ...]:
    """What the llama_context at this address takes, with its model, whose address is the other one."""
    devices: Any = ffi.new("kvf_need[]", lib.kvf_model_n_devices(_address(model)))
    check(lib.kvf_context_needs(_address(context), devices, len(devices)))
    return _read_needs(devices)


def _read_needs(raw: Any) -> tuple[Need, ...]:
    return tuple(
        Need(device=_text(x.device), model=x.model, context=x.context, compute=x.compute, queries=x.queries)
        for x in raw
    )


def _address(model: int) -> Any:
    return ffi.cast("void *", model)


def _pointer(params: ctypes.Structure) -> Any:
    return ffi.cast("void *", ctypes.addressof(params))


def _text(raw: Any) -> str:
    return str(ffi.string(raw).decode("utf-8", "replace"))
