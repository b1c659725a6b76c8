"""Answers under the grammar of a JSON schema: what it allows is valid, in the class and the server, and in calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.families import template as upstreams
from support.held import Held
from support.schema_maker import SchemaMaker

from kvflash_ggml.chat import formats
from kvflash_ggml.chat.schemas import SchemaError
from kvflash_ggml.chat.templates import ChatTemplate
from kvflash_ggml.chat.values import ChatInput, Grammar

ASKED = [{"role": "user", "content": "Give me JSON."}]


@pytest.fixture
def taken(llama: Callable[..., Any]) -> Callable[..., list[bool]]:
    """Which texts an answer may be, as a whole: of a schema, or of a grammar."""
    llm = llama(vocab_only=True)

    def take(schema: Any, *texts: str) -> list[bool]:
        grammar = schema if isinstance(schema, Grammar) else Grammar(text=formats.grammar_of(schema)[0])
        # behind a whole answer only the end may come
        return [(answer := Held(llm, grammar)).takes(text) and not answer.allows("x", " ")[0] for text in texts]

    return take


def of(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}


def objects(values: Sequence[Any]) -> list[str]:
    return [json.dumps({"a": value}, ensure_ascii=False, separators=(",", ":")) for value in values]


ALLOWED = {
    "a class": ({"pattern": r"^\d{4}$"}, ["2024"], ["24", "x"]),
    "a quote and a backslash": ({"pattern": r'^[^a]{1}"\\$'}, ['""\\', 'b"\\', '\n"\\'], ['a"\\', '"\\']),
    "no anchors": ({"pattern": r"b\.c"}, ["b.c", 'x"b.c\n'], ["bxc", "b"]),
    "a repeated escape": ({"pattern": r"^x\.+y$"}, ["x.y", "x...y"], ["xy", "xx.y"]),
    "letters of several bytes": ({"pattern": "^\u00e9+\u2603?$"}, ["\u00e9", "\u00e9\u00e9\u2603"], ["\u2603"]),
    "an integer": ({"type": "integer", "maximum": 9}, [9, -123, 0], [10, 1.5, "9"]),
    "a negative integer": ({"type": "integer", "maximum": -5}, [-5, -12], [-4, 5, 0]),
    "a number": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.25, 1], [-0.5, 1.5]),
    "a great length": ({"type": "string", "maxLength": 3000}, ["", "x" * 3000], ["x" * 3001]),
    "a great count": ({"pattern": "^[ab]{2001,2100}$"}, ["ab" * 1005], ["a" * 2000, "b" * 2101]),
    "many items": (
        {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 500}, [[None] * 500], [[None]],
    ),
    "anything": (True, [1, "x", None, [True, {"k": 2}]], []),
    "a value": ({"const": "a\nb"}, ["a\nb"], ["a"]),
    "nothing in it": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "a row": ({"prefixItems": [{"type": "null"}, {"type": "boolean"}]}, [[None, True]], [[True, None], [None, None]]),
}  # fmt: skip


@pytest.mark.parametrize(("part", "values", "others"), ALLOWED.values(), ids=ALLOWED)
def test_what_a_schema_allows(
    part: Any, values: list[Any], others: list[Any], taken: Callable[..., list[bool]]
) -> None:
    assert taken(of(part), *objects(values)) == [True] * len(values)
    assert taken(of(part), *objects(others)) == [False] * len(others)


def test_names_of_further_properties(taken: Callable[..., list[bool]]) -> None:
    """They are JSON, and none of the named ones, whatever characters these have."""
    for names in (["ab", "a-c", "a]", "a^"], ["q^", "^", "]", "-"], ['say "hi"', "back\\slash", "x"], ["a\nb"]):
        schema = {"properties": {name: {"type": "null"} for name in names}, "additionalProperties": {"type": "boolean"}}
        named = [json.dumps({name: None}, separators=(",", ":")) for name in names]
        assert taken(schema, *named, '{"zz":true}', '{"a-b":true}', '{"\u00e9":false}') == [True] * (len(names) + 3)
        again = [json.dumps({name: True}, separators=(",", ":")) for name in names]
        no_json = ['{"\\":true}', '{"a\nx":true}', '{"a\\qx":true}']
        assert taken(schema, *again, *no_json) == [False] * (len(names) + 3)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": r"^\d{5}$"}, "n": {"type": "integer", "maximum": 3}},
            "required": ["zip", "n"],
        },
    },
}
IN_JSON = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_calls_keep_patterns(taken: Callable[..., list[bool]]) -> None:
    """The prompt shows the schema as it was sent, and the grammar holds its pattern and its bound."""
    rendered = ChatTemplate(IN_JSON).render(ChatInput(messages=ASKED, tools=[WEATHER], choice="required"))
    assert r"^\\d{5}$" in rendered.prompt
    assert (rendered.ignored, rendered.grammar is not None) == ((), True)
    assert rendered.grammar is not None
    (rule,) = (line for line in rendered.grammar.text.split("\n") if line.startswith("tool-weather-schema ::= "))
    root = rendered.grammar.text.replace("root ::= ", "whole ::= ") + "\nroot ::= tool-weather-schema"
    calls = ['{"zip":"12345","n":3}', '{"zip":"1234","n":3}', '{"zip":"12345","n":4}']
    assert taken(Grammar(text=root), *calls) == [True, False, False], rule


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("HuggingFaceTB-SmolLM3-3B", ()),
        ("Qwen3-Coder", ("tools.weather.zip.pattern",)),
        ("inclusionai-ling-3.0-flash", ("tools.weather.zip.pattern",)),
        ("google-gemma-4-31B-it", ("tools.weather.zip.pattern", "tools.weather.n.maximum")),
    ],
)
def test_formats_that_write_arguments_in_their_own_way(name: str, told: tuple[str, ...]) -> None:
    """Between marks a text has no quotes, and no pattern."""
    assert upstreams(name).render(ChatInput(messages=ASKED, tools=[WEATHER])).ignored == told


def test_what_a_call_does_not_keep_is_told() -> None:
    template = ChatTemplate(IN_JSON)
    function = WEATHER["function"]
    assert isinstance(function, dict)
    parameters = {**function["parameters"], "properties": {"zip": {"type": "string", "pattern": "^(?!0)"}}}
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    assert template.render(ChatInput(messages=ASKED, tools=[tool])).ignored == ("tools.weather.zip.pattern",)
    strict = {"type": "function", "function": {**function, "parameters": parameters, "strict": True}}
    with pytest.raises(SchemaError, match="has pattern at tools"):
        template.render(ChatInput(messages=ASKED, tools=[strict]))


def test_the_class_holds_to_a_form(llama: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    llm = llama(kvflash=512)
    schema = of(
        {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 7}, "minItems": 2, "maxItems": 2}
    )

    def answer(form: Any, **more: Any) -> Any:
        said = llm.create_chat_completion(ASKED, max_tokens=60, temperature=2.0, response_format=form, **more)
        return json.loads(said["choices"][0]["message"]["content"])

    for form in (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "json_schema", "schema": schema},
        {"type": "json_object", "schema": schema},
    ):
        (values,) = answer(form).values()
        assert len(values) == 2
        assert set(values) <= {5, 6, 7}
    chunks = llm.create_chat_completion(ASKED, max_tokens=60, response_format=form, stream=True)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert set(json.loads(text)["a"]) <= {5, 6, 7}
    unique = of({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2})
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        answer({"type": "json_schema", "json_schema": {"schema": unique}})
    assert "response_format.a.uniqueItems" in caplog.text
    for form, why in (
        ({"type": "json_shema", "schema": schema}, "it must be text, json_object or json_schema"),
        ({"type": "json_schema"}, "has the type json_schema, and no schema"),
        ({"type": "json_schema", "json_schema": {"schema": unique, "strict": True}}, "has uniqueItems at"),
        ({"type": "json_object", "schema": of({"pattern": "(?=x)"})}, "a grammar cannot look ahead"),
    ):
        with pytest.raises(ValueError, match=why):
            llm.create_chat_completion(ASKED, max_tokens=2, response_format=form)


def check(schema: dict[str, Any], ignored: Sequence[str], value: Any) -> list[str]:
    """What is wrong with an answer, but for the keywords that were named."""
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    named = {place.rpartition(".")[2] for place in ignored}
    return [error.message for error in checker.iter_errors(value) if error.validator not in named]


def test_a_hundred_schemas(llama: Callable[..., Any]) -> None:
    """Every answer that comes to its end is valid."""
    pytest.importorskip("jsonschema")
    llm, ended = llama(kvflash=1024), 0
    for seed in range(100):
        schema = SchemaMaker(seed).whole()
        text, ignored = formats.grammar_of(schema)
        said = llm.create_completion("JSON:", max_tokens=240, temperature=1.2, seed=seed, grammar=Grammar(text=text))
        if said["choices"][0]["finish_reason"] == "stop":
            ended += 1
            value = json.loads(said["choices"][0]["text"])
            assert check(schema, ignored, value) == [], (seed, value)
    assert ended >= 50
