"""A context of stock llama.cpp beside a pooled one, as drafters have it: tokens and rows in, logits and states out."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats, Int32s
from ._kvf import ffi, lib
from .status import check

NO_STATES, STATES, ALL_STATES = range(3)


def has_head(model: int) -> bool:
    """Report whether a model was loaded with a head for further tokens. model: address of the llama_model."""
    return bool(lib.kvf_draft_head(ffi.cast("void *", model)))


def open_draft(context: int, *, states: int = NO_STATES, causal: bool = True) -> None:
    """Call it once, before the context computes. context: address of the llama_context.

    states: is the state in front of the head wanted, STATES of what has an output, ALL_STATES of everything. causal:
    tokens do not see what follows them. HostMemoryError if there is no memory to compute so.
    """
    check(lib.kvf_draft_open(ffi.cast("void *", context), states, causal))


def run_draft(
    context: int, positions: Int32s, tokens: Int32s | None = None, rows: Floats | None = None, *,
    outputs: int = 0, encode: bool = False,
) -> None:  # fmt: skip
    """Evaluate tokens [n], rows [n, width], or both, at these positions [n]; at most the context's n_ubatch of them.

    outputs: keep logits, and states if they are wanted, of the last so many: all or none, unless the model reads a text
    by itself. encode: run the encoder. Raises EngineError for values
    that cannot be, DecodeError if llama.cpp fails.
    """
    at = ffi.from_buffer("int32_t[]", np.ascontiguousarray(positions, np.int32))
    ids = ffi.NULL if tokens is None else ffi.from_buffer("int32_t[]", np.ascontiguousarray(tokens, np.int32))
    data, width = ffi.NULL, 0
    if rows is not None:
        data, width = ffi.from_buffer("float[]", np.ascontiguousarray(rows, np.float32)), rows.shape[1]
    check(lib.kvf_draft_run(ffi.cast("void *", context), encode, len(positions), ids, data, width, at, outputs))


def draft_states(context: int, count: int, width: int) -> Floats:
    """Return the states of the first `count` tokens of the last run, [count, width]."""
    out = np.empty((count, width), np.float32)
    check(lib.kvf_draft_states(ffi.cast("void *", context), count, width, ffi.from_buffer("float[]", out)))
    return out
