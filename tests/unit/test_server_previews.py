"""Previews as clients ask for them and are told of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import Reply
from support.fake_model import STEP
from support.fake_server import Server

LONG = "word " * 60
READ = {"read": STEP, "prompt": len("user: \nassistant: ") + len(LONG)}
PREVIEW = {"reading": "preview"}


def chat(server: Server | None = None, *, content: str = LONG, **more: Any) -> Reply:
    data = {"messages": [{"role": "user", "content": content}], "kvflash": PREVIEW, **more}
    return (server or Server()).post("/v1/chat/completions", data)


def test_an_answer_says_that_it_is_a_preview() -> None:
    reply = chat()
    assert reply.status == 200, reply.json
    assert reply.headers["x-kvflash-preview"] == f"read {STEP} of {READ['prompt']} tokens"
    assert reply.json["kvflash"] == {"preview": READ}
    assert reply.json["usage"]["prompt_tokens"] == READ["prompt"]
    assert reply.json["timings"]["prompt_n"] == STEP
    told = chat(kvflash={**PREVIEW, "report": "summary"}).json["kvflash"]
    assert told["preview"] == READ
    assert "page_ins" in told


def test_a_stream_says_so_before_its_first_word() -> None:
    frames = chat(stream=True, stream_options={"include_usage": True}).frames
    marked = [i for i, frame in enumerate(frames[:-1]) if "kvflash" in frame]
    words = [
        i for i, frame in enumerate(frames[:-1]) if frame["choices"] and frame["choices"][0]["delta"].get("content")
    ]
    assert frames[marked[0]]["kvflash"] == {"preview": READ}
    assert marked[0] < words[0]
    assert frames[-2]["kvflash"] == {"preview": READ}


def test_completions_say_so_too() -> None:
    asked = {"prompt": LONG, "kvflash": PREVIEW}
    whole = Server().post("/v1/completions", asked)
    assert whole.json["kvflash"]["preview"] == {"read": STEP, "prompt": len(LONG)}
    assert "x-kvflash-preview" in whole.headers
    frames = Server().post("/v1/completions", {**asked, "stream": True}).frames
    assert frames[0]["kvflash"]["preview"] == {"read": STEP, "prompt": len(LONG)}
    assert "".join(frame["choices"][0]["text"] for frame in frames[:-1] if frame["choices"]) == "an answer"


def test_what_is_read_as_a_whole_says_nothing() -> None:
    for reply in (chat(content="short"), chat(kvflash={})):
        assert "kvflash" not in reply.json
        assert "x-kvflash-preview" not in reply.headers
    assert not [frame for frame in chat(content="short", stream=True).frames[:-1] if "kvflash" in frame]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response format"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"kvflash": {**PREVIEW, "answer": "exact"}}, "kvflash.answer 'exact'"),
        ({"kvflash": {**PREVIEW, "pins": [[0, 4]]}}, "kvflash.pins"),
    ],
)
def test_what_needs_the_whole_prompt_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    reply = chat(**more)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "kvflash.reading"
    assert named in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/api/chat", {"model": "kvflash", "messages": [{"role": "user", "content": LONG}]}),
        ("/completion", {"prompt": LONG}),
    ],
)
def test_interfaces_that_cannot_say_so_refuse_it(path: str, data: dict[str, Any]) -> None:
    reply = Server().post(path, {**data, "kvflash": PREVIEW})
    assert reply.status == 400
    assert "preview" in str(reply.json)
    assert "this interface" in str(reply.json)


def test_two_answers_are_two_previews_and_one_reading() -> None:
    reply = chat(n=2)
    assert reply.json["kvflash"]["preview"] == READ
    assert len(reply.json["choices"]) == 2
