"""`/api/...`: Ollama's interface, translated to a chat or a completion and back. Open WebUI and editors look for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Event, Finished
from ..chat.reader import AnswerReader
from .chat import prepared
from .completions import prompt_tokens
from .errors import ApiError, invalid
from .exchange import AnswerWriter, dumps
from .fields import NAMES, note
from .front import Front
from .images import data_url, image_part
from .intake import Intake
from .schema import ChatRequest, Objects, PoolFields, RawRequest, _Asked, _Sampled, parse
from .turns import as_json, as_object, text_of

VERSION = "0.12.6"
"""The version of Ollama whose interface this is. Editors refuse an older one: Copilot wants 0.6.4."""

NEVER = "2100-01-01T00:00:00Z"
"""When the model is unloaded."""

_OWN = ("kvflash", "logit_bias", "model", "n", "response_format", "stream", "stream_options")
"""Fields of a request that `options` cannot set."""

_OPTIONS = frozenset(_Sampled.model_fields) - frozenset(_OWN)


class _OllamaRequest(_Asked):
    """keep_alive: without effect, since the model stays loaded."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool | None = None
    keep_alive: str | float | None = None
    kvflash: PoolFields = PoolFields.model_construct()


class OllamaChatRequest(_OllamaRequest):
    messages: Objects = Field(default_factory=list)
    tools: Objects | None = None


class GenerateRequest(_OllamaRequest):
    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool = False
    images: list[str] | None = None


class ShowRequest(_Asked):
    name: str | None = None
    verbose: bool = False


# --- what there is


async def version(front: Intake, request: HttpRequest) -> Response:
    """Tell the version of Ollama whose interface this is."""
    return JSONResponse({"version": VERSION})


async def tags(front: Front, request: HttpRequest) -> Response:
    """List the models, as Ollama does."""
    return JSONResponse({"models": [_entry(front)]})


async def ps(front: Front, request: HttpRequest) -> Response:
    """List the models that are loaded, as Ollama does."""
    loaded = {**_entry(front), "expires_at": NEVER, "context_length": front.scheduler.model.n_ctx}
    return JSONResponse({"models": [loaded]})


async def show(front: Front, http: HttpRequest, asked: ShowRequest) -> Response:
    """Describe a model, as Ollama does."""
    wanted, alias, facts = asked.model or asked.name, front.settings.alias, front.prompts.facts
    if wanted is not None and wanted.removesuffix(":latest") not in (alias, *front.settings.aliases):
        raise ApiError(404, f"model {wanted[:80]!r} not found: {alias!r} is served", code="model_not_found")
    template, n_ctx = front.prompts.template or "", front.scheduler.model.n_ctx
    able = {"insert": bool(front.prompts.gap), "embedding": front.embedder is not None}
    return JSONResponse(shown(_entry(front), facts, template=template, n_ctx=n_ctx, able=able))


def shown(
    listed: Mapping[str, Any], facts: Mapping[str, Any], *, template: str, n_ctx: int, able: Mapping[str, bool]
) -> dict[str, Any]:
    """Return what `/api/show` tells of a model. listed: its `entry`. able: capabilities beside those of every model."""
    architecture, able = facts.get("architecture", ""), {"thinking": "think" in template, **able}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": listed["details"],
        "model_info": {"general.architecture": architecture, f"{architecture}.context_length": n_ctx},
        "capabilities": ["completion", "tools", *(name for name, can in able.items() if can)],
        "modified_at": listed["modified_at"],
    }


def _entry(front: Front) -> dict[str, Any]:
    return entry(front.settings.alias, front.created, front.prompts.facts)


def entry(name: str, created: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model for `/api/tags`."""
    family = facts.get("architecture", "")
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(created),
        "size": facts.get("size", 0),
        "digest": "",
        "details": {
            "parent_model": "", "format": "gguf", "family": family, "families": [family],
            "parameter_size": facts.get("size_label", ""), "quantization_level": "unknown",
        },
    }  # fmt: skip


# --- answers


async def chat(front: Front, http: HttpRequest, asked: OllamaChatRequest) -> Response:
    """Answer a chat in lines of JSON, as Ollama does."""
    if not asked.messages:
        return silent(front.settings.alias, "load", generate=False)
    data = {"messages": await front.work(http, _messages, asked.messages), "tools": asked.tools}
    return await _chat(front, http, asked, data, generate=False)


async def generate(front: Front, http: HttpRequest, asked: GenerateRequest) -> Response:
    """Answer a prompt in lines of JSON, as Ollama does."""
    if not (asked.prompt or asked.suffix):
        return silent(front.settings.alias, "load", generate=True)
    if not asked.suffix and not asked.raw and front.prompts.template is not None:
        said = {"system": asked.system, "user": asked.prompt}
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said.items() if text]
        if asked.images:
            messages[-1]["content"] = _seen(asked.images, asked.prompt)
        return await _chat(front, http, asked, {"messages": messages}, generate=True)
    if asked.images:
        raise invalid("images", "they are part of a chat: leave out raw and suffix")
    raw = await front.work(http, _translated, front, http, RawRequest, asked, {"prompt": asked.prompt})
    tokens = await front.work(http, prompt_tokens, front, asked.prompt, suffix=asked.suffix or None)
    grammar = await front.format_grammar(http, raw)
    more: Any = {"max_tokens": raw.n_predict, "grammar": grammar}
    request = await front.work(http, front.make, http, raw, tokens, kind="gen", **more)
    answer = OllamaAnswer(front.settings.alias, raw, AnswerReader(), generate=True)
    return await front.respond(http, [request], [answer], each=1, stream=asked.stream)


async def _chat(
    front: Front, http: HttpRequest, asked: _OllamaRequest, data: dict[str, Any], *, generate: bool
) -> Response:
    if asked.think is not None:
        data["enable_thinking"] = asked.think is not False
        data["reasoning_effort"] = asked.think if isinstance(asked.think, str) else None
    chat = await front.work(http, _translated, front, http, ChatRequest, asked, data)
    requests, rendered = await prepared(front, http, chat, kind="gen" if generate else "chat")
    answer = OllamaAnswer(front.settings.alias, chat, rendered.reader(), generate=generate)
    return await front.respond(http, requests, [answer], each=1, stream=asked.stream)


def _translated(
    front: Front, http: HttpRequest, kind: type[Any], asked: _OllamaRequest, data: Mapping[str, Any]
) -> Any:
    """Translate into a request of another kind. ApiError names what is no such request."""
    form: dict[str, Any] | None = None
    if isinstance(asked.format, dict):
        form = {"type": "json_schema", "json_schema": {"schema": asked.format}}
    elif asked.format:
        form = {"type": "json_object"}
    options = {name: value for name, value in (asked.options or {}).items() if value is not None}
    most = options.pop("num_predict", -1)
    if type(most) is int and most < 0:  # -2 is "until the context is full"
        most = -1
    length = options.get("num_ctx")
    if type(length) is int and length <= front.scheduler.model.n_ctx:
        options.pop("num_ctx")
    foreign = [name for name in options if name in kind.model_fields and name not in _OPTIONS]
    note(http, [f"options.{name}"[:48] for name in foreign])
    options = {name: value for name, value in options.items() if name not in foreign}
    strict, names = front.settings.strict, {name: f"options.{name}" for name in options}
    names |= {"n_predict": "options.num_predict", "response_format": "format"}
    fields = {**options, **data, "n_predict": most, "response_format": form}
    made, ignored = parse(kind, fields, strict=strict, names=names)
    made.kvflash = asked.kvflash if asked.truncate is None else asked.kvflash.overflowing(roll=asked.truncate)
    http.scope[NAMES] = {**names, "messages": "prompt" if isinstance(asked, GenerateRequest) else "messages"}
    note(http, [f"options.{name}" if name.partition("=")[0] in options else name for name in ignored])
    return made


def _seen(images: Any, text: str) -> list[dict[str, Any]]:
    """Make parts of a message of images in base64, and the text behind them."""
    given = images if isinstance(images, list) else [images]
    return [*(image_part(data_url("image", one)) for one in given), {"type": "text", "text": text}]


def _messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate messages into OpenAI's: arguments of calls are text, and a result names its call."""
    made: list[dict[str, Any]] = []
    told: list[tuple[str, str]] = []  # identifier and name of each call
    waits: dict[str, deque[int]] = {"": deque()}  # calls for a result, by name; all of them by ""
    answered: set[int] = set()
    for i, message in enumerate(given):
        where = f"messages.{i}"
        one: dict[str, Any] = {"role": message.get("role"), "content": text_of(message, "content", where, "")}
        if message.get("images"):
            one["content"] = _seen(message["images"], one["content"])
        if message.get("thinking"):
            one["reasoning_content"] = text_of(message, "thinking", where)
        calls = []
        for call in _calls(message.get("tool_calls"), where):
            id = text_of(call, "id", f"{where}.tool_calls", "") or f"call_{len(told) + 1}"
            arguments = call["function"].get("arguments") or {}
            function = {
                "name": text_of(call["function"], "name", f"{where}.tool_calls"),
                "arguments": arguments if isinstance(arguments, str) else as_json(arguments),
            }
            calls.append({"id": id, "type": "function", "function": function})
            for queue in (waits[""], waits.setdefault(function["name"], deque())):
                queue.append(len(told))
            told.append((id, function["name"]))
        if calls:
            one["tool_calls"] = calls
        if one["role"] == "tool":
            name = text_of(message, "tool_name", where, "") or text_of(message, "name", where, "")
            queue, id = waits.get(name, deque()), ""
            while queue and not id:
                if (number := queue.popleft()) not in answered:
                    answered.add(number)
                    id, name = told[number]
            one |= {"tool_call_id": text_of(message, "tool_call_id", where, "") or id, "name": name}
        made.append(one)
    return made


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    valid = isinstance(value or [], list) and all(
        isinstance(one, dict) and isinstance(one.get("function"), dict) for one in value or ()
    )
    if not valid:
        raise invalid(f"{where}.tool_calls", "each has a function with a name and arguments")
    return value or []


def silent(alias: str, reason: str, *, generate: bool) -> Response:
    """Answer a request for nothing, by which clients load or unload a model. generate: of `/api/generate`."""
    said = {"response": ""} if generate else {"message": {"role": "assistant", "content": ""}}
    return JSONResponse({"model": alias, "created_at": _now(), **said, "done": True, "done_reason": reason})


class OllamaAnswer(AnswerWriter):
    """Events as Ollama's objects, each of a stream on a line of its own. generate: in the words of `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, alias: str, asked: _Sampled, reader: AnswerReader, *, generate: bool) -> None:
        super().__init__(asked, reader)
        self._alias, self._generate = alias, generate

    def choice(self, finished: Finished) -> dict[str, Any]:
        said = self._said(finished)
        return self._object(said.content, said.reasoning, self._called(), finished)

    def ping(self, doing: str) -> bytes:
        """Write a line that says nothing. Every line must be an object: clients parse each."""
        return self._line()

    def frames(self, event: Event) -> Iterator[bytes]:
        for delta in self._deltas(event):
            if delta.index is None:  # calls are told when they are complete
                yield self._line(delta.content or "", delta.reasoning or "")
        if isinstance(event, Finished):
            if calls := self._called():
                yield self._line(calls=calls)
            yield self._line(finished=event)

    def failed(self, error: ApiError) -> bytes:
        return f"{dumps(error.ollamas_body)}\n".encode()

    def _called(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "function": {"name": call.name, "arguments": as_object(call.arguments)}}
            for call in self._reader.said.calls
        ]

    def _line(
        self, text: str = "", thinking: str = "", calls: Sequence[Any] = (), finished: Finished | None = None
    ) -> bytes:
        return f"{dumps(self._object(text, thinking, calls, finished))}\n".encode()

    def _object(self, text: str, thinking: str, calls: Sequence[Any], finished: Finished | None) -> dict[str, Any]:
        head, thought = {"model": self._alias, "created_at": _now()}, {"thinking": thinking} if thinking else {}
        if self._generate:
            said: dict[str, Any] = {"response": text, **thought}
        else:
            called = {"tool_calls": list(calls)} if calls else {}
            said = {"message": {"role": "assistant", "content": text, **thought, **called}}
        if finished is None:
            return {**head, **said, "done": False}
        return {**head, **said, **_took(finished), **self._report(finished)}


def _took(finished: Finished) -> dict[str, Any]:
    """Report times in nanoseconds. load_duration: until the text was in the pool."""
    took = finished.usage
    seconds = {
        "load": took.queue_s + took.restore_s, "prompt_eval": took.prompt_s, "eval": took.generation_s,
    }  # fmt: skip
    return {
        "done": True,
        "done_reason": "length" if finished.reason == "length" else "stop",
        "total_duration": _ns(sum(seconds.values())),
        **{f"{name}_duration": _ns(value) for name, value in seconds.items()},
        "prompt_eval_count": took.prompt,
        "eval_count": took.generated,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    return rfc3339(datetime.now(timezone.utc).timestamp())


def rfc3339(seconds: float) -> str:
    """Write seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
