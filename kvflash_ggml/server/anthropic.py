"""`/v1/messages`: Anthropic's interface, translated to a chat and back. Claude Code speaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Event, Finished, Usage
from ..chat.reader import AnswerReader
from ..chat.values import Delta
from .chat import prepared, tokens_of
from .errors import ApiError, invalid
from .exchange import AnswerWriter, frame
from .front import Front
from .images import data_url, image_part
from .schema import ChatRequest, Objects, TranslatedRequest, Whole, _stop
from .turns import Turns, as_json, as_object, form_of, kind_of, parts_of, role_of, text_of

_CHANGING = re.compile(r"(?<=\bcch=)[0-9a-zA-Z]+")
"""In Claude Code's billing header, the first thing of each request: a number that differs in every one."""

_BILLING = "x-anthropic-billing-header:"

_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""What fields of a chat are called here."""

_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesRequest(TranslatedRequest):
    """A request for an answer, or for its tokens to be counted."""

    messages: Annotated[Objects, Field(min_length=1)]
    system: Any = None
    max_tokens: Whole = Field(-1, ge=-1)
    stop_sequences: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    top_k: Whole | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    # known to Anthropic's clients, without effect here
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


async def messages(front: Front, http: HttpRequest, asked: MessagesRequest) -> Response:
    """Answer messages as Anthropic's interface does."""
    chat = await front.work(http, _translated, front, http, asked)
    requests, rendered = await prepared(front, http, chat, kind="msg")
    answer = MessageAnswer(front.settings.alias, requests[0].id, chat, rendered.reader(), len(requests[0].tokens))
    return await front.respond(http, requests, [answer], each=1, stream=asked.stream)


async def count_tokens(front: Front, http: HttpRequest, asked: MessagesRequest) -> Response:
    """Count the tokens that `messages` would read. It takes no slot, and asks nothing of the engine's thread."""
    chat = await front.work(http, _translated, front, http, asked)
    return JSONResponse({"input_tokens": await tokens_of(front, http, chat)})


def _translated(front: Front, http: HttpRequest, asked: MessagesRequest) -> ChatRequest:
    """Translate a request into a chat. What is not understood is left out, and noted. ApiError names what is wrong."""
    turns = Turns(sees=front.prompts.sees)
    for i, part in enumerate(parts_of(asked.system, "system")):
        text = text_of(part, "text", f"system.{i}")
        if front.settings.steady_prompts and text.startswith(_BILLING):
            text = _CHANGING.sub("0", text)
        turns.system(text)
    tools = list(asked.tools or ())
    for i, message in enumerate(asked.messages):
        _message(turns, tools, message, f"messages.{i}")
    data = {
        "tools": _tools(turns, tools),
        "max_tokens": asked.max_tokens,
        "stop": list(asked.stop_sequences),
        "top_k": asked.top_k,
        **({} if asked.tool_choice is None else _choice(asked.tool_choice)),
        **_effort(turns, asked),
    }
    return turns.chat(http, asked, data, _NAMES)


def _message(turns: Turns, added: list[dict[str, Any]], message: dict[str, Any], where: str) -> None:
    """Add a message to the turns. added: gets the tools that come with it."""
    role, parts = role_of(message, where), parts_of(message.get("content"), f"{where}.content")
    if role == "system":
        turns.system("\n\n".join(filter(None, (_instruction(turns, added, part, where) for part in parts))))
        return
    for i, part in enumerate(parts):
        _block(turns, role, part, f"{where}.content.{i}")
    if not parts:
        turns.say(role, "")


def _block(turns: Turns, role: str, part: dict[str, Any], where: str) -> None:
    kind = kind_of(part)
    if kind == "text":
        turns.say(role, text_of(part, "text", where))
    elif kind == "thinking" and role == "assistant":
        turns.think(text_of(part, "thinking", where))
    elif kind == "tool_use" and role == "assistant":
        id, name = text_of(part, "id", where), text_of(part, "name", where)
        turns.call(id, name, as_json(part.get("input") or {}))
    elif kind == "tool_result":
        id, content = text_of(part, "tool_use_id", where), part.get("content")
        turns.result(id, [said for one in parts_of(content, f"{where}.content") for said in _result(turns, one, where)])
    elif kind == "image" and role == "user":
        turns.see(role, _image(part))
    elif (inner := _inside(part, where)) is not None:
        for one in inner:
            _block(turns, role, one, where)
    else:
        turns.leave_out(kind)


def _inside(part: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the title, text and images of a document or of a search result. None for a file, and others."""
    source, kind = part.get("source"), kind_of(part)
    if kind == "search_result":
        names, content = ("title", "source"), part.get("content")
    elif kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        names, content = ("title", "context"), source.get("data" if source["type"] == "text" else "content")
    else:
        return None
    heads = [text_of(part, name, where, "") for name in names]
    return [{"type": "text", "text": head} for head in heads if head] + parts_of(content, f"{where}.content")


def _instruction(turns: Turns, added: list[dict[str, Any]], part: dict[str, Any], where: str) -> str:
    """Return a part of a system message as text. Tools that Claude Code adds later join those at the front."""
    kind, tool = kind_of(part), part.get("tool")
    if kind == "text":
        return text_of(part, "text", f"{where}.content")
    if kind in ("tool_addition", "tool_removal") and isinstance(tool, dict):
        definition = tool.get("definition")
        if isinstance(definition, dict):
            added.append(definition)
        name = (definition if isinstance(definition, dict) else tool).get("name")
        return f"The tool {name} {'can be called now' if kind == 'tool_addition' else 'cannot be called any more'}."
    turns.leave_out(kind)
    return ""


def _image(part: dict[str, Any]) -> dict[str, Any]:
    source: Any = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return image_part(data_url(source.get("media_type"), source.get("data")))
    return image_part(source.get("url") if isinstance(source, dict) else None)


def _result(turns: Turns, part: dict[str, Any], where: str) -> Iterator[str | dict[str, Any]]:
    """Yield a part of a tool's result: what a tool has sent must not end the conversation for good."""
    kind = kind_of(part)
    if kind == "image" and turns.sees:
        yield _image(part)
    elif kind == "text":
        yield text_of(part, "text", f"{where}.content")
    elif kind == "tool_reference":
        yield f"The tool {part.get('tool_name')} can be called now."
    elif (inner := _inside(part, where)) is not None:
        for one in inner:
            yield from _result(turns, one, where)
    else:
        yield turns.leave_out(f"tool_result.{kind}")


def _tools(turns: Turns, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate tools into functions; tools that Anthropic's servers have themselves are left out."""
    made, names = [], set()
    for i, tool in enumerate(tools):
        if "input_schema" not in tool:
            if tool.get("type") in (None, "custom"):
                raise invalid(f"tools.{i}.input_schema", "it is missing")
            turns.leave_out(f"tools.{kind_of(tool)}")
            continue
        if str(tool.get("name")) in names:
            continue
        names.add(str(tool.get("name")))
        function = {
            "name": text_of(tool, "name", f"tools.{i}"),
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
        }
        made.append({"type": "function", "function": function})
    return made


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind, alone = text_of(choice, "type", "tool_choice"), choice.get("disable_parallel_tool_use")
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"it is {kind[:40]!r}, and must be 'auto', 'any', 'tool' or 'none'")
    wanted: Any = "required" if kind == "any" else kind
    if kind == "tool":
        wanted = {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}
    return {
        "tool_choice": wanted,
        "parallel_tool_calls": not alone if isinstance(alone, bool) else alone,
    }


def _effort(turns: Turns, asked: MessagesRequest) -> dict[str, Any]:
    """Return whether to think, and the form of the answer."""
    form = (asked.output_config or {}).get("format")  # once it was a field of its own
    given: dict[str, Any] = {"response_format": form_of(asked.output_format if form is None else form)}
    thinking = text_of(asked.thinking or {}, "type", "thinking", "")
    if thinking in ("enabled", "disabled"):
        given["enable_thinking"] = thinking == "enabled"
    elif thinking not in ("", "adaptive"):
        turns.leave_out(f"thinking.{thinking[:40]}")
    return given


class MessageAnswer(AnswerWriter):
    """Events of an answer as Anthropic's: blocks of text, thinking and calls, one after the other."""

    def __init__(self, alias: str, id: str, asked: ChatRequest, reader: AnswerReader, prompt: int) -> None:
        super().__init__(asked, reader)
        self._alias, self._id, self._prompt = alias, id.replace("-", "_"), prompt
        self._index = -1
        self._open: tuple[str, int | None] | None = None  # the block that is being written: its kind, and its call

    # --- as a whole

    def choice(self, finished: Finished) -> dict[str, Any]:
        said = self._said(finished)
        blocks: list[dict[str, Any]] = []
        if said.reasoning:
            blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.content:
            blocks.append({"type": "text", "text": said.content})
        for call in said.calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": as_object(call.arguments)})
        return {**self._message(finished.usage), "content": blocks, **self._end(finished)}

    # --- as a stream

    def opening(self) -> bytes:
        """Begin the message. How much was not read again is known at its end only."""
        return _event("message_start", message=self._message(Usage(prompt=self._prompt))) + self.ping()

    def ping(self, doing: str = "") -> bytes:
        return _event("ping")

    def frames(self, event: Event) -> Iterator[bytes]:
        for delta in self._deltas(event):
            yield from self._delta(delta)
        if isinstance(event, Finished):
            yield from self._close()
            usage = _usage(event.usage)
            yield _event("message_delta", delta=self._end(event), usage=usage, **self._report(event))
            yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        held = b"".join(frame for delta in self._reader.push("", end=True) for frame in self._delta(delta))
        return held + b"".join(self._close()) + _event("error", error=error.anthropics_body["error"])

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.index is not None:
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            yield from self._start(("tool_use", delta.index), block)
            if delta.arguments:
                yield self._more({"type": "input_json_delta", "partial_json": delta.arguments})
        elif delta.reasoning:
            yield from self._start(("thinking", None), {"type": "thinking", "thinking": "", "signature": ""})
            yield self._more({"type": "thinking_delta", "thinking": delta.reasoning})
        else:
            yield from self._start(("text", None), {"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": delta.content})

    def _start(self, what: tuple[str, int | None], block: dict[str, Any]) -> Iterator[bytes]:
        if self._open != what:
            yield from self._close()
            self._open = what
            self._index += 1
            yield _event("content_block_start", index=self._index, content_block=block)

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open[0] == "thinking":
            yield self._more({"type": "signature_delta", "signature": ""})
        yield _event("content_block_stop", index=self._index)
        self._open = None

    def _message(self, took: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._alias,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(took),
        }

    def _end(self, finished: Finished) -> dict[str, Any]:
        reason = _REASONS.get(finished.reason, finished.reason)
        if finished.reason == "stop" and self._reader.called:
            reason = "tool_use"
        elif finished.stop in self._asked.stop:  # and not a template's own
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": finished.stop if reason == "stop_sequence" else None}


def _usage(took: Usage) -> dict[str, Any]:
    """Report the prompt's tokens that were read, and those that were known. All are kept; none counts as created."""
    return {
        "input_tokens": took.prompt - took.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": took.cached,
        "output_tokens": took.generated,
    }


def _event(kind: str, **more: Any) -> bytes:
    return frame(more, kind)
