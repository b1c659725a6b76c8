"""What agents send again and again is read once, and where it is not, the server says why."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.server import requestlog

SYSTEM = {"role": "system", "content": "You are of use. " * 20}


def turn(*texts: str) -> list[dict[str, Any]]:
    """Questions and answers in turn, behind the system message."""
    return [SYSTEM, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


async def ask(client: Client, messages: list[dict[str, Any]], **more: Any) -> Any:
    asked = {"messages": messages, "kvflash": {"report": "summary"}, **more}
    return (await client.post("/v1/chat/completions", asked)).json


@pytest.mark.parametrize("parked", [False, True])
def test_an_answer_says_which_message_differs(parked: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: Client) -> tuple[Any, str]:
        await ask(client, turn("It is noon. What now?"))
        await ask(client, turn("It is noon. What now?", "an answer", "and then?"))
        if parked:
            await ask(client, [{"role": "user", "content": "quite another text " * 30}])
        reply = await ask(client, turn("It is past noon. What now?", "an answer", "and then?", "an answer", "well?"))
        return reply, bytes((await client.get("/metrics")).body).decode()

    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    server = Server(on_end=requestlog.ended)
    reply, metrics = server.run(work)
    at = len(f"system: {SYSTEM['content']}\nuser: It is ")
    assert reply["kvflash"]["missed"] == {"at_token": at, "message": 1, "role": "user"}
    assert "kvflash:prefix_missed_total 1.0" in metrics
    said = [line["missed"] for record in caplog.records if "missed" in (line := json.loads(record.getMessage()))]
    assert said == [f"message 1 differs from token {at} on"]


def test_what_is_new_is_not_missed() -> None:
    """A turn, the same again, another conversation with the same system message, and another answer."""

    async def work(client: Client) -> list[Any]:
        asked = [
            turn("hello"),
            turn("hello", "an answer", "and then?"),
            turn("hello", "an answer", "and then?"),
            turn("something else"),
            turn("hello", "an answer", "or else?"),
            [{"role": "user", "content": "short"}],
        ]
        return [await ask(client, messages) for messages in asked]

    assert ["missed" in reply["kvflash"] for reply in Server().run(work)] == [False] * 6


def test_an_answer_that_comes_back_otherwise_is_told() -> None:
    """As where a client leaves out the reasoning."""

    async def work(client: Client) -> Any:
        await ask(client, turn("hello"))
        return await ask(client, turn("hello", "answer", "and then?"))

    missed = Server().run(work)["kvflash"]["missed"]
    assert (missed["message"], missed["role"]) == (2, "assistant")


def test_a_late_system_message_of_a_chat_is_told_in_place() -> None:
    server = Server()
    late = {"role": "developer", "content": [{"type": "text", "text": "It is late."}]}
    server.post("/v1/chat/completions", {"messages": [*turn("hello", "an answer"), late]})
    roles = [(message["role"], message["content"]) for message in server.prompts.rendered[-1]]
    assert roles[0][0] == "system"
    assert roles[-1] == ("user", "<system-reminder>\nIt is late.\n</system-reminder>")


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_a_retry_goes_on_where_the_client_gave_up(path: str, stateful: bool) -> None:
    """Claude Code gives up after five minutes, and asks again up to ten times."""
    text, waits = "x" * 3000, threading.Event()
    there, on = threading.Event(), threading.Event()
    waits.set()

    def step() -> None:
        if waits.is_set() and server.model.steps % 12 == 11:
            there.set()
            assert on.wait(60)
            on.clear()

    async def work(client: Client) -> Reply:
        asked = {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
        for _ in range(3):
            call = client.call("POST", path, {**asked, "max_tokens": 20, "stream": True})
            assert await asyncio.to_thread(there.wait, 60)
            there.clear()
            call.leave()
            await call.done()
            on.set()
        waits.clear()
        return await client.post(path, asked)

    server = Server(FakeModel(stateful=stateful, on_step=step))
    assert "an answer" in bytes(server.run(work).body).decode()
    assert 3000 < server.model.read_tokens < 3000 + 4 * 64, "each part of the prompt was read once"


@pytest.mark.parametrize("stateful", [False, True])
def test_a_side_request_reads_what_is_new_only(stateful: bool) -> None:
    """A title, a summary: with the same system message and tools, between two turns of the conversation."""

    async def work(client: Client) -> list[int]:
        read = []
        for messages in (
            turn("a question " * 60),
            turn("Give this a title."),
            turn("a question " * 60, "an answer", "and then?"),
        ):
            before = server.model.read_tokens
            asked = {"system": SYSTEM["content"], "messages": messages[1:], "max_tokens": 20}
            assert (await client.post("/v1/messages", asked)).status == 200
            read.append(server.model.read_tokens - before)
        return read

    server = Server(FakeModel(stateful=stateful))
    first, side, turned = server.run(work)
    assert first > 900
    assert side < 80
    assert turned < 80
