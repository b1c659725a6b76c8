"""What goes into a chat template and comes out of it, and what an answer consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Reasoning = Literal["auto", "none"]
"""auto: reasoning is apart from content. none: it stays in the content, between the marks of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A chat as OpenAI's clients send it.

    messages: with `role`, `content` (a text), `tool_calls`, `tool_call_id`, `reasoning_content`. tools: as
    `{"type": "function", "function": {"name", "description", "parameters"}}`. choice: must the model call one?
    named: the one tool that it must call. parallel: may it call several, None if the template knows. kwargs: further
    names for the template. continued: the last message is an answer that is gone on with. salt: a rendering that is
    kept is for chats of the same salt.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["auto", "required", "none"] = "auto"
    named: str | None = None
    parallel: bool | None = None
    reasoning: Reasoning = "auto"
    enable_thinking: bool | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that the sampler follows.

    text: GBNF with a rule `root`. lazy: nothing is held to it before one of the `triggers`, which are regular
    expressions, or one of `trigger_words` has been written. prefill: text at the prompt's end with which the template
    has begun the answer. thinking: the mark before reasoning and those behind it; no trigger counts between them.
    """

    text: str
    lazy: bool = False
    triggers: tuple[str, ...] = ()
    trigger_words: tuple[str, ...] = ()
    prefill: str = ""
    thinking: tuple[str, ...] = ()

    def as_asked(self) -> dict[str, Any]:
        """Return the grammar as `kvf_chat_sampler` takes it."""
        return {
            "grammar": self.text, "lazy": self.lazy, "triggers": self.triggers, "words": self.trigger_words,
            "prefill": self.prefill, "thinking": self.thinking,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function. arguments: JSON, which may be cut off where the answer is."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """Return the call as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, as far as it has been read."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def as_openai(self) -> dict[str, Any]:
        """Return the answer as a message of OpenAI's API."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content if self.content.strip() or not self.calls else None,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is added to an answer: one of `reasoning`, `content`, or a part of the call `index`.

    The first delta of a call has its `id` and its whole `name`; all of its `arguments` joined are its arguments.
    """

    reasoning: str = ""
    content: str = ""
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """Return the `delta` of OpenAI's API."""
        if self.reasoning:
            return {"reasoning_content": self.reasoning}
        if self.index is None:
            return {"content": self.content}
        if not self.name:
            return {"tool_calls": [{"index": self.index, "function": {"arguments": self.arguments}}]}
        made = Call(id=self.id, name=self.name, arguments=self.arguments)
        return {"tool_calls": [{"index": self.index, **made.as_openai()}]}
