"""Programs that split texts as llama.cpp's BPE tokenizers do before they merge: as it comes, and with our matcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .archs import REPO

SOURCE = Path(__file__).with_name("splits.cpp")
NATIVE = REPO / "kvflash_ggml" / "native"


def pre_tokenizers() -> list[str]:
    """Return the names that the pinned llama.cpp knows, and takes as `tokenizer.ggml.pre`."""
    return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', _vocab().read_text(encoding="utf-8"))))


def build(folder: Path) -> tuple[Path, Path]:
    """Compile both programs into a folder. Returns upstream's and ours; `splits.cpp` says what they read and write."""
    from vendoring.build import upstream_llama
    from vendoring.source import LLAMA, pristine_tree

    text = _vocab().read_text(encoding="utf-8")
    (cut,) = re.findall(r"^struct llm_tokenizer_bpe : llm_tokenizer \{.*?^\};", text, re.DOTALL | re.MULTILINE)
    (folder / "pre_tokenizers.h").write_text(cut, encoding="utf-8")
    header = _vocab().with_suffix(".h").read_text(encoding="utf-8")
    count = len(re.findall(r"^ +LLAMA_VOCAB_PRE_TYPE_\w+ += \d+", header, re.MULTILINE))

    def compile_one(tree: Path, name: str, ours: Sequence[str]) -> Path:
        include = [folder, NATIVE, *(tree / part for part in ("src", "include", "ggml/include"))]
        sources = [SOURCE, tree / "src/unicode.cpp", tree / "src/unicode-data.cpp"]
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", f"-DN_PRE_TYPES={count}", *ours]
        subprocess.run([*command, *(f"-I{i}" for i in include), *sources, "-o", folder / name], check=True)
        return folder / name

    with ThreadPoolExecutor() as pool:
        upstream = pool.submit(compile_one, pristine_tree() / LLAMA, "upstream", [])
        ours = pool.submit(compile_one, upstream_llama(), "ours", ["-DOURS", str(NATIVE / "kvf_regex.cpp")])
        return upstream.result(), ours.result()


def _vocab() -> Path:
    sys.path.append(str(REPO / "scripts"))
    from vendoring.build import upstream_llama

    return upstream_llama() / "src" / "llama-vocab.cpp"


class Splitter:
    """A running program of `build`."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def split(self, text: bytes) -> list[str]:
        """Return, for each list of expressions, the bytes of the words. A text has at least one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(text.hex(), file=self._process.stdin, flush=True)
        words = []
        while (line := self._process.stdout.readline()) != "end\n":
            assert line, "the program has ended"
            words.append(line)
        return words

    def close(self) -> None:
        self._process.communicate()
