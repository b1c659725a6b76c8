"""`create_chat_completion` with tools, by the model's own template: its prompt, its grammar, and its calls."""

from __future__ import annotations

import inspect
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import llama_cpp

from ..errors import ConfigError, brief
from ..native import vocabulary
from ..notation import stop_texts
from . import messages
from .formatting import text_of
from .preview import refuse

if TYPE_CHECKING:
    from ..chat.reader import AnswerReader, Rendered
    from ..chat.templates import ChatTemplate
    from ..chat.values import ChatInput

logger = logging.getLogger("kvflash_ggml")

PARAMETERS = inspect.signature(llama_cpp.Llama.create_chat_completion)
"""Of upstream's `create_chat_completion`."""

_ELSEWHERE = ("functions", "function_call", "grammar", "response_format", "logprobs")
"""What upstream's own handler does with tools, or instead of them."""

_OURS = {"self", "messages", "tools", "tool_choice", "stream", "stop", "top_logprobs", *_ELSEWHERE}


def formatted(args: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call of `create_chat_completion`, with a grammar in place of its `response_format`.

    ConfigError for a form that is none. What a grammar cannot hold of a schema is logged; a strict one is refused.
    """
    try:
        bound = PARAMETERS.bind(None, *args, **settings)
    except TypeError as err:
        raise TypeError(f"Llama.create_chat_completion() {err}") from None
    given = {name: value for name, value in bound.arguments.items() if name != "self"}
    if given.get("response_format") is not None:
        from ..chat import formats  # here, as below: most models are opened for other calls
        from ..chat.values import Grammar

        found = formats.schema_of(given.pop("response_format"))
        if found is not None:
            text, ignored = formats.grammar_of(found[0], strict=found[1])
            _tell(ignored)
            given["grammar"] = Grammar(text=text)
    return given


def _tell(ignored: Sequence[str]) -> None:
    if ignored:
        logger.warning("no grammar can hold all of a JSON schema, so an answer may differ in %s", ", ".join(ignored))


class Chatting:
    """Answers chats with tools for one model. previews: it answers long prompts from a part of them."""

    def __init__(self, llm: llama_cpp.Llama, *, previews: bool) -> None:
        self._llm, self._previews = llm, previews
        self._vocab = vocabulary.of(llm.model)

    def answer(self, settings: Mapping[str, Any]) -> Any:
        """What a call of `create_chat_completion` with these keywords returns. None where upstream's handler answers.

        ConfigError for messages that the template refuses, and a `tool_choice` that names no tool.
        """
        llm = self._llm
        bound = PARAMETERS.bind(llm, **settings)
        bound.apply_defaults()
        given = bound.arguments
        source = llm.metadata.get("tokenizer.chat_template")
        tools = given["tools"] and given["tool_choice"] != "none" and not any(given[name] for name in _ELSEWHERE)
        if self._previews and (given["tools"] or given["functions"]):
            refuse("tools")
        if not tools or not source or llm.chat_handler is not None:
            return None
        messages.check(given["messages"])
        template = _template(
            source, *(vocabulary.name(self._vocab, token) for token in (llm.token_bos(), llm.token_eos()))
        )
        rendered = template.render(_requested(given))
        _tell(rendered.ignored)
        made: dict[str, Any] = {
            **{name: value for name, value in given.items() if name not in _OURS},
            "prompt": self._prompt_of(rendered),
            "stop": [*stop_texts(given["stop"]), *rendered.stops],
            "grammar": rendered.grammar,
        }
        return self._chunks(rendered, made) if given["stream"] else self._whole(rendered, made)

    def _prompt_of(self, rendered: Rendered) -> list[int]:
        bos = vocabulary.name(self._vocab, self._llm.token_bos())
        adds = not (bos and rendered.prompt.startswith(bos))
        tokens: list[int] = self._llm.tokenize(rendered.prompt.encode("utf-8", "replace"), add_bos=adds, special=True)
        return tokens

    @contextmanager
    def _shown(self, rendered: Rendered) -> Iterator[None]:
        """Let the answer have the special tokens that its format needs."""
        found = [self._llm.tokenize(text.encode(), add_bos=False, special=True) for text in rendered.preserved]
        tokenizer: Any = self._llm.tokenizer_
        tokenizer.shown = frozenset(tokens[0] for tokens in found if len(tokens) == 1)
        try:
            yield
        finally:
            tokenizer.shown = frozenset()

    def _whole(self, rendered: Rendered, made: Mapping[str, Any]) -> dict[str, Any]:
        with self._shown(rendered):
            done: Any = self._llm.create_completion(**made)
        (choice,) = done["choices"]
        reader = rendered.reader()
        reader.push(choice["text"], end=True, stopped=choice["finish_reason"] == "stop")
        reason = _reason(reader, choice["finish_reason"])
        answer = {"index": 0, "message": reader.said.as_openai(), "logprobs": None, "finish_reason": reason}
        return {**done, "id": f"chat{done['id']}", "object": "chat.completion", "choices": [answer]}

    def _chunks(self, rendered: Rendered, made: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": made["model"] or self._llm.model_path,
        }

        def chunk(delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
            return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

        reader, reason = rendered.reader(), "stop"
        yield chunk({"role": "assistant"})
        with self._shown(rendered):
            parts: Any = self._llm.create_completion(**made, stream=True)
            for part in parts:
                (choice,) = part["choices"]
                reason = choice["finish_reason"] or reason
                for delta in reader.push(choice["text"]):
                    yield chunk(delta.as_openai())
        for delta in reader.push("", end=True, stopped=reason == "stop"):
            yield chunk(delta.as_openai())
        yield chunk({}, _reason(reader, reason))


@cache
def _template(source: str, bos: str, eos: str) -> ChatTemplate:
    from ..chat.templates import ChatTemplate

    return ChatTemplate(source, bos=bos, eos=eos)


def _requested(given: Mapping[str, Any]) -> ChatInput:
    from ..chat.values import ChatInput

    choice: Any = given["tool_choice"] or "auto"
    named = None
    try:
        tools = {tool["function"]["name"] for tool in given["tools"]}
        if not all(isinstance(tool["function"].get("parameters") or {}, Mapping) for tool in given["tools"]):
            raise TypeError("parameters that are no schema")
    except (KeyError, TypeError) as err:
        raise ConfigError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}') from err
    if choice not in ("auto", "required"):
        try:
            named = choice["function"]["name"]
            known = named in tools
        except (KeyError, TypeError) as err:
            raise ConfigError(
                f"tool_choice={brief(repr(choice))}: 'auto', 'required', 'none', or a tool's function and its name"
            ) from err
        if not known:
            raise ConfigError(f"tool_choice names '{brief(named)}', which is no tool: name one of `tools`")
        choice = "required"
    told = [{**message, "content": text_of(i, message.get("content"))} for i, message in enumerate(given["messages"])]
    return ChatInput(messages=told, tools=given["tools"], choice=choice, named=named)


def _reason(reader: AnswerReader, reason: str) -> str:
    return "tool_calls" if reason == "stop" and reader.called else reason
