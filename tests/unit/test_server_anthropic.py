"""Anthropic's interface, on a model made of a few lines."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server

from kvflash_ggml.server import requestlog

HELLO = [{"role": "user", "content": "hello"}]

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'

TOOLS = [
    {"name": "clock", "description": "Tells the time.", "input_schema": {"type": "object", "properties": {}}},
    {"type": "web_search_20250305", "name": "web_search"},
]


def ask(data: dict[str, Any] | None = None, *, server: Server | None = None, **more: Any) -> Reply:
    asked = {"model": "any", "max_tokens": 500, "messages": HELLO, **(data or {}), **more}
    return (server or Server()).post("/v1/messages", asked)


def saying(text: str) -> Server:
    return Server(FakeModel(reply=lambda prompt: text.encode()))


def told(messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """What the template gets of these messages."""
    server = Server()
    reply = ask(server=server, messages=messages, **more)
    assert reply.status == 200, reply.json
    return server.prompts.rendered[-1]


# --- answers


def test_a_message() -> None:
    reply = ask()
    said = len("user: hello\nassistant: ")
    id = reply.json["id"]
    assert reply.json == {
        "id": id, "type": "message", "role": "assistant", "model": "fake",
        "content": [{"type": "text", "text": "an answer"}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": said, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 9,
        },
    }  # fmt: skip
    assert id.startswith("msg_")


def test_a_stream_has_every_event_in_its_order() -> None:
    reply = ask(server=saying(f"Let me see.{CALL}"), tools=TOOLS, stream=True)
    kinds = [frame["type"] for frame in reply.frames]
    names = [line[7:] for line in bytes(reply.body).decode().split("\n") if line.startswith("event: ")]
    assert names == kinds
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert short == [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    message = reply.frames[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    blocks: dict[int, Any] = {}
    for frame in reply.frames:
        if frame["type"] == "content_block_start":
            blocks[frame["index"]] = [frame["content_block"], ""]
        elif frame["type"] == "content_block_delta":
            blocks[frame["index"]][1] += frame["delta"].get("text", "") + frame["delta"].get("partial_json", "")
    (text, said), (use, arguments) = blocks.values()
    assert (text, said) == ({"type": "text", "text": ""}, "Let me see.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "clock", {})
    assert json.loads(arguments) == {"zone": "CET"}
    assert reply.frames[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert reply.frames[-2]["usage"]["output_tokens"] == len(f"Let me see.{CALL}")


def test_why_an_answer_ended() -> None:
    ends = [ask(max_tokens=2).json, ask(stop_sequences=["ans"]).json, ask(server=saying(CALL), tools=TOOLS).json]
    assert [(end["stop_reason"], end["stop_sequence"]) for end in ends] == [
        ("max_tokens", None), ("stop_sequence", "ans"), ("tool_use", None),
    ]  # fmt: skip
    assert ends[2]["content"][0]["input"] == {"zone": "CET"}


def test_a_template_that_stops_an_answer_ends_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is none of the client's sequences."""
    server = Server()
    chat = server.prompts.chat
    monkeypatch.setattr(server.prompts, "chat", lambda asked: replace(chat(asked), stops=("ans",)))
    reply = ask(server=server, stop_sequences=["x"]).json
    assert (reply["stop_reason"], reply["stop_sequence"], reply["usage"]["output_tokens"]) == ("end_turn", None, 6)


def test_fields_of_sampling_reach_the_model() -> None:
    seen = []
    server = Server(on_end=lambda request, usage, reason: seen.append(request))
    more = {"temperature": 0.3, "top_p": 0.4, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "y"}}
    assert ask(server=server, **more).status == 200
    (request,) = seen
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.3, 0.4, 5)
    assert (request.stop, request.max_tokens) == (("x",), 500)
    assert request.id.startswith("msg-")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_request_has_a_message(path: str) -> None:
    reply = Server().post(path, {"model": "claude", "max_tokens": 9, "messages": []})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert reply.message.startswith("messages: ")


def test_a_system_message_alone_is_a_question_without_words() -> None:
    assert ask(messages=[{"role": "system", "content": "Be brief."}]).status == 200


def test_what_was_known_is_told_apart() -> None:
    async def work(client: Client) -> list[Any]:
        asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 400}]}
        return [(await client.post("/v1/messages", asked)).json["usage"] for _ in range(2)]

    first, second = Server().run(work)
    assert (first["cache_read_input_tokens"], second["input_tokens"]) == (0, 1)
    assert second["cache_read_input_tokens"] == first["input_tokens"] - 1


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_tokens_are_counted_as_they_are_read(path: str) -> None:
    asked = {"system": "Be brief.", "messages": HELLO, "tools": TOOLS, "max_tokens": 5}
    reply = Server().post(f"{path}?beta=true", asked).json
    assert reply.get("usage", reply)["input_tokens"] == len("tools\nsystem: Be brief.\nuser: hello\nassistant: ")


def test_tokens_are_counted_while_the_engine_is_busy() -> None:
    """And while the server drains: neither a slot nor the engine's thread is needed."""

    async def work(client: Client) -> Reply:
        call = client.call("POST", "/v1/messages", {"messages": HELLO, "stream": True})
        await call.until(lambda reply: len(reply.frames) > 3)
        held = server.scheduler.running
        assert held
        reply = await client.post("/v1/messages/count_tokens", {"messages": HELLO})
        assert server.scheduler.running == held
        call.leave()
        await call.done()
        return reply

    server = Server(FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.002)))
    assert server.run(work).json == {"input_tokens": len("user: hello\nassistant: ")}


def test_somebody_looks_whether_the_server_is_there() -> None:
    for server in (Server(), Server(page=False), Server(keys=("k",))):
        reply = server.run(lambda client: client.call("HEAD", "/").done())
        assert (reply.status, bytes(reply.body)) == (200, b"")


# --- what a model is told


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "time?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "CET"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    system, user, answer, result, again = told(
        messages, system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], tools=TOOLS
    )
    assert (system["role"], system["content"]) == ("system", "One.\n\nTwo.")
    assert (user["role"], user["content"]) == ("user", "What\n\ntime?")
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    assert answer["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"zone": "CET"}}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "t1", "noon")
    assert again["content"] == "Well?"


def test_a_late_system_message_is_told_in_place() -> None:
    """Claude Code writes one behind the first question; at the front it would change the front."""
    late = {"role": "system", "content": [{"type": "text", "text": "The date is new."}]}
    first = told([*HELLO, late])
    reminder = "<system-reminder>\nThe date is new.\n</system-reminder>"
    assert [(one["role"], one["content"]) for one in first] == [("user", f"hello\n\n{reminder}")]
    later = told([*HELLO, {"role": "assistant", "content": "hi"}, late, {"role": "user", "content": "go on"}])
    assert later[2]["content"] == f"{reminder}\n\ngo on"


def test_tools_that_come_and_go() -> None:
    """Claude Code tells of them in late system messages."""
    clock = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
    late = {
        "role": "system",
        "content": [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": clock}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "chart"}},
            {"type": "hologram"},
        ],
    }
    server = saying(CALL)
    reply = ask(server=server, messages=[*HELLO, late], tools=[clock | {"name": "chart"}, clock])
    assert reply.json["content"][0]["name"] == "clock"
    assert reply.headers["x-kvflash-ignored"] == "hologram"
    assert ask(server=saying(CALL), messages=[*HELLO, late]).json["stop_reason"] == "tool_use"
    said = server.prompts.rendered[-1][0]["content"]
    assert "The tool clock can be called now.\n\nThe tool chart cannot be called any more." in said


def test_what_changes_in_each_request_is_left_out() -> None:
    def front(cch: str, **settings: Any) -> str:
        server = Server(**settings)
        header = f"x-anthropic-billing-header: cch={cch};"
        ask(server=server, system=[{"type": "text", "text": header}, {"type": "text", "text": "cch=kept"}])
        return str(server.prompts.rendered[0][0]["content"])

    assert front("0a1b2") == front("fffff")
    assert front("0a1b2").endswith("cch=kept")
    assert front("0a1b2", steady_prompts=False) != front("fffff", steady_prompts=False)


def test_very_many_blocks_are_one_message() -> None:
    """Each of them joined to those before takes the square of their number."""
    blocks = [{"type": "text", "text": "x" * 200}] * 20_000
    asked = {"messages": [{"role": role, "content": blocks} for role in ("user", "assistant")]}
    assert Server().post("/v1/messages/count_tokens", asked).json["input_tokens"] > 8_000_000


def test_an_answer_that_has_begun() -> None:
    reply = ask(messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert reply.json["usage"]["input_tokens"] == len("user: hello\nassistant: It is")


# --- tolerance


def test_what_is_not_known_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [
        {"type": "text", "text": "hello"},
        {"type": "hologram", "beam": 1},
        {"type": "document", "source": {"type": "base64", "data": ""}},
        {"type": "document", "source": 5},
        {"type": "document", "source": {"type": "text", "data": "of text"}},
    ]
    asked = {"messages": [{"role": "user", "content": blocks}], "tools": TOOLS, "max_tokens": 9, "novelty": 1}

    async def work(client: Client) -> list[Reply]:
        return [await client.post("/v1/messages", asked) for _ in range(3)]

    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    replies = Server().run(work)
    assert [reply.status for reply in replies] == [200] * 3
    for reply in replies:
        assert reply.headers["x-kvflash-ignored"] == "novelty, hologram, document, tools.web_search_20250305"
    logged = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(logged) == 1


def test_a_picture_that_cannot_be_seen() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    reply = ask(messages=[{"role": "user", "content": [image]}])
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "'fake'" in reply.message
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    (said,) = told([{"role": "user", "content": [result]}])
    assert said["content"] == "[image: left out, since this model reads text only]"


def test_bounds_of_tools_that_are_too_large_for_a_grammar() -> None:
    schema = {
        "type": "object",
        "properties": {"script": {"type": "string", "maxLength": 524288}, "maxLength": {"type": "string"}},
    }
    assert ask(tools=[{"name": "run", "input_schema": schema}]).status == 200


@pytest.mark.parametrize(
    "data",
    [
        {"messages": 5},
        {"messages": None},
        {"messages": ["x"]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 5}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}]},
        {"system": 5},
        {"system": [{"type": "text", "text": ["x"]}]},
        {"tools": 5},
        {"tools": [{"name": "a", "input_schema": 5}]},
        {"tools": [{"name": 5, "input_schema": {}}]},
        {"tool_choice": {"type": "tool", "name": "other"}},
        {"tool_choice": {"type": "any"}},
        {"max_tokens": "x"},
        {"stop_sequences": [5]},
        {"thinking": 5},
        {"temperature": -1},
        {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
    ],
)
def test_what_is_refused(data: dict[str, Any]) -> None:
    reply = ask(data)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.message


def test_a_prompt_that_is_too_long_is_told_as_claude_code_reads_it() -> None:
    reply = ask(messages=[{"role": "user", "content": "x" * 5000}])
    assert re.match(r"prompt is too long: 5018 tokens > 4096 maximum", reply.message)


def test_errors_have_anthropics_shape() -> None:
    def shape(reply: Reply) -> tuple[int, str, str]:
        return reply.status, reply.json["type"], reply.json["error"]["type"]

    locked = Server(keys=("k",))
    assert shape(ask(server=locked)) == (401, "error", "authentication_error")
    assert Server(keys=("k",)).post("/v1/messages", {"messages": HELLO}, x_api_key="k").status == 200
    assert shape(Server().post("/v1/messages/nowhere", {})) == (404, "error", "not_found_error")
    assert shape(ask(server=Server(max_body=60))) == (413, "error", "request_too_large")
    drains = Server()
    drains.front.draining = True
    assert shape(ask(server=drains)) == (503, "error", "overloaded_error")


def test_a_stream_that_fails_says_so() -> None:
    def fail() -> None:
        raise MemoryError

    reply = ask(server=Server(FakeModel(on_step=fail)), stream=True)
    assert reply.frames[-1]["type"] == "error"
    assert reply.frames[-1]["error"]["type"] == "api_error"


def test_a_client_waits_and_is_told_that_it_is_remembered() -> None:
    async def work(client: Client) -> bytes:
        call = client.call("POST", "/v1/messages", {"messages": HELLO, "stream": True})
        reply = await call.until(lambda reply: bytes(reply.body).count(b"event: ping") > 1)
        call.leave()
        await call.done()
        return bytes(reply.body)

    server = Server(FakeModel(on_step=lambda: time.sleep(0.1)), ping_s=0.01)
    assert b'data: {"type":"ping"}' in server.run(work)


INNER = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
DOCUMENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "document", "source": {"type": "text", "data": "plain"}}, ["plain"]),
    ({"type": "document", "title": "notes", "context": "of May", "source": {"type": "text", "data": "plain"}},
     ["notes", "of May", "plain"]),
    ({"type": "document", "source": {"type": "content", "content": INNER}}, ["first", "second"]),
    ({"type": "document", "source": {"type": "content", "content": "a text"}}, ["a text"]),
    ({"type": "search_result", "title": "Found", "source": "https://x", "content": INNER},
     ["Found", "https://x", "first", "second"]),
]  # fmt: skip


@pytest.mark.parametrize(("block", "texts"), DOCUMENTS)
def test_the_text_of_documents_and_search_results_is_read(block: dict[str, Any], texts: list[str]) -> None:
    (said,) = told([{"role": "user", "content": [block]}])
    assert said["content"] == "\n\n".join(texts)
    (said,) = told([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}])
    assert said["content"] == "\n".join(texts)


def test_an_image_in_a_document_is_seen() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    block = {"type": "document", "source": {"type": "content", "content": [image]}}
    prompts = FakePrompts(sees=True)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for content in (block, result):
        asked = {"messages": [{"role": "user", "content": [content]}], "max_tokens": 1}
        assert Server(prompts=prompts).post("/v1/messages", asked).status == 200
    assert prompts.seen == [b"ABC"] * 2


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"thinking": {"type": "telepathy"}}, "thinking.telepathy"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ({"messages": [{"role": "user", "content": [{"text": "no type"}]}]}, "untyped"),
    ],
)
def test_what_has_no_effect_is_told(data: dict[str, Any], told: str | None) -> None:
    reply = ask(data)
    assert (reply.status, reply.headers.get("x-kvflash-ignored")) == (200, told)
