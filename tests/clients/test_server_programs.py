"""Programs that speak to `kvflash-run serve` as to any server of OpenAI's API.

`scripts/test --clients` installs them, in environments beside .venv-clients' own. Each asks for a fact in a document of
several times the pool.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.serving import serve  # noqa: E402

PLACES = REPO / ".venv-clients"
NODE = PLACES / "node"
PROGRAMS = Path(__file__).with_name("programs") / "server"
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
CODE = "4820917"

FORM = r"\b[0-9]{7}\b"
"""What programs print that keep the answer to a form; the model was not trained to answer in JSON."""

LIBRARIES = [
    ("agents", "ag2_agent", CODE),
    ("agents", "agent_framework_run", CODE),
    ("agents", "agno_agent", CODE),
    ("agents", "aisuite_chat", CODE),
    ("agents", "any_llm_chat", CODE),
    ("agents", "autogen_agent", CODE),
    ("agents", "dspy_predict", CODE),
    ("agents", "ell_call", CODE),
    ("agents", "griptape_agent", CODE),
    ("agents", "haystack_generator", CODE),
    ("agents", "instructor_json", FORM),
    ("agents", "langchain_chat", CODE),
    ("agents", "langgraph_agent", CODE),
    ("agents", "litellm_chat", CODE),
    ("agents", "llamaindex_like", CODE),
    ("agents", "magentic_prompt", CODE),
    ("agents", "mirascope_call", CODE),
    ("agents", "openai_agents_run", CODE),
    ("agents", "outlines_json", FORM),
    ("agents", "pydantic_ai_run", CODE),
    ("agents", "smolagents_model", CODE),
    ("crews", "crewai_llm", CODE),
    ("crews", "strands_agent", CODE),
    ("kernel", "semantic_kernel_chat", CODE),
]

QUIET = {
    "AIDER_ANALYTICS_DISABLE": "true",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "OTEL_SDK_DISABLED": "true",
}
"""Nothing is fetched or told."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if not (PLACES / "bin/python").exists():
        pytest.skip("there is no .venv-clients: scripts/test --clients makes it")
    limits = ("-c", "65536", "--max-tokens-limit", "48", "-a", "recall", "-q")
    with serve(MODEL, "--kvflash", "1024", *limits, python=PLACES / "bin/python") as server:
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="module")
def question() -> str:
    """About 3,500 tokens with the fact in the middle."""
    text = (REPO / "tests/text/licences.txt").read_text(encoding="utf-8")
    fact = f"The access code for silver harbor is {CODE}."
    return f"{text[:6000]}\n{fact}\n{text[6000:12000]}\nWhat is the access code for silver harbor?"


def run(program: Path, *arguments: object, home: Path, stdin: str = "", **more: str) -> str:
    """What a program prints. home: where it starts, and what it takes for the user's home."""
    if not program.exists():
        pytest.skip(f"{program.relative_to(REPO)} is not there: scripts/test --clients installs it")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVFLASH_", "PYTHON", "OPENAI_"))}
    done = subprocess.run(
        [program, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=home,
        env={**kept, **QUIET, "HOME": str(home), "PWD": str(home), **more},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("place", "name", "expected"), LIBRARIES, ids=[name for _, name, _ in LIBRARIES])
def test_a_library(place: str, name: str, expected: str, url: str, question: str, tmp_path: Path) -> None:
    said = run(PLACES / place / "bin/python", PROGRAMS / f"{name}.py", url, home=tmp_path, stdin=question)
    assert re.search(expected, said), said


@pytest.mark.parametrize("name", ["ai_sdk", "langchain_node", "openai_node"])
def test_a_library_of_javascript(name: str, url: str, question: str, tmp_path: Path) -> None:
    if not (NODE / "node_modules").exists():
        pytest.skip("there is no .venv-clients/node: scripts/test --clients makes it where npm is")
    program = shutil.copy(PROGRAMS / f"{name}.mjs", NODE)  # node finds packages beside the program
    node = shutil.which("node")
    assert node is not None
    assert CODE in run(Path(node), program, url, home=tmp_path, stdin=question)


def test_aider(url: str, question: str, tmp_path: Path) -> None:
    """It wraps what it is asked in its own examples, which the test model cannot tell apart: it answers something."""
    (tmp_path / "question.txt").write_text(question, encoding="utf-8")
    flags = """--model openai/recall --no-git --no-show-model-warnings --no-check-update --yes-always --no-pretty
        --edit-format ask --map-tokens 0 --message-file question.txt"""
    said = run(PLACES / "aider/bin/aider", *flags.split(), home=tmp_path, OPENAI_API_BASE=url)
    assert re.search(r"Tokens: |Output tokens: ~[1-9]", said), said  # the second where the limit cuts the answer


def test_opencode(url: str, question: str, tmp_path: Path) -> None:
    model = {"name": "recall", "limit": {"context": 65536, "output": 48}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvflash",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {"recall": model},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"kvflash": provider}, "model": "kvflash/recall"}
    (tmp_path / "opencode.json").write_text(json.dumps({**config, "small_model": "kvflash/recall"}))
    assert CODE in run(NODE / "node_modules/.bin/opencode", "run", question, home=tmp_path)


def test_qwen_code(url: str, question: str, tmp_path: Path) -> None:
    line = ("--auth-type", "openai", "-p", question)
    said = run(NODE / "node_modules/.bin/qwen", *line, home=tmp_path, OPENAI_BASE_URL=url, OPENAI_MODEL="recall")
    assert CODE in said
