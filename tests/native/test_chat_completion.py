"""`Llama.create_chat_completion` with tools: by the model's template, whatever its family."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvflash_ggml.errors import ConfigError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")]
CLOCK = {"type": "function", "function": {"name": "clock"}}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("choice", ["required", CLOCK])
def test_a_call(choice: Any, llama: Callable[..., Any]) -> None:
    llm = llama("dense", n_ctx=1024, kvflash=512)
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 99, "seed": 1}
    whole = llm.create_chat_completion(**asked)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] in ({"clock"} if choice is CLOCK else {"weather", "clock"})
    assert "city" in json.loads(call["function"]["arguments"])
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    chunks = [chunk["choices"][0] for chunk in llm.create_chat_completion(**asked, stream=True)]
    told = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert told[0]["function"]["name"] == call["function"]["name"]
    assert "".join(part["function"]["arguments"] for part in told) == call["function"]["arguments"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]


def test_without_tools_nothing_changes(llama: Callable[..., Any], stock: Callable[..., Any]) -> None:
    asked = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    told = [
        make("dense", n_ctx=512).create_chat_completion(**asked, **more)["choices"]
        for make in (llama, stock)
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"})
    ]
    assert told[0] == told[2]
    assert told[1] == told[3]


def test_a_format_of_upstreams_stays_upstreams(llama: Callable[..., Any]) -> None:
    llm = llama("dense", n_ctx=1024, chat_format="chatml-function-calling")
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": CLOCK, "max_tokens": 60}
    message = llm.create_chat_completion(**asked)["choices"][0]["message"]
    assert "function_call" in message, "upstream's handler tells both"


def test_a_format_that_is_set_later(llama: Callable[..., Any]) -> None:
    llm = llama("dense", n_ctx=1024)
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": CLOCK, "max_tokens": 60, "temperature": 0}
    own, llm.chat_format = llm.chat_format, "chatml-function-calling"
    assert "function_call" in llm.create_chat_completion(**asked)["choices"][0]["message"]
    llm.chat_format = own
    assert "function_call" not in llm.create_chat_completion(**asked)["choices"][0]["message"]


def test_a_tool_that_is_none(llama: Callable[..., Any]) -> None:
    llm = llama("dense", n_ctx=512)
    with pytest.raises(ConfigError, match="'other', which is no tool"):
        llm.create_chat_completion(
            messages=HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}
        )


def test_contents_in_parts_are_texts_beside_tools(llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llama("dense", n_ctx=1024)
    prompts: list[Any] = []

    def stop(prompt: Any, **asked: Any) -> None:
        prompts.append(prompt)
        raise InterruptedError

    monkeypatch.setattr(llm, "create_completion", stop)
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Always."}]
    for content, nothing in (("Be brief.\nAlways.", ""), (parts, None)):
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "a", "content": content}
        for told in (content, nothing):
            with pytest.raises(InterruptedError):
                llm.create_chat_completion([{"role": "system", "content": told}, *HELLO, turn, result], tools=TOOLS)
    assert prompts[:2] == prompts[2:]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, "tool_calls"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "the type 'text' alone"),
    ],
)
def test_messages_that_no_tools_can_be_beside(message: Any, told: str, llama: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=rf"messages\[0\].*{told}"):
        llama("dense", n_ctx=512).create_chat_completion([message, *HELLO], tools=TOOLS)


def test_a_tool_without_a_schema(llama: Callable[..., Any]) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": True}}
    with pytest.raises(ConfigError, match='"parameters": '):
        llama("dense", n_ctx=512).create_chat_completion(HELLO, tools=[tool])
