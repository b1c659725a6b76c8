"""JSON schemas of clients, rewritten so that llama.cpp's converter makes grammars of them, in bounded time.

Its converter looks at one keyword of a schema and passes over the others. `held` merges what must hold together
(`allOf`, what stands beside `$ref` or `anyOf`) and writes patterns, formats and bounds as patterns of JSON text. It
names the keywords that no grammar can hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, TypeGuard

from ..errors import ConfigError
from . import patterns
from .schemas import PATH, SchemaError, at, check, check_work

MAX_VISITED = 1 << 16
"""Parts of a schema that are looked at: a part that is merged with others counts each time."""

MAX_MERGED = 48
"""Places within each other that are rewritten before the next one is done."""

MAX_NAMED = 512
"""Parts that references lead to. llama.cpp's converter goes from one to the next by recursion."""

MAX_WRITTEN = 4 << 20
"""Characters of a rewritten schema."""

MAX_WAYS = 64
"""Alternatives of `oneOf` that are compared with each other."""

MAX_ITEMS = 500
"""Of `minItems` and `maxItems`. The rules of a grammar write out each item, and 2,000 parts of one are the most."""

_VALUE = 16
"""Characters of `enum` and `const` that count as a part."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_SPEAKS_OF = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
"""Keywords that say which type a schema without one means."""

_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef", "dependencies", "dependentSchemas")
"""Keywords that no grammar holds, whatever the type."""

_KEYWORDS = {
    *(key for keys in _SPEAKS_OF.values() for key in keys), *_NEVER, "type", "enum", "const", "additionalItems",
    "unevaluatedProperties",
}  # fmt: skip
_CHOICES = ("anyOf", "oneOf")
_LIMITING = _KEYWORDS - {"type", "properties", "required", "additionalProperties", "items"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a grammar holds of a schema.

    schema: rewritten, for llama.cpp's converter. ignored: places of the keywords that it does not hold.
    """

    schema: dict[str, Any]
    ignored: tuple[str, ...] = ()


def held(schema: Any, where: str, *, strict: bool = False, call: bool = False) -> Held:
    """Rewrite a schema for llama.cpp's converter. `where` names it in messages and in `ignored`.

    strict: SchemaError for what a grammar cannot hold, and for patterns in any case. call: of a tool's arguments, an
    object at its root; patterns that cannot be held are ignored too. SchemaError for what is no schema, for one that
    nothing fulfils, and for one that costs too much.
    """
    check(schema, where)
    rewriting = _Rewriting(schema, where, call=call)
    found = rewriting.whole()
    if strict and rewriting.refused:
        path, keyword, why = rewriting.refused[0]
        raise SchemaError(where, f'has {keyword} at {path}, {why}: leave it out, or "strict"')
    check_work([found], where)
    return Held(schema=found, ignored=tuple(dict.fromkeys(rewriting.ignored)))


def unwritten(function: Mapping[str, Any], grammar: str) -> Iterator[str]:
    """Yield places of keywords that the grammar of a function's calls has not.

    Some formats of calls write arguments that are texts without quotes, or all arguments in a way of their own.
    """
    rules = set(re.findall(r"(?m)^([\w-]+) ::=", grammar))
    name, properties = f"tool-{function['name']}", (function.get("parameters") or {}).get("properties") or {}
    if _rule_name(f"{name}-schema") in rules:
        return
    for argument, part in properties.items():
        each = (f"{name}-arg-{argument}-schema", f"ling3-arg-{function['name']}-{argument}-schema")
        if isinstance(part, dict) and not rules & set(map(_rule_name, each)):
            yield from (f"tools.{function['name']}.{argument}.{key}" for key in part if key in _LIMITING)


def _rule_name(name: str) -> str:
    return re.sub("[^a-zA-Z0-9-]+", "-", name)


_FOLLOWED, _CHOSEN = 1, 2
_Conjunct = tuple[Any, int]


class _None(Exception):
    """Nothing fulfils a part of a schema. Its arguments: the part's path, and why."""

    def __str__(self) -> str:
        path, why = self.args
        return f"{path[-PATH:]} {why}"


@dataclass(eq=False, slots=True)
class _Part:
    """A rewritten part that others may refer to, once it has a name."""

    name: str | None = None
    found: dict[str, Any] | None = None
    none: tuple[str, ...] = ()


class _Rewriting:
    """Rewrites one schema. A place is rewritten from all parts of the schema that must hold there, its *conjuncts*.

    A conjunct is a part, and what of it is done: its references are `_FOLLOWED`, one of its alternatives is `_CHOSEN`.
    """

    def __init__(self, schema: Any, where: str, *, call: bool) -> None:
        self.root, self.where, self.call = schema, where, call
        self.ignored: list[str] = []
        self.refused: list[tuple[str, str, str]] = []
        self.parts: dict[frozenset[tuple[int, int]], _Part] = {}
        self.named: list[_Part] = []
        self.waiting: list[tuple[_Part, list[_Conjunct], str]] = []
        self.choices: list[tuple[str, list[dict[str, Any]]]] = []  # of `oneOf`
        self.others: dict[int, dict[str, Any]] = {}  # `oneOf` beside an `anyOf`, by the part that has both
        self.open: dict[int, dict[str, Any]] = {}  # rewritten objects that may have further properties, by identity
        self.trees: dict[str, patterns.Node | patterns.Unheld] = {}  # of its patterns
        self.visited = self.depth = self.written = 0
        digest = hashlib.sha256(json.dumps([schema, call]).encode()).hexdigest()[:16]
        self.prefix = f"ref-{digest}"

    def whole(self) -> dict[str, Any]:
        """Return the rewritten schema, with its definitions."""
        try:
            found = self.rewritten([(self.root, 0)], self.where, root=True)
            for part, conjuncts, path in self.waiting:  # which grows meanwhile
                part.found = self.merged(conjuncts, path)
        except _None as err:
            raise SchemaError(self.where, f"is fulfilled by nothing: {err}") from None
        for path, ways in self.choices:
            if len(ways) > MAX_WAYS or any(not self.apart(a, b) for i, a in enumerate(ways) for b in ways[:i]):
                self.ignore(path, "oneOf", "whose alternatives may hold at once, which no grammar can tell")
        definitions = {part.name: part.found for part in self.named}
        whole = {**found, "$defs": definitions} if definitions else found
        self.written = 0
        self.write(json.dumps(whole))
        return whole

    def look(self, count: int = 1) -> None:
        """Count parts that are looked at. SchemaError for too many."""
        self.visited += count
        if self.visited > MAX_VISITED:
            raise SchemaError(self.where, f"has more than {MAX_VISITED} parts once its references are followed")

    def write(self, text: str) -> str:
        """Count what is written. SchemaError for too much."""
        self.written += len(text)
        if self.written > MAX_WRITTEN:
            raise SchemaError(
                self.where, f"asks for a grammar of more than {MAX_WRITTEN} characters: lower its counts, and names"
            )
        return text

    # --- what does not hold

    def ignore(self, path: str, keyword: str, why: str = "which no grammar can hold", *, strictly: bool = True) -> None:
        """Note a keyword that does not hold. strictly: a strict schema may not have it."""
        place = f"{path}.{keyword}"
        self.ignored.append(place if len(place) <= PATH else "..." + place[3 - PATH :])
        if strictly:
            self.refused.append((path[-PATH:], keyword, why))

    def wrong(self, path: str, keyword: str, value: Any, wanted: str) -> SchemaError:
        shown = json.dumps(value)[:PATH]
        return SchemaError(self.where, f"has {keyword} = {shown} at {path[-PATH:]}, and it must be {wanted}")

    # --- conjuncts

    def rewritten(self, conjuncts: Sequence[_Conjunct], path: str, *, root: bool = False) -> dict[str, Any]:
        """Rewrite conjuncts as one part. _None if nothing fulfils them."""
        self.look()
        flat = self.flat(conjuncts, path)
        key = frozenset((id(node), done & _CHOSEN) for node, done in flat)
        part = self.parts.get(key)
        if part is not None:
            if part.none:
                raise _None(*part.none)
            if part.found is not None and len(part.found) < 2 and part.name is None:
                return part.found  # a plain type
            return self.reference(part)
        part = self.parts[key] = _Part()
        if len(flat) == 1 and not root and all(flat[0][0] is not node for node, _ in conjuncts):
            self.waiting.append((part, flat, path))  # a reference leads to it, and perhaps others do
            return self.reference(part)
        self.depth += 1
        if self.depth > MAX_MERGED:
            raise SchemaError(self.where, f"is nested more than {MAX_MERGED} deep once its references are followed")
        try:
            part.found = self.merged(flat, path, root=root)
        except _None as err:
            part.none = err.args
            if part.name is not None:  # it refers to itself
                raise SchemaError(self.where, f"is fulfilled by nothing at {path[-PATH:]}: {err}") from None
            raise
        finally:
            self.depth -= 1
        return part.found if part.name is None or root else self.reference(part)

    def reference(self, part: _Part) -> dict[str, Any]:
        if part.name is None:
            part.name = f"{self.prefix}-{len(self.named)}"
            self.named.append(part)
            if len(self.named) > MAX_NAMED:
                raise SchemaError(self.where, f"refers to more than {MAX_NAMED} of its parts")
        return {"$ref": f"#/$defs/{part.name}"}

    def flat(self, conjuncts: Sequence[_Conjunct], path: str) -> list[_Conjunct]:
        """Add what references and `allOf` of the conjuncts say, and drop those that say nothing. _None for `false`."""
        out: dict[int, _Conjunct] = {}
        todo = sorted(conjuncts, key=lambda one: one[1])  # from the end, so that what is done counts as such
        while todo:
            node, done = todo.pop()
            self.look()
            if node is True or id(node) in out:
                continue
            if node is False:
                raise _None(path, "is false")
            if not isinstance(node, dict):
                raise SchemaError(self.where, f"has {json.dumps(node)[:PATH]} at {path[-PATH:]}: write an object")
            out[id(node)] = node, done | _FOLLOWED
            if done & _FOLLOWED:
                continue
            if "$ref" in node:
                todo.append((at(self.root, node["$ref"]), 0))
            every = node.get("allOf", [])
            if not isinstance(every, list):
                raise self.wrong(path, "allOf", every, "a list of schemas")
            todo += [(child, 0) for child in reversed(every)]
        return [
            (node, done)
            for node, done in out.values()
            if _KEYWORDS & node.keys() or (not done & _CHOSEN and any(key in node for key in _CHOICES))
        ]

    def merged(self, flat: list[_Conjunct], path: str, *, root: bool = False) -> dict[str, Any]:
        """Merge flat conjuncts into one part."""
        nodes = [node for node, _ in flat]
        left = [(node, key) for node, done in flat if not done & _CHOSEN for key in _CHOICES if key in node]
        if left and root and self.call and any("properties" in node for node in nodes):
            for _, key in left:  # formats of calls need the names of the arguments
                self.ignore(path, key, "beside the properties of a call")
        elif left:
            return self.chosen(flat, *left[0], path)
        for node in nodes:
            for keyword in _NEVER:
                if keyword in node and (keyword != "if" or "then" in node or "else" in node):
                    self.ignore(path, keyword)
        values = self.values(nodes, path)
        if values is not None:
            return {"enum": values}
        types = self.types(nodes, path)
        if types is None:
            return {}
        return _any_of(_fulfilled([partial(self.typed, kind, nodes, path) for kind in types]))

    def chosen(self, flat: list[_Conjunct], node: dict[str, Any], key: str, path: str) -> dict[str, Any]:
        """Make one way for each of the alternatives, with everything else that must hold."""
        ways = node[key]
        if not isinstance(ways, list) or not ways:
            raise self.wrong(path, key, ways, "a list of schemas, with one at least")
        base = [(one, done | _CHOSEN) if one is node else (one, done) for one, done in flat]
        if key == "anyOf" and "oneOf" in node:
            base.append((self.others.setdefault(id(node), {"oneOf": node["oneOf"]}), 0))
        found = _fulfilled([partial(self.rewritten, [*base, (way, 0)], path) for way in ways])
        if key == "oneOf" and len(found) > 1:
            self.choices.append((path, found))
        return _any_of(found)

    def apart(self, one: dict[str, Any], other: dict[str, Any], depth: int = 4) -> bool:
        """Tell whether nothing can fulfil both of two rewritten parts."""
        one, other = self.target(one), self.target(other)
        for a, b in ((one, other), (other, one)):
            if "anyOf" in a:
                return len(a["anyOf"]) * depth < 256 and all(self.apart(way, b, depth) for way in a["anyOf"])
        if "enum" in one and "enum" in other:
            return not {_key(value) for value in one["enum"]} & {_key(value) for value in other["enum"]}
        kinds = [{_type_of(value) for value in x["enum"]} if "enum" in x else {x.get("type")} for x in (one, other)]
        if None in kinds[0] | kinds[1]:
            return False
        if not kinds[0] & kinds[1]:
            return not any("integer" in a and "number" in b for a, b in (kinds, kinds[::-1]))
        if one.get("type") != "object" or other.get("type") != "object" or not depth:
            return False
        for a, b in ((one, other), (other, one)):
            for name in a.get("required", ()):
                if name not in b.get("properties", {}):
                    if id(b) not in self.open:
                        return True
                elif self.apart(a["properties"][name], b["properties"][name], depth - 1):
                    return True
        return False

    def target(self, part: dict[str, Any]) -> dict[str, Any]:
        """Follow the reference of a rewritten part; return anything where its target is not rewritten yet."""
        if "$ref" not in part:
            return part
        found = self.named[int(part["$ref"].rpartition("-")[2])].found
        return {} if found is None else self.target(found)

    # --- types and values

    def types(self, nodes: Sequence[dict[str, Any]], path: str) -> list[str] | None:
        """Return the types that all parts allow, in their order. None for any."""
        types: list[str] | None = None
        for node in nodes:
            if node.get("type") is None:
                continue
            given = node["type"] if isinstance(node["type"], list) else [node["type"]]
            for kind in given:
                if kind not in _TYPES:
                    raise self.wrong(path, "type", kind, f"one of {', '.join(_TYPES)}")
            if not given:
                raise self.wrong(path, "type", given, "a type at least")
            given = [kind for kind in given if kind != "integer" or "number" not in given]
            types = given if types is None else _common(types, given)
        if types is None:
            found = [kind for kind, keys in _SPEAKS_OF.items() if any(key in node for node in nodes for key in keys)]
            return found or None
        if not types:
            raise _None(path, "has types without one in common")
        return types

    def values(self, nodes: Sequence[dict[str, Any]], path: str) -> list[Any] | None:
        """Return the values that `enum` and `const` leave. None where neither is."""
        values: list[Any] | None = None
        for node in nodes:
            for key in ("enum", "const"):
                if key not in node:
                    continue
                given = node[key] if key == "enum" else [node[key]]
                if not isinstance(given, list) or not given:
                    raise self.wrong(path, key, given, "a list of values, with one at least")
                self.look(len(json.dumps(given)) // _VALUE)
                keys = set(map(_key, given))
                values = given if values is None else [value for value in values if _key(value) in keys]
        if values is None:
            return None
        for number in (value for value in _numbers(values) if abs(value) >= 1 << 63):
            raise SchemaError(self.where, f"has the number {number} at {path[-PATH:]}: 2 ** 63 is too large")
        if any("pattern" in node for node in nodes) and any(isinstance(value, str) for value in values):
            self.ignore(path, "pattern", "beside values")
        left = [value for value in values if all(_fits(value, node) for node in nodes)]
        if not left:
            raise _None(path, "has values of which none fits its other keywords")
        unique: dict[Any, Any] = {}
        for value in left:
            unique.setdefault(_key(value), value)
        return list(unique.values())

    def typed(self, kind: str, nodes: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
        if kind in ("integer", "number"):
            return self.number(kind, nodes, path)
        if kind == "string":
            return self.string(nodes, path)
        if kind == "array":
            return self.array(nodes, path)
        return self.object(nodes, path) if kind == "object" else {"type": kind}

    # --- numbers

    def number(self, kind: str, nodes: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
        for node in nodes:
            if node.get("multipleOf") is not None and not (kind == "integer" and node["multipleOf"] == 1):
                self.ignore(path, "multipleOf")
        low, above = self.bound(nodes, path, "minimum", "exclusiveMinimum", 1)
        high, below = self.bound(nodes, path, "maximum", "exclusiveMaximum", -1)
        if low is None and high is None:
            return {"type": kind}
        if kind == "integer":
            first = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
            last = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
            written = patterns.integers(first, last)
        else:
            try:
                written = patterns.numbers(low, high, above=above, below=below)
            except ConfigError as err:
                self.ignore(path, "minimum" if low is not None else "maximum", f"but {err}")
                return {"type": kind}
        if written is None:
            raise _None(path, "has a minimum above its maximum")
        return {"type": kind, "pattern": self.write(f"^{written}$")}

    def bound(
        self, nodes: Sequence[dict[str, Any]], path: str, inclusive: str, exclusive: str, sign: int
    ) -> tuple[Decimal | None, bool]:
        """Return the strictest bound, and whether it is outside the numbers. sign: 1 for the lower one."""
        found: list[tuple[Decimal, bool]] = []
        for node in nodes:
            old = node.get(exclusive) is True  # a switch, in draft 4
            for key, strictly in ((inclusive, old), (exclusive, True)):
                value = node.get(key)
                if value is None or (isinstance(value, bool) and key == exclusive):
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise self.wrong(path, key, value, "a number")
                if abs(value) >= 10**18:
                    if (value < 0) == (sign == 1):
                        continue  # beyond every number that is written
                    raise _None(path, f"has {key} = {value}, and 10 ** 18 is the most")
                found.append((Decimal(repr(value)), strictly))
        return max(found, key=lambda one: (sign * one[0], one[1]), default=(None, False))

    # --- strings

    def string(self, nodes: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
        least, most = self.limits(nodes, path, "Length", patterns.MOST_REPEATED)
        tree = None
        texts: list[tuple[str, Any]] = [(key, n[key]) for key in ("pattern", "format") for n in nodes if key in n]
        for key, value in texts:
            if not isinstance(value, str):
                raise self.wrong(path, key, value, "a text")
            one = self.pattern(value, path) if key == "pattern" else self.format(value, path)
            if one is None or one == tree:
                continue
            if tree is not None:
                self.ignore(path, key, "beside another pattern", strictly=key == "pattern")
                continue
            tree = one
        if tree is None and not least and most is None:
            return {"type": "string"}
        whole = tree or patterns.ANY
        short = patterns.limited(whole, least, most)
        if short is None:
            for limit in ("minLength", "maxLength"):
                if any(limit in node for node in nodes):
                    self.ignore(path, limit, "beside a pattern of other lengths")
        try:
            return {"type": "string", "pattern": self.write(f"^{patterns.quoted(short or whole)}$")}
        except patterns.Unheld as err:
            raise _None(path, f"has a pattern that nothing fulfils: {err}") from None

    def pattern(self, pattern: str, path: str) -> patterns.Node | None:
        """Read a pattern, as far as a grammar can hold it. SchemaError for one that it cannot, but for tools."""
        if pattern not in self.trees:
            try:
                self.trees[pattern] = patterns.parsed(pattern)
            except patterns.Unheld as err:
                self.trees[pattern] = err
        tree = self.trees[pattern]
        if not isinstance(tree, patterns.Unheld):
            return tree
        if not self.call:
            raise SchemaError(
                self.where,
                f"has a pattern that a grammar cannot hold, {pattern[:PATH]!r} at {path[-PATH:]}: {tree}",
            )
        self.ignore(path, "pattern", f"{pattern[:PATH]!r}: {tree}")
        return None

    def format(self, name: str, path: str) -> patterns.Node | None:
        """Return a format as a pattern. To JSON schemas it is a remark, so that a strict one may have any."""
        if name in patterns.FORMATS:
            return self.pattern(patterns.FORMATS[name], path)
        self.ignore(path, f"format={name[:24]}", strictly=False)
        return None

    def count(self, node: dict[str, Any], key: str, path: str) -> int | None:
        value = node.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(path, key, value, "a number of 0 or more")
        return value

    def limits(self, nodes: Sequence[dict[str, Any]], path: str, unit: str, top: int) -> tuple[int, int | None]:
        """Find the strictest lengths. unit: "Length" or "Items". top: the longest that a grammar holds."""
        least = max((self.count(node, f"min{unit}", path) or 0 for node in nodes), default=0)
        most = min((n for node in nodes if (n := self.count(node, f"max{unit}", path)) is not None), default=None)
        if most is not None and most < least:
            raise _None(path, f"has a min{unit} above its max{unit}")
        if least > top:
            raise SchemaError(self.where, f"has min{unit} = {least} at {path[-PATH:]}, and {top} is the most: lower it")
        if most is not None and most > top:
            self.ignore(path, f"max{unit}", f"and {top} is the most")
            most = None
        return least, most

    # --- arrays

    def array(self, nodes: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
        least, most = self.limits(nodes, path, "Items", MAX_ITEMS)
        for node in nodes:
            if node.get("uniqueItems") is True and (most is None or most > 1):
                self.ignore(path, "uniqueItems")
            if "contains" in node:
                self.ignore(path, "contains")
        if most == 0:
            return {"enum": [[]]}
        first = max((len(self.fixed(node, path)) for node in nodes), default=0)
        if not first:
            try:
                items = self.item(nodes, 0, path)
            except _None:
                if least:
                    raise
                return {"enum": [[]]}
            made: dict[str, Any] = {"type": "array"} if items == {} and not least and most is None else {
                "type": "array", "items": items
            }  # fmt: skip
            return {
                **made, **({"minItems": least} if least else {}), **({} if most is None else {"maxItems": most})
            }  # fmt: skip
        length = max(least, first if most is None else min(first, most))
        rows = []
        for place in range(length):
            try:
                rows.append(self.item(nodes, place, path))
            except _None:
                if place < least:
                    raise
                break
        return {"type": "array", "prefixItems": rows} if rows else {"enum": [[]]}

    def fixed(self, node: dict[str, Any], path: str) -> list[Any]:
        """Return the schemas of an array's first items."""
        for key in ("prefixItems", "items"):
            given = node.get(key)
            if isinstance(given, list):
                return given
            if key == "prefixItems" and given is not None:
                raise self.wrong(path, key, given, "a list of schemas")
        return []

    def item(self, nodes: Sequence[dict[str, Any]], place: int, path: str) -> dict[str, Any]:
        """Return what an array's item must be."""
        conjuncts = []
        for node in nodes:
            fixed = self.fixed(node, path)
            rest = node.get("additionalItems" if isinstance(node.get("items"), list) else "items")
            if place < len(fixed):
                conjuncts.append((fixed[place], 0))
            elif rest is not None:
                conjuncts.append((rest, 0))
        return self.rewritten(conjuncts, f"{path}[]")

    # --- objects

    def object(self, nodes: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
        names: dict[str, None] = {}
        required: dict[str, None] = {}
        for node in nodes:
            properties = node.get("properties")
            if properties is not None and not isinstance(properties, dict):
                raise self.wrong(path, "properties", properties, "an object of schemas")
            names |= dict.fromkeys(properties or ())
            given = node.get("required")
            if isinstance(given, list):
                required |= dict.fromkeys(name for name in given if isinstance(name, str))
        names |= required
        made: dict[str, Any] = {}
        for name in names:
            conjuncts = []
            for node in nodes:
                if name in (node.get("properties") or ()):
                    conjuncts.append((node["properties"][name], 0))
                elif node.get("additionalProperties") is not None and not node.get("patternProperties"):
                    conjuncts.append((node["additionalProperties"], 0))
            try:
                made[name] = self.rewritten(conjuncts, f"{path}.{name}")
            except _None:
                if name in required:
                    raise
        further = [node["additionalProperties"] for node in nodes if node.get("additionalProperties") is not None]
        rest: Any = not names or bool(further)
        if further:
            try:
                rest = self.rewritten([(schema, 0) for schema in further], f"{path}.*")
            except _None:
                rest = False
        if made.keys() != names.keys():
            rest = False  # a property that cannot be is no further one either
        self.unheld(nodes, path, made, required, rest)
        out: dict[str, Any] = {"type": "object"}
        if made or rest is False:
            out |= {"properties": made, "additionalProperties": rest}
        elif rest is not True and rest != {}:
            out |= {"additionalProperties": rest}
        if required:
            out |= {"required": list(required)}
        if not any(node.get("additionalProperties") is False for node in nodes):
            self.open[id(out)] = out
        return out

    def unheld(
        self,
        nodes: Sequence[dict[str, Any]],
        path: str,
        made: Mapping[str, Any],
        required: Mapping[str, Any],
        rest: Any,
    ) -> None:
        """Note the keywords of objects that no grammar holds."""
        for node in nodes:
            for key in ("patternProperties", "dependentRequired"):
                if node.get(key):
                    self.ignore(path, key)
            if "propertyNames" in node and rest is not False:
                self.ignore(path, "propertyNames")
            least, most = self.count(node, "minProperties", path), self.count(node, "maxProperties", path)
            if least is not None and least > len(required):
                self.ignore(path, "minProperties")
            if most is not None and (rest is not False or len(made) > most):
                self.ignore(path, "maxProperties")
            if node.get("unevaluatedProperties") not in (None, True) and rest is not False:
                self.ignore(path, "unevaluatedProperties")


def _fulfilled(makers: Iterable[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parts that something fulfils. _None if there is none."""
    found: list[dict[str, Any]] = []
    none: _None | None = None
    for make in makers:
        try:
            found.append(make())
        except _None as err:
            none = err
    if none is not None and not found:
        raise none
    return found


def _any_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Allow what any of several rewritten parts allows, each once."""
    unique = list({json.dumps(part): part for part in parts}.values())
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _common(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the types of both lists. An integer is a number."""
    both = [kind for kind in some if kind in others or (kind == "integer" and "number" in others)]
    return both + ["integer"] * ("number" in some and "integer" in others and "integer" not in both)


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, list | dict):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _numbers(child)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> Any:
    """Make a key that equal values of JSON share: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, list):
        return "list", tuple(map(_key, value))
    if isinstance(value, dict):
        return "dict", frozenset((name, _key(child)) for name, child in value.items())
    return isinstance(value, bool), value


def _fits(value: Any, node: dict[str, Any]) -> bool:
    """Tell whether a value keeps the type, bounds and lengths of a part. Other keywords are not looked at."""
    kind, given = _type_of(value), node.get("type")
    kinds = given if isinstance(given, list) else [given]
    if given is not None and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return False
    if kind in ("integer", "number"):
        low, high = node.get("minimum"), node.get("maximum")
        above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
        return not (
            (_is(low) and (value < low or (above is True and value == low))) or (_is(above) and value <= above)
            or (_is(high) and (value > high or (below is True and value == high))) or (_is(below) and value >= below)
        )  # fmt: skip
    if kind == "string":
        low, high = node.get("minLength"), node.get("maxLength")
        return not (_is(low) and len(value) < low) and not (_is(high) and len(value) > high)
    return True


def _is(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
