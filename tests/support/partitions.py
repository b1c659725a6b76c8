"""A program that divides texts at special tokens: as llama.cpp does, and as our one pass does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from .archs import REPO

SOURCE = Path(__file__).with_name("marks.cpp")
NATIVE = REPO / "kvflash_ggml" / "native"

USER_DEFINED, CONTROL, UNKNOWN, LSTRIP, RSTRIP = 1 << 4, 1 << 3, 1 << 0, 1 << 7, 1 << 8


def build(folder: Path) -> Path:
    """Compile the program into a folder; `marks.cpp` says what it reads and writes."""
    sys.path.append(str(REPO / "scripts"))
    from vendoring.source import LLAMA, pristine_tree

    tree = pristine_tree() / LLAMA
    text = (tree / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    pattern = r"^typedef enum FRAGMENT_BUFFER_VARIANT_TYPE.*?^\};|^void llama_vocab::impl::tokenizer_st_partition.*?^\}"
    cuts = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    assert len(cuts) == 2
    (folder / "partition.h").write_text("\n".join(cuts), encoding="utf-8")
    include = [f"-I{path}" for path in (folder, NATIVE, tree / "include", tree / "ggml/include")]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", *include, SOURCE, NATIVE / "kvf_marks.cpp"]
    subprocess.run([*command, "-o", folder / "marks"], check=True)
    return folder / "marks"


class Partitioner:
    """A running program of `build`."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def divide(self, text: bytes, marks: Iterable[tuple[int, bytes]], *, special: bool) -> tuple[str, str]:
        """Return upstream's pieces and ours. marks: attributes and text of each special token. No text is empty."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = [str(int(special)), text.hex(), *(f"{kind}:{mark.hex()}" for kind, mark in marks)]
        print(*words, file=self._process.stdin, flush=True)
        theirs, ours = self._process.stdout.readline(), self._process.stdout.readline()
        assert ours, "the program has ended"
        return theirs, ours

    def close(self) -> None:
        self._process.communicate()
