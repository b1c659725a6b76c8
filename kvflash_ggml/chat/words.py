"""Tools in plain words, for templates that know none: what the model is told, and the form of its calls."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"

PYTHONIC, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
"""Marks around the calls of LFM2."""

_TOLD = """\
You can call functions. Their signatures:
<tools>
{signatures}
</tools>"""

_RESULT = "<tool_response>\n{}\n</tool_response>"

_FORM = f"""
To call one, write its name and arguments as JSON:
{OPEN}{{"name": <function-name>, "arguments": <arguments>}}{CLOSE}"""

TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>\\n' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if tools %}{{ '<|tools|>' + (tools | tojson) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""A template with calls of this form: their grammar and parser are made of it."""


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, calls: bool
) -> list[dict[str, Any]]:
    """Return messages that describe the tools. calls: the template has a form for calls, so that tools suffice."""
    out = [dict(message) for message in messages] if calls else _without_calls(messages)
    if not tools:
        return out
    text = _TOLD.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    text += "" if calls else _FORM
    if out and out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content'] or ''}\n\n{text}"
    else:
        out.insert(0, {"role": "system", "content": text})
    return out


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn calls into text of the answer, and results into turns of the user: such templates leave both out.

    A result and the user's turn beside it are one message, since many templates want roles to alternate.
    """
    out: list[dict[str, Any]] = []
    joins = False  # the last message has results
    for message in map(dict, messages):
        content = message.get("content") or ""
        if called := message.pop("tool_calls", None):
            said = "\n".join(map(call_in_words, called))
            message["content"] = f"{content}\n{said}" if content else said
        result = message["role"] == "tool"
        if result:
            content = _RESULT.format(content)
            message = {"role": "user", "content": content}
        if out and out[-1]["role"] == message["role"] == "user" and (joins or result):
            out[-1]["content"] = f"{out[-1]['content']}\n\n{content}"
        else:
            out.append(message)
        joins = message["role"] == "user" and (result or joins)
    return out


def calls_as_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call behind the content of its turn, as LFM2's models write it."""
    out = list(map(dict, messages))
    for message in out:
        if called := message.pop("tool_calls", None):
            message["content"] = (
                f"{message.get('content') or ''}{PYTHONIC}[{', '.join(map(_pythonic, called))}]{_CLOSE}"
            )
    return out


def _pythonic(call: Mapping[str, Any]) -> str:
    made = plain_call(call)["function"]
    given = json.loads(made["arguments"])
    return f"{made['name']}({', '.join(f'{name}={json.dumps(given[name], ensure_ascii=False)}' for name in given)})"


def one_call_a_turn(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call in a turn of its own, and its result behind it.

    A result belongs to the call with its `tool_call_id`. Others belong to the calls without a result, in their order.
    """
    out: list[dict[str, Any]] = []
    ahead = deque(map(dict, messages))
    while ahead:
        turn = ahead.popleft()
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            out.append(turn)
            continue
        ids = [str(call.get("id") or "") for call in calls]
        results: dict[str, deque[dict[str, Any]]] = {id: deque() for id in (*ids, "")}
        while ahead and ahead[0]["role"] == "tool":
            result = ahead.popleft()
            results.get(str(result.get("tool_call_id")), results[""]).append(result)
        for id, call in zip(ids, calls, strict=True):
            out.append({**turn, "tool_calls": [call]})
            turn = {"role": turn["role"], "content": ""}
            if found := results[id] or results[""]:
                out.append(found.popleft())
        out.extend(chain.from_iterable(results.values()))
    return out


def text_apart(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the text of a calling turn in a turn of its own, in front of the calls."""
    out: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if message.get("tool_calls") and message.get("content"):
            out.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        out.append(message)
    return out


def joined_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each user's turn behind a tool's result added to that result."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and (out[-1]["role"], message["role"]) == ("tool", "user"):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out


def call_in_words(call: Mapping[str, Any]) -> str:
    """Return a call as the model writes it."""
    made = plain_call(call)["function"]
    name = json.dumps(made["name"], ensure_ascii=False)
    return f'{OPEN}{{"name": {name}, "arguments": {made["arguments"]}}}{CLOSE}'


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are a JSON object: templates want one, and a model may have written none."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_int=finite, parse_float=finite, parse_constant=finite)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    # half of a surrogate pair would be no UTF-8
    text = json.dumps(arguments, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": text},
    }


def finite(text: str) -> int | float:
    """Read a number of JSON. ValueError for one beyond a double, which neither llama.cpp nor clients can take."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number that JSON and a double can have")
    return int(text) if text.lstrip("-").isdigit() else value
