"""The tile configuration as a CPU with AMX would get it, on any x86: compiled, and the load replaced by a copy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vendoring.build import upstream_llama
from vendoring.source import LLAMA, pristine_tree

ROWS = (8, 8, 16, 16, 16, 16, 16, 16)
COLUMN_BYTES = (64, 64, 32, 32, 64, 64, 64, 64)
CONFIGURATION = b"".join(
    [b"\1", bytes(15), *(n.to_bytes(2, "little") for n in COLUMN_BYTES), bytes(16), bytes(ROWS), bytes(8)]
)
CALLER = """
extern "C" {
__attribute__((visibility("protected"))) unsigned char seen[64];
__attribute__((visibility("default"))) void configure() { ggml_tile_config_init(); }
}
"""
FLAGS = {"-mamx-tile": "", "-march=sapphirerapids": "avx512bw"}
"""How to compile, and what the CPU needs to run it: with the second, the build's own flags on such a CPU."""


def given(llama: Path, flag: str, folder: Path) -> bytes:
    """The 64 bytes that `ldtilecfg` would read, if the function of this source tree ran."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    text = (llama / "ggml/src/ggml-cpu/amx/mmq.cpp").read_text(encoding="utf-8")
    parts = [
        re.search(r"^struct tile_config_t *\{.*?^\};", text, re.DOTALL | re.MULTILINE),
        re.search(r"^inline void ggml_tile_config_init\(.*?^\}", text, re.DOTALL | re.MULTILINE),
    ]
    assert all(parts), "upstream moved the function: read its new form, and mend this test"
    source, assembly, library = folder / "tiles.cpp", folder / "tiles.s", folder / "tiles.so"
    source.write_text(
        "#include <immintrin.h>\n#include <cstdint>\n" + "\n".join(part[0] for part in parts if part) + CALLER
    )
    # Hidden, so that one process can hold two of them, each with its own "done".
    command = [compiler, "-O3", "-fPIC", "-fvisibility=hidden", flag, "-S", "-o", str(assembly), str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        pytest.skip(f"the compiler does not know {flag}: {compiled.stderr.splitlines()[0]}")
    code, loads = re.subn(r"^\s*ldtilecfg\s+(-?\d*)(\(.*\))\s*$", _copy, assembly.read_text(), flags=re.MULTILINE)
    assert loads == 1
    assembly.write_text(code)
    subprocess.run([compiler, "-shared", "-o", str(library), str(assembly)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.configure()
    return bytes((ctypes.c_ubyte * 64).in_dll(loaded, "seen"))


def _copy(load: re.Match[str]) -> str:
    """Through a register that code this short leaves alone."""
    start = int(load[1] or 0)
    copies = (f"\tmovups {start + at}{load[2]}, %xmm15\n\tmovups %xmm15, {at}+seen(%rip)\n" for at in range(0, 64, 16))
    return "".join(copies)


@pytest.fixture(params=FLAGS)
def flag(request: pytest.FixtureRequest) -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file() or "flags\t\t:" not in (text := info.read_text()):
        pytest.skip("AMX is of x86")
    if FLAGS[request.param] not in text:
        pytest.skip(f"runs code for a CPU with {FLAGS[request.param]}")
    return str(request.param)


def test_the_cpu_is_given_the_whole_tile_configuration(flag: str, tmp_path: Path) -> None:
    assert given(upstream_llama(), flag, tmp_path) == CONFIGURATION


def test_some_compilers_need_the_patch_for_that(flag: str, tmp_path: Path) -> None:
    got = given(pristine_tree() / LLAMA, flag, tmp_path)
    if got == CONFIGURATION:
        pytest.skip("this compiler keeps the stores")
    assert got[0] == 1, "the palette is within the bytes that every compiler keeps"


def test_weights_of_three_dimensions_stay_out_of_its_buffers(llama: Any, tokens: Any) -> None:
    """A model with latent attention has some. On a CPU with AMX a context for it ended the process."""
    llm = llama("latent heads", kvflash=512)
    llm.eval((tokens[:64] % llm.n_vocab()).tolist())
    assert llm.n_tokens == 64
