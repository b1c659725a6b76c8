"""`/v1/chat/completions`: from messages to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..batching.messages import Request
from .chat_answer import ChatAnswer
from .errors import ApiError
from .front import Front, several
from .schema import ChatRequest, Message, TemplateRequest
from .tools import ToolPlan, messages_for, plan


async def chat(front: Front, http: HttpRequest) -> Response:
    asked: ChatRequest = await front.asked(http, ChatRequest)
    front.admit()
    requests, tools = await prepared(front, http, asked)
    id = requests[0].id
    answers = [ChatAnswer(front.settings.alias, id, asked, tools, index=i) for i in range(len(requests))]
    return await front.respond(http, requests, answers, each=len(requests), stream=asked.stream)


async def prepared(front: Front, http: HttpRequest, asked: ChatRequest) -> tuple[list[Request], ToolPlan]:
    """The requests of a chat, one for each answer, and how these are read. ApiError."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    tools, tokens, shared_until = await front.work(http, _prompt, front, asked)
    form = asked.response_format
    formatted = asked.json_schema is not None or (form is not None and form.type != "text")
    if tools.grammar is not None and (asked.grammar or formatted):
        raise ApiError(400, "a tool that must be called excludes a grammar and a JSON format", param="tool_choice")
    grammar = await front.format_grammar(http, asked)
    if tools.grammar is not None:
        grammar = await front.grammar(http, text=tools.grammar)
    request = front.make(
        http,
        asked,
        tokens,
        kind="chatcmpl",
        most=None if asked.max_tokens < 0 else asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
        shared_until=shared_until,
    )
    return several(request, asked.n or 1), tools


def tokens_of(front: Front, asked: ChatRequest) -> int:
    """How many tokens the prompt of a chat has. On a thread of the front's."""
    return len(_prompt(front, asked)[1])


def _prompt(front: Front, asked: ChatRequest) -> tuple[ToolPlan, list[int], int]:
    """What becomes of the tools; the prompt; and how many of its tokens are the system message's."""
    tools = plan(asked, front.prompts)
    text = render(front, asked, tools.tools)
    tokens = front.prompts.tokenize(text, add_special=True, parse_special=True)
    return tools, tokens, _system_end(front, asked.messages, text, tokens)


RENDERER = frozenset(
    (
        "add_generation_prompt", "bos_token", "eos_token", "function_call", "functions", "messages",
        "raise_exception", "self", "strftime_now", "tool_choice", "tools",
    )
)  # fmt: skip
"""What the renderer gives every template itself."""


def render(front: Front, asked: ChatRequest | TemplateRequest, tools: Sequence[dict[str, Any]] | None) -> str:
    """The text of a chat. ApiError for content that is not text."""
    plain = []
    for i, message in enumerate(asked.messages):
        entry = message.model_dump(exclude_unset=True)
        entry["role"] = "system" if message.role == "developer" else message.role
        entry["content"] = _content(message.content, f"messages.{i}.content")
        plain.append(entry)
    more = {} if asked.enable_thinking is None else {"enable_thinking": asked.enable_thinking}
    more |= asked.chat_template_kwargs or {}
    for name in more:
        if not name.isidentifier() or name in RENDERER:
            raise ApiError(400, f"chat_template_kwargs: {name[:40]!r} cannot be given", param="chat_template_kwargs")
    template = front.prompts.template or ""
    told = messages_for(plain, tools, template)
    begun = ""
    if told[-1]["role"] == "assistant" and "tool_calls" not in told[-1]:  # the answer has begun: it is gone on with
        begun = told.pop()["content"]
        if not told or told[-1]["role"] == "assistant":
            raise ApiError(400, "messages: an answer that has begun follows a message it answers", param="messages")
    return front.prompts.render(told, tools, more) + begun


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
