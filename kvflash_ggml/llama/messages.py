"""Checks the messages of a chat, and tells which value is wrong where a chat template fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..errors import ConfigError, KVFlashError, brief

_TEMPLATE = "<template>"
"""What Jinja calls the file of a template, in tracebacks."""


def check(messages: Any) -> None:
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
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            shown = brief(repr(calls))
            raise ConfigError(
                f"{where}['tool_calls']={shown}: each must be a dict with a function, which is a dict too"
            )


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


@contextmanager
def templating(messages: Any) -> Iterator[None]:
    """Turn what a chat template of upstream's raises into a ConfigError, which names the message that is wrong."""
    try:
        yield
    except KVFlashError:
        raise
    except Exception as err:
        check(messages)
        if not _passes(err.__traceback__, _TEMPLATE):
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
