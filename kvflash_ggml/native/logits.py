"""The likeliest tokens of what a context has computed last: of the target, or of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import DecodeError, NotFinite
from ._kvf import ffi, lib
from .status import check

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
