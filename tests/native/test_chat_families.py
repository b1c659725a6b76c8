# ruff: noqa: RUF001, E501
"""Answers of every family, as llama.cpp's own tests have them (tests/test-chat.cpp): calls are read, no text is lost.

The templates are in the pinned sdist; they come from the build's cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import pytest
from support.held import Held
from vendoring import source
from vendoring.pin import VendorError

from kvflash_ggml.chat.reader import AnswerReader, words
from kvflash_ggml.chat.templates import ChatTemplate
from kvflash_ggml.chat.values import Call, ChatInput, Delta, Grammar, Said

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
        },
    },
]
CITY = "Tokyo"
ARGUMENTS = json.dumps({"city": CITY, "days": 3})
NAMED = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


@dataclass(frozen=True)
class Family:
    """template: its file. text: an answer with one call of `weather`. thinking: is the model to reason?"""

    template: str
    text: str
    reasoning: str = ""
    content: str = ""
    thinking: bool = False


THOUGHT = "I should ask someone"

FAMILIES = {
    "hermes": Family("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "qwen3": Family(
        "Qwen-Qwen3-0.6B",
        f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n<tool_call>\n{NAMED}\n</tool_call>",
        reasoning=THOUGHT, content="Let me see.", thinking=True,
    ),
    "qwen3-coder": Family(
        "Qwen3-Coder",
        f"Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        content="Let me see.",
    ),
    "qwen3.5": Family(
        "Qwen3.5-4B",
        f"{THOUGHT}\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        reasoning=THOUGHT, thinking=True,
    ),
    "nemotron": Family(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        f"{THOUGHT}\n</think>\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        reasoning=THOUGHT, thinking=True,
    ),
    "ministral": Family(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        f"[THINK]{THOUGHT}[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
        reasoning=THOUGHT, content="Let me see.",
    ),
    "devstral": Family(
        "unsloth-mistral-Devstral-Small-2507", f"Let me see.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", content="Let me see."
    ),
    "mistral-nemo": Family(
        "mistralai-Mistral-Nemo-Instruct-2407", f'[TOOL_CALLS][{NAMED[:-1]}, "id": "123456789"}}]'
    ),
    "functionary-3.1": Family("meetkai-functionary-medium-v3.1", f"<function=weather>{ARGUMENTS}</function>"),
    "functionary-3.2": Family("meetkai-functionary-medium-v3.2", f"weather\n{ARGUMENTS}"),
    "firefunction": Family("fireworks-ai-llama-3-firefunction-v2", f" functools[{NAMED}]"),
    "gpt-oss": Family(
        "openai-gpt-oss-120b",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        reasoning=THOUGHT,
    ),
    "kimi-k2": Family(
        "Kimi-K2-Thinking",
        f"<think>{THOUGHT}</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        reasoning=THOUGHT, content="Let me see.",
    ),
    "kimi-k3": Family(
        "Kimi-K3",
        f"{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|><|open|>tools<|sep|>"
        f'<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>{CITY}'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        reasoning=THOUGHT, content="Let me see.", thinking=True,
    ),
    "deepseek-3.1": Family(
        "deepseek-ai-DeepSeek-V3.1",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Let me see.",
    ),
    "deepseek-3.2": Family(
        "deepseek-ai-DeepSeek-V3.2",
        f'{THOUGHT}</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        reasoning=THOUGHT, thinking=True,
    ),
    "glm-4.6": Family(
        "GLM-4.6",
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
    ),
    "glm-4.7": Family(
        "GLM-4.7-Flash",
        f"{THOUGHT}</think><tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        reasoning=THOUGHT, thinking=True,
    ),
    "minimax-m2": Family(
        "MiniMax-M2",
        f'{THOUGHT}\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        reasoning=THOUGHT, thinking=True,
    ),
    "minimax-m3": Family(
        "MiniMax-M3",
        f'<mm:think>{THOUGHT}</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>'
        f"{CITY}]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        reasoning=THOUGHT, thinking=True,
    ),
    "gemma-4": Family(
        "google-gemma-4-31B-it", f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>'
    ),
    "lfm2": Family(
        "LFM2-8B-A1B", f'Let me see.<|tool_call_start|>[weather(city="{CITY}", days=3)]<|tool_call_end|>',
        content="Let me see.",
    ),
    "command-r7b": Family(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        f'<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", '
        f'"parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
        reasoning=THOUGHT,
    ),
    "command-r+": Family(
        "CohereForAI-c4ai-command-r-plus-tool_use",
        f'Action:\n```json\n[\n    {{\n        "tool_name": "weather",\n        "parameters": {ARGUMENTS}\n    }}\n]```',
    ),
    "seed-oss": Family(
        "ByteDance-Seed-OSS",
        f"<seed:tool_call>\n<function=weather>\n<parameter=city>{CITY}</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    "apertus": Family("Apertus-8B-Instruct", f'<|tools_prefix|>[{{"weather": {ARGUMENTS}}}]<|tools_suffix|>'),
    "gigachat-3": Family(
        "GigaChat3-10B-A1.8B", f"Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{NAMED}", content="Let me see."
    ),
    "gigachat-3.1": Family("GigaChat3.1-10B-A1.8B", f"Let me see.<|function_call|>{NAMED}", content="Let me see."),
    "minicpm5": Family(
        "openbmb-MiniCPM5-1B",
        f'<function name="weather"><param name="city">{CITY}</param><param name="days">3</param></function>',
    ),
    "llama-3.1": Family(
        "meta-llama-Llama-3.1-8B-Instruct", f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
    ),
    "granite-4.0": Family("ibm-granite-granite-4.0", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "reka": Family("Reka-Edge", f"<tool_call>\n{NAMED}</tool_call>"),
    "step-3.5": Family(
        "StepFun3.5-Flash",
        f"{THOUGHT}\n</think>\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        reasoning=THOUGHT, thinking=True,
    ),
}  # fmt: skip

INSERTED = "<>{}[]()|/\"':,= \nxé\\"


@cache
def template(name: str) -> ChatTemplate:
    try:
        path = source.pristine_tree() / source.LLAMA / "models" / "templates" / f"{name}.jinja"
    except VendorError as err:
        pytest.skip(f"no source of llama.cpp: {err}")
    return ChatTemplate(path.read_text(encoding="utf-8"), bos="<s>", eos="</s>")


def reader(family: Family) -> AnswerReader:
    """That reads whatever has come at each push."""
    asked = ChatInput(
        messages=[{"role": "user", "content": "How will the weather be?"}], tools=TOOLS, enable_thinking=family.thinking,
    )  # fmt: skip
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
