"""Files with numbers that llama.cpp asserts: an error of the call that meets them, in a process that goes on."""

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
pool = {"kvflash": 256, "kvflash_calibrate": False} if "pool" in kind else {}
try:
    llm = Llama(hostile, n_ctx=256, verbose=False, **pool)
    for tokens in ([5, 6], [5, 6], [5]):  # a graph that is there is not taken again
        try:
            llm.eval(tokens)
        except RuntimeError as err:
            print(llm.n_tokens, type(err).__name__, err)
except ValueError as err:
    print(type(err).__name__, err)
llm = Llama(sound, n_ctx=256, verbose=False)
print(len(llm.create_completion([5, 6], max_tokens=1, temperature=0.0)["choices"]))
"""
"""Opens a hostile file, asks for steps if that is an object, and then for one of a sound file."""


def _nanbeige(fields: dict[str, Field]) -> None:
    """Make a model of an architecture whose layers are read several times."""
    for name in list(fields):
        if name.startswith("qwen3."):
            key = f"nanbeige.{name.removeprefix('qwen3.')}"
            fields[key] = Field.of(key, fields.pop(name).value)
    fields["general.architecture"] = Field.of("general.architecture", "nanbeige")
    fields["nanbeige.num_loops"] = Field.of("nanbeige.num_loops", 0)


def _no_length(fields: dict[str, Field]) -> None:
    """Scale attention by positions, without the length that they are divided by."""
    key = "deepseek2.attention.temperature_scale"
    fields[key] = Field.of(key, 0.5)


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
    first, last = _opened(kind, rewritten(source, tmp_path / "model.gguf", change), sound)
    assert re.match(said, first), first
    assert last == "1"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("step", r"0 DecodeError llama\.cpp says {}: convert the model again"),
        ("step in a pool", r"0 DecodeError llama_decode returned -3 for [12] tokens: {}"),
    ],
)
def test_a_number_that_a_step_asserts(
    kind: str, said: str, model: Callable[[str], Path], models: dict[str, Path], tmp_path: Path
) -> None:
    """It ended the process. The text stays as it was, and each further step fails as the first."""
    hostile = rewritten(model("latent heads"), tmp_path / "model.gguf", _no_length)
    *steps, last = _opened(kind, hostile, models["small"])
    asserted = r"llama-graph\.cpp:\d+: GGML_ASSERT\(n_attn_temp_floor_scale != 0\) failed"
    assert len(steps) == 3
    for step in steps:
        assert re.match(said.format(asserted), step), step
    assert last == "1"


def _opened(kind: str, hostile: Path, sound: Path) -> list[str]:
    """Run CHILD, and return what it prints."""
    command = [sys.executable, "-c", CHILD, kind, str(hostile), str(sound)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.splitlines()
