"""Messages of a chat, made from the items of another interface so that any template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from . import bodies
from .errors import invalid
from .fields import NAMES, note
from .schema import LATE, ChatRequest, TranslatedRequest, named, parse


class Turns:
    """Collects messages as `ChatRequest` has them.

    Texts of one role that follow each other are one message, since many templates want roles to alternate. left_out:
    names of parts that are not understood, for the header. sees: may a tool's result have images?
    """

    def __init__(self, *, sees: bool) -> None:
        self._messages: list[dict[str, Any]] = []  # with lists of texts: to join them one by one takes their square
        self.left_out: list[str] = []
        self.sees = sees
        self._names: dict[str, str] = {}  # of calls, by their ids

    def system(self, text: str) -> None:
        """Add a system message: at the front as such, later as a user's turn in place."""
        if not text:
            return
        if self._at_front():
            self._last("system")["content"].append(text)
        else:
            self.say("user", LATE.format(text))

    def say(self, role: str, text: str) -> None:
        self._last(role)["content"].append(text)

    def see(self, role: str, image: dict[str, Any]) -> None:
        """Add an image. image: a content part of a chat."""
        self._last(role)["content"].append(image)

    def think(self, text: str) -> None:
        self._last("assistant").setdefault("reasoning_content", []).append(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        self._names[id] = name
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, id: str, parts: Sequence[str | dict[str, Any]]) -> None:
        """Add a tool's result. parts: texts, one a line, and images."""
        named = {"name": self._names[id]} if id in self._names else {}
        content = _joined(parts, "\n")
        self._messages.append({"role": "tool", "tool_call_id": id, **named, "content": content})

    def leave_out(self, what: str) -> str:
        """Note a part for the header. Return what stands for one that must have a text."""
        self.left_out.append(what)
        return f"[{what.rpartition('.')[2]}: left out, since this model reads text only]"

    def chat(
        self, http: HttpRequest, asked: TranslatedRequest, data: dict[str, Any], names: Mapping[str, str]
    ) -> ChatRequest:
        """Return `asked` as a chat with these messages and the fields `data`. ApiError for a field that is wrong.

        names: what the client calls fields of `data`. The header of the answer to `http` names what was left out.
        """
        made: ChatRequest
        same = {name: getattr(asked, name) for name in ("stream", "temperature", "top_p", "chat_template_kwargs")}
        made, _ = parse(ChatRequest, {"messages": self._ended(), **same, **data}, strict=False, names=names)
        made.kvflash = asked.kvflash
        http.scope[NAMES] = names
        note(http, self.left_out)
        return made

    def _ended(self) -> list[dict[str, Any]]:
        """Return the messages. Templates want a question; programs that look for the server send none."""
        if self._at_front():
            self.say("user", "")
        for message in self._messages:
            between = "" if message["role"] == "assistant" else "\n\n"
            first, *others = _joined(message["content"], between)
            message["content"] = [_part(part) for part in (first, *others) if part] if others else first
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        return self._messages

    def _at_front(self) -> bool:
        return all(message["role"] == "system" for message in self._messages[:2])

    def _last(self, role: str) -> dict[str, Any]:
        """Return the last message, if it is of this role, or else a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def _joined(parts: Sequence[str | dict[str, Any]], between: str) -> list[str | dict[str, Any]]:
    """Join texts that follow each other, and keep images as they are."""
    made: list[str | dict[str, Any]] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        made += [between.join(filter(None, texts)), part]
        texts = []
    return [*made, between.join(filter(None, texts))]


def _part(part: str | dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else part


def text_of(part: dict[str, Any], name: str, where: str, usual: str | None = None) -> str:
    """Read a field of an object that must be a text. usual: for one that is left out, or null; without it, it must be
    there.

    where: the object is in the request; "" for the request.
    """
    value = usual if part.get(name) is None else part[name]
    if isinstance(value, str):
        return value
    why = "missing" if value is None else f"{named(value)}, and must be a text"
    raise invalid(f"{where}.{name}" if where else name, f"it is {why}")


def parts_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Read content, a text or a list of parts, as parts."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    raise invalid(where, f"it is {named(value)}, and must be a text or a list of parts, which are objects")


def role_of(message: dict[str, Any], where: str) -> str:
    """Read the role: user, assistant, or system, which developer is too. ApiError for another role, and without
    content.
    """
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"{str(role)[:40]!r}, and it must be user, assistant, system or developer")
    if "content" not in message:
        raise invalid(f"{where}.content", "it is missing")
    return str(role)


def kind_of(part: dict[str, Any]) -> str:
    """Return the type of a part, for comparisons and for the header."""
    return str(part.get("type") or "untyped")[:40]


def form_of(form: Any) -> Any:
    """Return the form of an answer as a chat has it."""
    if not isinstance(form, dict):
        return form
    inner = {name: form[name] for name in ("schema", "strict") if name in form}
    return {"type": form.get("type"), "json_schema": inner or None}


def as_object(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, as clients want them. What is none stays as it was written, under a name."""
    try:
        value = bodies.loads(arguments.encode() or b"{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
