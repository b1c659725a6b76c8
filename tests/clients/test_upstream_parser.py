"""Answers of every family, said by a model to upstream's own server: its parser finds in them what ours finds.

The model writes them under upstream's grammars, so these are answers that a model of the family may give. The wheel has
another llama.cpp than ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests"), str(REPO / "scripts")]
from support import saying  # noqa: E402
from support.families import CITIES, FAMILIES, TOOLS, answer, template, template_source  # noqa: E402

from kvflash_ggml.chat.values import ChatInput, Said  # noqa: E402

PYTHON = REPO / ".venv-clients/oracle/bin/python"
HELLO = [{"role": "user", "content": "How will the weather be?"}]


def ours(name: str, text: str) -> Said:
    asked = ChatInput(messages=HELLO, tools=TOOLS, enable_thinking=FAMILIES[name].thinking)
    reader = template(FAMILIES[name].template).render(asked).reader()
    reader.push(text, end=True, stopped=True)
    return reader.said


@pytest.mark.parametrize("name", FAMILIES)
def test_upstreams_parser_finds_the_same(name: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("xllamacpp is not there: scripts/test --clients installs it")
    family = FAMILIES[name]
    texts = [family.text, *(answer(family, city, -7) for city in CITIES)]
    firsts = saying.write(tmp_path / "model.gguf", texts)
    options = {"temperature": 0, "max_tokens": 2000, "chat_template_kwargs": {"enable_thinking": family.thinking}}
    requests = [
        {"messages": HELLO, "tools": TOOLS, "logit_bias": [[first, saying.BIAS]], **options} for first in firsts
    ]
    asked = {"model": str(tmp_path / "model.gguf"), "template": template_source(family.template), "requests": requests}
    program = REPO / "tests/clients/programs/upstream_said.py"
    done = subprocess.run([PYTHON, program], input=json.dumps(asked), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [text for text, _ in told] == texts, "the model says it, and upstream's grammar lets it"
    for text, message in told:
        said = ours(name, text)
        assert said.content == (message.get("content") or "")
        assert said.reasoning == (message.get("reasoning_content") or "")
        found = [call["function"] for call in message["tool_calls"]]
        assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
            (call["name"], json.loads(call["arguments"])) for call in found
        ]
