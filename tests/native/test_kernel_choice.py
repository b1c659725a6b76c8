"""Which kernels CUDA takes, asked without a GPU: the function that decides is compiled alone."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from vendoring.build import NATIVE, upstream_llama
from vendoring.source import LLAMA, pristine_tree

AMPERE, HOPPER = 800, 900
GGML_PREC_F32 = 10
Type = gguf.GGMLQuantizationType
MAX_ROWS = {Type.Q4_K: 5, Type.Q5_K: 6, Type.Q6_K: 7, Type.Q8_0: 8}


CUDA = Path("ggml/src/ggml-cuda")


def compiled(llama: Path, folder: Path, function: str, file: str | Path, callers: str) -> Path:
    """A library of one function of ggml's CUDA backend, and of what calls it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    defined = [
        line
        for header in (llama / CUDA / "common.cuh", llama / CUDA / "mmvq.cuh", NATIVE / "kvf_narrow.cuh")
        for line in header.read_text(encoding="utf-8").splitlines()
        if re.match(r"#define (GGML_CUDA_CC_|MMVQ_MAX_BATCH_SIZE|KVF_NARROW_)", line)
    ]
    code = (llama / CUDA / file).read_text(encoding="utf-8")
    found = re.search(rf"^(static )?bool {function}\(.*?^\}}", code, re.DOTALL | re.MULTILINE)
    assert found, "upstream moved the function: read its new form, and mend this test"
    source, library = folder / "choice.cpp", folder / "choice.so"
    headers = ["#include <cstdlib>", "#include <cstring>", '#include "ggml.h"']
    source.write_text("\n".join([*headers, *defined, found[0], callers]))
    own = "-Wl,-Bsymbolic"  # the stand-ins below, not the functions of a library that is loaded here
    subprocess.run(
        [compiler, "-shared", "-fPIC", own, f"-I{llama / 'ggml/include'}", "-o", library, source], check=True
    )
    return library


def max_rows(llama: Path, folder: Path) -> dict[Type, int]:
    """Rows up to which the vector kernel is taken, by the weights' type."""
    callers = """
extern "C" bool ggml_is_quantized(enum ggml_type) { return true; }
extern "C" bool vector(int type, int cc, int64_t rows) { return ggml_cuda_should_use_mmvq((ggml_type) type, cc, rows); }
"""
    loaded = ctypes.CDLL(str(compiled(llama, folder, "ggml_cuda_should_use_mmvq", "mmvq.cu", callers)))
    loaded.vector.restype = ctypes.c_bool
    loaded.vector.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return {type: max(rows for rows in range(1, 17) if loaded.vector(type, HOPPER, rows)) for type in MAX_ROWS}


def test_a_few_rows_go_to_the_faster_kernel(tmp_path: Path) -> None:
    assert max_rows(upstream_llama(), tmp_path) == MAX_ROWS


def test_that_takes_the_patch(tmp_path: Path) -> None:
    assert set(max_rows(pristine_tree() / LLAMA, tmp_path).values()) == {8}


def dense(
    library: Path, cc: int, rows: int, elements: int, kernels: str = "", *, prec: int = 0, whole: bool = True
) -> bool:
    """Is such a product computed by cuBLAS? Asked in a process of its own, which reads the variable once."""
    arguments = f"{cc}, {rows}, ctypes.c_int64({elements}), {prec}, {int(whole)}"
    ask = f"import ctypes; print(ctypes.CDLL({str(library)!r}).dense({arguments}))"
    env = {"KVFLASH_KERNELS": kernels} if kernels else {}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "1"


def test_prompts_on_hopper_take_dense_products(tmp_path: Path) -> None:
    callers = """
static int64_t elements;
static bool whole;
extern "C" int64_t ggml_nelements(const struct ggml_tensor *) { return elements; }
extern "C" bool ggml_is_contiguously_allocated(const struct ggml_tensor *) { return whole; }
extern "C" int dense(int cc, int rows, int64_t n, int prec, int is_whole) {
    elements = n;
    whole = is_whole;
    return ggml_cuda_prefer_dense(nullptr, cc, rows, prec);
}
"""
    library = compiled(upstream_llama(), tmp_path, "ggml_cuda_prefer_dense", "ggml-cuda.cu", callers)
    layer = 17_408 * 5_120
    assert dense(library, HOPPER, 320, layer)
    assert not dense(library, HOPPER, 319, layer)  # there the matrix kernel is as fast
    assert not dense(library, HOPPER, 2048, 248_320 * 5_120)  # 2.4 GiB of converted weights
    assert not dense(library, AMPERE, 2048, layer)
    assert not dense(library, HOPPER, 2048, layer, "stock")
    assert not dense(library, HOPPER, 2048, layer, prec=GGML_PREC_F32)
    assert not dense(library, HOPPER, 2048, layer, whole=False)  # a view with gaps between its rows
    asked = "!ggml_cuda_prefer_dense(src0, cc, ne11, dst->op_params[0]) &&"
    assert asked in (upstream_llama() / CUDA / "ggml-cuda.cu").read_text("utf-8")


def test_narrow_products_are_ours(tmp_path: Path) -> None:
    """That their values are right was compared on a GPU, by upstream's own test of products (test-backend-ops)."""
    callers = """
extern "C" bool ggml_is_contiguous(const struct ggml_tensor * tensor) { return tensor->nb[0]; }
extern "C" bool narrow(int type, int cc, int64_t rows, int64_t sequences, bool whole) {
    ggml_tensor src0{}, src1{};
    src0.type = (ggml_type) type;
    src0.ne[2] = src0.ne[3] = src1.ne[3] = 1;
    src1.ne[1] = rows;
    src1.ne[2] = sequences;
    src1.nb[0] = whole;
    return kvf_narrow_wanted(&src0, &src1, &src1, cc);
}
"""
    loaded = ctypes.CDLL(
        str(compiled(upstream_llama(), tmp_path, "kvf_narrow_wanted", NATIVE / "kvf_narrow.cu", callers))
    )
    loaded.narrow.restype = ctypes.c_bool
    loaded.narrow.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool]
    for type, least in {Type.Q4_K: 2, Type.Q5_K: 2, Type.Q6_K: 4}.items():
        assert [rows for rows in range(1, 97) if loaded.narrow(type, HOPPER, rows, 1, True)] == list(range(least, 33))
        assert [count for count in range(2, 99) if loaded.narrow(type, HOPPER, 1, count, True)] == list(range(2, 65))
        assert not loaded.narrow(type, HOPPER, 1, 8, False)
        assert not loaded.narrow(type, AMPERE, 8, 1, True)
    assert not loaded.narrow(Type.Q8_0, HOPPER, 8, 1, True)
    told = (NATIVE.parents[1] / "docs" / "exact-reading.md").read_text(encoding="utf-8")
    assert "| 2 to 32 (Q6_K: 4 to 32). In a step of several texts with recurrent state: up to 64 |" in told
    code = (upstream_llama() / CUDA / "ggml-cuda.cu").read_text(encoding="utf-8")
    ours, stock = "kvf_narrow(ctx, src0, src1, dst);", "ggml_cuda_mul_mat_vec_q(ctx, src0, src1, nullptr, dst);"
    assert code.index(ours) < code.index(stock)


def test_a_warp_holds_several_columns() -> None:
    """The grid has a warp for each four columns of 128. That the bits stay was compared on a GPU, of all outputs."""
    code = (upstream_llama() / CUDA / "gated_delta_net.cu").read_text(encoding="utf-8")
    assert "gated_delta_net_cuda<128, KDA, keep_rs_t, wide>" in code
    assert "num_cols  = num_warps * (S_v == 128 ? wide : 1);" in code
    assert "(S_v + num_cols - 1) / num_cols" in code


def test_a_warp_fetches_the_next_token() -> None:
    """The next token's rows are asked for before this one is computed; the bits were compared as above."""
    code = (upstream_llama() / CUDA / "gated_delta_net.cu").read_text(encoding="utf-8")
    loop = code[code.index("for (int t = 0; t < n_tokens; t++)") :]
    assert loop.index("fetch(t + 1)") < loop.index("warp_reduce_sum")
