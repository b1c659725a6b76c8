"""Which kernel CUDA takes for products of a few rows, asked without a GPU: the function is compiled alone."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
from vendoring.build import upstream_llama
from vendoring.source import LLAMA, pristine_tree

HOPPER = 900
Type = gguf.GGMLQuantizationType
MAX_ROWS = {Type.Q4_K: 5, Type.Q5_K: 6, Type.Q6_K: 7, Type.Q8_0: 8}


def max_rows(llama: Path, folder: Path) -> dict[Type, int]:
    """Rows up to which the vector kernel is taken, by the weights' type."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    cuda = llama / "ggml/src/ggml-cuda"
    defined = [
        line
        for name in ("common.cuh", "mmvq.cuh")
        for line in (cuda / name).read_text(encoding="utf-8").splitlines()
        if re.match(r"#define (GGML_CUDA_CC_|MMVQ_MAX_BATCH_SIZE)", line)
    ]
    code = (cuda / "mmvq.cu").read_text(encoding="utf-8")
    function = re.search(r"^bool ggml_cuda_should_use_mmvq\(.*?^\}", code, re.DOTALL | re.MULTILINE)
    assert function, "upstream moved the function: read its new form, and mend this test"
    source, library = folder / "choice.cpp", folder / "choice.so"
    callers = """
extern "C" bool ggml_is_quantized(enum ggml_type) { return true; }
extern "C" bool vector(int type, int cc, int64_t rows) { return ggml_cuda_should_use_mmvq((ggml_type) type, cc, rows); }
"""
    source.write_text("\n".join(['#include "ggml.h"', *defined, function[0], callers]))
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{llama / 'ggml/include'}", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.vector.restype = ctypes.c_bool
    loaded.vector.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return {type: max(rows for rows in range(1, 17) if loaded.vector(type, HOPPER, rows)) for type in MAX_ROWS}


def test_a_few_rows_go_to_the_faster_kernel(tmp_path: Path) -> None:
    assert max_rows(upstream_llama(), tmp_path) == MAX_ROWS


def test_that_takes_the_patch(tmp_path: Path) -> None:
    assert set(max_rows(pristine_tree() / LLAMA, tmp_path).values()) == {8}
