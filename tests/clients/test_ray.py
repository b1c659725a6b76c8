"""Ray on this machine: a file of prompts over two workers, through kills, and two replicas behind Ray Serve.

`scripts/test --clients` installs it, in an environment of its own that has the package too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.harness import TEXT  # noqa: E402

PYTHON = REPO / ".venv-clients/ray/bin/python"
EXAMPLES = REPO / "examples"
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
PROMPTS = 40
WAIT_S = 240

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="ray is not there: scripts/test --clients installs it")


@contextmanager
def started(folder: Path, *line: str) -> Iterator[subprocess.Popen[str]]:
    """A program of Ray's environment in a process group of its own, all of which is killed at the end."""
    told = {
        "HOME": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(EXAMPLES),
    }
    with (folder / "log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(PYTHON), *line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **told},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def read(answers: Path) -> list[dict[str, Any]]:
    """The answers whose lines are whole."""
    lines = answers.read_text(encoding="utf-8").splitlines(keepends=True) if answers.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until(done: Callable[[], bool]) -> None:
    for _ in range(10 * WAIT_S):
        if done():
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"not in {WAIT_S} s")


def wait_for(process: subprocess.Popen[str], answers: Path, count: int) -> list[dict[str, Any]]:
    """The answers, once there are so many."""
    until(lambda: len(read(answers)) >= count or process.poll() is not None)
    assert len(read(answers)) >= count, (answers.parent / "log").read_text()
    return read(answers)


def test_each_prompt_of_a_file_is_answered_once_through_kills(tmp_path: Path) -> None:
    words = TEXT.read_text(encoding="utf-8").split()
    asked = [{"id": f"p{n}", "prompt": " ".join(words[100 * n :][:60])} for n in range(PROMPTS)]
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    line = [str(EXAMPLES / "ray_batch.py"), str(MODEL), str(prompts), str(answers), "--workers", "2", "--batch", "2"]
    line += ["--pool", "512", "--context", "2048", "--parallel", "2", "--max-tokens", "8"]

    with started(tmp_path, *line) as process:
        wait_for(process, answers, 4)
        end(process)
    with answers.open("a", encoding="utf-8") as file:
        file.write('{"number": 39, "pro')  # as a kill within a write leaves it
    before = len(read(answers))
    assert before < PROMPTS, "the first run was not killed in its middle"

    with started(tmp_path, *line) as process:
        told = wait_for(process, answers, before + 2)
        os.kill(told[-1]["worker"], signal.SIGKILL)
        said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert f"{before} of {PROMPTS} prompts are answered" in said
    told = read(answers)
    assert sorted(one["number"] for one in told) == list(range(PROMPTS))
    assert [one for one in told if one["error"] or not one["text"]] == []
    assert {(one["id"], one["prompt"]) for one in told} == {(one["id"], one["prompt"]) for one in asked}
    assert len({one["worker"] for one in told}) >= 4  # two of each run

    with started(tmp_path, *line) as process:
        said, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said) == (0, f"{PROMPTS} of {PROMPTS} prompts are answered\n")
    prompts.write_text(json.dumps({"prompt": "another"}) + "\n", encoding="utf-8")
    with started(tmp_path, *line) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "is of another prompt: name another file" in (tmp_path / "log").read_text()


SERVE = """
import sys
from ray import serve
from ray_serve import build
serve.start(http_options={"port": int(sys.argv[1])})
serve.run(build({"model": sys.argv[2], "replicas": "2", "options": sys.argv[3]}))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
"""


def test_replicas_behind_ray_serve(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]

    def ask(session: str, **more: Any) -> Any:
        words = f"{session} " * 200
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 8, "temperature": 0, **more}
        headers = {"content-type": "application/json", "x-session-id": session}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as reply:
            return reply.read().decode()

    def known(session: str) -> int:
        return int(json.loads(ask(session))["usage"]["prompt_tokens_details"]["cached_tokens"])

    def answered(session: str) -> bool:
        """Ask; False where the replica says that it has lost its server."""
        try:
            ask(session)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False
        return True

    def servers() -> set[int]:
        found = subprocess.run(
            ["pgrep", "-f", f"kvflash_ggml serve {MODEL} "], capture_output=True, text=True, check=False
        )
        return {int(word) for word in found.stdout.split()}

    options = "--kvflash 512 -c 8192 -t 1 -q"
    with started(tmp_path, "-c", SERVE, str(port), str(MODEL), options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", (tmp_path / "log").read_text()
        sessions = [f"talk{n}" for n in range(6)]
        for session in sessions:
            assert known(session) < 100 < known(session)
        assert ask("talk0", stream=True).endswith("data: [DONE]\n\n")

        before = servers()
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(servers()) == 2 and servers() != before)
        for session in sessions:
            until(lambda session=session: answered(session))
        process.communicate("", timeout=WAIT_S)
    assert process.returncode == 0
    assert servers() == set()
