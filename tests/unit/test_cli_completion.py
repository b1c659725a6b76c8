"""What a shell is told after Tab: verbs, which are imported when they are asked for, options, values and files."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.testing import CliRunner

from kvflash_ggml.cli import main


def complete(line: str, shell: str = "bash") -> list[str]:
    """What completes the last word of a command line, which may be empty: kind and value, as bash is told."""
    words = line.split(" ")
    position = words[-1] if shell == "fish" else str(len(words) - 1)
    environment = {"_KVFLASH_RUN_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": position}
    result = CliRunner().invoke(main, [], env=environment, prog_name="kvflash-run")
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_verbs() -> None:
    assert {f"plain,{verb}" for verb in ("run", "serve", "pull", "list", "exec", "snapshot")} <= {
        *complete("kvflash-run ")
    }
    assert complete("kvflash-run sn") == ["plain,snapshot"]
    assert complete("kvflash-run snapshot v") == ["plain,verify"]


@pytest.mark.parametrize("verb", ["", "run ", "serve ", "model.gguf ", "hello ", "-hf owner/repo "])
def test_options(verb: str) -> None:
    """Where the verb is left out they are those of `run`, also after a word that is no file yet."""
    found = complete(f"kvflash-run {verb}--kvflash-ca")
    assert found == [f"plain,--kvflash-{name}" for name in ("cache", "cache-size", "calibrate")]


def test_the_group_has_its_own() -> None:
    assert complete("kvflash-run --ver") == ["plain,--verbose", "plain,--version"]
    assert complete("kvflash-run --help") == ["plain,--help-all", "plain,--help"]


def test_values() -> None:
    assert complete("kvflash-run serve --split-mode n") == ["plain,none"]
    assert complete("kvflash-run launch co") == ["plain,codex"]


@pytest.mark.parametrize(
    "line", ["mod", "./", "run mod", "run -m mod", "serve mod", "serve -m mod", "serve -hf o/r -md mod", "run a.gguf x"]
)
def test_files(line: str) -> None:
    """The shell does it, by its own rules."""
    assert complete(f"kvflash-run {line}") == [f"file,{line.split(' ')[-1]}"]


def test_other_shells() -> None:
    assert [line.split("\t")[0] for line in complete("kvflash-run se", "fish")] == ["plain,serve"]
    assert complete("kvflash-run se", "zsh")[:2] == ["plain", "serve"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_its_script_is_one(shell: str) -> None:
    environment = {"_KVFLASH_RUN_COMPLETE": f"{shell}_source"}
    script = CliRunner().invoke(main, [], env=environment, prog_name="kvflash-run").stdout
    assert "kvflash-run" in script
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
