"""Anthropic's messages and OpenAI's responses on a real model: templates, grammars and answers by its own format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serve

MODELS = Path(__file__).parents[1] / "models"

SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}, "hours": {"type": "integer", "maximum": 24, "minimum": 0}},
    "required": ["zone", "hours"],
    "additionalProperties": False,
}

ASKED = "What time is it there? " * 20


@pytest.fixture(scope="module", params=["recall-qwen3-q8_0", "recall-qwen35-q8_0"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A plain model and a hybrid one."""
    options = ("--kvflash", "512", "-c", "8192", "--kvflash-calibrate", "off", "-q")
    with serve(MODELS / f"{request.param}.gguf", *options) as server:
        yield server


def messages(served: Served, path: str = "/v1/messages", **more: Any) -> Any:
    asked = {"max_tokens": 200, "messages": [{"role": "user", "content": ASKED}], "temperature": 0, **more}
    status, body = served.post(path, asked)
    assert status == 200, body
    return body


def responses(served: Served, path: str = "/v1/responses", **more: Any) -> Any:
    status, body = served.post(path, {"max_output_tokens": 200, "input": ASKED, "temperature": 0, **more})
    assert status == 200, body
    return body


TOOLS = [{"name": "clock", "description": "Tells the time.", "input_schema": SCHEMA}]


def is_sound(arguments: Any) -> bool:
    return arguments["zone"] in ("CET", "UTC") and 0 <= arguments["hours"] <= 24 and len(arguments) == 2


def test_a_message_that_must_call_a_tool(served: Served) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        reply = messages(served, tools=TOOLS, tool_choice=choice)
        assert reply["stop_reason"] == "tool_use"
        assert reply["content"][-1]["name"] == "clock"
        assert is_sound(reply["content"][-1]["input"])


def test_a_stream_of_a_message_that_must_call_a_tool(served: Served) -> None:
    asked = {"max_tokens": 200, "messages": [{"role": "user", "content": ASKED}], "tools": TOOLS}
    frames = list(served.frames("/v1/messages", {**asked, "tool_choice": {"type": "any"}}))
    kinds = [frame["type"] for frame in frames]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [frame["index"] for frame in frames if frame["type"] == "content_block_start"]
    stops = [frame["index"] for frame in frames if frame["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(starts)))
    assert frames[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_response_that_must_call_a_tool(served: Served) -> None:
    tools = [{"type": "function", "name": "clock", "parameters": SCHEMA}, {"type": "web_search"}]
    reply = responses(served, tools=tools, tool_choice="required")
    assert (reply["output"][-1]["type"], reply["output"][-1]["name"]) == ("function_call", "clock")
    custom = [{"type": "custom", "name": "note", "description": "Writes a note."}]
    reply = responses(served, tools=custom, tool_choice="required", max_output_tokens=60)
    assert reply["output"][-1]["type"] in ("custom_tool_call", "message")


def test_tokens_are_counted_as_they_are_read(served: Served) -> None:
    usage = messages(served, tools=TOOLS, max_tokens=1)["usage"]
    counted = messages(served, "/v1/messages/count_tokens", tools=TOOLS)["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    read = responses(served, max_output_tokens=1)["usage"]["input_tokens"]
    assert responses(served, "/v1/responses/input_tokens")["input_tokens"] == read
    chat = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 1}
    read = served.post("/v1/chat/completions", chat)[1]["usage"]["prompt_tokens"]
    assert served.post("/v1/chat/completions/input_tokens", chat)[1]["input_tokens"] == read


def test_a_deep_answer_that_has_begun_ends_no_server(served: Served) -> None:
    begun = '<tool_call>\n{"name": "clock", "arguments": {"zone": ' + "[" * 5000
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"properties": {"zone": {}}}}}]
    chat = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": begun}], "tools": tools}
    for choice in ("required", "auto"):
        asked = {**chat, "tool_choice": choice, "max_tokens": 4}
        assert served.post("/v1/chat/completions", asked)[0] in (200, 400)
    assert served.get("/health")[0] == 200


def test_a_turn_reads_what_is_new(served: Served) -> None:
    """With a late system message, which stays where it is, and a result of a tool."""
    late = {"role": "system", "content": "The weather is fine. " * 10}
    call = {"type": "tool_use", "id": "t", "name": "clock", "input": {"zone": "CET", "hours": 3}}
    first = [{"role": "user", "content": ASKED}, late]
    before = messages(served, system="Be brief.", tools=TOOLS, messages=first, max_tokens=1)["usage"]
    more = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}]},
    ]
    usage = messages(served, system="Be brief.", tools=TOOLS, messages=[*first, *more], max_tokens=1)["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * (before["input_tokens"] + before["cache_read_input_tokens"])


def test_a_response_goes_on_from_another(served: Served) -> None:
    first = responses(served, max_output_tokens=8)
    second = responses(served, input="And now?", previous_response_id=first["id"], max_output_tokens=8)
    usage = second["usage"]
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 60
