"""What is imported before a user can work: counted, since seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import MODELS

PROGRAMS = {
    "import kvflash_ggml": 12,
    "from kvflash_ggml.cli import main; main(['--version'], standalone_mode=False)": 19,
    "from kvflash_ggml import Llama": 61,
}
"""Programs, and how many modules of ours each may load. More cost every user: import what is rarely needed later."""

ANSWER = """
from kvflash_ggml import Llama
llm = Llama({model!r}, n_ctx=1024, verbose=False, {pool})
assert llm({prompt!r}, max_tokens=2, temperature=0)["usage"]["completion_tokens"] == 2
"""

UNUSED = {
    "calibration.finder", "calibration.run", "chat.templates", "chat.values", "drafter.model", "gguf.encoding",
    "host.spill", "llama.chatting", "llama.embedding", "llama.fitting", "llama.messages", "llama.preview",
    "llama.speculating", "llama.states", "llama.stats", "media.files", "native.chat", "native.measure",
    "native.remote", "native.vulkan", "pip_line", "placement.devices", "placement.predict", "policy.drafter",
    "runtime.bias", "runtime.samplers", "sampling", "sequence.clock", "sequence.restore", "snapshot.format",
    "speculation.draft", "speculation.find", "speculation.loop", "state.session", "store.disk", "store.prefixes",
    "trace.recorder",
}  # fmt: skip
"""What a plain answer does not need."""

LINES = {
    "kvflash=None": 9_400,
    "kvflash=512, kvflash_calibrate=False": 15_900,
    "kvflash=512": 16_350,
}
"""Keywords for a pool, and how many lines of ours may be loaded once a model has given an answer with them.

The retrieval heads of the last one are known.
"""


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


def answered(pool: str, prompt: str = "A pool of") -> dict[str, str]:
    """The modules that a plain answer has loaded, with these keywords for a pool."""
    return loaded(ANSWER.format(model=str(MODELS / "recall-qwen3-q8_0.gguf"), pool=pool, prompt=prompt))


def test_an_answer_loads_no_more_than_it_needs() -> None:
    modules = {name.removeprefix("kvflash_ggml.") for name in answered("kvflash=512, kvflash_calibrate=False")}
    assert "sequence.sequence" in modules
    assert sorted(UNUSED & modules) == []


def test_chunks_are_scored_without_the_package_gguf() -> None:
    modules = answered("kvflash=512, kvflash_calibrate=False", prompt="A pool of slots. " * 120)
    assert "kvflash_ggml.sequence.relevance" in modules
    assert "gguf" not in modules, "it takes longer than a question about a saved text"


@pytest.mark.parametrize("pool", LINES)
def test_few_lines_are_loaded(pool: str, known_heads: None) -> None:
    modules = answered(pool)
    ours = [Path(file) for name, file in modules.items() if name.startswith("kvflash_ggml") and file.endswith(".py")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in ours) <= LINES[pool]
    assert ("kvflash_ggml.sequence.sequence" in modules) is (pool != "kvflash=None")
    assert ("kvflash_ggml.calibration.finder" in modules) is (pool == "kvflash=512")
