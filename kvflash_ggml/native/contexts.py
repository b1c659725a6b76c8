"""A llama.cpp context by its address: the likeliest tokens that it has computed, and the steps of a drafter's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import DecodeError, NotFinite
from ._kvf import ffi, lib
from .status import check

NO_STATES, STATES, ALL_STATES = range(3)

Rows = Sequence[int] | Int32s
"""Tokens of the newest batch whose logits were kept, by their place in it; -1 is the last one kept."""


def top(context: int, rows: Rows, k: int) -> tuple[Int32s, Floats]:
    """Return the `k` likeliest tokens of each row, best first, and their log-probabilities: both [n, k].

    context: address of a llama_context. Of equally likely tokens the one with the lower id comes first. Waits for the
    compute.

    Raises:
        EngineError: the logits of a row were not kept, or `k` is not between 1 and the size of the vocabulary.
        NotFinite: the logits of a row are not finite.
    """
    shape = len(rows), max(k, 0)
    ids, logp = np.empty(shape, np.int32), np.empty(shape, np.float32)
    _call(context, rows, k, ids, ffi.from_buffer("float[]", logp))
    return ids, logp


def argmax(context: int, rows: Rows) -> Int32s:
    """Return the likeliest token of each row, [n], the lowest id of equal ones. Faster than `top`."""
    ids = np.empty(len(rows), np.int32)
    _call(context, rows, 1, ids, ffi.NULL)
    return ids


def _call(context: int, rows: Rows, k: int, ids: Int32s, logp: object) -> None:
    which = ffi.from_buffer("int32_t[]", np.ascontiguousarray(rows, np.int32))
    out = ffi.from_buffer("int32_t[]", ids, require_writable=True)
    try:
        check(lib.kvf_logits_top(ffi.cast("void *", context), len(rows), which, k, out, logp))
    except DecodeError as err:
        raise NotFinite(str(err)) from None


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
