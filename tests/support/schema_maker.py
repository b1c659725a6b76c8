"""JSON schemas by chance, of every kind that a grammar can hold."""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = [
    r"^\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^[A-Z]{2}-\d+$", r"^\w{3}@\w{3}$", r"^[\w-]{3}$", r"^a\.b$", r"^https:\/\/x$",
    r"^[^\s]{3}$", "^a", "b$", "^(ab|c)+$", r"^a|b$", r"^(?:x|y)?z{2,}$", r"^\u0041[\u00e9-\u00fc]$", r'^"[\\"]"$',
]  # fmt: skip
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "duration", "hostname", "uri"]
NAMES = ["a", "b", "ab", "name", "a-b", "x]y", "q^", 'say "hi"', "back\\slash", "é", "", "value", "root", "string"]


class SchemaMaker:
    """Makes schemas. Of one seed they are the same. They refer to `node`, which refers to itself, and `small`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def whole(self) -> dict[str, Any]:
        """Return a schema with its definitions."""
        made = self.object(3)
        node = {
            "type": "object",
            "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 99}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
        return {**made, "$defs": {"node": node, "small": {"type": "integer", "maximum": 20}}}

    def part(self, depth: int) -> Any:
        """Return a schema whose parts are nested so deep at most."""
        plain = [self.string, self.integer, self.number, self.value, self.reference, self.anything]
        nested = [self.object, self.array, self.row, self.choice, self.every, self.nullable]
        make = self.random.choice(plain + nested * 2 if depth else plain)
        return make(depth - 1) if make in nested else make()

    def string(self) -> dict[str, Any]:
        kind, few = self.random.randrange(5), self.random.randrange(6)
        more: list[dict[str, Any]] = [
            {"minLength": few, "maxLength": few + 4}, {"pattern": self.random.choice(PATTERNS)},
            {"format": self.random.choice(FORMATS)}, {"maxLength": 3000}, {},
        ]  # fmt: skip
        return {"type": "string", **more[kind]}

    def _bounds(self, low: float, high: float) -> dict[str, Any]:
        lower = {self.random.choice(["minimum", "exclusiveMinimum"]): low}
        upper = {self.random.choice(["maximum", "exclusiveMaximum"]): high}
        return self.random.choice([lower, upper, lower | upper, {}])

    def integer(self) -> dict[str, Any]:
        low = self.random.randrange(-150, 150)
        return {"type": "integer", **self._bounds(low, low + self.random.randrange(2, 1200))}

    def number(self) -> dict[str, Any]:
        low = self.random.randrange(-150, 150) / self.random.choice([1, 2, 10, 100])
        return {"type": "number", **self._bounds(low, low + self.random.randrange(1, 300) / 4)}

    def value(self) -> dict[str, Any]:
        values = ["red", 'a "quote"', 7, 2.5, None, True, [1, "x"], {"k": [None]}, "line\nend", "\u2603"]
        return self.random.choice([{"const": self.random.choice(values)}, {"enum": self.random.sample(values, 3)}])

    def reference(self) -> dict[str, Any]:
        small = {"$ref": "#/$defs/small"}
        return self.random.choice([{"$ref": "#/$defs/node"}, small, {**small, "minimum": 3, "title": "T"}])

    def anything(self) -> Any:
        return self.random.choice([True, {"title": "Any"}, {"type": "boolean"}, {"type": "null"}])

    def nullable(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {"anyOf": [self.part(depth), {"type": "null"}], "default": None}
        return {"type": ["string", "null"], "maxLength": 5}

    def array(self, depth: int) -> dict[str, Any]:
        least = self.random.randrange(3)
        more = self.random.choice(
            [{}, {"minItems": least}, {"minItems": least, "maxItems": least + 2}, {"maxItems": 3}]
        )
        unique = {"uniqueItems": True} if self.random.random() < 0.1 else {}
        return {"type": "array", "items": self.part(depth), **more, **unique}

    def row(self, depth: int) -> dict[str, Any]:
        parts = [self.part(depth) for _ in range(self.random.randrange(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": self.random.randrange(2)}

    def choice(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {"anyOf": [self.part(depth), self.part(depth)]}
        ways = [{"properties": {"kind": {"const": kind}, "x": self.part(0)}, "required": ["kind"]} for kind in "pq"]
        return {"oneOf": [{"type": "object", **way} for way in ways]}

    def every(self, depth: int) -> dict[str, Any]:
        one = {"type": "object", "properties": {"i": {"type": "integer"}, "s": self.string()}, "required": ["i"]}
        other = {"properties": {"i": {"minimum": 5, "maximum": 50}, "t": self.part(depth)}, "required": ["t"]}
        return {"allOf": [one, other], "description": "both"}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(NAMES, self.random.randrange(1, 5))
        required = [name for name in names if self.random.random() < 0.5]
        further = self.random.choice(
            [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "boolean"}}]
        )
        made = {"type": "object", "properties": {name: self.part(depth) for name in names}, **further}
        return {**made, "required": required} if required else made
