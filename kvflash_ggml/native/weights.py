"""The weights of a model: how large each is, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._kvf import ffi, lib
from .status import check

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


def work(model: int) -> int:
    """Return the multiplications with weights that a step of one token of this model makes."""
    return int(lib.kvf_model_work(ffi.cast("void *", model)))


def of_model(model: int) -> tuple[Weight, ...]:
    """Return the weights of the llama_model at this address, with or without its data."""
    address = ffi.cast("void *", model)
    raw: Any = ffi.new("kvf_weight[]", lib.kvf_model_n_weights(address))
    check(lib.kvf_model_weights(address, raw, len(raw)))
    names = (ffi.string(x.name).decode("utf-8", "replace") for x in raw)
    return tuple(
        Weight(name=name, size=x.size, layer=x.layer, kind=x.kind, device=x.device)
        for name, x in zip(names, raw, strict=True)
    )
