"""`--snapshot`: what is restored, what is saved, and what stops a run before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_llama import REPLY, Stage, interrupt_at, staged, write_snapshot

from kvflash_ggml.cli import chat, prompt, run
from kvflash_ggml.errors import ConfigError, SnapshotError, SnapshotMismatch
from kvflash_ggml.snapshot import codec

POOL = ("m.gguf", "--kvflash", "1024")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.kvs"


def test_a_missing_file_is_made_and_then_gone_on_from(cli: Stage, path: Path) -> None:
    first = cli(*POOL, "hello", "--snapshot", path)
    assert first.exit_code == 0, first.stderr
    assert first.stdout == REPLY + "\n"
    assert f"saved 5 tokens to {path}: " in first.stderr
    assert "restored" not in first.stderr
    second = cli(*POOL, "hello there", "--snapshot", path)
    assert f"restored 5 tokens from {path} in " in second.stderr
    assert f"saved 11 tokens to {path}: " in second.stderr
    assert list(path.parent.iterdir()) == [path]


def test_json_says_what_was_restored_and_saved(cli: Stage, path: Path) -> None:
    line = (*POOL, "hello", "--json", "--snapshot", path)
    first = json.loads(cli(*line).stdout)["snapshot"]
    assert first.pop("saved").keys() == {"tokens", "bytes", "seconds"}
    assert first == {"file": str(path), "restored": None}
    again = json.loads(cli(*line).stdout)["snapshot"]
    assert again["restored"]["tokens"] == 5
    assert again["saved"] is None  # there is nothing new
    assert json.loads(cli(*POOL, "hello", "--json").stdout)["snapshot"] is None


def test_read_only_never_writes(cli: Stage, path: Path) -> None:
    write_snapshot(path, b"hello")
    before = path.read_bytes()
    result = cli(*POOL, "goodbye", "--snapshot", path, "--snapshot-ro")
    assert result.exit_code == 0
    assert "restored 5" in result.stderr
    assert "saved" not in result.stderr
    assert path.read_bytes() == before


def test_read_only_needs_the_file(cli: Stage, path: Path) -> None:
    result = cli(*POOL, "hello", "--snapshot", path, "--snapshot-ro")
    assert result.exit_code == 1
    assert "does not exist: leave out --snapshot-ro" in result.stderr
    assert not cli.made


def test_a_snapshot_of_another_model_stays_as_it_is(cli: Stage, path: Path) -> None:
    write_snapshot(path, b"hello")
    before = path.read_bytes()
    result = cli(
        *POOL, "hi", "--snapshot", path, snapshot_error=SnapshotMismatch(str(path), "model", "abc", "def")
    )  # fmt: skip
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{path} was saved with model = abc, this model has def" in result.stderr
    assert path.read_bytes() == before
    assert cli.made[0].closed


@pytest.mark.parametrize("content", [b"", b"text", b"GGUF" + bytes(100)])
def test_a_file_that_is_no_snapshot_stops_the_run_before_it_begins(cli: Stage, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    result = cli(*POOL, "hi", "--snapshot", path)
    assert result.exit_code == 1
    assert "is no snapshot" in result.stderr
    assert "give another file with --snapshot, or delete this one" in result.stderr
    assert path.read_bytes() == content
    assert not cli.made


def test_a_folder_that_is_missing_stops_the_run_before_it_begins(cli: Stage, tmp_path: Path) -> None:
    result = cli(*POOL, "hi", "--snapshot", tmp_path / "missing" / "s.kvs")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
    assert not cli.made


def test_a_disk_that_is_full_takes_no_answer_away(cli: Stage, path: Path) -> None:
    line = (*POOL, "hi", "--snapshot", path)
    full = SnapshotError("cannot write s.kvs: no space left")
    said = cli(*line, snapshot_error=full)
    assert (said.exit_code, said.stdout) == (1, REPLY + "\n")
    document = cli(*line, "--json", snapshot_error=full)
    assert document.exit_code == 1
    assert json.loads(document.stdout)["text"] == REPLY
    assert json.loads(document.stdout)["snapshot"]["saved"] is None


def test_an_answer_that_was_stopped_is_saved(cli: Stage, path: Path) -> None:
    result = cli(*POOL, "hello", "--snapshot", path, replies=["ab"], on_token=interrupt_at(1))
    assert result.exit_code == 130
    assert path.exists()


def test_a_chat_is_saved_at_its_end(cli: Stage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, chat, prompt):
        monkeypatch.setattr(module, "stdin_is_terminal", lambda: True)
    assert cli(*POOL, "--snapshot", path, stdin="/stats\n").exit_code == 0
    assert not path.exists()  # nothing was said
    result = cli(*POOL, "--snapshot", path, stdin="hello\n")  # ends as by Ctrl-D
    assert result.exit_code == 0
    assert "saved 5 tokens" in result.stderr
    again = cli(*POOL, "--snapshot", path, "-q", stdin="hello\nmore\n/exit\n")
    assert again.exit_code == 0
    assert "kvflash" not in again.stderr
    assert cli.made[-1].n_tokens > 5


def test_compression(cli: Stage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "require", lambda: None)
    assert cli(*POOL, "hello", "--snapshot", path, "--snapshot-compress").exit_code == 0
    assert cli.made[-1].compressed

    def missing() -> None:
        raise ConfigError("compressed snapshots need the package zstandard: pip install '.[zstd]'")

    monkeypatch.setattr(codec, "require", missing)
    result = cli(*POOL, "hello", "--snapshot", path, "--snapshot-compress")
    assert result.exit_code == 1
    assert "[zstd]" in result.stderr
    assert len(cli.made) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--snapshot x.kvs", "--snapshot needs a pool"),
        ("--snapshot-ro", "--snapshot-ro needs a pool"),
        ("--kvflash 1024 --snapshot-ro", "--snapshot-ro needs a file: add --snapshot FILE"),
        ("--kvflash 1024 --snapshot-compress", "--snapshot-compress needs a file"),
        ("--kvflash 1024 --snapshot x.kvs --snapshot-ro --snapshot-compress", "leave one of the two out"),
        ("--kvflash 1024 --snapshot .", "is a directory"),
    ],
)
def test_wrong_usage_exits_2(cli: Stage, line: str, message: str) -> None:
    result = cli("m.gguf", "hi", *line.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert not cli.made


def test_a_variable_without_a_pool_is_ignored(cli: Stage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_SNAPSHOT", str(path))
    assert cli("m.gguf", "hi").exit_code == 0
    assert not path.exists()
    assert cli(*POOL, "hi").exit_code == 0
    assert path.exists()


def test_help_says_what_is_restored(cli: Stage) -> None:
    text = cli("run", "--help").stdout
    assert "--snapshot FILE" in text
    assert "not the messages of a chat" in text
