"""Real programs that make their own `llama_cpp.Llama`, in an environment that was made as the README says.

`scripts/test --clients` makes it (.venv-clients); without it everything here is skipped. A document of several times
the pool is asked for a fact, which the model finds only if the chunk that has it comes back.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BIN = REPO / ".venv-clients" / "bin"
PROGRAMS = Path(__file__).with_name("programs")
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
CODE = "4820917"
POOL = ("--kvflash", "1024")


@cache
def has(package: str) -> bool:
    code = f"import importlib.metadata as m; m.version({package!r})"
    return subprocess.run([BIN / "python", "-c", code], capture_output=True, check=False).returncode == 0


def needs(package: str) -> None:
    if not (BIN / "python").exists():
        pytest.skip("there is no .venv-clients: scripts/test --clients makes it")
    if not has(package):
        pytest.skip(f"{package} is not in .venv-clients")


@pytest.fixture(scope="module")
def question() -> str:
    """About 3,500 tokens with the fact in the middle."""
    text = (REPO / "tests/text/licences.txt").read_text(encoding="utf-8")
    fact = f"The access code for silver harbor is {CODE}."
    return f"{text[:6000]}\n{fact}\n{text[6000:12000]}\nWhat is the access code for silver harbor?"


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVFLASH_", "LLAMA_"))}
    return {**kept, "PATH": f"{BIN}:{kept['PATH']}", **more}


def run(*line: str | Path, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / line[0]), *map(str, line[1:])]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=PROGRAMS,  # with python -m the folder counts, and the checkout is not built
        env=environment(**more),
        check=False,
    )


def execute(*line: str | Path, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return run("kvflash-run", "exec", *POOL, "--", *line, stdin=stdin, **more)


@pytest.mark.parametrize(
    ("package", "program", "pool"),
    [
        ("langchain-community", "langchain_completion", "1024 of 8192"),
        ("langchain-community", "langchain_chat", "1024 of 8192"),
        ("llama-index-llms-llama-cpp", "llamaindex_completion", "1024 of 8192"),
        ("llama-cpp-haystack", "haystack_completion", "1024 of 8192"),
        ("outlines", "outlines_regex", "1024 of 131072"),
        ("lm-format-enforcer", "format_enforcer", "1024 of 8192"),
    ],
)
def test_a_library_in_a_program(package: str, program: str, pool: str, question: str) -> None:
    needs(package)
    done = execute(PROGRAMS / f"{program}.py", MODEL, stdin=question)
    assert done.returncode == 0, done.stderr
    assert CODE in done.stdout
    assert f"kvflash: pool {pool} tokens" in done.stderr


def test_langchain_as_its_page_says(question: str, tmp_path: Path) -> None:
    needs("langchain-community")
    page = (REPO / "docs/clients.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "langchain" in block)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    (tmp_path / "book.txt").write_text(question.rpartition("\n")[0], encoding="utf-8")
    done = run("python", "-c", f"import os; os.chdir({str(tmp_path)!r})\n{example}")
    assert done.returncode == 0, done.stderr
    assert CODE in done.stdout
    assert "kvflash: pool 1024 of 131072 tokens" in done.stdout


def test_a_library_without_a_pool(question: str) -> None:
    """llama_cpp alone finds the library."""
    needs("langchain-community")
    done = run("python", PROGRAMS / "langchain_completion.py", MODEL, stdin=question)
    assert "object has no attribute 'kvflash'" in done.stderr, "stock's class has none"
    assert CODE in done.stdout


def test_guidance_is_told_why_it_cannot(question: str) -> None:
    needs("guidance")
    refused = execute(PROGRAMS / "guidance_gen.py", MODEL, stdin=question)
    assert refused.returncode != 0
    assert "llama_decode was called on a paged context" in refused.stderr
    assert "kvflash=None" in refused.stderr
    served = execute(PROGRAMS / "guidance_gen.py", MODEL, "without", stdin=question)
    assert served.returncode == 0, served.stderr
    assert CODE in served.stdout


def test_llm(question: str, tmp_path: Path) -> None:
    needs("llm-gguf")
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "models.json").write_text(json.dumps({"recall": {"path": str(MODEL), "aliases": []}}))
    done = execute("llm", "-m", "gguf/recall", stdin=question, LLM_USER_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert CODE in done.stdout
    assert "kvflash: pool 1024 of 131072 tokens" in done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The server of llama-cpp-python with a pool; its address."""
    needs("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = f"kvflash-run exec {' '.join(POOL)} -- python -m llama_cpp.server --model {MODEL} --n_ctx 8192 --port {port}"
    command = [*line.split(), "--logits_all", "false"]
    command[0] = str(BIN / command[0])
    log = tmp_path / "log"  # a pipe that nobody reads would hold a server that tells much
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=PROGRAMS, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(240):
            assert process.poll() is None, "the server has stopped"
            try:
                urllib.request.urlopen(f"{address}/models").close()
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()
        told = log.read_text()
        print(told)
    assert "kvflash: pool 1024 of 8192 tokens" in told
    assert "flash_attn=False of the program is raised to True" in told


def test_openai_and_the_server(server: str, question: str) -> None:
    needs("openai")
    done = run("python", PROGRAMS / "openai_chat.py", server, stdin=question)
    assert done.returncode == 0, done.stderr
    assert CODE in done.stdout
