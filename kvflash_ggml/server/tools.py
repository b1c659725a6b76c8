"""Tool calls: how a model is told of tools, held to them, and read.

A function that is named is called by a grammar of its parameters, with any model, as llama-cpp-python's handlers do it.
Calls that the model chooses to make are read between `<tool_call>` marks: those of templates that use them, and of all
that know nothing of tools and are told in words.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..chat.reader import AnswerReader
from ..chat.values import Call, Delta, Said
from . import bodies, schemas
from .errors import ApiError
from .prompts import Prompts
from .schema import ChatRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TOLD = """\
You can call functions. Their signatures:
<tools>
{signatures}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": <function-name>, "arguments": <arguments>}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """tools: for the template. grammar: of the answer, None for any text. named: the function whose arguments the
    answer is. reads: are calls read out of the text?
    """

    tools: Sequence[dict[str, Any]] | None = None
    grammar: str | None = None
    named: str | None = None
    reads: bool = False

    def reader(self) -> AnswerReader:
        """For one answer."""
        return _Reader(self)


def plan(request: ChatRequest, prompts: Prompts) -> ToolPlan:
    """What a request's tools come to. ApiError names what cannot be done."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    for i, tool in enumerate(tools):
        schemas.check(tool["function"].get("parameters", {}), f"tools.{i}.function.parameters")
    if choice is not None and not isinstance(choice, str):
        named = next((t["function"] for t in tools if t["function"]["name"] == choice.function.name), None)
        if named is None:
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is no tool", param="tool_choice")
        return ToolPlan(tools=tools, grammar=prompts.schema_grammar(_parameters(named)), named=choice.function.name)
    template = prompts.template or ""
    if "tools" in template and OPEN not in template:
        raise ApiError(
            501,
            "this model writes its tool calls in a form that is not read here: name a function in tool_choice, or "
            "start the server with a --chat-template-file that uses <tool_call>",
            code="tool_format",
            param="tool_choice",
        )
    return ToolPlan(tools=tools, grammar=_required(tools, prompts) if choice == "required" else None, reads=True)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _required(tools: Sequence[dict[str, Any]], prompts: Prompts) -> str:
    """One call of any of them, between its marks."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        function = tool["function"]
        parameters = schemas.resolved(_parameters(function))
        if "$defs" in parameters:  # those of all tools lie beside each other
            definitions |= parameters["$defs"]
            parameters = {key: value for key, value in parameters.items() if key != "$defs"}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    whole = {"anyOf": calls, "$defs": definitions}
    schemas.check(whole, "tools")
    inner = prompts.schema_grammar(whole)
    rules = "\n".join(f"call{line[4:]}" if line.startswith("root ") else line for line in inner.splitlines())
    return f'root ::= "{OPEN}\\n" call "\\n{CLOSE}"\n{rules}'


def messages_for(
    request_messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, template: str
) -> list[dict[str, Any]]:
    """Messages as a template reads them; in words what it knows nothing of."""
    knows_tools, knows_calls = "tools" in template, "tool_calls" in template
    out = []
    for message in request_messages:
        message = dict(message)
        calls = [_with_object(call) for call in message.get("tool_calls") or ()]
        if calls:
            message["tool_calls"] = calls
            if not knows_calls:
                del message["tool_calls"]
                said = "\n".join(f"{OPEN}\n{_words(call['function'])}\n{CLOSE}" for call in calls)
                message["content"] = f"{message['content']}\n{said}" if message["content"] else said
        else:
            message.pop("tool_calls", None)
        out.append(message)
    if tools and not knows_tools:
        told = _TOLD.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{told}"
        else:
            out.insert(0, {"role": "system", "content": told})
    return out


def _words(function: dict[str, Any]) -> str:
    return json.dumps(function, ensure_ascii=False)


def _with_object(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object, as templates want them; OpenAI's are a string of JSON."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ApiError(400, "tool_calls: each has a function with a name and arguments", param="messages")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = bodies.loads((function["arguments"] or "{}").encode())
        except bodies.Refused as err:
            raise ApiError(
                400, f"messages: the arguments of a tool call are refused: {err}", param="messages"
            ) from None
        except ValueError:  # a model may have written what is none
            pass
    return {**call, "function": {"name": function.get("name"), "arguments": function.get("arguments", {})}}


class CallReader:
    """Takes calls out of a text that comes in pieces. What is between marks and is no call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, *, end: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """More text; `end` with the last. Returns what is text, and the calls that have become whole."""
        self._held += text
        out, made = "", []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = 0 if end else _overlap(self._held, OPEN)
                out += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            stop = self._held.find(CLOSE, start)
            if stop < 0 and not end:
                out += self._held[:start]
                self._held = self._held[start:]
                break
            body = self._held[start + len(OPEN) : stop if stop >= 0 else None]
            call = _read_call(body)
            rest = self._held[stop + len(CLOSE) :] if stop >= 0 else ""
            if call is None:
                out += self._held[: len(self._held) - len(rest)]
            else:
                out += self._held[:start]
                call["index"] = len(self.calls)
                self.calls.append(call)
                made.append(call)
            self._held = rest.lstrip("\n") if call is not None else rest
        if self.calls and not out.strip():
            out = ""  # the line breaks around calls
        return out, made


class _Reader(AnswerReader):
    def __init__(self, tools: ToolPlan) -> None:
        self.said, self.odd = Said(), False
        self._named = tools.named
        self._calls = CallReader() if tools.reads else None

    def push(self, text: str, *, end: bool = False) -> list[Delta]:
        said, deltas = self.said, []
        if self._named is not None:
            first = not said.calls
            before = (
                Call(id=f"call_{secrets.token_hex(12)}", name=self._named, arguments="") if first else said.calls[0]
            )
            self.said = Said(calls=(replace(before, arguments=before.arguments + text),))
            return [Delta(index=0, id=before.id, name=self._named, arguments=text)] if text or first else []
        calls: list[dict[str, Any]] = []
        if self._calls is not None:
            text, calls = self._calls.push(text, end=end)
        if text:
            deltas.append(Delta(content=text))
        for one in calls:
            function = one["function"]
            made = Call(id=one["id"], name=function["name"], arguments=function["arguments"])
            deltas.append(Delta(index=one["index"], id=made.id, name=made.name, arguments=made.arguments))
            said = replace(said, calls=(*said.calls, made))
        self.said = replace(said, content=said.content + text)
        return deltas


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _read_call(body: str) -> dict[str, Any] | None:
    try:
        call = bodies.loads(body.encode())
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return made_call(call["name"], json.dumps(call.get("arguments", {}), ensure_ascii=False))


def made_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "index": 0,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
