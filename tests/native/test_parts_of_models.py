"""Files that are a part of a model, opened as one: an error that says what they are, and a process that goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import small_target, target_fields, write_gguf

from kvflash_ggml.errors import ConfigError, ConversionError

PARTS = {
    "mtp-recall-qwen35-q8_0.gguf": "a head for further tokens",
    "recall-dflash.gguf": "a DFlash drafter",
    "recall-eagle3-q8_0.gguf": "an EAGLE3 drafter",
}
MODELS = Path(__file__).parents[1] / "models"


@pytest.mark.parametrize("settings", [{}, {"kvflash": 512}, {"kvflash": "auto", "fit": True}], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_no_model(loaded: None, name: str, settings: dict[str, Any]) -> None:
    from kvflash_ggml import Llama

    with pytest.raises(ConfigError, match=f"{name} is {PARTS[name]}.*-md FILE"):
        Llama(str(MODELS / name), verbose=False, **settings)


@pytest.mark.parametrize(
    "verb", [["run", "-p", "hi"], ["serve", "--kvflash", "auto"], ["doctor"], ["run", "--dry-run"]]
)
def test_the_command_line_says_so(verb: list[str]) -> None:
    path = MODELS / "mtp-recall-qwen35-q8_0.gguf"
    command = [sys.executable, "-m", "kvflash_ggml.cli", verb[0], str(path), *verb[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1
    assert "is a head for further tokens (MTP) of a qwen35 model" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_is_run_with_a_pool_says_so() -> None:
    program = f"import llama_cpp; llama_cpp.Llama({str(MODELS / 'mtp-recall-qwen35-q8_0.gguf')!r}, verbose=False)"
    command = [sys.executable, "-m", "kvflash_ggml.cli", "exec", "--kvflash", "auto", "--", "python", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "ConfigError" in done.stderr) == (1, True), done.stderr
    assert "a head for further tokens" in done.stderr


def test_a_vocabulary_is_opened_as_one(loaded: None, tmp_path: Path) -> None:
    from kvflash_ggml import Llama

    path = write_gguf(tmp_path / "vocab.gguf", target_fields(), {})
    with pytest.raises(ConfigError, match="a vocabulary without weights"):
        Llama(str(path), verbose=False)


def test_a_drafters_file_of_another_vocabulary(llama: Any, tmp_path: Path) -> None:
    other = small_target(tmp_path / "other.gguf", whole=True)
    with pytest.raises(ConversionError, match=r"other\.gguf: the vocabulary is another one; wanted: the tokens of"):
        llama(kvflash=512, draft_model=str(other))


def test_a_drafters_file_that_is_none(llama: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "vocab.gguf", target_fields(), {})
    with pytest.raises(ConversionError, match=r"vocab\.gguf: the file is a vocabulary without weights; wanted:"):
        llama(kvflash=512, draft_model=str(path))
