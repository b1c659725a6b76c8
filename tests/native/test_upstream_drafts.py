"""What kvflash-convert writes drafts in llama.cpp itself: with its own speculative decoding, without our patches.

Such a build takes minutes and is asked for by name. TREE is the source without patches, src/HASH in our cache folder:

    cmake -S TREE/llama.cpp -B BUILD -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_COMMON=ON
    cmake --build BUILD
    KVFLASH_UPSTREAM_LIB=BUILD/bin scripts/test tests/native/test_upstream_drafts.py
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.drafter_models import with_head
from support.harness import MODELS
from vendoring.source import LLAMA, pristine_tree

from kvflash_ggml.convert import quantize
from kvflash_ggml.native import library

SOURCE = Path(__file__).parents[1] / "support" / "upstream_draft.cpp"
FOLDER = os.environ.get("KVFLASH_UPSTREAM_LIB")
TOKENS = 48
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOLDER is None, reason="KVFLASH_UPSTREAM_LIB names no folder with upstream's libllama and common"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled against upstream's own headers and libraries."""
    tree, out = pristine_tree() / LLAMA, tmp_path_factory.mktemp("upstream") / "draft"
    include = [f"-I{tree / folder}" for folder in ("common", "include", "ggml/include", "vendor")]
    libraries = [f"-L{FOLDER}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{FOLDER}"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", SOURCE, *include, *libraries, "-o", out], check=True
    )
    return out


def test_the_library_is_not_ours() -> None:
    assert b"kvf_step" in (library.library_folder() / "libllama.so").read_bytes()
    assert b"kvf_step" not in Path(str(FOLDER), "libllama.so").read_bytes()


@pytest.mark.parametrize("kind", ["draft-dflash", "quantised", "draft-eagle3", "draft-mtp", "own head"])
def test_upstream_drafts_with_the_file(program: Path, tmp_path: Path, kind: str) -> None:
    dense, hybrid = MODELS / "recall-qwen3-q8_0.gguf", MODELS / "recall-qwen35-q8_0.gguf"
    head, made = MODELS / "mtp-recall-qwen35-q8_0.gguf", tmp_path / "made.gguf"
    if kind == "quantised":
        quantize.quantize(MODELS / "recall-dflash.gguf", made, kind="q8_0")
    elif kind == "own head":
        with_head(hybrid, head, made)
    asked: list[str | Path] = {
        "draft-dflash": [dense, MODELS / "recall-dflash.gguf", kind],
        "quantised": [dense, made, "draft-dflash"],
        "draft-eagle3": [dense, MODELS / "recall-eagle3-q8_0.gguf", kind],
        "draft-mtp": [hybrid, head, kind],
        "own head": [made, "-", "draft-mtp"],
    }[kind]
    mapped = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert f"{FOLDER}/libllama.so" in mapped
    done = subprocess.run(
        [program, *asked, str(TOKENS), PROMPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafted, accepted, steps, text = done.stdout.split()
    print(f"{kind}: {accepted} of {drafted} drafted tokens accepted, in {steps} steps")
    assert int(accepted) > 0.2 * int(steps)
    assert text == "same"
