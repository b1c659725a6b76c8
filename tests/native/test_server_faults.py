"""Faults around a server that goes on: floods of connections, slow readers, prompts and schemas that are too much."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.harness import TEXT
from support.serving import Served, serve

from kvflash_bench.sockets import Server

OPTIONS = ("--kvflash", "512", "-c", "8192", "--kvflash-tau", "16", "--kvflash-calibrate", "off", "-q")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LINES = TEXT.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def served(models: dict[str, Path]) -> Iterator[Served]:
    with serve(models["dense"], *OPTIONS) as server:
        yield server


def request(data: dict[str, Any]) -> bytes:
    body = json.dumps(data).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def resources(served: Served) -> dict[str, int]:
    return Server(served.process, served.port).resources()


def test_a_flood_of_connections(served: Served) -> None:
    """Two thousand come and go at once, some with a part of a request: no stream is harmed, and nothing is left."""
    asked = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    wanted = served.post("/v1/completions", asked)[1]["choices"][0]["text"]
    before = resources(served)["descriptors"]
    told: list[str] = []
    begun = threading.Event()

    def read() -> None:
        for frame in served.frames("/v1/completions", asked):
            told.append(frame["choices"][0]["text"])
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60), "who comes later may be sent away"
    parts = (b"", b"GET /hea", request(asked)[:150], b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def flood(number: int) -> None:
        for i in range(500):
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
                connection.sendall(parts[(number + i) % len(parts)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(flood, range(4)))
    reader.join()
    assert "".join(told) == wanted
    for _ in range(3000):
        if resources(served)["descriptors"] <= before:
            break
        time.sleep(0.02)
    assert resources(served)["descriptors"] <= before
    assert served.get("/health")[0] == 200


def test_readers_of_a_byte_at_a_time(served: Served) -> None:
    """Several streams are read so: who asks meanwhile is answered, and each of them gets all of its answer."""
    asked = {"prompt": "Slowly", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    readers = []
    for _ in range(3):
        readers.append(socket.create_connection(("127.0.0.1", served.port), timeout=60))
        readers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        readers[-1].sendall(request(asked))
    came = [reader.recv(1) for reader in readers]
    assert served.post("/v1/chat/completions", CHAT)[0] == 200
    for i, reader in enumerate(readers):
        with reader:
            while b"[DONE]" not in came[i]:
                part = reader.recv(1)
                assert part
                came[i] += part
    ends = [data.split(b"\r\n\r\n", 1)[1].count(b"data: {") for data in came]
    assert len(set(ends)) == 1
    assert ends[0] > 40


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_no_token_and_of_one(most: int, stream: bool, served: Served) -> None:
    asked = {"prompt": LINES[5], "max_tokens": most, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    if stream:
        frames = list(served.frames("/v1/completions", {**asked, "stream_options": {"include_usage": True}}))
        choices, usage = [frame["choices"][0] for frame in frames if frame["choices"]], frames[-1]["usage"]
    else:
        reply = served.post("/v1/completions", asked)[1]
        choices, usage = reply["choices"], reply["usage"]
    assert usage["completion_tokens"] == most
    assert choices[-1]["finish_reason"] == "length"
    assert bool("".join(choice["text"] for choice in choices)) == bool(most)


def test_prompts_of_ten_thousand_lines(served: Served) -> None:
    """What does not fit is refused, what does is read."""
    lines = [LINES[i % len(LINES)] for i in range(10_000)]
    for data in ({"prompt": "\n".join(lines)}, {"prompt": "\n".join(lines), "stream": True}):
        status, reply = served.post("/v1/completions", data)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    short = "\n" * 10_000
    count = len(served.post("/tokenize", {"content": short})[1]["tokens"])
    assert 1000 < count < 8000
    reply = served.post("/v1/completions", {"prompt": short, "max_tokens": 2, "ignore_eos": True})[1]
    assert reply["usage"]["prompt_tokens"] >= count
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 200
    asked = {**CHAT, "messages": [*messages, *CHAT["messages"]]}
    assert served.post("/v1/chat/completions", asked)[0] == 200


def test_a_prompt_of_control_tokens(served: Served) -> None:
    """They are tokenised in linear time, and counted as any others."""
    text = "<|im_start|>" * 60_000
    assert len(served.post("/tokenize", {"content": text})[1]["tokens"]) == 60_000
    status, reply = served.post("/v1/completions", {"prompt": text})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "60000" in reply["error"]["message"]
    marks = {"content": text[:240_000], "parse_special": False}
    assert served.post("/tokenize", marks)[0] == 200


def tool(name: str, size: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", "description": "x" * 1000} for i in range(size // 1040)}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize(
    "tools", [[tool("one", 1 << 20)], [tool(f"t{i}", 1 << 18) for i in range(5)], [tool("many", 1 << 10)] * 200]
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tool_schemas_of_a_megabyte(tools: list[dict[str, Any]], choice: str, served: Served) -> None:
    status, reply = served.post("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": choice})
    assert status == 400, reply
    assert reply["error"]["param"] or reply["error"]["code"] == "context_length_exceeded"
    assert served.post("/v1/chat/completions", CHAT)[0] == 200
