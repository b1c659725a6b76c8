"""JSON schemas of strangers: what they refer to, and how much they may be."""

from __future__ import annotations

from typing import Any

import pytest

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.server import schemas
from kvflash_ggml.server.errors import ApiError

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}}}


def followed(schema: dict[str, Any], *path: str) -> Any:
    """What is at a path, through references."""
    node: Any = schema
    for part in path:
        node = node[part]
        if "$ref" in node:
            _, where, name = node["$ref"].split("/")
            node = schema[where][name]
    return node


def test_a_schema_without_references_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"$defs": {"type": "string"}}}
    schemas.check(schema, "x")
    assert schemas.resolved(schema) is schema


def test_references_lead_to_definitions_with_names_of_their_own() -> None:
    schema = {"properties": {"node": {"type": "string"}, "tree": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
    schemas.check(schema, "x")
    found = schemas.resolved(schema)
    assert len(found["$defs"]) == 2
    assert not {"node", "tree"} & found["$defs"].keys(), "a rule is called as the property is"
    tree = followed(found, "properties", "tree")
    assert followed({**found, "properties": tree["properties"]}, "properties", "next") == tree
    assert (
        followed({**found, "properties": tree["properties"]}, "properties", "all")["properties"] == found["properties"]
    )
    assert schemas.resolved(schema) == found
    schemas.check(found, "x")


def test_what_stands_beside_a_reference_at_the_root_is_reached() -> None:
    found = schemas.resolved({"$ref": "#/$defs/node", "$defs": {"node": NODE}})
    assert followed(found, "anyOf")[0].keys() == {"$ref"}, "a converter looks into nothing that has a reference"


@pytest.mark.parametrize("pointer", ["#/$defs/a~1b~0c", "#/anyOf/1", "#/properties/x/items"])
def test_pointers(pointer: str) -> None:
    number = {"type": "number"}
    schema = {
        "anyOf": [{"type": "null"}, number],
        "properties": {"x": {"items": number}, "y": {"$ref": pointer}},
        "$defs": {"a/b~c": number},
    }
    schemas.check(schema, "x")
    assert followed(schemas.resolved(schema), "properties", "y") == number


def test_values_are_no_schemas() -> None:
    schema = {
        "properties": {"enum": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"enum": [{"a": 1}], "default": {"b": [2]}}},
    }
    found = schemas.resolved(schema)
    assert followed(found, "properties", "enum") == schema["$defs"]["a"]
    schemas.check({"enum": [f"word {i}" for i in range(2 * schemas.MAX_NODES)]}, "x")
    schemas.check({"const": {"$ref": "https://example.com/schema", "maxItems": 10**9}}, "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a"},
        {"$ref": "#/anyOf/1", "anyOf": [{}]},
        {"$ref": "#/anyOf/-1", "anyOf": [{}]},
        {"$ref": "#a"},
        {"$ref": ""},
        {"$ref": "https://example.com/schema"},
        {"properties": {"default": {"$ref": "https://example.com/schema"}}},
        {"properties": {"properties": {"maxItems": schemas.MAX_REPEAT + 1}}},
        {"properties": {"x" * schemas.MAX_BYTES: {}}},
        {"anyOf": [{}] * schemas.MAX_NODES},
    ],
)
def test_what_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="the schema in here") as caught:
        schemas.check(schema, "here")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "pattern",
    ["^a{999999999}$", "^a{9_999_999}$", "^[ab]{0, 9999999 }$", "^a{2001}$", "^a{+99}$", "^]$", "^}a$", "^[]a]$"],
)
def test_patterns_that_would_never_be_written(pattern: str) -> None:
    with pytest.raises(ApiError, match="has a pattern"):
        schemas.check({"type": "string", "pattern": pattern}, "here")


@pytest.mark.parametrize("pattern", [r"^\{a\}$", "^[{}]{2}$", r"^[\]}]{,3}\]$", "^(a|b{2,}){2000}$", "^a{0,2000}$"])
def test_patterns_that_are_written(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    schemas.check(schema, "here")
    assert "root ::=" in schemas.grammar(schema)


MANY = {f"p{i}": {"type": "boolean"} for i in range(1000)}
LISTS = {f"p{i}": {"minItems": 2000, "items": {"enum": ["a"]}} for i in range(100)}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/a"}] * 800, "$defs": {"a": {"properties": MANY}}},
        {"properties": {"x" * 1000: {"properties": LISTS}}},
        {"properties": {"x" * 200: {"pattern": "^" + "[ab]{2000}" * 50 + "$"}}},
    ],
    ids=["references", "names", "patterns"],
)
def test_a_small_schema_of_a_large_grammar(schema: dict[str, Any]) -> None:
    schemas.check(schema, "here")
    with pytest.raises(ConfigError, match="characters or more"):
        schemas.grammar(schema)


def test_pointers_in_several_spellings_are_one_definition() -> None:
    places = {"anyOf": [{"type": "null"}]}
    schema = {**places, "properties": {f"p{i}": {"$ref": "#/anyOf/" + "0" * i} for i in range(1, 7)}}
    schemas.check(schema, "here")
    assert len(schemas.resolved(schema)["$defs"]) == 1


def test_a_long_chain_of_references() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
    schemas.check({"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": {"type": "null"}}}, "here")
    with pytest.raises(ApiError, match="only refer to each other"):
        schemas.check({"$ref": "#/$defs/d5", "$defs": {**chain, "d1000": {"$ref": "#/$defs/d999"}}}, "here")


def test_schemas_that_take_the_converter_seconds_are_refused() -> None:
    """It copies the rules of an object's properties for each of them, and writes out names within names."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    deep = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    for _ in range(14):
        deep = {"type": "object", "properties": {"x" * 800: deep}}
    usual = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    for tools in ([many], [deep], [usual] * 1000):
        with pytest.raises(ApiError, match="steps to become a grammar"):
            schemas.check_work(tools, "tools")
    schemas.check_work([usual] * 128, "tools")
