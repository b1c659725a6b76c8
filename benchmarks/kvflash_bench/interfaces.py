"""An agent's session through each interface of the server: what is read of it, beside what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = tuple[str, str]
"""Role and text."""

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""The JSON that a path answers to a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One turn, in tokens. new: of the prompt, beyond the prompt and the answer before."""

    turn: int
    prompt: int
    read: int
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, and how many tokens it took. known: of the prompt, not read again."""

    text: str
    prompt: int
    known: int
    made: int


def _chat(ask: Ask, system: str, messages: Sequence[Message], most: int) -> Said:
    told = [{"role": role, "content": text} for role, text in (("system", system), *messages)]
    reply = ask("/v1/chat/completions", {"messages": told, "max_tokens": most, "temperature": 0})
    took = reply["usage"]
    return Said(
        text=reply["choices"][0]["message"]["content"],
        prompt=took["prompt_tokens"],
        known=took["prompt_tokens_details"]["cached_tokens"],
        made=took["completion_tokens"],
    )


def _messages(ask: Ask, system: str, messages: Sequence[Message], most: int) -> Said:
    told = [{"role": role, "content": text} for role, text in messages]
    reply = ask("/v1/messages", {"system": system, "messages": told, "max_tokens": most, "temperature": 0})
    took, known = reply["usage"], reply["usage"]["cache_read_input_tokens"]
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return Said(text=text, prompt=took["input_tokens"] + known, known=known, made=took["output_tokens"])


def _responses(ask: Ask, system: str, messages: Sequence[Message], most: int) -> Said:
    told = [{"role": role, "content": text} for role, text in messages]
    asked = {"instructions": system, "input": told, "max_output_tokens": most, "temperature": 0, "store": False}
    reply = ask("/v1/responses", asked)
    took = reply["usage"]
    parts = (part for item in reply["output"] if item["type"] == "message" for part in item["content"])
    return Said(
        text="".join(part["text"] for part in parts),
        prompt=took["input_tokens"],
        known=took["input_tokens_details"]["cached_tokens"],
        made=took["output_tokens"],
    )


INTERFACES = {"chat": _chat, "messages": _messages, "responses": _responses}


def replay(ask: Ask, interface: str, *, system: str, results: Sequence[str], most: int) -> list[Read]:
    """A session: each result is a user's turn, and each answer goes back as it came. most: tokens of an answer."""
    messages: list[Message] = []
    done: list[Read] = []
    before = 0
    for turn, result in enumerate(results):
        messages.append(("user", result))
        said = INTERFACES[interface](ask, system, messages, most)
        done.append(Read(turn=turn, prompt=said.prompt, read=said.prompt - said.known, new=said.prompt - before))
        before = said.prompt + said.made
        messages.append(("assistant", said.text))
    return done


def ratio(done: Sequence[Read]) -> float:
    """Tokens that were read, beside those that were new."""
    return sum(one.read for one in done) / sum(one.new for one in done)
