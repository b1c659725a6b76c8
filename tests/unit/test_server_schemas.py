"""Schemas by every interface: what no grammar holds is named in the header, and refused where the schema is strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.asgi import Reply
from support.fake_server import Server

from kvflash_ggml.server.fields import HEADER

HELLO = [{"role": "user", "content": "hello"}]
UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
WRONG = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}

Form = Callable[[Any, bool], dict[str, Any]]
STRICT: dict[str, tuple[str, Form]] = {
    "chat": (
        "/v1/chat/completions",
        lambda schema, strict: {
            "messages": HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": strict},
            },
        },
    ),
    "responses": (
        "/v1/responses",
        lambda schema, strict: {
            "input": "hello",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": strict}},
        },
    ),
}
PLAIN: dict[str, tuple[str, Form]] = {
    "completions": ("/v1/completions", lambda schema, _: {"prompt": "hello", "json_schema": schema}),
    "an object": (
        "/v1/chat/completions",
        lambda schema, _: {"messages": HELLO, "response_format": {"type": "json_object", "schema": schema}},
    ),
    "llama-server": ("/completion", lambda schema, _: {"prompt": "hello", "json_schema": schema}),
    "messages": (
        "/v1/messages",
        lambda schema, _: {
            "messages": HELLO, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    ),
    "messages of before": (
        "/v1/messages",
        lambda schema, _: {
            "messages": HELLO, "max_tokens": 5, "output_format": {"type": "json_schema", "schema": schema},
        },
    ),
    "ollama": ("/api/chat", lambda schema, _: {"messages": HELLO, "stream": False, "format": schema}),
}  # fmt: skip
EVERY = STRICT | PLAIN
FIELD = {
    **{"responses": "text.format", "completions": "json_schema", "llama-server": "json_schema", "ollama": "format"},
    **dict.fromkeys(("messages", "messages of before"), "output_config.format"),
}
"""What the field of the schema is called; response_format if it is not here."""


def named(reply: Reply) -> str:
    return reply.headers.get(HEADER.lower(), "")


def message(reply: Reply) -> str:
    error = reply.json["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("kind", EVERY)
def test_every_form_has_the_same_schemas(kind: str) -> None:
    (path, form), field = EVERY[kind], FIELD.get(kind, "response_format")
    reply = Server().post(path, form(UNIQUE, False))
    assert (reply.status, named(reply)) == (200, f"{field}.tags.uniqueItems")
    reply = Server().post(path, form({"type": "object", "properties": {"x": True}}, False))
    assert (reply.status, named(reply)) == (200, "")
    reply = Server().post(path, form(WRONG, False))
    assert reply.status == 400
    why = f"a pattern that a grammar cannot hold, '(?=a)' at {field}.x: a grammar cannot look ahead"
    assert why in message(reply)


@pytest.mark.parametrize("kind", STRICT)
def test_a_strict_schema_holds_or_is_refused(kind: str) -> None:
    (path, form), field = EVERY[kind], FIELD.get(kind, "response_format")
    reply = Server().post(path, form(UNIQUE, True))
    assert (reply.status, reply.json["error"]["param"]) == (400, field)
    assert f"has uniqueItems at {field}.tags, which no grammar can hold: leave it out" in message(reply)
    assert (
        Server()
        .post(path, form({"type": "object", "properties": {"x": {"type": "integer", "maximum": 3}}}, True))
        .status
        == 200
    )


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "json_shema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_forms_that_are_none(form: dict[str, Any]) -> None:
    reply = Server().post("/v1/chat/completions", {"messages": HELLO, "response_format": form})
    assert (reply.status, "response_format" in message(reply)) == (400, True)
