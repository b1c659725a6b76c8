"""Types of tensors, and conversion of their values from one type to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..errors import LibraryError

Bytes = npt.NDArray[np.uint8]

F16_MAX = 65504.0


class TensorType(NamedTuple):
    """How ggml stores values. id: ggml's number. block: values that are stored together, in `size` bytes.

    scales: first and last byte of the 16-bit scales in a block; equal if there are none, or they are unknown.
    """

    id: int
    name: str
    block: int
    size: int
    scales: tuple[int, int] = (0, 0)


_TYPES = [
    TensorType(0, "f32", 1, 4), TensorType(1, "f16", 1, 2), TensorType(30, "bf16", 1, 2), TensorType(28, "f64", 1, 8),
    TensorType(24, "i8", 1, 1), TensorType(25, "i16", 1, 2), TensorType(26, "i32", 1, 4), TensorType(27, "i64", 1, 8),
    TensorType(2, "q4_0", 32, 18, (0, 2)), TensorType(3, "q4_1", 32, 20, (0, 4)),
    TensorType(6, "q5_0", 32, 22, (0, 2)), TensorType(7, "q5_1", 32, 24, (0, 4)),
    TensorType(8, "q8_0", 32, 34, (0, 2)), TensorType(10, "q2_k", 256, 84, (80, 84)),
    TensorType(11, "q3_k", 256, 110, (108, 110)), TensorType(12, "q4_k", 256, 144, (0, 4)),
    TensorType(13, "q5_k", 256, 176, (0, 4)), TensorType(14, "q6_k", 256, 210, (208, 210)),
    TensorType(16, "iq2_xxs", 256, 66, (0, 2)), TensorType(17, "iq2_xs", 256, 74, (0, 2)),
    TensorType(18, "iq3_xxs", 256, 98, (0, 2)), TensorType(19, "iq1_s", 256, 50, (0, 2)),
    TensorType(20, "iq4_nl", 32, 18, (0, 2)), TensorType(21, "iq3_s", 256, 110, (0, 2)),
    TensorType(22, "iq2_s", 256, 82, (0, 2)), TensorType(23, "iq4_xs", 256, 136, (0, 2)),
    TensorType(29, "iq1_m", 256, 56), TensorType(34, "tq1_0", 256, 54, (52, 54)),
    TensorType(35, "tq2_0", 256, 66, (64, 66)), TensorType(39, "mxfp4", 32, 17), TensorType(40, "nvfp4", 64, 36),
    TensorType(41, "q1_0", 128, 18, (0, 2)),
]  # fmt: skip

BY_ID = {kind.id: kind for kind in _TYPES}
BY_NAME = {kind.name: kind for kind in _TYPES}

FLOATS = {"f32", "f16", "bf16"}
WITHOUT_LIBRARY = {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}
"""Types that numpy and the package gguf can write. ggml itself must make other types."""

Encoder = Callable[[Floats, TensorType], Bytes]
"""A function from rows of values to rows of bytes."""


def nbytes(kind: TensorType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. shape: the length of a row first; a row must be whole blocks."""
    count = 1
    for length in shape:
        count *= length
    return count // kind.block * kind.size


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
