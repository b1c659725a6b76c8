"""A server whose disk is full: requests go on, and it says so once."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import TEXT
from support.serving import Served, serve

OPTIONS = ("--kvflash", "512", "-c", "4096", "--kvflash-tau", "16", "--kvflash-calibrate", "off")
WORDS = TEXT.read_text(encoding="utf-8").split()
COUNT = 6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of so many bytes."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip("only who may mount a file system can fill one")
        mounted.append(folder)
        return folder

    try:
        yield make
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def asked(which: int, turns: int) -> dict[str, Any]:
    words = WORDS[which * 4000 + 500 :][: 300 + 60 * turns]
    return {"prompt": " ".join(words), "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def talk(server: Served) -> dict[tuple[int, int], str]:
    """Several conversations take turns; what each is told."""
    order = [which for which in range(COUNT) for _ in range(2)]
    random.Random(1).shuffle(order)
    turns, told = [0] * COUNT, {}
    for which in order:
        status, reply = server.post("/v1/completions", asked(which, turns[which]))
        assert status == 200, reply
        told[which, turns[which]] = reply["choices"][0]["text"]
        turns[which] += 1
    return told


def value(server: Served, name: str) -> float:
    lines = str(server.get("/metrics")[1]).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"kvflash:{name} "))


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> dict[tuple[int, int], str]:
    """What the conversations are told where there is room."""
    with serve(models["dense"], *OPTIONS, "-q") as server:
        return talk(server)


@pytest.mark.parametrize("what", ["folder", "cache", "spill"])
def test_a_full_disk(
    what: str, models: dict[str, Path], disk: Callable[[str], Path], wanted: dict[tuple[int, int], str]
) -> None:
    small = disk("1M")
    options = {
        "folder": ("--park-memory", "100K", "--session-dir", str(small)),
        "cache": ("--kvflash-cache", str(small)),
        "spill": ("--kvflash-host-limit", "4M", "--kvflash-spill", str(small)),
    }[what]
    with serve(models["dense"], *OPTIONS, *options) as server:
        assert talk(server) == wanted
        assert value(server, "conversations_lost_total") == 0
        assert (value(server, "conversations_not_stored_total") > 1) == (what == "folder")
        assert (value(server, "conversations_dropped_total") > 1) == (what != "cache")
        assert server.stop() == 0
    (said,) = [line for line in server.lines if "warning" in line]
    assert "No space left on device" in said


def test_room_comes_back(
    models: dict[str, Path], disk: Callable[[str], Path], wanted: dict[tuple[int, int], str]
) -> None:
    """What could not be stored is, once something else has left the disk."""
    small = disk("8M")
    filler = small / "filler"
    filler.write_bytes(bytes(7 << 20))
    with serve(models["dense"], *OPTIONS, "-q", "--park-memory", "100K", "--session-dir", str(small)) as server:
        server.post("/v1/completions", asked(0, 0))
        server.post("/v1/completions", asked(1, 0))
        assert value(server, "conversations_not_stored_total") == 1
        filler.unlink()
        server.post("/v1/completions", asked(2, 0))
        reply = server.post("/v1/completions", asked(1, 0))[1]
        assert reply["choices"][0]["text"] == wanted[1, 0]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
        assert value(server, "conversations_stored_total") > 0
