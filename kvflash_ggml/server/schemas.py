"""Bounds on JSON schemas and grammars that strangers send: whoever turns them into a grammar has none of its own."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from .errors import ApiError

MAX_BYTES = 256 << 10
MAX_DEPTH = 32
MAX_NODES = 4096
MAX_REPEAT = 2000
"""Of `maxItems`, `maxLength` and their like: each is written out in the grammar."""

_DEFINING = ("$defs", "definitions")
_NAMING = ("properties", "patternProperties", *_DEFINING)
_VALUES = ("const", "enum", "default", "examples")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check(schema: Any, where: str) -> None:
    """ApiError for a schema that is too large, too deep, refers to elsewhere, or to itself without end."""
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise _refused(where, f"has {size} bytes, and may have {MAX_BYTES}")
    nodes = 0
    stack: list[tuple[Any, int, bool]] = [(schema, 0, False)]
    references = []
    while stack:
        node, depth, named = stack.pop()  # named: the keys are somebody's names
        nodes += 1
        if nodes > MAX_NODES:
            raise _refused(where, f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise _refused(where, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(node, dict) and named:
            stack += [(child, depth + 1, False) for child in node.values()]
        elif isinstance(node, dict):
            for name in _COUNTS:
                count = node.get(name)
                if isinstance(count, int) and count > MAX_REPEAT:
                    raise _refused(where, f"has {name} = {count}, and {MAX_REPEAT} is the most")
            pattern = node.get("pattern")
            if isinstance(pattern, str):
                _check_pattern(pattern, where)
            if isinstance(node.get("$ref"), str):
                references.append(node["$ref"])
            stack += [(child, depth + 1, key in _NAMING) for key, child in node.items() if key not in _VALUES]
        elif isinstance(node, list):
            stack += [(child, depth + 1, False) for child in node]
    for reference in references:
        _follow(schema, reference, where)


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > 512:
        raise _refused(where, "has a pattern of more than 512 characters")
    if any(int(number) > MAX_REPEAT for number in re.findall(r"\d+(?=[,}])", pattern[:512]) if len(number) < 9):
        raise _refused(where, f"has a pattern that repeats something more than {MAX_REPEAT} times")


def _follow(schema: Any, reference: str, where: str) -> None:
    """A reference must lead somewhere in the schema, and not from reference to reference for ever."""
    seen: set[str] = set()
    while True:
        if reference != "#" and not reference.startswith("#/"):
            raise _refused(
                where, f"refers to {reference[:80]!r}: only references within it ('#', '#/...') are followed"
            )
        if reference in seen:
            raise _refused(where, f"has references that only refer to each other: {reference[:80]!r}")
        seen.add(reference)
        try:
            node = _at(schema, reference)
        except LookupError:
            raise _refused(where, f"refers to {reference[:80]!r}, which it does not have") from None
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            return
        reference = node["$ref"]


def _at(schema: Any, reference: str) -> Any:
    """Where a JSON pointer leads. LookupError if it leads nowhere."""
    node = schema
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and re.fullmatch("[0-9]{1,6}", part):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node[part]
        else:
            raise LookupError(reference)
    return node


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A checked schema whose references lead to definitions at its root, with names that nothing else in it has.

    llama-cpp-python's converter takes rules for each other whose names are alike, looks into nothing beside a
    reference, and knows no '#'.
    """
    prefix = "ref-" + hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]
    names: dict[str, str] = {}

    def copy(node: Any, *, named: bool = False) -> Any:
        """named: the keys are somebody's names."""
        if isinstance(node, list):
            return [copy(child) for child in node]
        if not isinstance(node, dict):
            return node
        if not named and isinstance(node.get("$ref"), str):
            name = names.setdefault(node["$ref"], f"{prefix}-{len(names)}")
            return {"$ref": f"#/$defs/{name}"}
        return {
            key: child if not named and key in _VALUES else copy(child, named=not named and key in _NAMING)
            for key, child in node.items()
        }

    whole = copy({key: child for key, child in schema.items() if key not in _DEFINING})
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        reference, name = list(names.items())[len(definitions)]
        definitions[name] = copy(_at(schema, reference))
    if not names:
        return schema
    return {**({"anyOf": [whole]} if "$ref" in whole else whole), "$defs": definitions}


def _refused(where: str, why: str) -> ApiError:
    return ApiError(400, f"the schema in {where} {why}", code="invalid_schema", param=where)
