"""Products of K-quants with the columns of a step, on the device under test, beside float64."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from support.rounding import ON_GPU

from kvflash_ggml.native import library as native

POINTER = ctypes.c_void_p
CPU, GPU, INTEGRATED = 0, 1, 2
WEIGHTS = 1
VALUES, ROWS = 9 * 256, 4104
"""Nine blocks, which four warps share unevenly. Rows that end within a tile of 16, and enough for one column."""


class Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", POINTER), ("no_alloc", ctypes.c_bool))


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    found = getattr(ctypes.CDLL(None), name)
    found.restype, found.argtypes = result, arguments
    return found  # type: ignore[no-any-return]


def device() -> int:
    """The device under test."""
    native.load()
    by_type = function("ggml_backend_dev_by_type", POINTER, ctypes.c_int)
    return by_type(GPU) or by_type(INTEGRATED) if ON_GPU else by_type(CPU)  # type: ignore[no-any-return]


@functools.cache
def quantised(kind: Type) -> tuple[np.ndarray, np.ndarray]:
    """Weights of both signs, so that the minima of a block matter: of rows and bytes, and what they stand for."""
    native.load()
    values = 2 * np.random.default_rng(0).random((ROWS, VALUES), np.float32) - 1
    quantise = function(
        "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, *[POINTER] * 2, *[ctypes.c_int64] * 3, POINTER
    )
    data = np.empty(values.nbytes, np.uint8)
    count = quantise(kind, values.ctypes.data, data.ctypes.data, 0, ROWS, VALUES, None)
    weights = data[:count].reshape(ROWS, -1)
    return weights, dequantize(weights, kind).astype(np.float64)


def products(kind: Type, weights: np.ndarray, columns: np.ndarray, *, sequences: bool) -> np.ndarray:
    """What the device computes: of columns and rows. sequences: each column is one of another text of the step."""
    tensor = function("ggml_new_tensor_3d", POINTER, POINTER, ctypes.c_int, *[ctypes.c_int64] * 3)
    place = function("ggml_backend_alloc_ctx_tensors", POINTER, POINTER, POINTER)
    put = function("ggml_backend_tensor_set", None, POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)
    backend = function("ggml_backend_dev_init", POINTER, POINTER, ctypes.c_char_p)(device(), None)
    fixed, moving = (function("ggml_init", POINTER, Init)(Init(1 << 20, None, True)) for _ in range(2))
    w = tensor(fixed, kind, VALUES, ROWS, 1)
    shape = (1, len(columns)) if sequences else (len(columns), 1)
    x = tensor(moving, Type.F32, VALUES, *shape)
    out = function("ggml_mul_mat", POINTER, *[POINTER] * 3)(moving, w, x)
    graph = function("ggml_new_graph", POINTER, POINTER)(moving)
    function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
    buffers = place(fixed, backend), place(moving, backend)
    function("ggml_backend_buffer_set_usage", None, POINTER, ctypes.c_int)(buffers[0], WEIGHTS)
    for made, values in ((w, weights), (x, columns)):
        put(made, values.ctypes.data, 0, values.nbytes)
    assert function("ggml_backend_graph_compute", ctypes.c_int, POINTER, POINTER)(backend, graph) == 0
    found = np.empty((len(columns), ROWS), np.float32)
    get = function("ggml_backend_tensor_get", None, POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)
    get(out, found.ctypes.data, 0, found.nbytes)
    for buffer in buffers:
        function("ggml_backend_buffer_free", None, POINTER)(buffer)
    for context in (fixed, moving):
        function("ggml_free", None, POINTER)(context)
    function("ggml_backend_free", None, POINTER)(backend)
    return found


def is_ours(kind: Type, count: int, *, sequences: bool) -> bool:
    """Does our kernel compute it?"""
    describe = function("ggml_backend_dev_description", ctypes.c_char_p, POINTER)
    if not ON_GPU or os.environ.get("KVFLASH_KERNELS") == "stock" or not re.search(b"H[12]00", describe(device())):
        return False
    fits = count <= 64 if sequences or kind != Type.Q6_K else 4 <= count <= 32
    return fits and (count > 1 or kind != Type.Q6_K)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 9, 19, 32, 33, 61, 64, 65] if ON_GPU else [1, 4, 33])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_products_are_right_and_columns_apart(kind: Type, count: int, sequences: bool) -> None:
    """Within what rounding of the columns to 8 bits costs. A number that is none reaches no other column.

    Upstream's matrix kernel multiplies the minima of Q4_K and Q5_K with sums of the values before they were rounded.
    """
    weights, real = quantised(kind)
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
