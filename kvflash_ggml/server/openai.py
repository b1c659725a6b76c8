"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Event, Finished, Logprob, Piece, Started, Usage
from .errors import ApiError
from .exchange import DONE, EventStream, collected, dumps, frame
from .front import Front
from .schema import ChatRequest, CompletionRequest, Message, parse
from .tools import CallReader, ToolPlan, made_call, messages_for, plan


async def models(front: Front, request: HttpRequest) -> Response:
    entry = {
        "id": front.settings.alias,
        "object": "model",
        "created": front.created,
        "owned_by": "kvflash_ggml",
        "meta": {**front.prompts.facts, "n_ctx": front.scheduler.model.n_ctx},
    }
    wanted = request.path_params.get("model")
    if wanted is None:
        return JSONResponse({"object": "list", "data": [entry]})
    if wanted != entry["id"]:
        raise ApiError(404, f"there is no model {wanted[:80]!r}: {entry['id']!r} is served", code="model_not_found")
    return JSONResponse(entry)


# --- chat


async def chat(front: Front, http: HttpRequest) -> Response:
    asked: ChatRequest = parse(ChatRequest, await front.body(http))
    front.admit()
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    tools = await front.work(plan, asked, front.prompts)
    if tools.grammar is not None and (asked.grammar or (asked.response_format or _TEXT).type != "text"):
        raise ApiError(400, "a tool that must be called excludes a grammar and a JSON format", param="tool_choice")
    grammar = await _format_grammar(front, asked)
    if tools.grammar is not None:
        grammar = await front.grammar(text=tools.grammar, schema=None, any_json=False)
    text = await front.work(render, front, asked.messages, tools.tools, asked.chat_template_kwargs)
    tokens = await front.work(front.prompts.tokenize, text, add_special=True, parse_special=True)
    request = front.make(
        http,
        asked,
        tokens,
        kind="chatcmpl",
        most=asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
        shared_until=await front.work(_system_end, front, asked.messages, text, tokens),
    )
    exchange = front.exchange(http, request)
    answer = ChatAnswer(front.settings.alias, request.id, asked, tools)
    if asked.stream:
        settings = front.settings
        first = answer.chunk({"role": "assistant", "content": "" if tools.named is None else None})
        return EventStream(
            exchange, answer.frames, ping_s=settings.ping_s, stall_s=settings.stall_timeout_s, first=first
        )
    finished = await collected(exchange, answer.take)
    return JSONResponse(answer.whole(finished))


class _Text:
    type = "text"


_TEXT = _Text()


async def _format_grammar(front: Front, asked: ChatRequest) -> str | None:
    form = asked.response_format
    schema = None
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "response_format.json_schema is missing", param="response_format")
        schema = form.json_schema.json_schema
    elif form is not None and form.type == "json_object":
        schema = form.json_object
    any_json = form is not None and form.type == "json_object" and schema is None
    return await front.grammar(text=asked.grammar or None, schema=schema, any_json=any_json)


def render(
    front: Front,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    more: dict[str, Any] | None,
) -> str:
    """The text of a chat. ApiError for content that is not text."""
    plain = []
    for i, message in enumerate(messages):
        entry = message.model_dump(exclude_unset=True)
        entry["role"] = "system" if message.role == "developer" else message.role
        entry["content"] = _content(message.content, f"messages.{i}.content")
        plain.append(entry)
    for name in more or {}:
        if not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt", "raise_exception"):
            raise ApiError(400, f"chat_template_kwargs: {name[:40]!r} cannot be given", param="chat_template_kwargs")
    template = front.prompts.template or ""
    return front.prompts.render(messages_for(plain, tools, template), tools, **(more or {}))


def _system_end(front: Front, messages: Sequence[Message], text: str, tokens: Sequence[int]) -> int:
    """Where the system message ends, in tokens: side requests of an agent begin with it. 0 if that is of no use."""
    said = _content(messages[0].content, "") if messages[0].role in ("system", "developer") else ""
    at = text.find(said) if said and front.scheduler.model.stateful else -1
    if at < 0:
        return 0
    begin = front.prompts.tokenize(text[: at + len(said)], add_special=True, parse_special=True)
    return next((i for i, (a, b) in enumerate(zip(begin, tokens, strict=False)) if a != b), len(begin))


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "refusal"):
            raise ApiError(
                501,
                f"{where}: this server reads text, not {str(part.get('type'))[:40]!r}",
                code="not_text",
                param=where,
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(400, f"{where}: a part has no text", param=where)
        texts.append(text)
    return "".join(texts)


class ChatAnswer:
    """Events as OpenAI's chat objects: chunks of a stream, or one of the whole."""

    def __init__(self, alias: str, id: str, asked: ChatRequest, tools: ToolPlan) -> None:
        self._alias, self._id, self._asked, self._tools = alias, id, asked, tools
        self._created = int(time.time())
        self._reader = CallReader() if tools.reads else None
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []
        self._calls: list[dict[str, Any]] = []
        if tools.named is not None:
            self._calls.append(made_call(tools.named, ""))
        self._head = (
            f'data: {{"id":{dumps(id)},"object":"chat.completion.chunk","created":{self._created},'
            f'"model":{dumps(alias)},"choices":[{{"index":0,"delta":'
        )

    def take(self, event: Event) -> None:
        """For one of the whole."""
        if isinstance(event, Piece):
            self._logprobs += event.logprobs
            self._text.append(event.text)

    def whole(self, finished: Finished) -> dict[str, Any]:
        text = "".join(self._text)
        if self._tools.named is not None:
            self._calls[0]["function"]["arguments"] = text
            text = ""
        elif self._reader is not None:
            text, self._calls = self._reader.push(text, end=True)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self._calls else None}
        if self._calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _chat_logprobs(self._logprobs) if self._asked.logprobs else None,
            "finish_reason": self._reason(finished),
        }
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._alias,
            "choices": [choice],
            "usage": usage(finished.usage),
            "timings": timings(finished.usage),
            **report(self._asked.kvflash.report, finished),
        }

    def chunk(self, delta: dict[str, Any], *, logprobs: Sequence[Logprob] = (), reason: str | None = None) -> bytes:
        told = dumps(_chat_logprobs(logprobs)) if logprobs else "null"
        return f'{self._head}{dumps(delta)},"logprobs":{told},"finish_reason":{json.dumps(reason)}}}]}}\n\n'.encode()

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Piece):
            yield from self._piece(event.text, event.logprobs)
        elif isinstance(event, Finished):
            yield from self._piece("", (), end=True)
            yield self.chunk({}, reason=self._reason(event))
            last = {
                "id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._alias,
                "choices": [], "timings": timings(event.usage), **report(self._asked.kvflash.report, event),
            }  # fmt: skip
            options = self._asked.stream_options
            if options is not None and options.include_usage:
                yield frame({**last, "usage": usage(event.usage)})
            elif self._asked.kvflash.report != "none" or self._asked.timings_per_token:
                yield frame(last)
            yield DONE

    def _piece(self, text: str, logprobs: Sequence[Logprob], *, end: bool = False) -> Iterator[bytes]:
        if self._tools.named is not None:
            call = {"index": 0, "function": {"arguments": text}}
            if self._calls[0]["function"]["arguments"] == "":
                call = {**self._calls[0], "function": {"name": self._tools.named, "arguments": text}}
            self._calls[0]["function"]["arguments"] += text
            if text:
                yield self.chunk({"tool_calls": [call]}, logprobs=logprobs)
            return
        calls: list[dict[str, Any]] = []
        if self._reader is not None:
            text, calls = self._reader.push(text, end=end)
        if text or logprobs:
            yield self.chunk({"content": text}, logprobs=logprobs)
        for made in calls:
            self._calls.append(made)
            yield self.chunk({"tool_calls": [made]})

    def _reason(self, finished: Finished) -> str:
        if finished.reason == "stop" and self._calls and self._tools.named is None:
            return "tool_calls"
        return finished.reason


def _chat_logprobs(told: Sequence[Logprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(one.piece, one.logprob),
                "top_logprobs": [_token(piece, logprob) for _, piece, logprob in one.top],
            }
            for one in told
        ],
        "refusal": None,
    }


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


# --- completions


async def completions(front: Front, http: HttpRequest) -> Response:
    asked: CompletionRequest = parse(CompletionRequest, await front.body(http))
    front.admit()
    if asked.suffix is not None or asked.best_of not in (None, 1):
        name = "suffix" if asked.suffix is not None else "best_of"
        raise ApiError(501, f"{name} is not supported: leave it out", param=name)
    if asked.echo and asked.logprobs is not None:
        raise ApiError(501, "logprobs of the prompt are not kept: leave out echo or logprobs", param="echo")
    tokens = await prompt_tokens(front, asked.prompt)
    grammar = await front.grammar(text=asked.grammar or None, schema=None, any_json=False)
    request = front.make(
        http, asked, tokens, kind="cmpl", most=asked.max_tokens, logprobs=asked.logprobs, grammar=grammar
    )
    echoed = front.prompts.detokenize(tokens).decode("utf-8", "replace") if asked.echo else ""
    answer = TextAnswer(front.settings.alias, request.id, asked, echoed)
    exchange = front.exchange(http, request)
    if asked.stream:
        settings = front.settings
        return EventStream(exchange, answer.frames, ping_s=settings.ping_s, stall_s=settings.stall_timeout_s)
    finished = await collected(exchange, answer.take)
    return JSONResponse(answer.whole(finished))


async def prompt_tokens(front: Front, prompt: Any) -> list[int]:
    """The tokens of one prompt, however it is given."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(501, f"{len(prompt)} prompts in one request: send one request for each", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return await front.work(front.prompts.tokenize, prompt, add_special=True, parse_special=True)
    n_vocab = front.prompts.n_vocab
    wrong = next((token for token in prompt if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise ApiError(400, f"prompt: {wrong} is no token: they are from 0 to {n_vocab - 1}", param="prompt")
    return list(prompt)


class TextAnswer:
    """Events as OpenAI's completion objects."""

    def __init__(self, alias: str, id: str, asked: CompletionRequest, echoed: str) -> None:
        self._asked, self._echoed = asked, echoed
        self._base = {"id": id, "object": "text_completion", "created": int(time.time()), "model": alias}
        self._text: list[str] = [echoed]
        self._logprobs: list[Logprob] = []
        self._length = 0

    def take(self, event: Event) -> None:
        if isinstance(event, Piece):
            self._text.append(event.text)
            self._logprobs += event.logprobs

    def whole(self, finished: Finished) -> dict[str, Any]:
        choice = self._choice("".join(self._text), self._logprobs, finished.reason)
        return {
            **self._base,
            "choices": [choice],
            "usage": usage(finished.usage),
            "timings": timings(finished.usage),
            **report(self._asked.kvflash.report, finished),
        }

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started) and self._echoed:
            yield frame({**self._base, "choices": [self._choice(self._echoed, (), None)]})
        elif isinstance(event, Piece):
            yield frame({**self._base, "choices": [self._choice(event.text, event.logprobs, None)]})
        elif isinstance(event, Finished):
            yield frame({**self._base, "choices": [self._choice("", (), event.reason)]})
            options, shown = self._asked.stream_options, report(self._asked.kvflash.report, event)
            if options is not None and options.include_usage:
                yield frame({**self._base, "choices": [], "usage": usage(event.usage), **shown})
            elif shown:
                yield frame({**self._base, "choices": [], **shown})
            yield DONE

    def _choice(self, text: str, told: Sequence[Logprob], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs is not None and told:
            pieces = [one.piece.decode("utf-8", "replace") for one in told]
            offsets = []
            for piece in pieces:
                offsets.append(self._length)
                self._length += len(piece)
            logprobs = {
                "tokens": pieces,
                "token_logprobs": [one.logprob for one in told],
                "top_logprobs": [{p.decode("utf-8", "replace"): value for _, p, value in one.top} for one in told],
                "text_offset": offsets,
            }
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}


# --- what an answer took


def usage(took: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": took.prompt,
        "completion_tokens": took.generated,
        "total_tokens": took.prompt + took.generated,
        "prompt_tokens_details": {"cached_tokens": took.cached},
    }


def timings(took: Usage) -> dict[str, Any]:
    """As llama-server has them; times in milliseconds."""
    read, made = took.prompt - took.cached, took.generated
    return {
        "cache_n": took.cached,
        "prompt_n": read,
        "prompt_ms": round(took.prompt_s * 1e3, 3),
        "prompt_per_second": round(read / took.prompt_s, 3) if took.prompt_s > 0 else 0.0,
        "predicted_n": made,
        "predicted_ms": round(took.generation_s * 1e3, 3),
        # the first token comes with the prompt
        "predicted_per_second": round((made - 1) / took.generation_s, 3) if took.generation_s > 0 and made > 1 else 0.0,
    }


def report(wanted: str, finished: Finished) -> dict[str, Any]:
    """`kvflash` of an answer, for those who ask for it."""
    if wanted == "none":
        return {}
    took = finished.usage
    times = {"queue_ms": round(took.queue_s * 1e3, 3), "restore_ms": round(took.restore_s * 1e3, 3)}
    return {"kvflash": {**finished.report, **times}}
