"""Reasoning of a model, through the interfaces that tell it apart: as it is written, and as clients send it back."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server

from kvflash_ggml.chat.reader import AnswerReader, Parsed, Rendered, words
from kvflash_ggml.chat.values import ChatInput
from kvflash_ggml.server import exchange

SAID = "<think>It is noon there.</think>Noon."


def parsed(text: str) -> Parsed:
    """An answer that begins with its reasoning."""
    if "<think>".startswith(text):
        return Parsed()
    reasoning, end, content = text.removeprefix("<think>").partition("</think>")
    reasoning = reasoning if end else reasoning.partition("<")[0]
    size = len(text.encode())
    return Parsed(reasoning=reasoning, content=content, read=size, plain=size, first=size)


class Thinking(FakePrompts):
    def chat(self, asked: ChatInput) -> Rendered:
        return replace(super().chat(asked), reader=partial(AnswerReader, parsed, marks=words("think")))


def server() -> Server:
    return Server(FakeModel(reply=lambda prompt: SAID.encode()), Thinking())


def ask(path: str, **more: Any) -> Reply:
    asked = {"input": "time?"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "time?"}]}
    return server().post(path, {**asked, "max_tokens": 500, **more})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_the_loop_does_not_read_a_long_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves other clients meanwhile."""
    read: dict[str, str] = {}

    def watched(text: str) -> Parsed:
        read[text] = threading.current_thread().name
        return parsed(text)

    class Watched(FakePrompts):
        def chat(self, asked: ChatInput) -> Rendered:
            return replace(super().chat(asked), reader=partial(AnswerReader, watched, marks=words("think")))

    monkeypatch.setattr(exchange, "LONG", len(SAID) - 1)
    asked = {"input": "time?"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "time?"}]}
    one = Server(FakeModel(reply=lambda prompt: SAID.encode()), Watched())
    assert b"Noon." in one.post(path, {**asked, "max_tokens": 500, "stream": True}).body
    assert read[SAID].startswith("kvflash-front"), "the whole answer is read on a thread"
    assert read["<"] == threading.main_thread().name, "and its beginning at once"


def short(kinds: list[str]) -> list[str]:
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def test_a_message_has_a_block_of_thinking() -> None:
    thinking, text = ask("/v1/messages").json["content"]
    assert thinking == {"type": "thinking", "thinking": "It is noon there.", "signature": ""}
    assert text == {"type": "text", "text": "Noon."}


def test_a_stream_of_a_message_has_its_thinking_first() -> None:
    frames = ask("/v1/messages", stream=True).frames
    deltas = [frame["delta"] for frame in frames if frame["type"] == "content_block_delta"]
    assert short([delta["type"] for delta in deltas]) == ["thinking_delta", "signature_delta", "text_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "It is noon there."
    starts = [frame["content_block"]["type"] for frame in frames if frame["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


def test_a_response_has_an_item_of_reasoning() -> None:
    reasoning, message = ask("/v1/responses").json["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It is noon there."}]
    assert message["content"][0]["text"] == "Noon."
    assert "encrypted_content" not in reasoning


def test_a_stream_of_a_response_has_its_reasoning_first() -> None:
    frames = ask("/v1/responses", stream=True).frames
    kinds = short([frame["type"].removeprefix("response.") for frame in frames])
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress",
        *item[0], "reasoning_text.delta", "reasoning_text.done", *item[1],
        *item[0], "output_text.delta", "output_text.done", *item[1],
        "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_reasoning_comes_back_as_it_was(path: str) -> None:
    """Also from a client that sends nothing of it but what it cannot read, as Codex does."""

    async def work(client: Client) -> None:
        more: dict[str, Any] = {"max_tokens": 500}
        if path == "/v1/messages":
            first = {"messages": [{"role": "user", "content": "time?"}], **more}
            content = (await client.post(path, first)).json["content"]
            answer = [{"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
            assert (await client.post(path, {**first, "messages": [*first["messages"], *answer]})).status == 200
            return
        more |= {"include": ["reasoning.encrypted_content"], "store": False}
        said = (await client.post(path, {"input": "time?", **more})).json["output"]
        del said[0]["content"]
        items = [{"role": "user", "content": "time?"}, *said, {"role": "user", "content": "sure?"}]
        assert (await client.post(path, {"input": items, **more})).status == 200

    one = server()
    one.run(work)
    assert isinstance(one.prompts, Thinking)
    _, answer, _ = one.prompts.rendered[-1]
    assert (answer["reasoning_content"], answer["content"]) == ("It is noon there.", "Noon.")
