"""Conversion of tensors' values from one type to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..errors import LibraryError
from .types import FLOATS, Bytes, TensorType

F16_MAX = 65504.0

WITHOUT_LIBRARY = {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}
"""Types that numpy and the package gguf can write. ggml itself must make other types."""

Encoder = Callable[[Floats, TensorType], Bytes]
"""A function from rows of values to rows of bytes."""


def decode(raw: Bytes, kind: TensorType) -> Floats:
    """Decode F32, F16 or BF16 as F32, exactly. ValueError for another type."""
    if kind.name == "f32":
        return raw.view(np.float32)
    if kind.name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if kind.name == "bf16":
        bits: npt.NDArray[np.uint32] = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    raise ValueError(f"{kind.name} is not a plain float type")


def dequantise(raw: Bytes, kind: TensorType) -> Floats | None:
    """Decode rows of any type as F32. None for a type that neither numpy nor the package gguf reads."""
    if kind.name in FLOATS:
        return decode(raw, kind)
    try:
        gguf = _gguf()
        done: Floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    except (LibraryError, NotImplementedError, ValueError):
        return None
    return done


def encode(rows: Floats, kind: TensorType) -> Bytes:
    """Encode finite rows, [n, width], as rows of bytes of a type in WITHOUT_LIBRARY. LibraryError without gguf."""
    if kind.name == "f32":
        return rows.view(np.uint8)
    if kind.name == "f16":
        return rows.astype(np.float16).view(np.uint8)
    if kind.name == "bf16":
        bits = rows.view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)  # ties go to the even neighbour
        upper: npt.NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
        return upper.view(np.uint8)
    gguf = _gguf()
    done: Bytes = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(kind.id))
    return done


def all_finite(raw: Bytes, kind: TensorType) -> bool:
    """Report whether no value is NaN or infinite. For quantised types it checks the scales."""
    if kind.name in FLOATS:
        return bool(np.isfinite(decode(raw, kind)).all())
    lo, hi = kind.scales
    if lo == hi:
        return True
    scales = np.ascontiguousarray(raw.reshape(-1, kind.size)[:, lo:hi]).view(np.float16)
    return bool(np.isfinite(scales).all())


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise LibraryError("quantised types need the package gguf: pip install gguf") from error
    return gguf
