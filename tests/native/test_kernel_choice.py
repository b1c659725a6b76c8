"""Which kernels CUDA takes, asked without a GPU: the function that decides is compiled alone."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from vendoring.build import NATIVE, upstream_llama
from vendoring.source import LLAMA, pristine_tree

AMPERE, HOPPER = 800, 900
GGML_PREC_F32 = 10
Type = gguf.GGMLQuantizationType
MAX_ROWS = {Type.Q4_K: 5, Type.Q5_K: 6, Type.Q6_K: 7, Type.Q8_0: 8}


CUDA = Path("ggml/src/ggml-cuda")


def library_of(source: Path, *flags: str) -> Path:
    """A source of C++, compiled beside it for the CPU."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return library


def compiled(llama: Path, folder: Path, function: str, file: str | Path, callers: str) -> Path:
    """A library of one function of ggml's CUDA backend, and of what calls it."""
    defined = [
        line
        for header in (llama / CUDA / "common.cuh", llama / CUDA / "mmvq.cuh", *sorted(NATIVE.glob("*.cuh")))
        for line in header.read_text(encoding="utf-8").splitlines()
        if re.match(r"#define (GGML_CUDA_CC_|MMVQ_MAX_BATCH_SIZE|KVF_(NARROW|ATTEND)_)", line)
    ]
    code = (llama / CUDA / file).read_text(encoding="utf-8")
    found = re.search(rf"^(static )?bool {function}\(.*?^\}}", code, re.DOTALL | re.MULTILINE)
    assert found, "upstream moved the function: read its new form, and mend this test"
    source = folder / "choice.cpp"
    standard = ["#include <cstdlib>", "#include <cstring>", "#include <initializer_list>"]
    headers = [*standard, '#include "ggml.h"', "#define ampere_mma_available(cc) true"]
    source.write_text("\n".join([*headers, *defined, found[0], callers]))
    own = "-Wl,-Bsymbolic"  # the stand-ins below, not the functions of a library that is loaded here
    return library_of(source, own, f"-I{llama / 'ggml/include'}")


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


def narrow(folder: Path) -> Callable[..., bool]:
    """Is such a product computed by us? What the environment says is read once."""
    folder.mkdir()
    callers = """
extern "C" bool ggml_is_contiguous(const struct ggml_tensor * tensor) { return tensor->nb[0]; }
extern "C" bool narrow(int type, int cc, int64_t rows, int64_t sequences, bool whole, int64_t of, int64_t at) {
    ggml_tensor src0{}, src1{};
    src0.ne[1] = of;
    src1.data = (void *) at;
    src0.type = (ggml_type) type;
    src0.ne[2] = src0.ne[3] = src1.ne[3] = 1;
    src1.ne[1] = rows;
    src1.ne[2] = sequences;
    src1.nb[0] = whole;
    return kvf_narrow_wanted(&src0, &src1, &src1, cc);
}
"""
    library = compiled(upstream_llama(), folder, "kvf_narrow_wanted", NATIVE / "kvf_narrow.cu", callers)
    ask = ctypes.CDLL(str(library)).narrow
    ask.restype = ctypes.c_bool
    ask.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool, *[ctypes.c_int64] * 2]

    def taken(
        type: Type, rows: int, *, cc: int = HOPPER, texts: int = 1, whole: bool = True, of: int = 4096, at: int = 0
    ) -> bool:
        return bool(ask(type, cc, rows, texts, whole, of, at))

    return taken


def test_narrow_products_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_products.py` compares their values, where it runs on a GPU."""
    monkeypatch.delenv("KVFLASH_KERNELS", raising=False)
    taken = narrow(tmp_path / "ours")
    for type, (least, most) in {Type.Q4_K: (1, 64), Type.Q5_K: (1, 64), Type.Q6_K: (4, 32)}.items():
        assert [rows for rows in range(1, 97) if taken(type, rows)] == list(range(least, most + 1))
        assert not taken(type, 1, of=4095)
        assert taken(type, 4, of=4095)
        assert [count for count in range(2, 99) if taken(type, 1, texts=count)] == list(range(2, 65))
        assert not taken(type, 1, texts=8, whole=False)
        assert not taken(type, 8, cc=AMPERE)
        assert not taken(type, 8, at=8)
    assert not taken(Type.Q8_0, 8)
    monkeypatch.setenv("KVFLASH_KERNELS", "stock")
    assert not narrow(tmp_path / "stock")(Type.Q4_K, 8)
    told = (NATIVE.parents[1] / "docs" / "exact-reading.md").read_text(encoding="utf-8")
    assert "| 1 to 64 (Q6_K: 4 to 32), 1 only with weights of at least 4,096 rows. In a step of several texts" in told
    code = (upstream_llama() / CUDA / "ggml-cuda.cu").read_text(encoding="utf-8")
    ours, stock = "kvf_narrow(ctx, src0, src1, dst);", "ggml_cuda_mul_mat_vec_q(ctx, src0, src1, nullptr, dst);"
    assert code.index(ours) < code.index(stock)
    fused = code[code.index("bool ggml_cuda_should_fuse_mul_mat_vec_q(") :]
    assert fused.index("kvf_narrow_wanted(src0, src1, dst, cc)") < fused.index("return use_mul_mat_vec_q;")


def attend(folder: Path) -> Callable[..., bool]:
    """Is such an attention computed by us? What the environment says is read once."""
    folder.mkdir()
    callers = """
extern "C" size_t ggml_type_size(enum ggml_type type) { return type; }
extern "C" bool attend(int cc, int type, int64_t rows, int64_t slots, int64_t head, int sequences, int other) {
    ggml_tensor tensors[5]{}, out{};
    ggml_tensor &q = tensors[0], &k = tensors[1], &v = tensors[2], &mask = tensors[3];
    q.type = GGML_TYPE_F32;
    k.type = v.type = (ggml_type) type;
    mask.type = GGML_TYPE_F16;
    q.ne[0] = k.ne[0] = v.ne[0] = head;
    q.ne[1] = rows;
    q.ne[2] = 24;
    k.ne[2] = v.ne[2] = 4;
    q.ne[3] = mask.ne[2] = mask.ne[3] = 1;
    mask.ne[0] = k.ne[1] = v.ne[1] = slots;
    float bent = 0, capped = 0;
    for (ggml_tensor * tensor : {&q, &k, &v, &mask}) tensor->nb[0] = tensor->type;
    switch (other) {
        case 1:  v.type = GGML_TYPE_Q4_0; v.nb[0] = v.type; break;
        case 2:  bent = 8; break;
        case 3:  capped = 30; break;
        case 4:  out.op_params[4] = 1; break;
        case 5:  q.ne[3] = 2; break;
        case 6:  mask.ne[3] = 2; break;
        case 7:  mask.ne[0] = slots + 1; break;
        case 8:  v.ne[2] = 1; break;
        case 9:  v.nb[0] = 99; break;
        case 10: q.data = (void *) 8; break;
        case 11: k.data = (void *) 2; break;
        case 12: v.nb[1] = 2; break;
        case 13: mask.nb[1] = 2; break;
        case 14: v.ne[0] = 192; break;
        case 15: k.nb[2] = 2; break;
        case 16: mask.ne[2] = 2; break;
        case 17: q.nb[2] = 8; break;
    }
    for (int i = 0; i < 5; ++i) out.src[i] = tensors + i;
    if (other == 18) out.src[3] = nullptr;
    if (other != 19) out.src[4] = nullptr;
    memcpy(out.op_params + 1, &bent, sizeof(float));
    memcpy(out.op_params + 2, &capped, sizeof(float));
    out.op_params[15] = sequences;
    if (other == 20) q.ne[2] = 4;
    if (other == 21) k.nb[1] = head / 16;
    return kvf_attend_wanted(&out, cc);
}
"""
    library = compiled(upstream_llama(), folder, "kvf_attend_wanted", NATIVE / "kvf_attend.cu", callers)
    ask = ctypes.CDLL(str(library)).attend
    ask.restype = ctypes.c_bool
    ask.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_int, ctypes.c_int]

    def taken(
        type: Type, rows: int, sequences: int, *, cc: int = HOPPER, slots: int = 4096, head: int = 256, other: int = 0
    ) -> bool:
        return bool(ask(cc, type, rows, slots, head, sequences, other))

    return taken


def test_rows_apart_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_attention.py` compares their values, where it runs on a GPU."""
    monkeypatch.delenv("KVFLASH_KERNELS", raising=False)
    taken = attend(tmp_path / "ours")
    for type, alone in {Type.Q8_0: [1, 2, 3], Type.F16: [], Type.Q4_0: []}.items():
        assert [rows for rows in range(1, 70) if taken(type, rows, 1)] == alone
    for type in Type.Q8_0, Type.F16:
        assert [rows for rows in range(1, 70) if taken(type, rows, 40)] == list(range(1, 65))
        assert [rows for rows in range(1, 70) if taken(type, rows, 2)] == list(range(1, 7))  # not beside a prompt
        assert [head for head in range(8, 600, 8) if taken(type, 4, 4, head=head)] == [64, 128, 256]
        assert not taken(type, 4, 4, cc=AMPERE)
        assert not taken(type, 4, 4, slots=4096 + 64)
        assert taken(type, 4, 4, slots=1 << 21)
        assert not taken(type, 4, 4, slots=(1 << 21) + 256)
        assert not any(taken(type, 4, 4, other=other) for other in range(1, 20))
    assert not taken(Type.Q4_0, 4, 4)
    assert not taken(Type.Q8_0, 1, 1, slots=3840)
    assert taken(Type.Q8_0, 4, 4, slots=256)
    assert not taken(Type.Q8_0, 1, 1, other=20)  # heads that share no key
    assert taken(Type.Q8_0, 4, 4, other=20)
    for head in 64, 128, 256:  # what is copied at once
        assert taken(Type.Q8_0, 4, 4, head=head, other=21)
        assert taken(Type.F16, 4, 4, head=head, other=21) == (head == 256)
    monkeypatch.setenv("KVFLASH_KERNELS", "stock")
    assert not attend(tmp_path / "stock")(Type.Q8_0, 4, 4)
    code = (upstream_llama() / CUDA / "fattn.cu").read_text(encoding="utf-8")
    assert code.index("kvf_attend(ctx, dst);") < code.index("case BEST_FATTN_KERNEL_NONE:\n            GGML_ABORT")
    graph = (upstream_llama() / "src" / "llama-graph.cpp").read_text(encoding="utf-8")
    assert "cur->op_params[15] = ubatch.n_seqs_unq;" in graph


def test_a_warp_holds_several_columns() -> None:
    """Eight lanes hold a column of 128, and the grid follows. That values stay within rounding was seen on a GPU."""
    code = (upstream_llama() / CUDA / "gated_delta_net.cu").read_text(encoding="utf-8")
    assert "return S_v == 128 ? 8 : warp_size < S_v ? warp_size : S_v;" in code
    assert "S_v / (num_warps * (block_dims.x / gated_delta_net_lanes(S_v, warp_size)))" in code


def test_a_warp_fetches_the_next_token() -> None:
    """The rows of the next two tokens are asked for before this one is computed."""
    code = (upstream_llama() / CUDA / "gated_delta_net.cu").read_text(encoding="utf-8")
    assert "constexpr int ahead = 2;" in code
    assert code.index("fetch(0, 0);\n    fetch(1, 1);") < code.index("warp_reduce_sum") < code.index("fetch(t + ahead")


def test_prompts_fill_columns_with_tokens() -> None:
    """That values stay within rounding was seen on a GPU, as for the next test."""
    code = (upstream_llama() / CUDA / "fattn.cu").read_text(encoding="utf-8")
    rule = code.index("Q->ne[1] >= 64 && gqa_ratio > 4 && gqa_ratio % 8 != 0")
    assert rule < code.index("if (use_gqa_opt && gqa_ratio > 4) {")


def test_prompts_on_hopper_take_wide_columns() -> None:
    folder = upstream_llama() / CUDA
    code = (folder / "fattn.cu").read_text(encoding="utf-8")
    wide = code.index("_case<DKQ, DV, 128/ncols2, ncols2>")
    assert code.rindex("cc == GGML_CUDA_CC_HOPPER && ggml_cuda_highest_compiled_arch(cc) == cc", 0, wide)
    instances = folder / "template-instances" / "fattn-mma-f16-instance-ncols1_64-ncols2_1.cu"
    for head in (128, 256):
        for heads in (2, 4, 8):
            case = f"DECL_FATTN_MMA_F16_CASE({head}, {head}, {128 // heads}, {heads})"
            assert case in instances.read_text("utf-8")
            assert f"extern {case}" in (folder / "fattn-mma-f16.cuh").read_text("utf-8")


def test_no_row_behind_the_mask_is_read() -> None:
    code = (upstream_llama() / CUDA / "fattn-common.cuh").read_text(encoding="utf-8")
    kernel = code[code.index("void flash_attn_mask_to_KV_max(") :]
    assert kernel.index("min(jt*ncols1 + j, ne01 - 1)") < kernel.index("mask[row*s31 + KV_max_sj/2 + tid]")
    assert "KV_max.ptr, int(Q->ne[1]), iter_k, s31, s33);" in code


HALVES = """
#include <cstdint>
#include <cstring>
#include <type_traits>
struct half {
    uint16_t bits;
    operator float() const {
        const int power = bits >> 10 & 31, rest = bits & 1023;
        const float value = power ? __builtin_ldexpf(1024 + rest, power - 25) : __builtin_ldexpf(rest, -24);
        return bits & 0x8000 ? -value : value;
    }
};
struct half2 { half low, high; };
inline float __low2float(half2 two) { return two.low; }
inline float __high2float(half2 two) { return two.high; }
"""


def test_weights_are_converted_by_eight(tmp_path: Path) -> None:
    """The functions of CUDA's kernels, compiled for a CPU, give the values of package gguf."""
    code = (upstream_llama() / CUDA / "convert.cu").read_text(encoding="utf-8")
    scales = (upstream_llama() / CUDA / "dequantize.cuh").read_text(encoding="utf-8")
    found = [
        *re.findall(r"^static inline __device__ void get_scale_min_k4.*?^}", scales, re.DOTALL | re.MULTILINE),
        *re.findall(
            r"^(?:template<typename block_t>[^\n]*\n)?static __device__ __forceinline__ void dequantize_8\(.*?^}",
            code,
            re.DOTALL | re.MULTILINE,
        ),
    ]
    assert len(found) == 3
    types = {Type.Q4_K: "block_q4_K", Type.Q5_K: "block_q5_K", Type.Q6_K: "block_q6_K"}
    (tmp_path / "cuda_fp16.h").write_text(HALVES)
    (source := tmp_path / "eight.cpp").write_text(
        "#define GGML_COMMON_DECL_CUDA\n#define __device__\n#define __forceinline__\n#define __align__(n) alignas(n)\n"
        '#include "ggml-common.h"\n'
        "template <int n, int = 0> void ggml_cuda_memcpy_1(void * to, const void * from) { memcpy(to, from, n); }\n"
        + "\n".join(found)
        + "\n".join(
            f'\nextern "C" void of_{name}(const {name} * x, int blocks, float * y) {{\n'
            f"    for (int i = 0; i < 32 * blocks; i++) dequantize_8(x[i / 32], i % 32, y + 8 * i);\n}}"
            for name in types.values()
        )
    )
    headers = (f"-I{tmp_path}", f"-I{upstream_llama() / 'ggml/src'}")
    eight = ctypes.CDLL(str(library_of(source, "-std=c++17", "-w", *headers)))
    random = np.random.default_rng(0)
    for type, name in types.items():
        size = gguf.GGML_QUANT_SIZES[type][1]
        blocks = random.integers(0, 256, (64, size), np.uint8)
        where = slice(size - 2, size) if type == Type.Q6_K else slice(0, 4)
        halves = random.standard_normal((64, (where.stop - where.start) // 2)).astype(np.float16)
        blocks[:, where] = halves.view(np.uint8)
        values = np.empty((64, 256), np.float32)
        getattr(eight, f"of_{name}")(blocks.ctypes.data_as(ctypes.c_void_p), 64, values.ctypes.data_as(ctypes.c_void_p))
        np.testing.assert_allclose(values, gguf.quants.dequantize(blocks, type), rtol=1e-6, atol=1e-6)


def test_gates_are_computed_by_four() -> None:
    """The same bits as one by one, which was seen on a GPU."""
    code = (upstream_llama() / CUDA / "unary.cu").read_text(encoding="utf-8")
    four = code.index("ggml_cuda_kernel_launch(unary_gated_op_kernel_4<op, T>")
    assert code.rindex("if (n % 4 == 0 && o0 % 4 == 0 && o1 % 4 == 0 &&", 0, four)
    assert four < code.index("ggml_cuda_kernel_launch(unary_gated_op_kernel<op, T>")
