"""Answers of every family, as llama.cpp's own tests have them: calls are read, no text is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from support.families import CITIES, CITY, FAMILIES, TOOLS, Family, answer, template
from support.held import Held

from kvflash_ggml.chat.reader import AnswerReader, words
from kvflash_ggml.chat.values import Call, ChatInput, Delta, Grammar, Said

INSERTED = "<>{}[]()|/\"':,= \nxé\\"


def reader(family: Family) -> AnswerReader:
    """That reads whatever has come at each push."""
    messages = [{"role": "user", "content": "How will the weather be?"}]
    asked = ChatInput(messages=messages, tools=TOOLS, enable_thinking=family.thinking)
    return template(family.template).render(asked).reader(clock=(float(n // 2) for n in count()).__next__)


def read(family: Family, text: str) -> Said:
    answer = reader(family)
    answer.push(text, end=True)
    return answer.said


def joined(deltas: Sequence[Delta]) -> Said:
    """What a client puts together."""
    calls: list[Call] = []
    for delta in deltas:
        if delta.index is not None and delta.name:
            assert delta.index == len(calls)
            calls.append(Call(id="", name=delta.name, arguments=""))
        if delta.index is not None:
            calls[delta.index] = replace(calls[delta.index], arguments=calls[delta.index].arguments + delta.arguments)
    return Said(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(calls),
    )


def missing(family: Family, text: str, said: Said) -> frozenset[str]:
    """Words of an answer that are told nowhere, and are none of its format."""
    parts = [said.content, said.reasoning]
    for call in said.calls:
        parts += [
            call.id,
            call.name,
            call.arguments,
            *(str(part) for pair in loaded(call.arguments).items() for part in pair),
        ]
    format_ = words(family.text) - words(f"{family.reasoning} {family.content} {CITY}")
    lost = words(text) - format_ - words("\n".join(parts))
    lost = {word for word in lost if word not in said.content.casefold()}  # content from around a call is put together
    # a mark that is cut off within a call is no text
    ends = {word for word in lost if text.casefold().endswith(word) and any(mark.startswith(word) for mark in format_)}
    return frozenset(lost - ends if said.calls else lost)


def loaded(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def mutations(text: str, count: int, seed: str) -> Iterator[str]:
    """The text with one to three changes: characters or stretches gone, doubled, swapped or put in."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = text
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed) + 1)
            end = min(len(changed), at + draw.choice((1, 1, 2, 5, 20)))
            kind = draw.randrange(5)
            if kind == 0:
                changed = changed[:at] + changed[end:]
            elif kind == 1:
                changed = changed[:at] + draw.choice(INSERTED) + changed[at:]
            elif kind == 2:
                changed = changed[:at] + draw.choice(INSERTED) + changed[at + 1 :]
            elif kind == 3:
                changed = changed[:end] + changed[at:end] + changed[end:]
            else:
                changed = changed[at:] + changed[:at]
        yield changed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_read(name: str) -> None:
    family = FAMILIES[name]
    said = read(family, family.text)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("weather", {"city": CITY, "days": 3})]
    assert (said.reasoning.strip(), said.content.strip()) == (family.reasoning, family.content)


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_are_read_as_they_were_meant(name: str) -> None:
    """`clients/test_upstream_parser.py` asks upstream's own server the same."""
    for city in CITIES:
        said = read(FAMILIES[name], answer(FAMILIES[name], city, -7))
        assert [json.loads(call.arguments) for call in said.calls] == [{"city": city, "days": -7}]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_comes_to_the_same(name: str) -> None:
    family = FAMILIES[name]
    answer = reader(family)
    deltas = [delta for char in family.text for delta in answer.push(char)]
    calls = [delta for delta in deltas if delta.index is not None]
    deltas += answer.push("", end=True)
    whole, told = read(family, family.text), joined(deltas)
    assert (told.content, told.reasoning) == (whole.content, whole.reasoning)
    assert [(call.name, call.arguments) for call in told.calls] == [(call.name, call.arguments) for call in whole.calls]
    assert len(calls) > 1, "a call is told while it is written"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_prefix_loses_text(name: str) -> None:
    family = FAMILIES[name]
    for size in range(len(family.text) + 1):
        text = family.text[:size]
        said = read(family, text)
        assert not missing(family, text, said), (text, said)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_mutation_loses_text(name: str) -> None:
    family = FAMILIES[name]
    for text in mutations(family.text, 1000, name):
        said = read(family, text)
        assert not missing(family, text, said), (text, said)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_mutation_of_a_stream_loses_text(name: str) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    for text in mutations(family.text, 40, f"{name}, as a stream"):
        answer, deltas, at = reader(family), [], 0
        while at < len(text):
            size = draw.choice((1, 2, 3, 7, 30))
            deltas += answer.push(text[at : at + size])
            at += size
        told = joined([*deltas, *answer.push("", end=True)])
        late = words(" ".join(call.id for call in read(family, text).calls))  # a call has a name of ours until then
        assert not missing(family, text, answer.said) - late, (text, answer.said)
        assert told == replace(answer.said, calls=tuple(replace(call, id="") for call in answer.said.calls))


PROSE = {
    "functionary-3.2": ("all\nLet me see.", "weather\n"),
    "command-r7b": ("<|START_RESPONSE|>Let me see.<|END_RESPONSE|>", "<|START_ACTION|>"),
    "command-r+": ("<|CHATBOT_TOKEN|>Let me see.<|END_OF_TURN_TOKEN|>", "Action:"),
    "gpt-oss": ("<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant", "<|channel|>commentary to="),
    **{name: ("Let me see.", "") for name, family in FAMILIES.items() if family.content},
}
"""Content in front of a call, and how the call begins if the family's answer is one without content."""


def must_call(family: Family, *, parallel: bool | None = None) -> Grammar:
    asked = ChatInput(
        messages=[{"role": "user", "content": "How will the weather be?"}],
        tools=TOOLS,
        choice="required",
        parallel=parallel,
        enable_thinking=family.thinking,
    )
    grammar = template(family.template).render(asked).grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", PROSE)
def test_a_call_that_must_be_made_comes_first(name: str, llama: Callable[..., Any]) -> None:
    family, (prose, begins) = FAMILIES[name], PROSE[name]
    head, _, call = family.text.partition(begins or prose)
    llm = llama("dense", n_ctx=64, n_batch=64)
    assert Held(llm, must_call(family)).takes(head + (begins + call if begins else call.lstrip()))
    assert not Held(llm, must_call(family)).takes(head + prose)


@pytest.mark.parametrize(("name", "begins", "ends"), [
    ("functionary-3.2", "weather", "}"), ("kimi-k3", "<|open|>call", "<|close|>call<|sep|>"),
])  # fmt: skip
def test_one_call_is_made_where_one_is_asked_for(name: str, begins: str, ends: str, llama: Callable[..., Any]) -> None:
    family = FAMILIES[name]
    text = family.text.replace(family.content, "")
    call = begins + text.partition(begins)[2].partition(ends)[0] + ends
    llm = llama("dense", n_ctx=64, n_batch=64)
    for parallel, may in ((True, True), (False, False), (None, False)):
        grammar = must_call(family, parallel=parallel)
        assert Held(llm, grammar).takes(text)
        assert Held(llm, grammar).takes(text.replace(call, call * 2)) == may


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_inside_its_marks_leaves_no_content(name: str) -> None:
    """A limit may end an answer anywhere: what there is of a closing mark is no text of the model's."""
    family = FAMILIES[name]
    whole = read(family, family.text)
    for size in range(len(family.text)):
        said = read(family, family.text[:size])
        if said.calls:
            assert whole.content.startswith(said.content), (family.text[:size], said)
