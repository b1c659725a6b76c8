# ruff: noqa: RUF001, E501
"""Answers of every model family, as llama.cpp's own tests have them (tests/test-chat.cpp): one call of `weather` each.

The templates are in the pinned sdist; they come from the build's cache.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

import pytest
from vendoring import source
from vendoring.pin import VendorError

from kvflash_ggml.chat.templates import ChatTemplate

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


CITIES = ["São Paulo", 'a "b" \\ c', "line\nbreak", "{x}, [1, 2]", "a & <b> 'c'", "👍 日本"]


def answer(family: Family, city: str, days: int) -> str:
    """The family's answer with other arguments."""
    quoted = json.dumps({"city": city, "days": days}, ensure_ascii=False)
    if ARGUMENTS in family.text:
        return family.text.replace(ARGUMENTS, quoted)
    text = re.sub(r'(?<![\w"])3(?!\w)', str(days), family.text)
    inner = json.dumps(city, ensure_ascii=False)
    return text.replace(f'"{CITY}"', inner) if f'"{CITY}"' in text else text.replace(CITY, city)


def template_source(name: str) -> str:
    """One of the templates in llama.cpp's sources."""
    try:
        path = source.pristine_tree() / source.LLAMA / "models" / "templates" / f"{name}.jinja"
    except VendorError as err:
        pytest.skip(f"no source of llama.cpp: {err}")
    return path.read_text(encoding="utf-8")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(template_source(name), bos="<s>", eos="</s>")
