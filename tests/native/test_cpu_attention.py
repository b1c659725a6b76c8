"""What the CPU's attention does with tiles of keys, compiled alone with and without vectors, beside numpy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendoring.build import upstream_llama

FLAGS = {"-O3": "", "-O3 -mavx -mf16c": "f16c", "-O3 -march=native": ""}
"""How to compile, and what the CPU needs to run it."""

HEAD = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif
typedef uint16_t ggml_fp16_t;
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static float table[1 << 16];
#define GGML_RESTRICT
#define GGML_CPU_FP16_TO_FP32(x) table[x]
static uint16_t half(float x) { _Float16 h = (_Float16) x; uint16_t bits; memcpy(&bits, &h, 2); return bits; }
#define GGML_CPU_FP32_TO_FP16(x) half(x)
"""
DOORS = """
extern "C" {
void fill(const float * values) { memcpy(table, values, sizeof(table)); }
void transpose(float * dst, int64_t stride, const char * src, size_t nb, int64_t rows, int64_t n) {
    transpose_f16(dst, stride, src, nb, rows, n);
}
void add(int n, uint16_t * y, const uint16_t * x, float v) { ggml_vec_mad_f16(n, y, x, v); }
float largest(int n, const float * x) { float s; ggml_vec_max_f32(n, &s, x); return s; }
}
"""


def function(file: str, name: str) -> str:
    text = (upstream_llama() / "ggml/src/ggml-cpu" / file).read_text(encoding="utf-8")
    found = re.search(rf"^[a-z ]*\bvoid {name}\(.*?^\}}", text, re.DOTALL | re.MULTILINE)
    assert found, f"{file} has no {name}: upstream moved it, or the patch is gone"
    return found[0]


@pytest.fixture(scope="module", params=FLAGS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    info = Path("/proc/cpuinfo")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    if FLAGS[request.param] and (not info.is_file() or FLAGS[request.param] not in info.read_text()):
        pytest.skip(f"runs code for a CPU with {FLAGS[request.param]}")
    folder = tmp_path_factory.mktemp("tiles")
    source, made = folder / "tiles.cpp", folder / "tiles.so"
    parts = (
        function("ops.cpp", "transpose_f16"),
        function("vec.h", "ggml_vec_max_f32"),
        function("vec.h", "ggml_vec_mad_f16"),
    )
    source.write_text("\n".join([HEAD, *parts, DOORS]))
    subprocess.run(
        [compiler, *request.param.split(), "-std=c++17", "-shared", "-fPIC", "-o", str(made), str(source)], check=True
    )
    loaded = ctypes.CDLL(str(made))
    loaded.largest.restype = ctypes.c_float
    floats = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    loaded.fill(floats.ctypes.data_as(ctypes.c_void_p))
    return loaded


@given(rows=st.integers(1, 64), values=st.integers(1, 130), apart=st.integers(0, 40), seed=st.integers(0, 99))
def test_bits_of_tiles_are_those_of_single_values(
    library: ctypes.CDLL, rows: int, values: int, apart: int, seed: int
) -> None:
    keys = np.random.default_rng(seed).standard_normal((rows, values + apart)).astype(np.float16)
    tile = np.full((values + 1, 64), 7, np.float32)
    numbers = (ctypes.c_int64(64), keys.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(keys.strides[0]))
    library.transpose(tile.ctypes.data_as(ctypes.c_void_p), *numbers, ctypes.c_int64(rows), ctypes.c_int64(values))
    want = np.full_like(tile, 7)
    want[:values, :rows] = keys[:, :values].T
    np.testing.assert_array_equal(tile.view(np.int32), want.view(np.int32))


@given(count=st.integers(0, 200), seed=st.integers(0, 99), hidden=st.booleans())
def test_maxima_are_found_at_every_place(library: ctypes.CDLL, count: int, seed: int, hidden: bool) -> None:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if hidden:
        values[:] = -np.inf
    got = library.largest(ctypes.c_int(count), values.ctypes.data_as(ctypes.c_void_p))
    assert got == (values.max() if count else -np.inf)


@given(count=st.integers(0, 200), seed=st.integers(0, 99), eighths=st.integers(0, 8))
def test_values_left_over_are_added_as_single_ones(library: ctypes.CDLL, count: int, seed: int, eighths: int) -> None:
    """A weight of few digits makes the sum exact in float64, so that it is rounded once, as by a fused operation."""
    y, x = np.random.default_rng(seed).standard_normal((2, count)).astype(np.float16)
    want = (y.astype(np.float64) + x.astype(np.float64) * (eighths / 8)).astype(np.float32).astype(np.float16)
    pointers = y.ctypes.data_as(ctypes.c_void_p), x.ctypes.data_as(ctypes.c_void_p)
    library.add(ctypes.c_int(count), *pointers, ctypes.c_float(eighths / 8))
    np.testing.assert_array_equal(y.view(np.int16), want.view(np.int16))
