"""What the CPU's attention does with tiles of keys, compiled alone with and without vectors, beside numpy."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendoring.build import upstream_llama

from kvflash_ggml.native import library as native

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


class Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads that share heads of keys, values of a key and of a value, and how their scores are bent."""

    count: int = 4
    keys: int = 2
    wide: int = 64
    deep: int = 64
    bias: float = 0.0
    cap: float = 0.0
    sinks: bool = False
    kind: type = np.float16


KINDS = {
    "shared": Heads(),
    "single": Heads(keys=4),
    "latent": Heads(count=20, keys=1, wide=576, deep=512),
    "odd": Heads(count=9, keys=3, wide=72, deep=40),
    "biased": Heads(count=6, keys=2, bias=8.0),
    "capped": Heads(cap=30.0),
    "sinks": Heads(count=6, keys=2, sinks=True),
    "float32": Heads(kind=np.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """q of heads, rows and values; k and v of heads, keys and values; mask of rows and keys; a sink of each head."""

    heads: Heads
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    sinks: np.ndarray


def inputs(rows: int, keys: int, heads: Heads = KINDS["shared"]) -> Inputs:
    """Every row sees some of the keys."""
    draw = np.random.default_rng(rows)
    k, v = (draw.standard_normal((heads.keys, keys, n)).astype(heads.kind) for n in (heads.wide, heads.deep))
    near = np.where(draw.random((rows, keys)) < 0.3, -np.inf, -draw.random((rows, keys))).astype(np.float16)
    q = draw.standard_normal((heads.count, rows, heads.wide)).astype(np.float32)
    return Inputs(heads=heads, q=q, k=k, v=v, mask=near, sinks=draw.standard_normal(heads.count).astype(np.float32))


def attention(given: Inputs, *, threads: int = 2) -> np.ndarray:
    """What the CPU computes: of heads, rows and values."""
    native.load()
    ggml = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    for name in ("ggml_init", "ggml_new_tensor_3d", "ggml_flash_attn_ext", "ggml_new_graph", "ggml_get_data"):
        getattr(ggml, name).restype = pointer
    context = pointer(ggml.ggml_init(Init(1 << 26, None, False)))

    def tensor(values: np.ndarray) -> ctypes.c_void_p:
        kind = ctypes.c_int(1 if values.dtype == np.float16 else 0)
        made = pointer(ggml.ggml_new_tensor_3d(context, kind, *(size(n) for n in values.shape[::-1])))
        ctypes.memmove(ggml.ggml_get_data(made), values.tobytes(), values.nbytes)
        return made

    ggml.ggml_get_data.argtypes = [pointer]
    heads = given.heads
    tensors = [tensor(values) for values in (given.q, given.k, given.v, given.mask[None])]
    numbers = [ctypes.c_float(number) for number in (heads.wide**-0.5, heads.bias, heads.cap)]
    out, graph = pointer(ggml.ggml_flash_attn_ext(context, *tensors, *numbers)), pointer(ggml.ggml_new_graph(context))
    if heads.sinks:
        ggml.ggml_flash_attn_ext_add_sinks(out, tensor(given.sinks[None, None]))
    ggml.ggml_build_forward_expand(graph, out)
    assert ggml.ggml_graph_compute_with_ctx(context, graph, ctypes.c_int(threads)) == 0
    shape = (given.q.shape[1], heads.count, heads.deep)
    found = np.ctypeslib.as_array(ctypes.cast(ggml.ggml_get_data(out), ctypes.POINTER(ctypes.c_float)), shape).copy()
    ggml.ggml_free(context)
    return found.transpose(1, 0, 2)


def exact(given: Inputs) -> np.ndarray:
    """The same in float64. Keys that no weight falls on count for nothing, whatever they hold."""
    heads = given.heads
    k, v = (np.repeat(values, heads.count // heads.keys, axis=0).astype(np.float64) for values in (given.k, given.v))
    scores = given.q.astype(np.float64) @ k.transpose(0, 2, 1) * heads.wide**-0.5
    if heads.cap:
        scores = np.tanh(scores / heads.cap) * heads.cap
    slopes = np.ones(heads.count)
    if heads.bias:  # as in the paper, where the heads are no power of two either
        most = 1 << int(np.log2(heads.count))
        slopes = np.array([2 ** (-heads.bias * (i + 1) / most) for i in range(most)])
        between = [2 ** (-heads.bias / 2 * (2 * i + 1) / most) for i in range(heads.count - most)]
        slopes = np.append(slopes, between)
    scores += slopes[:, None, None] * given.mask.astype(np.float64)
    largest = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=2, keepdims=True)
    if heads.sinks:
        sums += np.exp(given.sinks[:, None, None].astype(np.float64) - largest)
    return weights / sums @ np.where(np.isfinite(v), v, 0)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.int32)


tiles = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="only there do fewer than 64 rows take tiles"
)


@tiles
@pytest.mark.parametrize("threads", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 63, 64, 65])
def test_few_rows_are_nearer_to_exact_attention(rows: int, threads: int) -> None:
    """Tiles of keys sum in float32, and single ones in float16, which is wrong in the third digit."""
    given = inputs(rows, 1000)
    np.testing.assert_allclose(attention(given, threads=threads), exact(given), rtol=0, atol=2e-6)


@tiles
@pytest.mark.parametrize("keys", [1, 100, 511, 512, 700])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_any_kind_are_attended(kind: str, rows: int, keys: int) -> None:
    """From 512 keys on the threads divide the keys of a single row."""
    given = inputs(rows, keys, KINDS[kind])
    given.mask[:, 0] = 0  # a key that every row sees
    for threads in (1, 3):
        np.testing.assert_allclose(attention(given, threads=threads), exact(given), rtol=0, atol=4e-6)


@tiles
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"float32"}))
def test_rows_have_the_bits_that_they_have_among_others(kind: str) -> None:
    """Keys of float32 are taken one by one below 64 rows, which sum in float32 too."""
    given = inputs(70, 700, KINDS[kind])
    found = attention(given)
    for first, last in ((0, 1), (0, 2), (5, 12), (30, 63), (69, 70)):
        some = replace(given, q=given.q[:, first:last], mask=given.mask[first:last])
        np.testing.assert_array_equal(bits(attention(some, threads=1)), bits(found[:, first:last]))


@pytest.mark.parametrize("rows", [1, 7, 64, 90])
def test_heads_of_a_group_have_the_bits_of_single_ones(rows: int) -> None:
    given = inputs(rows, 300, KINDS["odd"])
    k, v = (np.repeat(values, 3, axis=0) for values in (given.k, given.v))
    alone = replace(given, heads=replace(given.heads, keys=given.heads.count), k=k, v=v)
    np.testing.assert_array_equal(bits(attention(given)), bits(attention(alone)))


@pytest.mark.parametrize("rows", [pytest.param(2, marks=tiles), 64, 70])
def test_tiles_leave_out_rows_that_see_nothing(rows: int) -> None:
    """Half of the rows see the first two tiles, the others two more: what lies there does not reach the first ones."""
    given = inputs(rows, 256)
    given.mask[: rows // 2, 128:] = given.mask[rows // 2 :, :128] = -np.inf
    given.v[:, 128:] = np.inf
    found = attention(given, threads=1)[:, : rows // 2]
    np.testing.assert_allclose(found, exact(given)[:, : rows // 2], rtol=0, atol=2e-6)


@tiles
def test_stock_kernels_take_single_keys() -> None:
    """They sum in float16, so they are far from exact attention: what is asked for is what is computed."""
    code = (
        "import numpy as np, test_cpu_attention as of\n"
        "for rows in (1, 8, 63):\n"
        "    given = of.inputs(rows, 1000)\n"
        "    print(np.abs(of.attention(given) - of.exact(given)).max())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"KVFLASH_KERNELS": "stock", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    errors = [float(error) for error in done.stdout.split()]
    assert len(errors) == 3
    assert min(errors) > 5e-5
