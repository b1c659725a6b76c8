"""A server that makes previews is killed, or has no disk: the conversation goes on, and what comes of it is exact."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import TEXT
from support.serving import Served, serve

pytestmark = pytest.mark.slow

OPTIONS = (
    "--kvflash", "1024", "-c", "16384", "--kvflash-tau", "16", "--kvflash-calibrate", "off", "-q",
    "--park-memory", "100K",
)  # fmt: skip
TEXTS = TEXT.read_text(encoding="utf-8")
FIRST, LONG = TEXTS[:2675], TEXTS[:24000]
"""With answers without near ties: what is read again after a restart is read in other steps."""
STAGES = ["reading", "answering", "behind"]


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


def told(server: Served, prompt: str, **more: Any) -> tuple[str, int, Any]:
    """The answer, how much was known, and what a preview says of itself."""
    status, reply = server.post("/v1/completions", asked(prompt, **more))
    assert status == 200, reply
    known = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["text"], known, reply.get("kvflash", {}).get("preview")


def read_behind(server: Served, length: int) -> None:
    """Wait until a text of so many tokens is being read behind its preview. A fast machine has then read it: skip."""
    for n in range(6000):
        state = server.get("/kvflash/state")[1]
        if state["reading"]:
            assert state["queue"]["running"] is None
            return
        # each such question interrupts the reading
        if n % 50 == 49 and length in [one["tokens"] for one in server.get("/kvflash/conversations")[1]["data"]]:
            pytest.skip("this machine has read it before anybody could look")
        time.sleep(0.01)
    raise AssertionError(state)


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """What a server that makes no previews says to both."""
    with serve(models["dense"], *OPTIONS) as server:
        yield told(server, FIRST)[0], told(server, LONG)[0]


def go_to(server: Served, stage: str) -> None:
    """Ask for a preview of the long text, up to this stage of it."""
    preview = asked(LONG, stream=True, kvflash={"reading": "preview"})
    if stage == "behind":
        seen = list(server.frames("/v1/completions", preview))
        made = seen[0]["kvflash"]["preview"]
        assert made["prompt"] > 2 * made["read"] > 0
        read_behind(server, made["prompt"])
        return
    frames = server.frames("/v1/completions", preview)
    marked = next(frames)
    assert "preview" in marked["kvflash"]
    if stage == "answering":
        assert next(frames)["choices"][0]["text"]
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(30)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_server_leaves_a_conversation_that_goes_on(
    models: dict[str, Path], tmp_path: Path, wanted: tuple[str, str], stage: str
) -> None:
    folder = ("--session-dir", str(tmp_path))
    with serve(models["dense"], *OPTIONS, *folder) as server:
        assert told(server, FIRST)[0] == wanted[0]
        go_to(server, stage)
        server.process.kill()
        server.process.wait(30)
    with serve(models["dense"], *OPTIONS, *folder) as server:
        said, known, preview = told(server, FIRST)
        assert (said, preview) == (wanted[0], None)
        assert known > 256, "the conversation was in the folder before the preview began"
        assert told(server, LONG)[0] == wanted[1]


@pytest.mark.parametrize("stage", ["answering", "behind"])
def test_a_full_disk_does_no_harm(models: dict[str, Path], tmp_path: Path, wanted: tuple[str, str], stage: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64K", "tmpfs", tmp_path], capture_output=True)
    if done.returncode:
        pytest.skip("only who may mount a file system can fill one")
    try:
        with serve(models["dense"], *OPTIONS, "--session-dir", str(tmp_path)) as server:
            told(server, FIRST)
            _, _, preview = told(server, LONG, kvflash={"reading": "preview"})
            assert preview is not None
            if stage == "behind":
                read_behind(server, preview["prompt"])
                told(server, FIRST)  # what was read so far has nowhere to go
            assert told(server, LONG)[0] == wanted[1]
            assert told(server, LONG, kvflash={"reading": "preview"})[2] is None
            assert server.stop() == 0
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
