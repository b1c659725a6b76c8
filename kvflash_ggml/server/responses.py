"""`/v1/responses`: OpenAI's newer interface, translated to a chat and back. Codex speaks nothing else."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Event, Finished, Started, Usage
from ..chat.reader import AnswerReader
from ..chat.values import Call, Delta
from . import bodies
from .chat import counted, prepared, tokens_of
from .errors import ApiError, invalid
from .exchange import AnswerWriter, frame
from .front import Front
from .images import image_part
from .kept import Kept
from .schema import ChatRequest, Objects, TranslatedRequest, Whole
from .turns import Turns, as_json, form_of, kind_of, parts_of, role_of, text_of

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")

_OURS = "kvflash:"
"""How reasoning begins that a client carries to and fro as `encrypted_content`. It is not encrypted, only opaque: some
clients send nothing else of it, and the prompt would differ from what was read.
"""

_CARRIED = "reasoning.encrypted_content"
"""What a client asks for with `include` to be given that."""

_NAMES = {"messages": "input", "reasoning_effort": "reasoning.effort", "response_format": "text.format"}
"""What fields of a chat are called here."""

_Told = Annotated[str, Field(max_length=512)]
"""Comes back in each event that tells of the whole response; OpenAI's bound."""


class ResponsesRequest(TranslatedRequest):
    """A request for a response, or for its tokens to be counted."""

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None  # refused
    max_output_tokens: Whole = Field(-1, ge=-1)
    store: bool = True
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, _Told] | None = Field(None, max_length=16)
    # known to OpenAI's clients, without effect here
    client_metadata: dict[str, Any] | None = None
    include: list[Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class ClientTool:
    """What a function of the chat is to the client. custom: its input is a text."""

    name: str
    namespace: str | None = None
    custom: bool = False


async def responses(front: Front, http: HttpRequest, asked: ResponsesRequest) -> Response:
    """Answer items, or go on from a response, as OpenAI's newer interface does."""
    kept, items = await _items(front, http, asked)
    chat, tools = await front.work(http, _translated, front, http, asked, items)
    requests, rendered = await prepared(front, http, chat, kind="resp")
    (request,) = requests
    new = await front.work(http, lambda: as_json(_given(asked)).encode())

    def keep(response: dict[str, Any], conversation: str) -> None:
        if asked.store and request.reuse:
            bare = {name: value for name, value in response.items() if name != "output"}
            front.items.keep(
                answer.id,
                Kept(
                    items=(*kept, new, as_json(response["output"]).encode()),
                    conversation=conversation,
                    salt=request.salt,
                    key=request.key,
                    response=as_json(bare).encode(),
                ),
            )

    answer = ResponseAnswer(front.settings.alias, request.id, asked, tools, rendered.reader(), keep)
    return await front.respond(http, requests, [answer], each=1, stream=asked.stream)


async def retrieve(front: Front, http: HttpRequest) -> Response:
    """Return a response that is kept, as it was told. ApiError 404 for another one."""
    kept = await _named(front, http)
    return Response(b'%s, "output": %s}' % (kept.response[:-1], kept.items[-1]), media_type="application/json")


async def erase(front: Front, http: HttpRequest) -> Response:
    """Forget a response. Its text stays in its conversation. ApiError 404 for one that is not kept."""
    await _named(front, http)
    id = http.path_params["id"]
    front.items.drop(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def _named(front: Front, http: HttpRequest) -> Kept:
    """Return what is kept of the response that the path names. ApiError 404."""
    id = http.path_params["id"]
    kept = await _kept(front, http, id)
    if kept is None:
        message = f"the response {id[:80]!r} is not kept, or not any more: ask again, with store: true"
        raise ApiError(404, message, code="response_not_found")
    return kept


async def input_tokens(front: Front, http: HttpRequest, asked: ResponsesRequest) -> Response:
    """Count the tokens that `responses` would read. It takes no slot."""
    _, items = await _items(front, http, asked)
    chat, _ = await front.work(http, _translated, front, http, asked, items)
    return counted(await tokens_of(front, http, chat))


def _given(asked: ResponsesRequest) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input


async def _kept(front: Front, http: HttpRequest, id: str) -> Kept | None:
    """Return what is kept of a response; None if it is unknown, not for this client, or its conversation was erased."""
    access, conversations = front.access(http), front.scheduler.conversations
    kept = front.items.find(id, access)
    # one that moves just now may be seen nowhere from here
    if kept is None or not (
        conversations.keeps(kept.conversation, access)
        or await front.engine(lambda: conversations.keeps(kept.conversation, access), looks=True)
    ):
        return None
    return kept


async def _items(
    front: Front, http: HttpRequest, asked: ResponsesRequest
) -> tuple[tuple[bytes, ...], list[dict[str, Any]]]:
    """Return what is kept of the response that a request continues; and all items, those of the request at the end.

    ApiError if it is not known, or if all items are more than a client could send.
    """
    id = asked.previous_response_id
    if asked.conversation is not None:  # left out, the model would answer without what went before
        raise invalid(
            "conversation", "conversations are not kept by a name here: send previous_response_id, or all items"
        )
    if id is None:
        return (), _given(asked)
    kept = await _kept(front, http, id)
    if kept is None:
        raise ApiError(
            400,
            f"previous_response_id: {id[:80]!r} is not kept, or not any more: send all items of the conversation",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if kept.size > front.settings.max_body:
        raise ApiError(
            413,
            f"previous_response_id: the items so far have {kept.size} bytes, and {front.settings.max_body} is the "
            f"most: shorten the conversation, or start the server with a larger --max-body",
            code="body_too_large",
            param="previous_response_id",
        )
    earlier = await front.work(http, lambda: front.loads(kept.json()))
    return kept.items, [*earlier, *_given(asked)]


def _translated(
    front: Front, http: HttpRequest, asked: ResponsesRequest, items: Sequence[dict[str, Any]]
) -> tuple[ChatRequest, dict[str, ClientTool]]:
    """Translate a request into a chat, and say what its functions are. What is not understood is left out, and noted.
    ApiError.
    """
    turns = Turns(sees=front.prompts.sees)
    turns.system(asked.instructions or "")
    given: list[dict[str, Any]] = list(asked.tools or ())
    for i, item in enumerate(items):
        if item.get("type") == "additional_tools":
            given += _objects(item.get("tools"), f"input.{i}.tools")
        else:
            _item(turns, item, f"input.{i}")
    functions, tools = _functions(turns, given)
    for one in asked.include or ():
        if one != _CARRIED:
            turns.leave_out(f"include.{str(one)[:40]}")
    data = {
        "tools": functions,
        "max_tokens": asked.max_output_tokens,
        "parallel_tool_calls": asked.parallel_tool_calls,
        **_choice(turns, asked.tool_choice),
        **_form(asked),
    }
    if asked.truncation is not None:
        asked.kvflash = asked.kvflash.overflowing(roll=asked.truncation == "auto")
    asked.truncation = "auto" if front.rolls(asked.kvflash) else "disabled"
    return turns.chat(http, asked, data, _NAMES), tools


def _item(turns: Turns, item: dict[str, Any], where: str) -> None:
    kind = kind_of(item) if "type" in item else "message"
    if kind == "message":
        _message(turns, item, where)
    elif kind in ("function_call", "custom_tool_call"):
        id, name = text_of(item, "call_id", where), text_of(item, "name", where)
        space = text_of(item, "namespace", where, "")
        if kind == "function_call":
            arguments = text_of(item, "arguments", where)
        else:
            arguments = as_json({"input": text_of(item, "input", where)})
        turns.call(id, f"{space}__{name}" if space else name, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        parts = parts_of(item.get("output"), f"{where}.output")
        told = [_image(part) if turns.sees and _shows(part) else _said(turns, part, where) for part in parts]
        turns.result(text_of(item, "call_id", where), told)
    elif kind == "reasoning":
        turns.think(_reasoning(item, where))
    else:
        turns.leave_out(f"input.{kind}")


def _message(turns: Turns, item: dict[str, Any], where: str) -> None:
    role, parts = role_of(item, where), parts_of(item.get("content"), f"{where}.content")
    for shows, run in groupby(parts, lambda part: role == "user" and _shows(part)):
        if shows:
            for part in run:
                turns.see("user", _image(part))
            continue
        text = "".join(_said(turns, part, where) for part in run)
        if role == "system":
            turns.system(text)
        else:
            turns.say(role, text)
    if not parts and role != "system":
        turns.say(role, "")


def _shows(part: dict[str, Any]) -> bool:
    return kind_of(part) == "input_image"


def _image(part: dict[str, Any]) -> dict[str, Any]:
    return image_part(part.get("image_url"))


def _said(turns: Turns, part: dict[str, Any], where: str) -> str:
    kind = kind_of(part)
    if kind in _TEXTS:
        return text_of(part, "refusal" if kind == "refusal" else "text", where)
    return turns.leave_out(kind)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Read reasoning from its content, from what this server gave to be carried along, or from its summary."""
    for name in ("content", "summary"):
        sealed = item.get("encrypted_content")
        if name == "summary" and isinstance(sealed, str) and sealed.startswith(_OURS):
            try:
                return base64.b64decode(sealed[len(_OURS) :], validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                pass
        texts = [text_of(part, "text", where) for part in parts_of(item.get(name), f"{where}.{name}")]
        if any(texts):
            return "".join(texts)
    return ""


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return value
    raise invalid(where, "it must be a list of objects")


def _functions(turns: Turns, given: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, ClientTool]]:
    """Translate tools into functions, and say by name what each was. OpenAI's own servers' tools are left out."""
    made: list[dict[str, Any]] = []
    tools: dict[str, ClientTool] = {}

    def add(tool: dict[str, Any], space: str | None) -> None:
        kind, name = kind_of(tool), text_of(tool, "name", "tools", "")
        if kind == "namespace" and space is None:
            for inner in _objects(tool.get("tools"), "tools.tools"):
                add(inner, name)
            return
        if kind not in ("function", "custom"):
            turns.leave_out(f"tools.{kind}")
            return
        flat = f"{space}__{name}" if space else name
        if flat in tools:
            return
        tools[flat] = ClientTool(name, space, custom=kind == "custom")
        function = {"name": flat, "description": tool.get("description"), "parameters": tool.get("parameters")}
        if kind == "custom":
            function |= {"description": _explained(tool), "parameters": _ONE_TEXT}
        made.append({"type": "function", "function": function})

    for tool in given:
        add(tool, None)
    return made, tools


_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _explained(tool: dict[str, Any]) -> str:
    """Describe a tool whose input is a text, with the grammar of that text if it has one."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    said = text_of(tool, "description", "tools", "")
    return f"{said}\n\nThe input follows this grammar:\n{grammar}" if isinstance(grammar, str) else said


def _choice(turns: Turns, choice: str | dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(choice, dict):
        return {} if choice is None else {"tool_choice": choice}
    kind, name = kind_of(choice), choice.get("name")
    if kind in ("function", "custom"):
        space = choice.get("namespace")
        return {"tool_choice": {"type": "function", "function": {"name": f"{space}__{name}" if space else name}}}
    turns.leave_out(f"tool_choice.{kind}")
    return {"tool_choice": "required"} if choice.get("mode") == "required" else {}


def _chosen(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return a choice of tools as `_choice` has read it."""
    if isinstance(choice, str):
        return choice
    if choice.get("type") in ("function", "custom"):
        return {name: choice[name] for name in ("type", "name")}
    return "required" if choice.get("mode") == "required" else "auto"


def _form(asked: ResponsesRequest) -> dict[str, Any]:
    """Return whether to think, and the form of the answer."""
    effort = (asked.reasoning or {}).get("effort")
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinking, "response_format": form_of((asked.text or {}).get("format"))}


class ResponseAnswer(AnswerWriter):
    """Events of an answer as OpenAI's: items of reasoning, text and calls, one after the other.

    tools: what the chat's functions are to the client. keep: called with the whole response, and the name of the
    conversation that has it.
    """

    def __init__(
        self,
        alias: str,
        id: str,
        asked: ResponsesRequest,
        tools: Mapping[str, ClientTool],
        reader: AnswerReader,
        keep: Callable[[dict[str, Any], str], None],
    ) -> None:
        super().__init__(asked, reader)
        self.id = id.replace("-", "_")
        self._alias, self._tools, self._keep = alias, tools, keep
        self._created = int(time.time())
        self._conversation = ""
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: tuple[str, int | None] | None = None  # the item that is being written: its kind, and its call
        self._written: list[str] = []

    # --- as a whole

    def take(self, event: Event) -> None:
        self._begun(event)
        super().take(event)

    def choice(self, finished: Finished) -> dict[str, Any]:
        said = self._said(finished)
        items = []
        if said.reasoning:
            items.append(self._reasoning(said.reasoning))
        if said.content:
            items.append(self._message(said.content))
        items += [self._call(call) for call in said.calls]
        for item in items[-1:]:
            item["status"] = _ended(finished)[0]
        response = self._response(*_ended(finished), output=items, usage=_usage(finished.usage))
        self._keep(response, self._conversation)
        return response

    # --- as a stream

    def opening(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def ping(self, doing: str) -> bytes:
        """Write an event, since Codex gives up where none comes for five minutes, whatever else does."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def frames(self, event: Event) -> Iterator[bytes]:
        self._begun(event)
        for delta in self._deltas(event):
            yield from self._delta(delta)
        if isinstance(event, Finished):
            status, why = _ended(event)
            yield from self._close(status)
            response = self._response(status, why, output=self._output, usage=_usage(event.usage))
            self._keep(response, self._conversation)
            yield self._event(f"response.{status}", response=response | self._report(event))

    def failed(self, error: ApiError) -> bytes:
        held = b"".join(frame for delta in self._reader.push("", end=True) for frame in self._delta(delta))
        held += b"".join(self._close("incomplete"))
        why = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response("failed"), "output": self._output, "error": why}
        return held + self._event("response.failed", response=response)

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.index is not None:
            yield from self._start(("call", delta.index), Call(id=delta.id, name=delta.name, arguments=""))
            self._written.append(delta.arguments)
            if delta.arguments and self._item["type"] == "function_call":
                yield self._at("response.function_call_arguments.delta", delta=delta.arguments)
            return
        kind, text = ("reasoning", delta.reasoning) if delta.reasoning else ("message", delta.content)
        yield from self._start((kind, None), None)
        self._written.append(text)
        more: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "reasoning":
            yield self._at("response.reasoning_text.delta", **more)
        else:
            yield self._at("response.output_text.delta", **more, logprobs=[])

    def _start(self, what: tuple[str, int | None], call: Call | None) -> Iterator[bytes]:
        if self._open == what:
            return
        yield from self._close()
        self._open, self._written = what, []
        if call is not None:
            self._opened = call
            self._item = self._call(call, status="in_progress")
        else:
            self._item = self._reasoning("") if what[0] == "reasoning" else self._message("")
            self._item |= {"status": "in_progress", "content": []}
        yield self._at("response.output_item.added", item=self._item)
        if call is None:
            part = _text("reasoning_text" if what[0] == "reasoning" else "output_text", "")
            yield self._at("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        (kind, _), self._open, text, id = self._open, None, "".join(self._written), self._item["id"]
        if kind == "call":
            item = self._call(Call(id=self._opened.id, name=self._opened.name, arguments=text), id=id)
            if item["type"] == "function_call":
                name = {"name": item["name"], "arguments": text}
                yield self._at("response.function_call_arguments.done", **name)
            else:
                yield self._at("response.custom_tool_call_input.delta", delta=item["input"])
                yield self._at("response.custom_tool_call_input.done", input=item["input"])
        else:
            item = self._reasoning(text, id=id) if kind == "reasoning" else self._message(text, id=id)
            (part,) = item["content"]
            if kind == "reasoning":
                yield self._at("response.reasoning_text.done", content_index=0, text=text)
            else:
                yield self._at("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._at("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._at("response.output_item.done", item=item)
        self._output.append(item)

    def _at(self, kind: str, **more: Any) -> bytes:
        """Write an event of the item that is being written."""
        where = {} if "item" in more else {"item_id": self._item["id"]}
        return self._event(kind, **where, output_index=len(self._output), **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return frame({"sequence_number": self._number - 1, **more}, kind)

    # --- items

    def _begun(self, event: Event) -> None:
        if isinstance(event, Started):
            self._conversation = event.conversation

    def _message(self, text: str, *, id: str | None = None) -> dict[str, Any]:
        content = [_text("output_text", text)]
        return {
            "id": id or _id("msg"), "type": "message", "role": "assistant", "status": "completed", "content": content,
        }  # fmt: skip

    def _reasoning(self, text: str, *, id: str | None = None) -> dict[str, Any]:
        item = {"id": id or _id("rs"), "type": "reasoning", "summary": [], "status": "completed"}
        if _CARRIED in (self._asked.include or ()):
            item["encrypted_content"] = _OURS + base64.b64encode(text.encode()).decode()
        return {**item, "content": [_text("reasoning_text", text)]}

    def _call(self, call: Call, *, id: str | None = None, status: str = "completed") -> dict[str, Any]:
        tool = self._tools.get(call.name, ClientTool(call.name))
        item = {
            "id": id or _id("ctc" if tool.custom else "fc"),
            "call_id": call.id,
            "name": tool.name,
            "status": status,
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.custom:
            return {**item, "type": "custom_tool_call", "input": _input(call.arguments)}
        return {**item, "type": "function_call", "arguments": call.arguments}

    def _response(
        self,
        status: str,
        why: str | None = None,
        *,
        output: Sequence[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the response. The tools and the schema, which clients know, are not told again."""
        asked, form = self._asked, (self._asked.text or {}).get("format") or {"type": "text"}
        of_schema = {"name": str(form.get("name") or "")[:64], "schema": {}}  # clients want it to have both
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None if why is None else {"reason": why},
            "instructions": None,
            "max_output_tokens": None if asked.max_output_tokens < 0 else asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._alias,
            "output": list(output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store,
            "temperature": asked.temperature,
            "text": {"format": {"type": form["type"], **(of_schema if form["type"] == "json_schema" else {})}},
            "tool_choice": _chosen(asked.tool_choice or "auto"),
            "tools": [],
            "top_p": asked.top_p,
            "truncation": self._asked.truncation,
            "usage": usage,
        }


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _text(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _ended(finished: Finished) -> tuple[str, str | None]:
    return ("incomplete", "max_output_tokens") if finished.reason == "length" else ("completed", None)


def _usage(took: Usage) -> dict[str, Any]:
    return {
        "input_tokens": took.prompt,
        "input_tokens_details": {"cached_tokens": took.cached, "cache_write_tokens": 0},
        "output_tokens": took.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": took.prompt + took.generated,
    }


def _input(arguments: str) -> str:
    """Return the text that a custom tool is called with; what is none stays as it was written."""
    try:
        value = bodies.loads(arguments.encode())
    except ValueError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments
