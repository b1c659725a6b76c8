"""Files with numbers that llama.cpp asserts: an error of the call that opens them, in a process that goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import rewritten

from kvflash_ggml.gguf.reader import Field

CHILD = """
import sys
from kvflash_ggml import Llama
from kvflash_ggml.gguf import purpose

kind, hostile, sound = sys.argv[1:]
purpose.check_model = lambda *args, **settings: None  # it refuses the window that no layer has
try:
    Llama(hostile, n_ctx=256, verbose=False, **({"kvflash": 256, "kvflash_calibrate": False} if kind == "pool" else {}))
except ValueError as err:
    print(type(err).__name__, err)
llm = Llama(sound, n_ctx=256, verbose=False)
print(len(llm.create_completion([5, 6], max_tokens=1, temperature=0.0)["choices"]))
"""
"""Opens a hostile file, and then a sound one."""


def _nanbeige(fields: dict[str, Field]) -> None:
    """Make a model of an architecture whose layers are read several times."""
    for name in list(fields):
        if name.startswith("qwen3."):
            key = f"nanbeige.{name.removeprefix('qwen3.')}"
            fields[key] = Field.of(key, fields.pop(name).value)
    fields["general.architecture"] = Field.of("general.architecture", "nanbeige")
    fields["nanbeige.num_loops"] = Field.of("nanbeige.num_loops", 0)


def _no_window(fields: dict[str, Field]) -> None:
    """Give no layer the sliding window."""
    key = "gemma3.attention.sliding_window_pattern"
    fields[key] = Field.of(key, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("load", r"NotMade .*nanbeige\.cpp:\d+: GGML_ASSERT\(n_loops_u >= 1\) failed"),
        ("context", r"NotMade .*llama-model\.cpp:\d+: GGML_ASSERT\(hparams\.is_swa_any\(\)\) failed"),
        ("pool", r"UnsupportedModelError .*llama-model\.cpp:\d+: GGML_ASSERT\(hparams\.is_swa_any\(\)\) failed"),
    ],
)
def test_a_number_that_llama_cpp_asserts(
    kind: str, said: str, model: Callable[[str], Path], models: dict[str, Path], tmp_path: Path
) -> None:
    """It ended the process."""
    sound = models["small"]
    source, change = (sound, _nanbeige) if kind == "load" else (model("iswa"), _no_window)
    hostile = rewritten(source, tmp_path / "model.gguf", change)
    command = [sys.executable, "-c", CHILD, kind, str(hostile), str(sound)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    first, last = done.stdout.splitlines()
    assert re.match(said, first), first
    assert last == "1"
