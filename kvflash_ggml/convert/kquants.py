"""Rows in the types that only ggml itself makes, through the built library."""

from __future__ import annotations

import ctypes

import numpy as np

from ..arrays import Floats
from ..errors import LibraryError
from ..gguf import types
from ..gguf.types import Bytes, TensorType
from ..native import library


def encode(rows: Floats, kind: TensorType) -> Bytes:
    """Finite rows [n, width] as rows of bytes. LibraryError if the native library cannot be had."""
    if kind.name in types.WITHOUT_LIBRARY:
        return types.encode(rows, kind)
    try:
        library.load()
    except LibraryError as error:
        ours = ", ".join(sorted(types.WITHOUT_LIBRARY))
        raise LibraryError(f"{kind.name} is made by ggml itself; without it there are {ours}. {error}") from error
    quantize = ctypes.CDLL(None).ggml_quantize_chunk
    floats, number = ctypes.POINTER(ctypes.c_float), ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, floats, ctypes.c_void_p, number, number, number, floats]
    quantize.restype = ctypes.c_size_t
    values = np.ascontiguousarray(rows, np.float32)
    n, width = values.shape
    made = np.empty((n, width // kind.block * kind.size), np.uint8)
    size = quantize(kind.id, values.ctypes.data_as(floats), made.ctypes.data, 0, n, width, None)
    if size != made.nbytes:
        raise ValueError(f"ggml made {size} bytes of {kind.name}, {made.nbytes} were expected")
    return made
