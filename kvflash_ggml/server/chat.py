"""`/v1/chat/completions`: turns messages into a prompt, and an answer into OpenAI's chat objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Event, Finished, Image, Logprob, Piece, Request, Started
from ..chat.reader import Rendered
from ..chat.values import ChatInput, Reasoning
from ..errors import ContextFull, brief
from . import bodies, overflow
from .errors import ApiError, blaming, invalid
from .exchange import ChoiceAnswer, dumps
from .fields import note
from .front import Front, several
from .images import IMAGES, MARK, SOUND, RequestImages
from .schema import ChatRequest, Message, TemplateRequest, ToolChoice, text_of_content
from .turns import text_of
from .usage import heading, marked

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Of a tool. Formats of calls have marks behind a name, so a tool with another name is left out."""


async def chat(front: Front, http: HttpRequest, asked: ChatRequest) -> Response:
    """Answer a chat, as a whole or as a stream."""
    requests, rendered = await prepared(front, http, asked)
    answers = [ChatAnswer(front.settings.alias, requests[0].id, asked, rendered, index=i) for i in range(len(requests))]
    return await front.respond(http, requests, answers, each=len(requests), stream=asked.stream)


async def input_tokens(front: Front, http: HttpRequest, asked: ChatRequest) -> Response:
    """Count the tokens that `chat` would read. It takes no slot."""
    return counted(await tokens_of(front, http, asked))


def counted(tokens: int) -> Response:
    """Answer with a number of tokens as OpenAI's interface has it; llama-server answers so for chats too."""
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def prepared(
    front: Front, http: HttpRequest, asked: ChatRequest, *, kind: str = "chatcmpl"
) -> tuple[list[Request], Rendered]:
    """Prepare a chat: a request for each of its answers, and how these are read. ApiError.

    kind: what the identifiers of the requests begin with.
    """
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "it needs logprobs: true")
    formatted = _formatted(asked)
    called = asked.tool_choice == "required" or isinstance(asked.tool_choice, ToolChoice)
    if called and formatted:
        raise invalid("tool_choice", "a tool that must be called excludes a grammar and a JSON format")
    note(http, _unheard(asked))
    note(http, [f"tools.{tool.function.name}" for tool in asked.tools or () if not _NAME.fullmatch(tool.function.name)])
    prompt = await _prompt(front, http, asked)
    rendered = prompt.rendered
    note(http, rendered.ignored)
    preserved = await front.work(http, front.prompts.preserved, rendered.preserved) if rendered.preserved else {}
    request = await front.work(
        http,
        front.make,
        http,
        asked,
        prompt.tokens,
        kind=kind,
        max_tokens=asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=await front.format_grammar(http, asked) if formatted else rendered.grammar,
        shared_until=prompt.shared_until,
        stops=rendered.stops,
        preserved=preserved,
        images=prompt.images,
        left_out=prompt.left_out,
    )
    return several(request, asked.n or 1), rendered


def _unheard(asked: ChatRequest) -> list[str]:
    """Return fields that ask for another beginning than the answer has: a last answer is always gone on with."""
    goes_on, begins = asked.continue_final_message, asked.add_generation_prompt
    if goes_on and begins:
        raise invalid("add_generation_prompt", "it excludes continue_final_message: leave it out")
    if _continued(asked.messages):
        return []
    ignored = [f"continue_final_message={goes_on}"] if goes_on else []
    return [*ignored, "add_generation_prompt=False"] if begins is False else ignored


def _continued(messages: Sequence[Message]) -> bool:
    """Tell whether the last message is an answer that has begun."""
    return messages[-1].role == "assistant" and not messages[-1].tool_calls


async def tokens_of(front: Front, http: HttpRequest, asked: ChatRequest) -> int:
    """Count the tokens of a chat's prompt."""
    return len((await _prompt(front, http, asked, whole=True)).tokens)


def _formatted(asked: ChatRequest) -> bool:
    """Tell whether a grammar holds the whole answer. There is no reasoning in it then, and no call."""
    form = asked.response_format
    return asked.json_schema is not None or (form is not None and form.type != "text") or bool(asked.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A chat as a prompt. shared_until: how many tokens are the system message's. left_out: messages that it lacks."""

    rendered: Rendered
    tokens: list[int]
    shared_until: int
    images: tuple[Image, ...]
    left_out: int


async def _prompt(front: Front, http: HttpRequest, asked: ChatRequest, *, whole: bool = False) -> Prompt:
    """Make the prompt of a chat. Messages that are left out of it leave `asked`. whole: none is."""
    images = RequestImages(front, front.salt(http, asked))
    given = await front.work(http, _input, asked, images, formatted=_formatted(asked))
    rendered = await front.work(http, _rendered, front, asked, given)
    await images.fetch(http)
    rolls = not whole and front.rolls(asked.kvflash)
    return await front.work(http, _rolled if rolls else _whole, front, asked, given, rendered, images)


def _rendered(front: Front, asked: ChatRequest, given: ChatInput) -> Rendered:
    with blaming("messages"):
        rendered = front.prompts.chat(given)
    if rendered.grammar is not None and not _formatted(asked):
        front.check_grammar(rendered.grammar, "tools", given.salt)
    return rendered


def _whole(front: Front, asked: ChatRequest, given: ChatInput, rendered: Rendered, images: RequestImages) -> Prompt:
    with blaming("messages"):
        return _tokenized(front, asked, rendered, images)


def _tokenized(
    front: Front, asked: ChatRequest, rendered: Rendered, images: RequestImages, left_out: int = 0
) -> Prompt:
    tokens, seen = images.tokens(rendered.prompt)
    system = _system_end(front, asked.messages, rendered.prompt, tokens)
    return Prompt(rendered=rendered, tokens=tokens, shared_until=system, images=seen, left_out=left_out)


def _rolled(front: Front, asked: ChatRequest, given: ChatInput, rendered: Rendered, images: RequestImages) -> Prompt:
    """Make a prompt that has room for an answer: without the oldest messages, if it has to be."""
    n_ctx, all_messages = front.scheduler.model.n_ctx, asked.messages
    room = max(1, min(front.most(asked.max_tokens), n_ctx // overflow.SHARE))

    def fits(prompt: Prompt) -> bool:
        return len(prompt.tokens) + room <= n_ctx

    def make(kept: list[int]) -> Prompt:
        some = replace(given, messages=[given.messages[i] for i in kept])
        left_out = len(all_messages) - len(kept)
        return _tokenized(front, asked, _rendered(front, asked, some), images.of(kept), left_out)

    with blaming("messages"):
        try:
            if fits(whole := _tokenized(front, asked, rendered, images)):
                return whole
        except ContextFull:
            whole = None
        found = overflow.cuts(given.messages, n_ctx)
        if not found:
            return whole or _tokenized(front, asked, rendered, images)
        kept, prompt = overflow.longest(found, make, fits)
    asked.messages = [all_messages[i] for i in kept]
    return prompt


def render(front: Front, http: HttpRequest, asked: TemplateRequest) -> str:
    """Write a chat as text, with llama.cpp's mark for an image. ApiError for content that cannot be read."""
    given = _input(asked, RequestImages(front, front.salt(http, asked)))
    with blaming("messages"):
        return front.prompts.chat(given).prompt.replace(MARK, "<__media__>")


RENDERER = frozenset(
    (
        "add_generation_prompt", "bos_token", "date_string", "datetime", "eos_token", "function_call", "functions",
        "messages", "raise_exception", "self", "strftime_now", "tool_choice", "tools",
    )
)  # fmt: skip
"""What the renderer gives every template itself."""


def _input(asked: TemplateRequest, images: RequestImages, *, formatted: bool = False) -> ChatInput:
    """Turn a request into what a template takes. images: gets its images. ApiError for what cannot be read, or asked
    for.
    """
    messages = [_message(message, i, images) for i, message in enumerate(asked.messages)]
    more = dict(asked.chat_template_kwargs or {})
    for name in more:
        if not name.isidentifier() or name in RENDERER:
            raise invalid("chat_template_kwargs", f"{name[:40]!r} cannot be given")
    continued = _continued(asked.messages)
    if continued and (len(messages) == 1 or messages[-2]["role"] == "assistant"):
        raise invalid("messages", "an answer that has begun follows a message it answers")
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or () if _NAME.fullmatch(tool.function.name)]
    thinking, effort = asked.enable_thinking, getattr(asked, "reasoning_effort", None)
    if effort == "none" or formatted:
        thinking = False if thinking is None else thinking
    elif effort is not None:
        more.setdefault("reasoning_effort", effort)
    given = ChatInput(
        messages=messages, tools=tools, enable_thinking=thinking, kwargs=more, continued=continued, salt=images.salt
    )
    return _answered(given, asked, formatted=formatted) if isinstance(asked, ChatRequest) else given


def _answered(given: ChatInput, asked: ChatRequest, *, formatted: bool) -> ChatInput:
    """Add how a chat is to be answered."""
    named = asked.tool_choice.function.name if isinstance(asked.tool_choice, ToolChoice) else None
    choice = "required" if isinstance(asked.tool_choice, ToolChoice) else asked.tool_choice or "auto"
    if choice == "required" and not given.tools:
        raise invalid("tool_choice", "it asks for a call, and there are no tools")
    if named is not None and named not in {tool["function"]["name"] for tool in given.tools}:
        raise invalid("tool_choice", f"it names '{brief(named)}', which is no tool")
    reasoning: Reasoning = "none" if formatted or asked.reasoning_format == "none" else "auto"
    return replace(given, choice=choice, named=named, parallel=asked.parallel_tool_calls, reasoning=reasoning)


def _message(message: Message, index: int, images: RequestImages) -> dict[str, Any]:
    entry = message.model_dump(exclude_unset=True)
    entry["role"] = "system" if message.role == "developer" else message.role
    entry["content"] = _content(message.content, f"messages.{index}.content", images)
    if not message.tool_calls:
        entry.pop("tool_calls", None)
    for i, call in enumerate(message.tool_calls or ()):
        _check_call(call, f"messages.{index}.tool_calls.{i}")
    return entry


def _check_call(call: dict[str, Any], where: str) -> None:
    """Raise ApiError for what is no call. Arguments may be an object, as templates want them."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", "it is an object with a name and arguments")
    text_of(call, "id", where, "")
    text_of(function, "name", f"{where}.function")
    if isinstance(function.get("arguments"), dict):
        return
    try:
        bodies.loads((text_of(function, "arguments", f"{where}.function", "") or "{}").encode())
    except bodies.Refused as err:
        raise invalid(f"{where}.function.arguments", f"they are refused: {err}") from None
    except ValueError:  # a model may have written what is none
        pass


def _system_end(front: Front, messages: Sequence[Message], text: str, tokens: Sequence[int]) -> int:
    """Find where the system message ends, in tokens: an agent's side requests begin with it. 0 if that is of no use."""
    said = text_of_content(messages[0].content) if messages[0].role in ("system", "developer") else ""
    at = text.find(said) if said and front.scheduler.model.stateful else -1
    if at < 0:
        return 0
    begin = front.prompts.tokenize(text[: at + len(said)], add_special=True, parse_special=True)
    return next((i for i, (a, b) in enumerate(zip(begin, tokens, strict=False)) if a != b), len(begin))


def _content(content: str | list[dict[str, Any]] | None, where: str, images: RequestImages) -> str:
    """Return a message's text. As in llama-server and vLLM each part of text is a line; none breaks at an image."""
    if content is None or isinstance(content, str):
        return content or ""
    texts, between = [], ""
    for part in content:
        kind = part.get("type")
        if kind in IMAGES or kind == SOUND:
            texts.append(images.take(part, where))
            between = ""
            continue
        if kind is None:
            raise invalid(where, "a part has no type: text, image_url or input_audio")
        if kind not in ("text", "input_text", "refusal"):
            raise ApiError(
                501,
                f"{where}: this server reads text, images and sound, not {str(kind)[:40]!r}",
                code="not_text",
                param=where,
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid(where, "a part has no text")
        if text:
            texts.append(between + text)
            between = "\n"
    return "".join(texts)


class ChatAnswer(ChoiceAnswer):
    """Events as OpenAI's chat objects: chunks of a stream, or one of the whole."""

    def __init__(self, alias: str, id: str, asked: ChatRequest, rendered: Rendered, *, index: int) -> None:
        super().__init__(asked, rendered.reader(), base=heading(id, "chat.completion", alias), index=index)
        self._chunk = {**self._base, "object": "chat.completion.chunk"}
        self._head = f'data: {dumps(self._chunk)[:-1]},"choices":[{{"index":{index},"delta":'

    def choice(self, finished: Finished) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": self._said(finished).as_openai(),
            "logprobs": _chat_logprobs(self._logprobs) if self._asked.logprobs else None,
            "finish_reason": self._reason(finished),
        }

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[Logprob] = (),
        reason: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        probabilities = dumps(_chat_logprobs(logprobs)) if logprobs else "null"
        rest = f",{dumps(more)[1:-1]}" if more else ""
        choice = f'{dumps(delta)},"logprobs":{probabilities},"finish_reason":{json.dumps(reason)}'
        return f"{self._head}{choice}}}]{rest}}}\n\n".encode()

    def opening(self) -> bytes:
        return self.chunk({"role": "assistant", "content": ""})

    def frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started) and event.preview is not None:
            yield self.chunk({}, more=marked(event.preview))
        elif isinstance(event, Piece):
            yield from self._piece(event.text, event.logprobs)
        elif isinstance(event, Finished):
            yield from self._piece("", (), end=True, stopped=event.reason == "stop")
            yield self.chunk({}, reason=self._reason(event))

    def failed(self, error: ApiError) -> bytes:
        return b"".join(self._piece("", (), end=True)) + super().failed(error)

    def _piece(
        self, text: str, logprobs: Sequence[Logprob], *, end: bool = False, stopped: bool = False
    ) -> Iterator[bytes]:
        deltas = [delta.as_openai() for delta in self._reader.push(text, end=end, stopped=stopped)]
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for i, delta in enumerate(deltas):
            yield self.chunk(delta, logprobs=() if i else logprobs)

    def _reason(self, finished: Finished) -> str:
        """Return why the answer ended. A call that the client named beforehand is no reason; so says OpenAI's API."""
        called = self._reader.called and not isinstance(self._asked.tool_choice, ToolChoice)
        return "tool_calls" if finished.reason == "stop" and called else finished.reason


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


def _token(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
