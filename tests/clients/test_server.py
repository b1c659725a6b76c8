"""The official client of OpenAI, its last two major versions, against `kvflash-run serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.serving import Served, serve  # noqa: E402

PYTHON = REPO / ".venv-clients/bin/python"
OLDER = REPO / ".venv-clients/agents/bin/python"
PROGRAMS = Path(__file__).with_name("programs")
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-clients: scripts/test --clients makes it")
    with serve(MODEL, "--kvflash", "1024", "-c", "16384", "--max-queue", "16", "-q", python=PYTHON) as server:
        yield server


def program(name: str, url: str, python: Path = PYTHON) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVFLASH_", "PYTHON"))}
    done = subprocess.run(
        [python, PROGRAMS / name, url], capture_output=True, text=True, timeout=300, env=environment, cwd=PROGRAMS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("major", "python"), [("3", PYTHON), ("2", OLDER)])
def test_the_official_client(major: str, python: Path, served: Served) -> None:
    if not python.exists():
        pytest.skip("this client is not there: scripts/test --clients installs it")
    found: dict[str, Any] = json.loads(program("openai_server.py", f"http://127.0.0.1:{served.port}/v1", python))
    assert found["version"].split(".")[0] == major
    assert found["chat"][:2] == ["Hello! How can I help you?", "stop"]
    assert found["stream"] == [found["chat"][0], found["chat"][2]]
    assert found["logprobs"] == [3, 4, True]
    assert found["tool"] == ["city"]
    assert found["parsed"] == "Trip"
    assert found["several"][0] == [0, 1, 2]
    assert 3 <= found["several"][1] <= 18
    assert found["completion"] == [5, 5]
    assert found["errors"] == [
        "invalid_value", "invalid_value", "context_length_exceeded", "501 not_served", "timeout",
    ]  # fmt: skip
    assert found["streams"] == 64


def test_ollamas_client(served: Served) -> None:
    found: dict[str, Any] = json.loads(program("ollama_client.py", f"http://127.0.0.1:{served.port}"))
    assert found["models"] == ["recall-qwen3-q8_0", 16384, "qwen3"]
    assert "completion" in found["capabilities"]
    assert found["chat"][1:] == ["length", 5]
    assert found["stream"] == found["chat"][:2]
    assert found["durations"]
    assert found["generate"] == [True, True]
    assert found["raw"] == ["length", 5]
    assert found["format"] in ('"yes"', '"no"')
    assert found["wrong"].startswith("400 ")
    assert "temperature" in found["wrong"]


@pytest.mark.parametrize("name", ["chat_openai.py", "agent.py", "chat_langchain.py"])
def test_the_examples(name: str, served: Served) -> None:
    assert program(f"../../../examples/{name}", f"http://127.0.0.1:{served.port}/v1").strip()


def test_a_validator_of_openapi(served: Served) -> None:
    assert int(program("openapi_valid.py", f"http://127.0.0.1:{served.port}")) > 50
