"""Products of K-quants with the columns of a step, on the device under test, beside float64."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from support.on_device import POINTER, Work, function, has_our_kernels, new, put, quantised, take
from support.rounding import ON_GPU

WEIGHTS = 1
VALUES, ROWS = 9 * 256, 4104
"""Nine blocks, which four warps share unevenly. Rows that end within a tile of 16, and enough for one column."""


@functools.cache
def weights_of(kind: Type) -> tuple[np.ndarray, np.ndarray]:
    """Weights of both signs, so that the minima of a block matter: of rows and bytes, and what they stand for."""
    weights = quantised(kind, 2 * np.random.default_rng(0).random((ROWS, VALUES), np.float32) - 1)
    return weights, dequantize(weights, kind).astype(np.float64)


def products(kind: Type, weights: np.ndarray, columns: np.ndarray, *, sequences: bool) -> np.ndarray:
    """What the device computes: of columns and rows. sequences: each column is one of another text of the step."""
    with Work() as work:
        fixed, moving = work.context(), work.context()
        w = new(fixed, kind, VALUES, ROWS, 1)
        x = new(moving, Type.F32, VALUES, *((1, len(columns)) if sequences else (len(columns), 1)))
        out = function("ggml_mul_mat", POINTER, *[POINTER] * 3)(moving, w, x)
        graph = work.graph(moving, out)
        function("ggml_backend_buffer_set_usage", None, POINTER, ctypes.c_int)(work.place(fixed), WEIGHTS)
        work.place(moving)
        put(w, weights)
        put(x, columns)
        work.compute(graph)
        return take(out, (len(columns), ROWS))


def is_ours(kind: Type, count: int, *, sequences: bool) -> bool:
    """Does our kernel compute it?"""
    fits = count <= 64 if sequences or kind != Type.Q6_K else 4 <= count <= 32
    return has_our_kernels() and fits and (count > 1 or kind != Type.Q6_K)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 9, 19, 32, 33, 61, 64, 65] if ON_GPU else [1, 4, 33])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_products_are_right_and_columns_apart(kind: Type, count: int, sequences: bool) -> None:
    """Within what rounding of the columns to 8 bits costs. A number that is none reaches no other column.

    Upstream's matrix kernel multiplies the minima of Q4_K and Q5_K with sums of the values before they were rounded.
    """
    weights, real = weights_of(kind)
    columns = np.random.default_rng(count).standard_normal((count, VALUES)).astype(np.float32)
    found = products(kind, weights, columns, sequences=sequences)
    exact = columns.astype(np.float64) @ real.T
    usual = np.linalg.norm(columns, axis=1) * np.linalg.norm(real) / VALUES**0.5
    error = np.linalg.norm(found - exact, axis=1) / usual
    ours = is_ours(kind, count, sequences=sequences)
    assert error.max() < (0.006 if ours else 0.015 if kind == Type.Q6_K else 0.04)
    half = count // 2
    if half and ours and is_ours(kind, half, sequences=sequences):
        some = products(kind, weights, columns[:half], sequences=sequences)
        np.testing.assert_array_equal(some.view(np.int32), found[:half].view(np.int32))
    columns[half] = np.nan
    again = products(kind, weights, columns, sequences=sequences)
    others = np.arange(count) != half
    np.testing.assert_array_equal(again[others].view(np.int32), found[others].view(np.int32))
    assert np.isnan(again[half]).all() or not ON_GPU  # a CPU rounds such a column to zeros
