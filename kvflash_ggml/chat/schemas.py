"""What a JSON schema of a client may be: how large, how deep, where its references lead, and what it costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError

MAX_BYTES = 256 << 10
MAX_DEPTH = 32
MAX_NODES = 4096
MAX_WORK = 1 << 24
"""Of the schemas of all tools: characters, about, that llama.cpp's converter copies. So many take it about a second."""

_RULE = 64
"""Characters of a rule beside its name, about."""

PATH = 80
"""Characters of a place in a schema that a message or a header names."""

_NAMING = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")


class SchemaError(ConfigError):
    """A schema that is no schema, costs too much, or asks for what a grammar cannot hold.

    where: the schema in the request.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"the schema in {where} {why}")
        self.where = where


def check(schema: Any, where: str) -> None:
    """Raise SchemaError for a schema that is too large, too deep, refers to elsewhere, or to itself without end."""
    if not isinstance(schema, dict | bool):
        raise SchemaError(where, f"is {json.dumps(schema, default=str)[:PATH]}: it must be an object")
    try:
        size = len(json.dumps(schema, allow_nan=False).encode())
    except (ValueError, TypeError) as err:
        raise SchemaError(where, f"is no JSON: {err}") from None
    if size > MAX_BYTES:
        raise SchemaError(where, f"has {size} bytes, and may have {MAX_BYTES}")
    references = []
    for nodes, (node, depth, _, named) in enumerate(_parts(schema)):
        if nodes == MAX_NODES:
            raise SchemaError(where, f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise SchemaError(where, f"is nested more than {MAX_DEPTH} deep")
        if not named and isinstance(node, dict) and "$ref" in node:
            if not isinstance(node["$ref"], str):
                raise SchemaError(where, f"has $ref = {json.dumps(node['$ref'])[:PATH]}, and it must be a text")
            references.append(node["$ref"])
    sound: set[str] = set()
    for reference in references:
        sound |= _follow(schema, reference, where, sound)


def _parts(schema: Any) -> Iterator[tuple[Any, int, int, bool]]:
    """Yield each part of a schema: its depth, the characters of the names that lead to it, and whether its keys are
    names.
    """
    stack = [(schema, 0, 0, False)]
    while stack:
        node, depth, path, named = part = stack.pop()
        yield part
        if isinstance(node, list):
            stack += [(child, depth + 1, path, False) for child in node]
        elif isinstance(node, dict):
            stack += [
                (child, depth + 1, path + len(key) * named, not named and key in _NAMING)
                for key, child in node.items()
                if named or key not in _VALUES
            ]


def work(schema: Any) -> int:
    """Count what a checked schema costs the converter: the square of an object's properties, and names within names."""
    return sum(
        len(node) ** 2 * (path + _RULE) for node, _, path, named in _parts(schema) if named and isinstance(node, dict)
    )


def check_work(schemas: Iterable[Any], where: str) -> None:
    """Raise SchemaError for schemas that take llama.cpp's converter seconds, all together."""
    whole = sum(map(work, schemas))
    if whole > MAX_WORK:
        limit = f"takes {whole} steps to become a grammar, and {MAX_WORK} is the most"
        raise SchemaError(where, f"{limit}: name fewer properties, with shorter names")


def _follow(schema: Any, reference: str, where: str, sound: set[str]) -> set[str]:
    """Check that a reference leads somewhere in the schema, and not from reference to reference for ever.

    sound: references that do. Returns those that are found to do so as well.
    """
    seen: set[str] = set()
    while reference not in sound:
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(
                where, f"refers to {reference[:PATH]!r}: only references within it ('#', '#/...') are followed"
            )
        if reference in seen:
            raise SchemaError(where, f"has references that only refer to each other: {reference[:PATH]!r}")
        seen.add(reference)
        try:
            node = at(schema, reference)
        except LookupError:
            raise SchemaError(where, f"refers to {reference[:PATH]!r}, which it does not have") from None
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            break
        reference = node["$ref"]
    return seen


def at(schema: Any, reference: str) -> Any:
    """Return what a JSON pointer leads to. LookupError if it leads nowhere."""
    node = schema
    for part in reference.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and re.fullmatch("[0-9]{1,6}", part):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node[part]
        else:
            raise LookupError(reference)
    return node
