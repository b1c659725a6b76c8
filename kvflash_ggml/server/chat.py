"""`/v1/chat/completions`: from messages to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .chat_answer import ChatAnswer
from .errors import ApiError
from .front import Front, several
from .schema import ChatRequest, Message, parse
from .tools import messages_for, plan


async def chat(front: Front, http: HttpRequest) -> Response:
    asked: ChatRequest = parse(ChatRequest, await front.body(http))
    front.admit()
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    tools = await front.work(plan, asked, front.prompts)
    formatted = asked.json_schema is not None or (asked.response_format or _TEXT).type != "text"
    if tools.grammar is not None and (asked.grammar or formatted):
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
    requests = several(request, asked.n or 1)
    answers = [ChatAnswer(front.settings.alias, request.id, asked, tools, index=i) for i in range(len(requests))]
    return await front.respond(http, requests, answers, each=len(requests), stream=asked.stream)


class _Text:
    type = "text"


_TEXT = _Text()


async def _format_grammar(front: Front, asked: ChatRequest) -> str | None:
    form, schema = asked.response_format, asked.json_schema
    if form is not None and form.type != "text" and schema is not None:
        raise ApiError(400, "json_schema and response_format exclude each other", param="json_schema")
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
    told = messages_for(plain, tools, template)
    begun = ""
    if told[-1]["role"] == "assistant" and "tool_calls" not in told[-1]:  # the answer has begun: it is gone on with
        begun = told.pop()["content"]
        if not told or told[-1]["role"] == "assistant":
            raise ApiError(400, "messages: an answer that has begun follows a message it answers", param="messages")
    return front.prompts.render(told, tools, **(more or {})) + begun


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
