"""Bounds JSON schemas and grammars of clients: the code that makes grammars of them has no bounds."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ConfigError
from .errors import ApiError

MAX_BYTES = 256 << 10
MAX_DEPTH = 32
MAX_NODES = 4096
MAX_REPEAT = 2000
"""Of `maxItems`, `maxLength` and their like: each is written out in the grammar."""

MAX_WRITTEN = 16 << 20
"""Characters of a grammar, about, that a schema may ask for."""

MAX_WORK = 1 << 24
"""Of the schemas of all tools: characters, about, that llama.cpp's converter copies. So many take it about a second."""

_RULE = 64
"""Characters of a rule beside its name and repetitions, about."""

_DEFINING = ("$defs", "definitions")
_NAMING = ("properties", "patternProperties", *_DEFINING)
_VALUES = ("const", "enum", "default", "examples")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check(schema: Any, where: str) -> None:
    """ApiError for a schema that is too large, too deep, refers to elsewhere, or to itself without end."""
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise _refused(where, f"has {size} bytes, and may have {MAX_BYTES}")
    references = []
    for nodes, (node, depth, _, named) in enumerate(_parts(schema)):
        if nodes == MAX_NODES:
            raise _refused(where, f"has more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise _refused(where, f"is nested more than {MAX_DEPTH} deep")
        if named or not isinstance(node, dict):
            continue
        for name in _COUNTS:
            count = node.get(name)
            if isinstance(count, int) and count > MAX_REPEAT:
                raise _refused(where, f"has {name} = {count}, and {MAX_REPEAT} is the most")
        if isinstance(pattern := node.get("pattern"), str):
            _check_pattern(pattern, where)
        if isinstance(reference := node.get("$ref"), str):
            references.append(reference)
    sound: set[str] = set()
    for reference in references:
        sound |= _follow(schema, reference, where, sound)


def _parts(schema: Any) -> Iterator[tuple[Any, int, int, bool]]:
    """Each part of a schema: its depth, how many characters the names that lead to it have, and are its keys names?"""
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
    """What a checked schema costs the converter: the square of an object's properties, and names within names."""
    return sum(
        len(node) ** 2 * (path + _RULE) for node, _, path, named in _parts(schema) if named and isinstance(node, dict)
    )


def check_work(schemas: Iterable[Any], where: str) -> None:
    """ApiError for schemas that take llama.cpp's converter seconds, all together."""
    whole = sum(map(work, schemas))
    if whole > MAX_WORK:
        limit = f"takes {whole} steps to become a grammar, and {MAX_WORK} is the most"
        raise _refused(where, f"{limit}: name fewer properties, with shorter names")


def loosened(schema: Any, *, named: bool = False) -> Any:
    """A tool's schema without the bounds and patterns that `check` refuses.

    Agents send tools with a `maxLength` of half a million. Their calls are checked by the agent in any case. named: the
    keys are somebody's names.
    """
    if isinstance(schema, list):
        return [loosened(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: child if not named and key in _VALUES else loosened(child, named=not named and key in _NAMING)
        for key, child in schema.items()
        if named or not _refuses(key, child)
    }


def _refuses(key: str, value: Any) -> bool:
    if key == "pattern" and isinstance(value, str):
        try:
            _check_pattern(value, key)
        except ApiError:
            return True
    return key in _COUNTS and isinstance(value, int) and value > MAX_REPEAT


_IN_STRINGS = {
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])',
    "dot": r'[^"\\\x7F\x00-\x1F] | "\\" ["\\/]',
}
"""Rules of characters in strings. Upstream's let line breaks in, and in patterns quotes, which ends the JSON."""

_PATTERN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{([^}]*)\}|([\]}])", re.DOTALL)
"""Escapes and classes, whose braces are characters; a quantifier; and a bracket that closes nothing."""


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > 512:
        raise _refused(where, "has a pattern of more than 512 characters")
    for found in _PATTERN.finditer(pattern):
        if found[2] is not None:  # upstream's converter waits there for ever
            raise _refused(where, f"has a pattern with a {found[2]!r} that closes nothing: write \\{found[2]}")
        if found[1] is not None and not re.fullmatch("[0-9]{1,4}|[0-9]{0,4},[0-9]{0,4}", found[1]):
            raise _refused(
                where,
                f"has a pattern with {{{found[1][:40]}}}: write {{n}}, {{n,}} or {{m,n}}, {MAX_REPEAT} at most",
            )
    if max(_quantifiers(pattern), default=0) > MAX_REPEAT:
        raise _refused(where, f"has a pattern that repeats something more than {MAX_REPEAT} times")


def _quantifiers(pattern: str) -> list[int]:
    return [int(count) for found in _PATTERN.finditer(pattern) for count in (found[1] or "").split(",") if count]


def _follow(schema: Any, reference: str, where: str, sound: set[str]) -> set[str]:
    """A reference must lead somewhere in the schema, and not from reference to reference for ever.

    sound: references that do. Returns those that are found to do so as well.
    """
    seen: set[str] = set()
    while reference not in sound:
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
            break
        reference = node["$ref"]
    return seen


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
    targets: list[Any] = []
    names: dict[int, str] = {}  # by the target: pointers are spelled in several ways

    def copy(node: Any, *, named: bool = False) -> Any:
        """named: the keys are somebody's names."""
        if isinstance(node, list):
            return [copy(child) for child in node]
        if not isinstance(node, dict):
            return node
        if not named and isinstance(node.get("$ref"), str):
            target = _at(schema, node["$ref"])
            if id(target) not in names:
                names[id(target)] = f"{prefix}-{len(targets)}"
                targets.append(target)
            return {"$ref": f"#/$defs/{names[id(target)]}"}
        return {
            key: child if not named and key in _VALUES else copy(child, named=not named and key in _NAMING)
            for key, child in node.items()
        }

    whole = copy({key: child for key, child in schema.items() if key not in _DEFINING})
    definitions: dict[str, Any] = {}
    for target in targets:  # which grows meanwhile
        definitions[names[id(target)]] = copy(target)
    if not targets:
        return schema
    return {**({"anyOf": [whole]} if "$ref" in whole else whole), "$defs": definitions}


def grammar(schema: dict[str, Any]) -> str:
    """A checked schema as GBNF. ConfigError for one that asks for too much of it, or cannot be written."""
    from llama_cpp.llama_grammar import SchemaConverter

    class Bounded(SchemaConverter):
        """A small schema can ask for gigabytes: by names within names, repeated, and by many references to one part."""

        written = 0

        def _format_literal(self, literal: str) -> str:
            """Of JSON, as a model writes it. GBNF has escapes like JSON's, so that each backslash is written twice."""
            text = json.dumps(json.loads(literal), ensure_ascii=False)
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

        def visit(self, schema: dict[str, Any], name: str) -> Any:
            if self.written:
                name = name or "empty"  # a property without a name is not the root
            pattern = schema.get("pattern")
            repeats = [schema[count] for count in _COUNTS if isinstance(schema.get(count), int)]
            repeats += _quantifiers(pattern) if isinstance(pattern, str) else []
            self.written += (len(name) + _RULE) * (1 + sum(repeats))
            if self.written > MAX_WRITTEN:
                raise ConfigError(
                    f"this JSON schema asks for a grammar of {self.written} characters or more, and {MAX_WRITTEN} is "
                    f"the most: shorten names, and lower its maxItems, maxLength and repetitions"
                )
            return super().visit(schema, name)  # type: ignore[no-untyped-call]

    converter: Any = Bounded(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)  # type: ignore[no-untyped-call]
    try:
        converter.visit(converter.resolve_refs(resolved(schema), "schema"), "")
        rules = converter._rules
        rules.update({name: rule for name, rule in _IN_STRINGS.items() if name in rules})
        return str(converter.format_grammar())
    except ConfigError:
        raise
    except Exception as err:
        raise ConfigError(f"this JSON schema cannot be made a grammar: {type(err).__name__}: {str(err)[:300]}") from err


def _refused(where: str, why: str) -> ApiError:
    return ApiError(400, f"the schema in {where} {why}", code="invalid_schema", param=where)
