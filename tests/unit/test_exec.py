"""`kvflash-run exec`: which program is run, and what it is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvflash_ggml import env
from kvflash_ggml.cli import execute, main
from kvflash_ggml.cli.pool_options import pool_options
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
    assert {variable for variable, _ in env.VARIABLES.values()} == named - {"KVFLASH_REPORT"}


def test_what_it_reads_is_what_it_was_told(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_REPORT", "for-kvflash-run.html")
    run("--kvflash", "4k", "--kvflash-pin", "0:64", "--", "python")
    for name, value in started[0][2].items():
        monkeypatch.setenv(name, value)
    assert env.install()
    read = env.pool_options()
    assert (read["kvflash"], read["kvflash_pins"], read["kvflash_policy"]) == ({"pool": 4096}, ((0, 64),), "qk")
    monkeypatch.setenv("KVFLASH_TAU", "often")
    with pytest.raises(ConfigError, match="KVFLASH_TAU"):
        env.pool_options()
    monkeypatch.setenv("KVFLASH_POOL", "off")
    monkeypatch.delenv("KVFLASH_TAU")
    assert env.pool_options() == {}


def test_programs_are_found_beside_python_first(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "env" / "python3"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setattr(sys, "executable", str(python))
    mine = script(python.parent, f"#!{python}")
    assert execute.resolve(["prog", "-m", "x"]) == [str(mine), "-m", "x"]
    shell = script(tmp_path, "#!/bin/sh")
    mine.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert execute.resolve(["prog"]) == [str(shell)]
    (tmp_path / "it.py").touch()
    assert execute.resolve([str(tmp_path / "it.py"), "a"]) == [str(python), str(tmp_path / "it.py"), "a"]


@pytest.mark.parametrize("first", ["#!/usr/bin/python3", "#!/usr/bin/env python3"])
def test_a_program_of_another_python_is_refused(
    first: str, started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "python3").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    script(tmp_path, first.replace("/usr/bin/python3", str(tmp_path / "python3")))
    result = run("--kvflash", "auto", "prog")
    assert result.exit_code == 2
    assert "runs in another Python environment" in result.stderr
    assert not started


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-- python", "add --kvflash"),
        ("--kvflash off -- python", "add --kvflash"),
        ("--kvflash many -- python", "'many' is not"),
        ("--kvflash auto", "PROGRAM"),
        ("--kvflash auto -- no-such-program-here", "no-such-program-here"),
        ("--kvflash auto --kvflash-report x.html -- python", "--kvflash-report"),
        ("--kvflash auto --kvflash-drafter x.gguf -- python", "drafter"),
    ],
)
def test_what_cannot_be_run_is_said(line: str, message: str, started: Any) -> None:
    result = run(*line.split())
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not started


def test_without_the_startup_file_nothing_could_be_told(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_STARTUP", "no_such_module_here")
    result = run("--kvflash", "auto", "--", "python")
    assert (result.exit_code, started) == (1, [])
    assert "install" in result.stderr
