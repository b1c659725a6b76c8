"""Renders the chat templates of model files within bounds, where upstream compiles and runs them with Jinja."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from llama_cpp import llama_chat_format

from ..errors import ConfigError, brief


def rendered(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template with Jinja's variables. ConfigError for a template or messages that cannot be rendered.

    Functions among the variables are left out: the library has `raise_exception` and `strftime_now` of its own.
    """
    from ..native import chat as native  # here: most models are opened for other calls
    from .messages import check

    given = {name: value for name, value in variables.items() if not callable(value)}
    check(given["messages"])  # the library writes nothing for a role that is missing, where Jinja raises
    given["messages"] = _joined(source, given["messages"])
    try:
        return native.plain(source, given)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError) as err:
        raise ConfigError(
            f"the chat template refuses these messages: {brief(err)}: give texts, numbers, lists and dicts alone"
        ) from err


@lru_cache(8)
def takes_parts(source: str) -> bool:
    """Tell whether a chat template goes through the parts of a message. ConfigError for one that cannot be read."""
    from ..chat.templates import ChatTemplate

    try:
        return ChatTemplate(source).caps["supports_typed_content"]
    except ConfigError as err:
        raise ConfigError(f"the chat template cannot be read: {brief(err)}: give a chat_format, as 'chatml'") from err


def _joined(source: str, messages: Any) -> Any:
    """Return messages with the texts of their parts as one, where the template knows no parts: it would write none."""
    if not any(isinstance(message.get("content"), list) for message in messages) or takes_parts(source):
        return messages
    return [{**message, "content": text_of(i, message.get("content"))} for i, message in enumerate(messages)]


def text_of(i: int, content: Any) -> Any:
    """Join the texts of a message's parts with line ends, as the server does. i: the message's number, for errors."""
    if not isinstance(content, list):
        return content
    for j, part in enumerate(content):
        if not isinstance(part.get("text"), str):
            raise ConfigError(
                f"the chat template refuses these messages: messages[{i}]['content'][{j}]={brief(repr(part))}: give it "
                "parts of the type 'text' alone"
            )
    return "\n".join(part["text"] for part in content)


class BoundedFormatter(llama_chat_format.Jinja2ChatFormatter):
    """Upstream's formatter for a template of a model file, which the library renders. Jinja compiles nothing."""

    def __init__(self, template: str, *args: Any, **settings: Any) -> None:
        super().__init__("", *args, **settings)
        self.template = template
        self._environment: Any = SimpleNamespace(render=lambda **variables: rendered(template, variables))


@contextmanager
def bounded() -> Iterator[None]:
    """Let upstream's constructor make formatters of ours. Jinja computes constants while it compiles, without bounds.

    Upstream has no setting for the class, so its module has ours meanwhile. A formatter that another thread makes in
    that time is ours too.
    """
    module: Any = llama_chat_format
    stock = module.Jinja2ChatFormatter
    module.Jinja2ChatFormatter = BoundedFormatter
    try:
        yield
    finally:
        module.Jinja2ChatFormatter = stock
