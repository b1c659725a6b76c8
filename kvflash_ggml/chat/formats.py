"""The form of an answer, as OpenAI's clients ask for it, as a grammar: one way for `Llama` and the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .rewriting import held


def grammar_of(schema: Any, *, strict: bool = False, where: str = "response_format") -> tuple[str, tuple[str, ...]]:
    """Return the grammar of the JSON values that a schema allows, and places of what it does not hold.

    strict: SchemaError for what it does not hold. where: the schema in the request. SchemaError for what is no schema.
    """
    from ..native import chat as native  # here: the server's front is imported without the library

    found = held(schema, where, strict=strict)
    return native.schema_grammar(found.schema), found.ignored


def schema_of(form: Any) -> tuple[Any, bool] | None:
    """Return the schema that a `response_format` asks for, and whether it is strict. None for any text.

    ConfigError for another type than "text", "json_object" and "json_schema", and for a schema that is missing.
    """
    kind = "text" if form is None else form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"} if form.get("schema") is None else form["schema"], False
    if kind != "json_schema":
        shown = json.dumps(form, default=str)[:80]
        raise ConfigError(f"the response_format {shown} has no such type: it must be text, json_object or json_schema")
    inner = form if form.get("json_schema") is None else form["json_schema"]
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise ConfigError("the response_format has the type json_schema, and no schema: give it one")
    return inner["schema"], inner.get("strict") is True
