"""Checks what an answer is asked for, and tells which value is wrong where a chat template fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from numbers import Integral, Real
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, KVFlashError, brief

if TYPE_CHECKING:
    import llama_cpp

TEMPLATE = "<template>"
"""What Jinja calls the file of a template, in tracebacks."""


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral)


def _each_callable(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str, tuple[str, ...]]] = {
    "finite": (_finite, "a finite number", (
        "temp", "top_p", "min_p", "typical_p", "repeat_penalty", "frequency_penalty", "presence_penalty",
        "mirostat_tau", "mirostat_eta",
    )),
    "whole": (_whole, "a whole number", ("top_k", "mirostat_mode")),
    "optional": (lambda value: value is None or _whole(value), "a whole number, or None", ("max_tokens", "seed")),
    "text": (lambda value: value is None or isinstance(value, str), "a text, or None", ("suffix",)),
    "called": (
        lambda value: value is None or callable(value), "a StoppingCriteriaList of functions", ("stopping_criteria",),
    ),
    "several": (
        lambda value: value is None or _each_callable(value), "a LogitsProcessorList of functions",
        ("logits_processor",),
    ),
    "prompt": (lambda value: isinstance(value, str | list), "a text, or a list of tokens", ("prompt",)),
}  # fmt: skip

_TOLD = {"temp": "temperature"}
"""What callers of `create_completion` call keywords of samplers."""


def check(keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of a kind that an answer cannot be asked for with. Other keywords are let pass."""
    for right, what, names in _KINDS.values():
        for name in names:
            if name in keywords and not right(keywords[name]):
                raise ConfigError(f"{_TOLD.get(name, name)}={brief(repr(keywords[name]))}: it must be {what}")


def check_messages(messages: Any) -> None:
    """Raise ConfigError for what is no chat: the first message, role or content that is of another kind."""
    if not isinstance(messages, list | tuple):
        shown, kind = f"messages={brief(repr(messages))}", "a list of messages, as {'role': 'user', 'content': 'Hello'}"
        raise ConfigError(f"{shown}: it must be {kind}")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}={brief(repr(message))}: it must be a dict, with a role and content")
        if not isinstance(role := message.get("role"), str):
            raise ConfigError(f"{where}['role']={brief(repr(role))}: it must be a text, as 'user'")
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or parts):
            shown = brief(repr(content))
            raise ConfigError(f"{where}['content']={shown}: it must be a text, or a list of parts, which are dicts")


@contextmanager
def templating(messages: Any) -> Iterator[None]:
    """Turn what a chat template of upstream's raises into a ConfigError, which names the message that is wrong."""
    try:
        yield
    except KVFlashError:
        raise
    except Exception as err:
        check_messages(messages)
        if not _passes(err.__traceback__, TEMPLATE):
            raise
        why = brief(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {brief(err)}"
        raise ConfigError(
            f"the chat template refuses these messages: {why}: change them, or give another chat_format"
        ) from err


def _passes(trace: TracebackType | None, name: str) -> bool:
    """Report whether an error came through a file of this name."""
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    return trace is not None


def embed_checked(embed: Callable[..., Any]) -> Callable[..., Any]:
    """Return upstream's `Llama.embed`, with a ConfigError for an empty list."""

    @wraps(embed)
    def call(llm: llama_cpp.Llama, input: str | list[str], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, str) and not len(input):
            raise ConfigError(f"embed({input!r}): there is no text in it: give at least one")
        return embed(llm, input, *args, **kwargs)

    return call
