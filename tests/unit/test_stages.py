"""What the two CMake stages add to upstream's build, shown on a few lines in upstream's place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from vendoring.build import STAGES

CODE = """
#include <sstream>
extern "C" int places(double x) { std::ostringstream text; text << x; return (int) text.str().size(); }
"""
UPSTREAM = """
option(GGML_CUDA_NCCL "as upstream has it" ON)
add_library({name} SHARED code.cpp)
"""
STATIC = "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ -static-libgcc"


def configure(stage: str, folder: Path, *arguments: str) -> Path:
    """The stage, configured around a library of one function; returns the build folder."""
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    source = folder / "source"
    place = source / "ggml" if stage == "ggml" else source
    common = ("common", "json", "log", "peg-parser", "reasoning-budget", "trie", "unicode")
    for empty in ("tests/test-llama-archs.cpp", *(f"common/{name}.cpp" for name in common)):
        (source / empty).parent.mkdir(parents=True, exist_ok=True)
        (source / empty).touch()
    place.mkdir(exist_ok=True)
    (place / "code.cpp").write_text(CODE)
    names = [stage, "mtmd"] if stage == "llama" else [stage]
    (place / "CMakeLists.txt").write_text("".join(UPSTREAM.format(name=name) for name in names))
    command = ["cmake", "-G", "Ninja", "-S", str(STAGES / stage), "-B", str(folder / "build"), *arguments]
    command += [f"-DKVFLASH_SOURCE={source}", f"-DKVFLASH_NATIVE={folder / 'none'}", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "build"


@pytest.mark.parametrize("stage", ["ggml", "llama"])
def test_a_libstdcxx_linked_statically_stays_private(stage: str, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    folder = configure(stage, tmp_path, STATIC)
    made = subprocess.run(["cmake", "--build", str(folder), "--target", stage], capture_output=True, text=True)
    if "cannot find -lstdc++" in made.stdout:
        pytest.skip("no static libstdc++ here")
    assert made.returncode == 0, made.stdout
    (library,) = folder.rglob(f"lib{stage}.so")
    exported = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True).stdout
    assert " places" in exported
    # The identity of a kind of number formatting: one process-wide symbol, were it exported.
    assert "_ZNSt7num_putIcSt19ostreambuf_iteratorIcSt11char_traitsIcEEE2idE" not in exported


@pytest.mark.parametrize(("arguments", "value"), [((), "OFF"), (("-DGGML_CUDA_NCCL=ON",), "ON")])
def test_nccl_is_used_only_when_asked_for(arguments: tuple[str, ...], value: str, tmp_path: Path) -> None:
    cache = (configure("ggml", tmp_path, *arguments) / "CMakeCache.txt").read_text()
    assert f"GGML_CUDA_NCCL:BOOL={value}" in cache or f"GGML_CUDA_NCCL:UNINITIALIZED={value}" in cache
