"""`kvflash-run snapshot info`, `verify` and `prune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.snapshot_files import damage, write

from kvflash_ggml.cli import main, snapshot


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["snapshot", *map(str, arguments)], prog_name="kvflash-run")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.kvs")


def test_info(path: Path) -> None:
    result = cli("info", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == str(path)
    for text in ("qwen3", "abc123", "150 tokens in 3 chunks, 2 of them resident", "policy qk", "pages 8", "tokens 600"):
        assert text in result.stdout


def test_info_as_json(path: Path, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("text")
    result = cli("info", path, tmp_path / "b", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert (first["path"], first["tokens"], first["resident"]) == (str(path), 150, 2)
    assert "is no snapshot" in second["error"]


def test_a_file_that_is_none_does_not_hide_the_others(path: Path, tmp_path: Path) -> None:
    for verb in ("info", "verify"):
        result = cli(verb, tmp_path / "missing", path)
        assert result.exit_code == 1
        assert "cannot open" in result.stderr
        assert str(path) in result.stdout


def test_verify(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("verify", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{path}: sound, ")
    assert cli("verify", path, "-q").output == ""
    monkeypatch.setattr(snapshot, "stderr_is_terminal", lambda: True)
    assert cli("verify", path).exit_code == 0
    damage(path, 100)
    result = cli("verify", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Error: {path} is damaged: section 'tokens' does not match its checksum" in result.stderr


def test_prune(path: Path, tmp_path: Path) -> None:
    os.utime(path, (0, 0))
    (tmp_path / "book.txt").write_text("text")
    assert cli("prune", tmp_path).exit_code == 0
    assert path.exists()
    dry = cli("prune", tmp_path, "--older-than", 30, "--dry-run")
    assert (dry.exit_code, path.exists()) == (0, True)
    assert str(path) in dry.stdout
    assert "1 files" in dry.stderr
    assert "would be removed" in dry.stderr
    done = cli("prune", tmp_path, "--larger-than", "1K")
    assert done.exit_code == 0
    assert "oldest" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize("line", ["info", "verify", "prune", "prune missing", "prune . --older-than -1", "what"])
def test_wrong_usage_exits_2(line: str) -> None:
    assert cli(*line.split()).exit_code == 2


def test_no_native_library_is_loaded(path: Path) -> None:
    code = """
import sys
from kvflash_ggml.cli import main
for line in (["info", sys.argv[1]], ["verify", sys.argv[1]], ["prune", sys.argv[2], "--dry-run"]):
    main(["snapshot", *line], standalone_mode=False)
assert not {"llama_cpp", "kvflash_ggml.native._kvf", "kvflash_ggml.llama.llama"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, path, path.parent], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
