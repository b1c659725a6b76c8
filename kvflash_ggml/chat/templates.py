"""A model's chat template, by llama.cpp's own `common/chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

from ..errors import ConfigError
from ..native import chat as native
from . import rewriting, schemas
from .reader import AnswerReader, Parsed, ParsedCall, Rendered, words
from .values import ChatInput, Grammar
from .words import (
    PYTHONIC,
    TEMPLATE,
    calls_as_content,
    in_words,
    joined_results,
    one_call_a_turn,
    plain_call,
    text_apart,
)

KEPT = 16
"""Renderings that are kept, each for its salt: a request is often sent again, or counted before it is sent."""

MOST_OPEN = 128
"""Brackets open at once in an answer that has begun, where a grammar holds all of it. To read them takes the cube of
their number in time, 0.1 s for 100 and 6 s for 1,000.
"""

_MARKS = words("none null true false name arguments function parameters type id")
"""Words that formats write in other ways than requests, or that they leave out."""


class ChatTemplate:
    """A chat template. bos, eos: the texts of these tokens. ConfigError for a bad source. Threads may share it."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self._template, self.caps = native.open_template(source, bos=bos, eos=eos)
        self._marks = words(source) | _MARKS
        self._rendered = lru_cache(KEPT)(self._render)

    def render(self, request: ChatInput) -> Rendered:
        """Render a chat as a prompt, up to where the answer begins. ConfigError says what the template refuses."""
        tools = [] if request.choice == "none" else [_set(tool) for tool in request.tools]
        if not self.caps["supports_tool_calls"]:
            if not self._pythonic:
                return self._in_words(request, tools)
            several = request.parallel is None and request.choice == "auto"  # the template does not say that they may
            request = replace(
                request, messages=calls_as_content(request.messages), parallel=True if several else request.parallel
            )
        else:
            if (
                any(message.get("tool_calls") and message.get("content") for message in request.messages)
                and self._calls_or_text
            ):
                request = replace(request, messages=text_apart(request.messages))
            if not self.caps["supports_parallel_tool_calls"]:
                request = replace(request, messages=one_call_a_turn(request.messages))
        if not self.caps["supports_tools"]:
            request = replace(request, messages=in_words(request.messages, tools, calls=True))
        whole = self._rendered(_written(request, tools), request.salt)
        if request.named is None:
            return whole
        # the prompt has all tools, the answer calls one
        named = [tool for tool in tools if tool["function"]["name"] == request.named]
        return replace(self._rendered(_written(request, named), request.salt), prompt=whole.prompt)

    @cached_property
    def _pythonic(self) -> bool:
        """Whether calls belong into the content: LFM2's templates describe tools, and leave calls out."""
        hello = ChatInput(messages=[{"role": "user", "content": ""}])
        return self.caps["supports_tools"] and PYTHONIC in self._rendered(_written(hello, ()), "").preserved

    @cached_property
    def _calls_or_text(self) -> bool:
        """Whether the template leaves calls out where a turn has text too, as one for DeepSeek R1 does."""
        prompts = set()
        for zone in ("here", "there"):
            call = {"id": "abcdefghi", "function": {"name": "clock", "arguments": json.dumps({"zone": zone})}}
            turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
            reply = {"role": "tool", "tool_call_id": "abcdefghi", "name": "clock", "content": "noon"}
            chat = ChatInput(messages=[{"role": "user", "content": "When?"}, turn, reply])
            try:
                prompts.add(self._rendered(_written(chat, ()), "").prompt)
            except ConfigError:
                return False  # which says what it refuses when it is asked
        return len(prompts) == 1

    def _in_words(self, request: ChatInput, tools: Sequence[Mapping[str, Any]]) -> Rendered:
        """Render for a template without calls: a message describes the tools and the form of their calls."""
        messages = in_words(request.messages, tools, calls=False)
        whole = self._rendered(_written(replace(request, messages=messages, named=None), ()), request.salt)
        if not tools:
            return whole
        empty = [{"role": "user", "content": ""}]
        calls = _plain().render(replace(request, messages=empty, kwargs={}, continued=False))
        return replace(whole, grammar=calls.grammar, reader=calls.reader, ignored=calls.ignored)

    def _native(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Render, in a second attempt without user turns behind a tool's result: Mistral's templates refuse these."""
        try:
            return native.render(self._template, given)
        except ConfigError as err:
            joined = joined_results(given["messages"])
            if joined == given["messages"]:
                raise ConfigError(f"the chat template refuses these messages: {str(err)[:300]}") from err
        return self._native({**given, "messages": joined})

    def _render(self, request: str, salt: str) -> Rendered:
        given = json.loads(request)
        found, parser = self._native(given)
        if given["continued"] and found["grammar"] and not found["lazy"]:
            _check_begun(found["generation_prompt"])
        parses = given["tools"] or (found["thinks"] and given["reasoning"] != "none")
        functions = [tool["function"] for tool in given["tools"]] if found["grammar"] else []
        unwritten = [place for function in functions for place in rewriting.unwritten(function, found["grammar"])]
        grammar = Grammar(
            text=_strict(
                found["grammar"],
                called=given["tool_choice"] == "required",
                one=given["parallel"] is False,
                thinking=found["thinking"],
            ),
            lazy=found["lazy"],
            triggers=tuple(found["triggers"]),
            trigger_words=tuple(found["words"]),
            prefill=found["generation_prompt"],
            thinking=tuple(found["thinking"]),
        )
        return Rendered(
            prompt=found["prompt"],
            grammar=grammar if grammar.text else None,
            preserved=tuple(found["preserved"]),
            stops=tuple(found["stops"]),
            borders=tuple((role, text) for role, text in found["borders"]),
            thinks=found["thinks"],
            ignored=tuple(dict.fromkeys((*given["ignored"], *unwritten))),
            reader=partial(
                AnswerReader,
                partial(_parsed, parser) if parses else None,
                marks=self._marks | words(found["marks"]),
                fixed=frozenset(text for line in found["marks"].split("\n") if re.search(r"\W", text := line.strip())),
            ),
        )


def _check_begun(text: str) -> None:
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > MOST_OPEN:
            raise ConfigError(
                f"the answer that has begun has more than {MOST_OPEN} brackets open, the most where a tool must be "
                f"called: leave it out, or tool_choice"
            )


_CONTENT = (
    (re.compile(r"(?m)(?<=^root ::= )(.*?) until-\d+\?"), r"\1"),
    (re.compile(r"(?m)(?<=^root ::= )(.*) until-\d+(?= (?:space )?tool-call)"), r"\1"),
    # between marks that may be left out, as Kimi K3 has it
    (re.compile(r'(?m)(?<=^root ::= )(.*) until-\d+(?= "[^"]*"\? [\w-]*tool-call)'), r"\1"),
    # a message in front of the calls: Functionary's, and gpt-oss's among its reasoning
    (re.compile(r'(?m)(?<=^root ::= )(.*)\("all\\n" until-\d+ .* \| tools\)$'), r"\1tools"),
    (re.compile(r"(?m)(?<=^root ::= )\(start any\)\*"), "(start analysis)*"),
)
"""Where grammars of upstream's have content in front of calls, and what is left of that place."""

_WRAPPED = re.compile(r'\("([^"]*)" until-\d+ "[^"]*"\)\? (?=tool-call)')
"""Content between marks, or reasoning between those of `Grammar.thinking`."""

_SEVERAL = (
    (re.compile(r"(?m)^(tool-calls ::= )\(tool-call\?? space\)\+$"), r"\1tool-call space"),
    (re.compile(r'(?m)^((?:tools|kimi-k3-tool-call) ::= (?:"[^"]*" )?\([^()]*\))\+'), r"\1"),
)
"""Where these grammars have further calls, though one was asked for."""


def _strict(grammar: str, *, called: bool, one: bool, thinking: Sequence[str]) -> str:
    """Remove what a grammar of calls lets through: content before calls that must be made, and a second call.

    called: must there be a call? one: may there be no second? thinking: marks of reasoning, the first before it.
    """
    for pattern, left in (*(_CONTENT if called else ()), *(_SEVERAL if one else ())):
        grammar = pattern.sub(left, grammar)
    return _WRAPPED.sub(lambda found: found[0] if found[1] in thinking else "", grammar) if called else grammar


@lru_cache(1)
def _plain() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)


def _written(request: ChatInput, tools: Sequence[Mapping[str, Any]]) -> str:
    """Write what the library is asked, as JSON."""
    functions = [tool["function"] for tool in tools if tool["function"].get("parameters")]
    held = {
        function["name"]: rewriting.held(
            function["parameters"], f"tools.{function['name']}", strict=function.get("strict") is True, call=True
        )
        for function in functions
    }
    schemas.check_work((one.schema for one in held.values()), "tools")
    kwargs = dict(request.kwargs)
    if request.enable_thinking is not None:
        kwargs["enable_thinking"] = request.enable_thinking
    thinking = kwargs.get("enable_thinking", True)
    choice = "required" if request.named is not None and tools else request.choice
    return json.dumps(
        {
            "messages": [_message(message) for message in request.messages],
            "tools": [dict(tool) for tool in tools],
            "tool_choice": choice,
            "parallel": False if request.parallel is None and choice == "required" else request.parallel,
            "reasoning": request.reasoning,
            "enable_thinking": thinking if isinstance(thinking, bool) else True,
            "kwargs": kwargs,
            "continued": request.continued,
            "schemas": {name: one.schema for name, one in held.items()},
            "ignored": [place for one in held.values() for place in one.ignored],
        }
    )


_VALUES = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema with values, in which null is one."""


def _set(value: Any) -> Any:
    """Leave out fields that are null: some clients write each field that they know, and templates go through them."""
    if isinstance(value, Mapping):
        return {
            name: one if name in _VALUES else _set(one)
            for name, one in value.items()
            if one is not None or name in _VALUES[:2]
        }
    return [_set(one) for one in value] if isinstance(value, list) else value


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    out["content"] = message.get("content") or ""
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [plain_call(call) for call in calls]
    return out


def _parsed(parser: Any, text: str) -> Parsed | None:
    found = native.parse(parser, text)
    if not found.pop("understood"):
        return None
    return Parsed(**{**found, "calls": tuple(ParsedCall(**call) for call in found["calls"])})
