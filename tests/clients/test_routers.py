"""Routers of others before servers that share a store, with the files of deploy/: each answer is that of a lone run.

Each runs where its program is on the PATH: haproxy, nginx, litellm (LiteLLM's proxy), sglang-router.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.harness import TEXT  # noqa: E402
from support.serving import Served, serve  # noqa: E402

MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
OPTIONS = ("--kvflash", "512", "-c", "8192", "--kvflash-tau", "16", "--kvflash-calibrate", "off", "-a", "model", "-q")
WORDS = TEXT.read_text(encoding="utf-8").split()
TALKS, TURNS = 4, 3
STICKY = {"haproxy", "nginx", "sglang-router"}
RETRYING = {"haproxy", "nginx", "litellm"}
"""They ask another server where one has died. Others tell the client, until a check of theirs finds that."""

KEY = "sk-" + "0123456789abcdef" * 4

Messages = list[dict[str, str]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def routed(name: str, servers: list[Served], folder: Path) -> Iterator[int]:
    """The port of a router that is set up as its file in deploy/ says, but for addresses."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on the PATH")
    port = free_port()
    source = next((REPO / "deploy").glob(f"{name}.*"), folder / "none")
    setup = source.read_text(encoding="utf-8") if source.exists() else ""
    for number, server in enumerate(servers, 1):
        setup = setup.replace(f"server{number}:8080", f"127.0.0.1:{server.port}")
    setup = setup.replace("bind :8080", f"bind 127.0.0.1:{port}").replace("listen 8080", f"listen 127.0.0.1:{port}")
    kept = "".join(f"{what}_temp_path {folder}; " for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    setup = setup.replace("http {", f"http {{ access_log off; {kept}")
    path = folder / source.name
    path.write_text(setup, encoding="utf-8")
    line = {
        "haproxy": [program, "-db", "-f", str(path)],
        "nginx": [program, "-e", "stderr", "-c", str(path), "-g", f"daemon off; pid {folder}/pid;"],
        "litellm": [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)],
        "sglang-router": [
            *(program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
            *("--health-check-interval-secs", "2", "--prometheus-port", str(free_port()), "--worker-urls"),
            *(f"http://127.0.0.1:{server.port}" for server in servers),
        ],
    }[name]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY, "no_proxy": "*"}
    with (folder / "log").open("wb") as log:
        router = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        try:
            for _ in range(600):
                assert router.poll() is None, (folder / "log").read_text()
                with socket.socket() as one:
                    if one.connect_ex(("127.0.0.1", port)) == 0:
                        break
                threading.Event().wait(0.1)
            yield port
        finally:
            router.terminate()
            router.wait()


def ask(port: int, talk: int, messages: Messages, *, tries: int = 1) -> dict[str, Any]:
    """tries: as often as a client asks whose server has died, a second apart."""
    body = {"model": "model", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {
            "content-type": "application/json",
            "x-conversation": f"talk {talk}",
            "authorization": f"Bearer {KEY}",
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        data = reply.read()
        if reply.status >= 500 and tries > 1:
            threading.Event().wait(1)
            return ask(port, talk, messages, tries=tries - 1)
        assert reply.status == 200, data
        return dict(json.loads(data))
    finally:
        connection.close()


def begin() -> list[Messages]:
    return [[{"role": "user", "content": " ".join(WORDS[n * 3000 :][:500])}] for n in range(TALKS)]


def turn(port: int, talks: list[Messages], number: int, *, tries: int = 1) -> list[tuple[str, int]]:
    """The next turn of each conversation: what it is told, and how much of its prompt was known."""
    told = []
    for talk, messages in enumerate(talks):
        reply = ask(port, talk, messages, tries=tries)
        text = reply["choices"][0]["message"]["content"]
        told.append((text, reply["usage"]["prompt_tokens_details"]["cached_tokens"]))
        more = " ".join(WORDS[1000 * (number + 7 * talk + 20) :][:40])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": more}]
    return told


def total(servers: list[Served], name: str) -> float:
    return sum(server.metrics()[f"{name}_total"] for server in servers)


def settled(servers: list[Served], writes: int) -> None:
    for _ in range(3000):
        if total(servers, "store_writes") >= writes:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"{total(servers, 'store_writes')} states in a minute")


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[str, int]]]:
    talks = begin()
    with serve(MODEL, *OPTIONS) as server:
        return [turn(server.port, talks, number) for number in range(TURNS)]


@pytest.mark.parametrize("name", ["haproxy", "nginx", "litellm", "sglang-router"])
def test_a_router(name: str, alone: list[list[tuple[str, int]]], tmp_path: Path) -> None:
    talks = begin()
    with ExitStack() as stack:
        options = (*OPTIONS, "--store", str(tmp_path / "store"))
        servers = [stack.enter_context(serve(MODEL, *options)) for _ in range(3)]
        port = stack.enter_context(routed(name, servers, tmp_path))
        told = []
        for number in range(2):
            told.append(turn(port, talks, number))
            settled(servers, TALKS * (number + 1))
        takeovers = total(servers, "store_takeovers")
        print(f"{name}: {takeovers:g} of {TALKS} conversations moved before a server was killed")
        assert (takeovers == 0) == (name in STICKY)
        busiest = max(servers, key=lambda server: server.metrics()["store_writes_total"])
        servers.remove(busiest)
        busiest.stop(signal.SIGKILL)
        told.append(turn(port, talks, 2, tries=1 if name in RETRYING else 20))
        assert total(servers, "store_takeovers") > 0
        assert told == alone
