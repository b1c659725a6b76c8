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
