"""What is imported before a user can work: counted, since seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import MODELS

PROGRAMS = {
    "import kvflash_ggml": 14,
    "from kvflash_ggml.cli import main; main(['--version'], standalone_mode=False)": 20,
    "from kvflash_ggml import Llama": 66,
}
"""Programs, and how many modules of ours each may load. More cost every user: import what is rarely needed later."""

ANSWER = f"""
from kvflash_ggml import Llama
llm = Llama({str(MODELS / "recall-qwen3-q8_0.gguf")!r}, n_ctx=1024, kvflash=512, kvflash_calibrate=False, verbose=False)
assert llm("A pool of", max_tokens=2)["usage"]["completion_tokens"] == 2
"""

UNUSED = {
    "calibration.run", "chat.templates", "chat.values", "drafter.model", "llama.chatting", "llama.embedding",
    "llama.fitting", "llama.preview", "llama.speculating", "media.files", "native.chat", "native.remote",
    "placement.predict", "policy.drafter", "runtime.bias", "sampling", "snapshot.format", "speculation.draft",
    "speculation.find", "speculation.loop", "store.disk", "store.prefixes", "trace.recorder",
}  # fmt: skip
"""What a plain answer does not need."""

OPEN = """
from kvflash_ggml import Llama
Llama({model!r}, n_ctx=1024, verbose=False{pool})
"""

LINES = {"": 10_700, ", kvflash=512, kvflash_calibrate=False": 17_400}
"""Keywords for a pool, and how many lines of ours may be loaded once a model is open with them."""


def loaded(program: str) -> dict[str, str]:
    """The modules that a process has loaded after a program, each with its file."""
    files = "{name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}"
    code = f"{program}\nimport json, sys\nprint(json.dumps({files}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_few_modules_are_loaded(program: str) -> None:
    modules = loaded(program)
    ours = {name for name in modules if name.startswith("kvflash_ggml")}
    assert len(ours) <= PROGRAMS[program], sorted(ours)
    assert "importlib.metadata" not in modules, "it brings the email package"
    assert "Llama" in program or "numpy" not in modules


def test_an_answer_loads_no_more_than_it_needs() -> None:
    modules = loaded(ANSWER)
    assert "kvflash_ggml.sequence.sequence" in modules
    assert sorted(UNUSED & {name.removeprefix("kvflash_ggml.") for name in modules}) == []


@pytest.mark.parametrize("pool", LINES)
def test_few_lines_are_loaded(pool: str) -> None:
    model = str(MODELS / "recall-qwen3-q8_0.gguf")
    modules = loaded(OPEN.format(model=model, pool=pool))
    ours = [Path(file) for name, file in modules.items() if name.startswith("kvflash_ggml") and file.endswith(".py")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in ours) <= LINES[pool]
    assert ("kvflash_ggml.sequence.sequence" in modules) is bool(pool)
