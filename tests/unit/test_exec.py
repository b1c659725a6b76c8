"""`kvflash-run exec`: which program is run, and what it is told."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvflash_ggml import env
from kvflash_ggml.cli import execute, main
from kvflash_ggml.cli.options import pool_options
from kvflash_ggml.config import POOL_SETTINGS, from_environment
from kvflash_ggml.errors import ConfigError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What would have been executed."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(execute, "_STARTUP", "json")  # a checkout without an install has none
    for name in list(os.environ):
        if name.startswith("KVFLASH_"):
            monkeypatch.delenv(name)
    return calls


def run(*line: object) -> Result:
    return CliRunner().invoke(main, ["exec", *map(str, line)], prog_name="kvflash-run")


def script(folder: Path, first: str) -> Path:
    path = folder / "prog"
    path.write_text(f"{first}\n")
    path.chmod(0o755)
    return path


def test_the_program_is_told_through_its_environment(started: Any, tmp_path: Path) -> None:
    line = f"--kvflash 2G --kvflash-policy lru --kvflash-tau 8 --kvflash-pin 0:64 --kvflash-pin 128:192 \
        --kvflash-host-limit 1G --kvflash-spill {tmp_path} --kvflash-cache {tmp_path}/c --kvflash-cache-size 3G \
        --kvflash-calibrate heads.json \
        -- python -m some.thing --kvflash x"
    assert run(*line.split()).exit_code == 0
    ((path, command, environment),) = started
    assert path == command[0] == sys.executable
    assert command[1:] == ["-m", "some.thing", "--kvflash", "x"]
    told = {name: value for name, value in environment.items() if name.startswith("KVFLASH_")}
    assert told == {
        "KVFLASH_INSTALL": "1",
        "KVFLASH_POOL": "2g",
        "KVFLASH_POLICY": "lru",
        "KVFLASH_TAU": "8",
        "KVFLASH_CALIBRATE": "heads.json",
        "KVFLASH_DETERMINISTIC": "False",
        "KVFLASH_READING": "auto",
        "KVFLASH_PREVIEW_SHARE": "0.05",
        "KVFLASH_ANSWER": "pool",
        "KVFLASH_PIN": "0:64 128:192",
        "KVFLASH_HOST_LIMIT": str(1 << 30),
        "KVFLASH_SPILL": str(tmp_path),
        "KVFLASH_CACHE": f"{tmp_path}/c",
        "KVFLASH_CACHE_SIZE": str(3 << 30),
    }
    assert environment["PATH"] == os.environ["PATH"]


def test_every_option_of_the_pool_has_its_variable_read() -> None:
    @click.command()
    @pool_options
    def verb(pool: Any) -> None: ...

    named = {str(option.envvar) for option in verb.params}
    assert {one.variable_of(name) for name, one in POOL_SETTINGS.items()} == named - {"KVFLASH_REPORT"}


def test_what_it_reads_is_what_it_was_told(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_REPORT", "for-kvflash-run.html")
    run("--kvflash", "4k", "--kvflash-pin", "0:64", "--", "python")
    for name, value in started[0][2].items():
        monkeypatch.setenv(name, value)
    assert env.install()
    read = from_environment()
    assert (read["kvflash"], read["kvflash_pins"], read["kvflash_policy"]) == ("4k", ((0, 64),), "qk")
    monkeypatch.setenv("KVFLASH_TAU", "often")
    with pytest.raises(ConfigError, match="KVFLASH_TAU"):
        from_environment()
    monkeypatch.setenv("KVFLASH_POOL", "off")
    monkeypatch.delenv("KVFLASH_TAU")
    assert from_environment() == {}


def test_programs_are_found_beside_python_first(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "env" / "python3"
    python.parent.mkdir()
    python.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    mine = script(python.parent, f"#!{python}")
    assert execute.resolve(["prog", "-m", "x"]) == [str(mine), "-m", "x"]
    shell = script(tmp_path, "#!/bin/sh")
    mine.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert execute.resolve(["prog"]) == [str(shell)]
    (tmp_path / "it.py").touch()
    assert execute.resolve([str(tmp_path / "it.py"), "a"]) == [str(python), str(tmp_path / "it.py"), "a"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The Python of another environment."""
    venv.create(tmp_path / "other env", symlinks=True, with_pip=False)
    return tmp_path / "other env" / "bin" / "python"


FIRST_LINES = {
    "plain": "#!{python}",
    "options": "#!{python} -u",
    "env": "#!/usr/bin/env python",
    "env with options": "#!/usr/bin/env -S python -u",
    "pip's, where the path is long or has blanks": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''",
}


@pytest.mark.parametrize("first", FIRST_LINES.values(), ids=list(FIRST_LINES))
def test_a_program_of_another_python_is_refused(
    first: str, started: Any, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = other
    if first.startswith("#!{"):  # a first line cannot have blanks in a path
        (tmp_path / "bin").symlink_to(other.parent)
        python = tmp_path / "bin" / "python"
    monkeypatch.setenv("PATH", f"{tmp_path}:{python.parent}")
    script(tmp_path, first.format(python=python))
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python3")
    result = run("--kvflash", "auto", "prog")
    assert result.exit_code == 2
    assert "runs in another Python environment" in result.stderr
    assert str(python) in result.stderr
    assert "-m pip install" in result.stderr
    assert not started


@pytest.mark.parametrize("name", ["python", "python3"])
def test_another_python_itself_is_refused(name: str, started: Any, other: Path) -> None:
    result = run("--kvflash", "auto", "--", other.with_name(name), "script.py")
    assert result.exit_code == 2
    assert f"'{other.with_name(name)}' -m pip install" in result.stderr
    assert not started


def test_another_environment_that_has_the_package_is_as_good(
    started: Any, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages,) = other.parents[1].glob("lib/python*/site-packages")
    (packages / "what_is_started.py").touch()
    (packages / "x.pth").write_text("import what_is_started")
    monkeypatch.setattr(execute, "_STARTUP", "what_is_started")
    assert execute.resolve([str(other), "-c", "pass"]) == [str(other), "-c", "pass"]


def test_what_is_no_python_program_gets_a_warning(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shell = script(tmp_path, "#!/bin/sh")
    result = run("--kvflash", "auto", "prog")
    assert started[0][0] == str(shell)
    assert f"warning: {shell} is no Python program" in result.stderr
    assert sys.prefix in result.stderr


def test_a_file_that_cannot_be_executed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_STARTUP", "json")
    text = script(tmp_path, "no program")
    result = run("--kvflash", "auto", "--", text)
    assert result.exit_code == 1
    assert f"Error: {text} cannot be executed: Exec format error" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-- python", "add --kvflash"),
        ("--kvflash off -- python", "add --kvflash"),
        ("--kvflash many -- python", "'many' is not"),
        ("--kvflash auto", "PROGRAM"),
        ("--kvflash auto -- no-such-program-here", "no-such-program-here"),
        ("--kvflash auto --kvflash-report x.html -- python", "--kvflash-report"),
        ("--kvflash auto --kvflash-scorer x.gguf -- python", "the scorer x.gguf serves"),
    ],
)
def test_what_cannot_be_run_is_said(line: str, message: str, started: Any) -> None:
    result = run(*line.split())
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not started


@pytest.mark.parametrize("kind", ["pipe", "folder", "not executable", "folder.py"])
def test_what_is_there_and_is_no_program_is_said(kind: str, started: Any, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path, mode=0o755)
    elif kind == "not executable":
        path.touch(mode=0o644)
    else:
        path.mkdir()
    result = run("--kvflash", "auto", "--", path)
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert f"{str(path)!r} is not an executable file" in told
    assert "chmod +x" in told
    assert not started


def test_without_the_startup_file_nothing_could_be_told(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_STARTUP", "no_such_module_here")
    result = run("--kvflash", "auto", "--", "python")
    assert (result.exit_code, started) == (1, [])
    assert "install" in result.stderr
