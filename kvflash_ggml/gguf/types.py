"""Types of tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


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
    TensorType(41, "q1_0", 128, 18, (0, 2)), TensorType(42, "q2_0", 64, 18, (0, 2)),
]  # fmt: skip

BY_ID = {kind.id: kind for kind in _TYPES}
BY_NAME = {kind.name: kind for kind in _TYPES}

REMOVED = {31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8"}
"""Types that ggml had once."""

FLOATS = {"f32", "f16", "bf16"}


def nbytes(kind: TensorType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. shape: the length of a row first; a row must be whole blocks."""
    return math.prod(shape) // kind.block * kind.size
