"""Calls that a model must make, through each interface: the grammar holds it to the form, and the parser reads that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serve
from support.smollm import POOL
from vendoring import source
from vendoring.pin import VendorError

TEMPLATES = [None, "Qwen3-Coder"]
"""The model's own, which knows no tools, and one of llama-server's cases."""

SCHEMAS: dict[str, Any] = {
    "test": {
        "type": "object",
        "properties": {"success": {"type": "boolean", "const": True}},
        "required": ["success"],
    },
    "python": {
        "type": "object",
        "properties": {"code": {"type": "string", "maxLength": 12}},
        "required": ["code"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {"lines": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 4}},
        "required": ["lines"],
        "additionalProperties": False,
    },
}
MOST = 160
"""Tokens of an answer: each of the twelve characters of `code` may be written as an escape of six."""

SYSTEM, QUESTION = "You are a coding assistant.", "Write an example."


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: pytest.FixtureRequest, smol_path: Path) -> Iterator[Served]:
    options = []
    if request.param is not None:
        try:
            folder = source.pristine_tree() / source.LLAMA / "models" / "templates"
        except VendorError as err:
            pytest.skip(f"no source of llama.cpp: {err}")
        options = ["--chat-template-file", str(folder / f"{request.param}.jinja")]
    with serve(smol_path, "--kvflash", str(POOL), "-c", "4096", "-t", "2", "-q", *options) as server:
        yield server


def asked(interface: str, choice: str, *names: str) -> dict[str, Any]:
    """Request a short answer that must call one of the tools, or none."""
    if interface == "messages":
        tools: list[Any] = [{"name": name, "input_schema": SCHEMAS[name]} for name in names]
        more: dict[str, Any] = {"system": SYSTEM, "messages": [{"role": "user", "content": QUESTION}]}
        return {**more, "max_tokens": MOST, "tools": tools, "tool_choice": {"type": choice.replace("required", "any")}}
    tools = [{"type": "function", "name": name, "parameters": SCHEMAS[name]} for name in names]
    if interface == "responses":
        more = {"instructions": SYSTEM, "input": QUESTION, "max_output_tokens": MOST}
        return {**more, "tools": tools, "tool_choice": choice}
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in names]
    more = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]}
    return {**more, "max_tokens": MOST, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def calls(interface: str, body: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an answer."""
    if interface == "messages":
        return [(block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use"]
    if interface == "responses":
        found = [item for item in body["output"] if item["type"] == "function_call"]
    else:
        found = [call["function"] for call in body["choices"][0]["message"].get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


def streamed(interface: str, frames: list[Any]) -> list[tuple[str, Any]]:
    """The same of a stream, put together of its pieces."""
    names, pieces = [], []
    for frame in frames:
        if interface == "messages" and frame["type"] == "content_block_start":
            names += [frame["content_block"]["name"]] if frame["content_block"]["type"] == "tool_use" else []
        elif interface == "messages" and frame.get("delta", {}).get("type") == "input_json_delta":
            pieces.append(frame["delta"]["partial_json"])
        elif interface == "responses" and frame["type"] == "response.output_item.added":
            names += [frame["item"]["name"]] if frame["item"]["type"] == "function_call" else []
        elif interface == "responses" and frame["type"] == "response.function_call_arguments.delta":
            pieces.append(frame["delta"])
        elif "choices" in frame:
            for call in (call for one in frame["choices"] for call in one["delta"].get("tool_calls", ())):
                names += [call["function"]["name"]] if "name" in call["function"] else []
                pieces.append(call["function"]["arguments"])
    assert len(names) <= 1
    return [(name, json.loads("".join(pieces))) for name in names]


def check(name: str, arguments: Any) -> None:
    assert arguments.keys() == SCHEMAS[name]["properties"].keys()
    assert arguments.get("success", True) is True
    assert len(arguments.get("code", "")) <= 12
    assert {*arguments.get("lines", [1])} <= {1, 2, 3}


@pytest.mark.parametrize("interface", ["chat/completions", "messages", "responses"])
def test_a_tool_that_must_be_called(served: Served, interface: str, request: pytest.FixtureRequest) -> None:
    """In the form of Qwen3-Coder a string is raw text up to its mark, which upstream's grammar lets have any length."""
    status, body = served.post(f"/v1/{interface}", asked(interface, "required", "test"))
    assert status == 200, body
    assert calls(interface, body) == [("test", {"success": True})]
    other = "python" if request.node.callspec.params["served"] is None else "numbers"
    data = asked(interface, "required", other, "test") | {"stream": True}
    frames = [frame for frame in served.frames(f"/v1/{interface}", data) if isinstance(frame, dict)]
    ((name, arguments),) = streamed(interface, frames)
    check(name, arguments)


def test_a_tool_that_must_not_be_called(served: Served) -> None:
    data = asked("chat/completions", "none", "python") | {"max_tokens": 16}
    status, body = served.post("/v1/chat/completions", data)
    assert (status, calls("chat/completions", body)) == (200, [])
