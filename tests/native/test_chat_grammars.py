"""Grammars in the sampler: one waits for its trigger and the end of reasoning, one goes on a prompt; and schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest
from support.held import Held

from kvflash_ggml.chat import formats
from kvflash_ggml.chat.values import Grammar
from kvflash_ggml.errors import ConfigError

CALL = Grammar(text='root ::= "<go>" ("left" | "right")', lazy=True, trigger_words=("<go>",))
THINKING = Grammar(
    text=CALL.text, lazy=True, trigger_words=CALL.trigger_words, thinking=("<think>", "</think>"), prefill="<think>"
)


@pytest.fixture
def held(llama: Callable[..., Any]) -> Callable[[Grammar], Held]:
    llm = llama("dense", n_ctx=64, n_batch=64)
    return lambda grammar: Held(llm, grammar)


def test_a_grammar_waits_for_its_trigger(held: Callable[[Grammar], Held]) -> None:
    answer = held(CALL)
    assert answer.allows("left", "up") == [True, True]
    answer.write("Let me see: ")
    assert answer.allows("left", "up") == [True, True]
    answer.write("<go>")
    assert answer.allows("left", "right", "up") == [True, True, False]


def test_a_copy_goes_its_own_way(held: Callable[[Grammar], Held]) -> None:
    """Drafts are sampled with one."""
    answer = held(THINKING)
    answer.write("hm</think>")
    copy = Held.__new__(Held)
    copy._llm, copy._vocab, copy.sampler = answer._llm, answer._vocab, llama_cpp.llama_sampler_clone(answer.sampler)
    copy.write("<go>")
    assert copy.allows("left", "up") == [True, False]
    assert answer.allows("left", "up") == [True, True]


def test_no_trigger_counts_within_reasoning(held: Callable[[Grammar], Held]) -> None:
    answer = held(THINKING)  # the template has begun the reasoning
    answer.write("I could ", "<go>", "up")
    assert answer.allows("left", "up") == [True, True]
    answer.write("</think>", "So: ")
    assert answer.allows("left", "up") == [True, True]
    answer.write("<go>")
    assert answer.allows("left", "up") == [True, False]


def test_a_grammar_begins_with_what_the_template_has_written(held: Callable[[Grammar], Held]) -> None:
    answer = held(Grammar(text='root ::= "<ask>" ("left" | "right")', prefill="<ask>"))
    assert answer.allows("left", "up", "<") == [True, False, False]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(text="root ::= ("),
        Grammar(text='root ::= "x"', lazy=True, triggers=("(",)),
        Grammar(text='root ::= "\ud800"'),
    ],
)
def test_grammars_that_are_none(grammar: Grammar, held: Callable[[Grammar], Held]) -> None:
    with pytest.raises(ConfigError, match="the grammar"):
        held(grammar)


ODD = ["a\nb", 'say "hi"', "back\\slash", "\u00e9", "\u0000", "\U0001f600"]


@pytest.mark.parametrize(
    ("schema", "answers", "refused"),
    [
        ({"enum": ODD}, [json.dumps(text, ensure_ascii=False) for text in ODD], ['"a\nb"', '"a\\\\nb"']),
        (
            {"properties": {'a"b\\': {"type": "null"}, "": {"type": "null"}}, "required": ['a"b\\', ""]},
            ['{"a\\"b\\\\":null,"":null}'],
            ["null", '{"a"'],
        ),
        ({"type": "string", "pattern": "^a.*$"}, ['"a"', '"ab\\"c"'], ['"a"b', '"a\t', '"a\\n']),
    ],
)
def test_what_a_schema_allows_is_json(
    held: Callable[[Grammar], Held], schema: dict[str, Any], answers: list[str], refused: list[str]
) -> None:
    text, _ = formats.grammar_of(schema)
    assert [held(Grammar(text=text)).takes(answer) for answer in answers] == [True] * len(answers)
    assert [held(Grammar(text=text)).takes(answer) for answer in refused] == [False] * len(refused)


def test_a_trigger_is_looked_for_in_the_end_of_the_answer(held: Callable[[Grammar], Held]) -> None:
    """To search the whole answer at each token takes its square. What must stand at its beginning is nowhere later."""
    answer = held(CALL)
    answer.write(*["Let me see: "] * 2000, "<g", "o>")
    assert answer.allows("left", "right", "up") == [True, True, False]
    begun = Grammar(text=CALL.text, lazy=True, triggers=("^x[^#]*#(<go>)",))
    near, far = held(begun), held(begun)
    near.write("x", *["Let me see: "] * 10, "#<go>")
    assert near.allows("left", "up") == [True, False]
    far.write("x", *["Let me see: "] * 2000, "#<go>")
    assert far.allows("left", "up") == [True, True], "the beginning is not looked at any more"
