"""JSON schemas of strangers: what a grammar holds of them, what is named instead, and how much they may be."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.schema_maker import SchemaMaker

from kvflash_ggml.chat import formats, schemas
from kvflash_ggml.chat.rewriting import held
from kvflash_ggml.chat.schemas import SchemaError

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}}}


def only(schema: Any) -> Any:
    """What is rewritten of a schema, of which nothing is ignored."""
    found = held(schema, "here")
    assert found.ignored == ()
    return found.schema


def followed(schema: dict[str, Any], *path: str) -> Any:
    """What is at a path of properties, through references."""
    node: Any = schema
    for name in (*path, None):
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        node = node if name is None else node["properties"][name]
    return node


def of(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], **more}


def allows(part: dict[str, Any], *values: Any) -> list[bool]:
    """Does the pattern of a rewritten part allow these values, as JSON?"""
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    return [bool(re.fullmatch(part["pattern"][1:-1], text)) for text in texts]


def test_a_schema_that_the_converter_understands_stays_as_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {
            "$defs": {"type": "string"},
            "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["b"],
        "additionalProperties": False,
    }
    assert only(schema) == schema


def test_references_lead_to_definitions_with_names_of_their_own() -> None:
    schema = {"properties": {"node": {"type": "string"}, "tree": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
    found = only(schema)
    assert not {"node", "tree"} & found["$defs"].keys(), "a rule is called as the property is"
    tree = followed(found, "tree")
    assert followed(found, "tree", "next") == tree
    assert followed(found, "tree", "all")["properties"] == found["properties"]
    assert only(schema) == found


@pytest.mark.parametrize("pointer", ["#/$defs/a~1b~0c%20d", "#/$defs/some/anyOf/1", "#/properties/x/items"])
def test_pointers(pointer: str) -> None:
    number = {"type": "number"}
    schema = {
        "properties": {"x": {"items": number}, "y": {"$ref": pointer}},
        "$defs": {"a/b~c d": number, "some": {"anyOf": [{"type": "null"}, number]}},
    }
    assert followed(only(schema), "y") == number


BOUNDS = {
    "maximum": ({"type": "integer", "maximum": 9}, [9, -4, 0], [10, 123]),
    "minimum": ({"type": "integer", "minimum": 5}, [5, 123456], [4, -5]),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4}, [1, 3], [0, 4]),
    "exclusive, as draft 4 has it": ({"type": "integer", "maximum": 4, "exclusiveMaximum": True}, [3], [4]),
    "both": ({"type": "integer", "minimum": 5, "exclusiveMinimum": 7}, [8], [5, 7]),
    "a fraction": ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, [1, 2], [0, 3]),
    "beside a reference": ({"$ref": "#/$defs/n", "maximum": 3}, [3], [4]),
    "through allOf": ({"allOf": [{"$ref": "#/$defs/n"}, {"minimum": 2}], "maximum": 3}, [2], [1, 4]),
    "without a type": ({"minimum": 2}, [2, 2.5], [1.5]),
    "of numbers": ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.5, 0.999], [1, -0.5, 1.5]),
    "of both types": ({"type": ["number", "integer"], "maximum": 1}, [0.5, 1], [1.5]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", 'a"\n'], ["a", "abcd"]),
    "a great length": ({"type": "string", "maxLength": 2500}, ["", "a" * 2500], ["a" * 2501]),
    "a great minimum": ({"type": "string", "minLength": 2100}, ["a" * 2100, "a" * 9000], ["a" * 2099]),
    "a length of a pattern": ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["abc"], ["abcd", ""]),
    "a format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
    "a pattern without a type": ({"pattern": "b"}, ["abc"], ["ac"]),
}  # fmt: skip


@pytest.mark.parametrize(("part", "values", "others"), BOUNDS.values(), ids=BOUNDS)
def test_bounds(part: dict[str, Any], values: list[Any], others: list[Any]) -> None:
    found = followed(only(of(part, **{"$defs": {"n": {"type": "integer"}}})), "a")
    assert allows(found, *values) == [True] * len(values)
    assert allows(found, *others) == [False] * len(others)


MERGED = {
    "any": ({"title": "A"}, {}),
    "true": (True, {}),
    "one $ref": ({"allOf": [{"$ref": "#/$defs/n"}], "default": 1}, {"type": "integer"}),
    "values": ({"type": "string", "enum": ["a", 1, "b", "a"]}, {"enum": ["a", "b"]}),
    "values and a bound": ({"enum": [1, 5, 9], "maximum": 5}, {"enum": [1, 5]}),
    "a value": ({"const": None}, {"enum": [None]}),
    "two lists of values": ({"allOf": [{"enum": [1, 2, True]}, {"enum": [2, 1.0]}]}, {"enum": [1, 2]}),
    "a choice with false": ({"anyOf": [False, {"type": "null"}]}, {"type": "null"}),
    "a type beside a choice": ({"type": "string", "anyOf": [{"type": "integer"}, {}]}, {"type": "string"}),
    "choices of choices": (
        {"anyOf": [{"type": "string"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}]},
        {"anyOf": [{"type": "string"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}]},
    ),
    "no items": ({"type": "array", "maxItems": 0}, {"enum": [[]]}),
    "impossible items": ({"type": "array", "items": False}, {"enum": [[]]}),
    "a row": (
        {"prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 2},
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]},
    ),
    "a row of draft 4": ({"items": [{"type": "null"}]}, {"type": "array", "prefixItems": [{"type": "null"}]}),
    "a name that must be": (
        {"required": ["x"]},
        {"type": "object", "properties": {"x": {}}, "additionalProperties": False, "required": ["x"]},
    ),
    "impossible properties": (
        {"properties": {"x": False, "y": {"type": "null"}}},
        {"type": "object", "properties": {"y": {"type": "null"}}, "additionalProperties": False},
    ),
    "objects together": (
        {"allOf": [{"properties": {"x": {"type": "number"}}}, {"properties": {"x": {"type": "integer"}}}]},
        {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
    ),
    "a map": ({"additionalProperties": {"type": "null"}}, {"type": "object", "additionalProperties": {"type": "null"}}),
}  # fmt: skip


@pytest.mark.parametrize(("part", "wanted"), MERGED.values(), ids=MERGED)
def test_what_must_hold_together_is_one_part(part: Any, wanted: dict[str, Any]) -> None:
    assert followed(only(of(part, **{"$defs": {"n": {"type": "integer"}}})), "a") == wanted


def test_each_alternative_has_what_stands_beside_it() -> None:
    both = {"properties": {"a": {"type": "string"}, "b": {"type": "null"}}}
    found = only({"type": "object", **both, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert [one["required"] for one in found["anyOf"]] == [["a"], ["b"]]
    assert all(one["properties"] == both["properties"] for one in found["anyOf"])


def kinds(*names: str, required: bool = True) -> list[dict[str, Any]]:
    must = {"required": ["kind"]} if required else {}
    return [{"type": "object", "properties": {"kind": {"const": name}}, **must} for name in names]


IGNORED = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    "not": ({"type": "integer", "not": {"const": 1}}, "not"),
    "if": ({"type": "integer", "if": {"minimum": 1}, "then": {"maximum": 5}}, "if"),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, "patternProperties"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^x"}}, "propertyNames"),
    "minProperties": ({"type": "object", "minProperties": 2}, "minProperties"),
    "maxProperties": ({"type": "object", "maxProperties": 2}, "maxProperties"),
    "dependentRequired": ({"properties": {"x": {}}, "dependentRequired": {"x": ["y"]}}, "dependentRequired"),
    "alternatives that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "alternatives of optional kinds": ({"oneOf": kinds("x", "y", required=False)}, "oneOf"),
    "two patterns": ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "pattern"),
    "a length beside a pattern": ({"type": "string", "pattern": "^(ab|c)*$", "maxLength": 3}, "maxLength"),
    "items without end": ({"type": "array", "maxItems": 10**6}, "maxItems"),
    "a length without end": ({"type": "string", "maxLength": 10**9}, "maxLength"),
    "digits of a bound": ({"type": "number", "minimum": 0.1234567890123456}, "minimum"),
}  # fmt: skip


@pytest.mark.parametrize(("part", "keyword"), IGNORED.values(), ids=IGNORED)
def test_what_a_grammar_cannot_hold_is_named(part: dict[str, Any], keyword: str) -> None:
    assert held(of(part), "form").ignored == (f"form.a.{keyword}",)
    with pytest.raises(SchemaError, match=f"the schema in form has {keyword} at form.a, .*leave it out"):
        held(of(part), "form", strict=True)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "uniqueItems": False}, {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "integer", "multipleOf": 1}, {"type": "string", "if": {"minLength": 1}},
        {"properties": {"x": {}}, "propertyNames": {"pattern": "^x"}, "maxProperties": 1},
        {"required": ["x", "y"], "minProperties": 2}, {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": kinds("x", "y")}, {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
        {"oneOf": [{"enum": [1, 2]}, {"enum": [3]}]}, {"enum": ["a"], "uniqueItems": True},
        {"type": "integer", "format": "int32"},
    ],
)  # fmt: skip
def test_keywords_that_hold_anyway(part: dict[str, Any]) -> None:
    x, y = kinds("x", "y")
    assert held(of(part, **{"$defs": {"x": x, "y": y}}), "form", strict=True).ignored == ()


def test_a_format_is_a_remark() -> None:
    """JSON schemas may have any format, so a strict one too; that it does not hold is told."""
    assert held(of({"type": "string", "format": "iri"}), "form", strict=True).ignored == ("form.a.format=iri",)


def test_patterns_that_cannot_be_held() -> None:
    """They are refused with their reason; tools keep their other keywords."""
    schema = of({"type": "string", "pattern": "^(?!x)"})
    with pytest.raises(SchemaError, match=r"'\^\(\?!x\)' at form.a: a grammar cannot look ahead"):
        held(schema, "form")
    found = held(schema, "tools.f", call=True)
    assert (followed(found.schema, "a"), found.ignored) == ({"type": "string"}, ("tools.f.a.pattern",))
    with pytest.raises(SchemaError, match="has pattern at tools"):
        held(schema, "tools.f", call=True, strict=True)


def test_a_call_keeps_the_names_of_its_arguments() -> None:
    """Formats of calls that are no JSON are made of the root's properties."""
    schema = of({"type": "null"}, anyOf=[{"required": ["b"]}, {"required": ["c"]}])
    found = held(schema, "tools.f", call=True)
    assert (found.schema["properties"], found.ignored) == ({"a": {"type": "null"}}, ("tools.f.anyOf",))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "only refer to each other"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "only refer to each",
        ),
        ({"$ref": "#/$defs/a"}, "which it does not have"),
        ({"$ref": "#/anyOf/1", "anyOf": [{}]}, "which it does not have"),
        ({"$ref": "#/anyOf/-1", "anyOf": [{}]}, "which it does not have"),
        ({"$ref": "#a"}, "only references within it"),
        ({"$ref": ""}, "only references within it"),
        ({"$ref": 5}, "must be a text"),
        ({"$ref": "https://example.com/schema"}, "only references within it"),
        ({"properties": {"default": {"$ref": "https://example.com/schema"}}}, "only references within it"),
        ({"properties": {"x" * schemas.MAX_BYTES: {}}}, "bytes, and may have"),
        ({"anyOf": [{}] * schemas.MAX_NODES}, "more than 4096 parts"),
        (5, "it must be an object"),
        (False, "is fulfilled by nothing"),
        ({"type": "wizard"}, 'type = "wizard" at here'),
        ({"enum": []}, "with one at least"),
        ({"anyOf": []}, "with one at least"),
        ({"allOf": {}}, "a list of schemas"),
        ({"properties": {"x": 5}}, "has 5 at here.x"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "a minimum above its maximum"),
        ({"type": "integer", "minimum": "5"}, 'minimum = "5" at here, and it must be a number'),
        ({"type": "integer", "minimum": 10**20}, r"10 \*\* 18 is the most"),
        ({"enum": [2**64]}, r"2 \*\* 63 is too large"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength above its maxLength"),
        ({"type": "string", "minLength": -1}, "0 or more"),
        ({"type": "string", "minLength": 10**8}, "1000000 is the most"),
        ({"type": "string", "pattern": 5}, "must be a text"),
        ({"type": "array", "minItems": 10**6}, "500 is the most"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "types without one in common"),
        ({"type": "string", "enum": [1]}, "none fits its other keywords"),
        ({"properties": {"x": False}, "required": ["x"]}, "here.x is false"),
    ],
)
def test_what_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match="the schema in here .*" + why) as caught:
        held(schema, "here")
    assert caught.value.where == "here"


def test_values_are_no_schemas() -> None:
    only({"enum": [f"word {i}" for i in range(2 * schemas.MAX_NODES)]})
    assert only({"const": {"$ref": "https://example.com/schema", "maxItems": 10**9}})["enum"]
    schema = {
        "properties": {"enum": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"enum": [{"a": 1}], "default": {"b": [2]}}},
    }
    assert followed(only(schema), "enum") == {"enum": [{"a": 1}]}


def merged(depth: int) -> dict[str, Any]:
    """Each level asks for its parts in two ways, so that there are twice as many below it."""
    parts = {
        f"p{i}": {"type": "object", "properties": {
            name: {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}, {"required": [name]}]} for name in "xy"
        }}
        for i in range(depth)
    }  # fmt: skip
    return {"$ref": "#/$defs/p0", "$defs": {**parts, f"p{depth}": {"type": "object"}}}


def many_ways(count: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"properties": {f"{name}{i}": {}}} for name in "xy"]} for i in range(count)]}


def test_a_small_schema_does_not_become_a_large_one() -> None:
    """Parts that are asked for again are written once, and what would be written for ever is refused."""
    assert len(json.dumps(only(merged(20)))) < 100_000
    chain = {f"d{i}": {"properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "xy"}} for i in range(300)}
    assert len(only({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {"type": "null"}}})["$defs"]) == 300
    for schema in (many_ways(16), merged(100)):
        with pytest.raises(SchemaError, match="once its references are followed"):
            held(schema, "here")
    properties = {"properties": {f"p{i}": {"type": "boolean"} for i in range(1000)}}
    with pytest.raises(SchemaError, match="steps to become a grammar"):
        held({"allOf": [{"$ref": "#/$defs/a"}] * 800, "$defs": {"a": properties}}, "here")


@pytest.mark.parametrize(
    "part",
    [
        {"pattern": r"\S" * 250},
        {"enum": list(range(2000))},
        {"const": "a" * 20_000},
        {"required": [str(i) for i in range(2000)]},
        {"prefixItems": [{}] * 400},
        {"minItems": 400},
        {"type": "number", "exclusiveMinimum": 0.1234567},
    ],
)
def test_what_stands_beside_many_alternatives_counts_each_time(part: dict[str, Any]) -> None:
    limits = (("minLength", 0), ("maxLength", 100_000), ("minimum", -100), ("maximum", 100_000))
    choices = [{"anyOf": [{key: base + i} for i in range(90)]} for key, base in limits]
    with pytest.raises(SchemaError, match=r"once its references are followed|grammar of more than"):
        held({"allOf": [part, *choices]}, "here")


def test_a_long_chain_of_references() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
    assert only({"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": {"type": "null"}}}) == {"type": "null"}
    with pytest.raises(SchemaError, match="only refer to each other"):
        held({"$ref": "#/$defs/d5", "$defs": {**chain, "d1000": {"$ref": "#/$defs/d999"}}}, "here")


def test_schemas_that_take_the_converter_seconds_are_refused() -> None:
    """It copies the rules of an object's properties for each of them, and writes out names within names."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    deep = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    for _ in range(14):
        deep = {"type": "object", "properties": {"x" * 800: deep}}
    usual = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    for tools in ([many], [deep], [usual] * 1000):
        with pytest.raises(SchemaError, match="steps to become a grammar"):
            schemas.check_work(tools, "tools")
    schemas.check_work([usual] * 128, "tools")


def test_schemas_by_chance_are_rewritten() -> None:
    for seed in range(300):
        found = held(SchemaMaker(seed).whole(), "here")
        assert {place.rpartition(".")[2] for place in found.ignored} <= {"uniqueItems", "minimum", "maximum"}


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ({"type": "object"}, False)),
        ({"type": "json_object", "schema": {"const": 1}}, ({"const": 1}, False)),
        ({"type": "json_schema", "json_schema": {"schema": {"const": 1}, "strict": True}}, ({"const": 1}, True)),
        ({"type": "json_schema", "schema": {"const": 1}}, ({"const": 1}, False)),
        ({"type": "json_schema", "json_schema": {"schema": True}}, (True, False)),
    ],
)
def test_forms_of_answers(form: Any, found: Any) -> None:
    assert formats.schema_of(form) == found


@pytest.mark.parametrize(
    "form", ["json_object", {}, {"type": "json_shema"}, {"type": ["text"]}, {"type": "json_schema"}]
)
def test_forms_that_are_none(form: Any) -> None:
    with pytest.raises(ValueError, match="response_format"):
        formats.schema_of(form)
