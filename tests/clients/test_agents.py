"""Coding agents and official clients, each with a task of three tool calls, against a server that follows a script."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
PLACES = REPO / ".venv-clients"
PYTHON = PLACES / "bin/python"
MODULES = PLACES / "node/node_modules"
NAME = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "")
CLAUDE = MODULES / f"@anthropic-ai/claude-code-linux-{NAME}/claude"
CODEX = MODULES / f"@openai/codex-linux-{NAME}/vendor/{platform.machine()}-unknown-linux-musl/bin/codex"
END = "The task is done."
SHELL = ("cat notes.txt", "echo seven > out.txt", "cat out.txt")


def bash(name: str, key: str, **more: Any) -> Callable[[Path], list[Any]]:
    """Three calls of a tool that runs commands: read a file, write another one, read that."""
    return lambda home: [[name, {key: command, **more}] for command in SHELL]


AGENTS: dict[str, tuple[Path, Callable[[Path], list[Any]], list[str]]] = {
    "claude": (CLAUDE, bash("Bash", "command", description="x"), ["-p", "Go on", "--allowedTools", "Bash"]),
    "codex": (
        CODEX,
        bash("exec_command", "cmd"),
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Go on"],
    ),
    "opencode": (MODULES / ".bin/opencode", bash("bash", "command", description="x"), ["run", "Go on"]),
    "qwen-code": (
        MODULES / ".bin/qwen",
        bash("run_shell_command", "command", is_background=False),
        ["--yolo", "-p", "Go on"],
    ),
    "cline": (
        MODULES / ".bin/cline",
        lambda home: [["run_commands", {"commands": [one]}] for one in SHELL],
        ["Go on"],
    ),
}


@contextmanager
def scripted(calls: list[Any], folder: Path) -> Iterator[str]:
    """The address of a server that asks for these calls, one after the other."""
    script = folder / "script.json"
    script.write_text(json.dumps({"calls": calls, "end": END}))
    line = [sys.executable, REPO / "tests/support/scripted.py", script]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_a_task_of_three_calls(name: str, tmp_path: Path) -> None:
    """Started by `kvflash-run launch`, in a home of its own."""
    program, calls, arguments = AGENTS[name]
    if not program.exists():
        pytest.skip(f"{program.name} is not there: scripts/test --clients installs it where npm is")
    home, work, found = tmp_path / "home", tmp_path / "work", tmp_path / "bin"
    for folder in (home, work, found):
        folder.mkdir()
    (found / {"qwen-code": "qwen"}.get(name, name)).symlink_to(program.resolve())
    (work / "notes.txt").write_text("hello\n")
    (work / "opencode.json").write_text(json.dumps({"autoupdate": False, "share": "disabled", "permission": "allow"}))
    environment = {"PATH": f"{found}:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": str(REPO)}
    with scripted(calls(work), tmp_path) as url:
        line = [sys.executable, "-m", "kvflash_ggml", "launch", "--url", url, name, "--", *arguments]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=300, cwd=work, env=environment, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 0, done.stderr
    assert END in done.stdout
    assert (work / "out.txt").read_text() == "seven\n"


def test_libraries_for_agents_do_the_same(tmp_path: Path) -> None:
    """Pydantic AI through all three interfaces, LangChain through both of OpenAI's, and LiteLLM through Anthropic's."""
    python = PLACES / "agents/bin/python"
    if not python.exists():
        pytest.skip("these libraries are not there: scripts/test --clients installs them")
    calls = [["run", {"command": command}] for command in "abc"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OTEL_SDK_DISABLED": "true", "HOME": str(tmp_path)}
    with scripted(calls, tmp_path) as url:
        program = REPO / "tests/clients/programs/server/tools_of_libraries.py"
        done = subprocess.run(
            [python, program, url], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=quiet
        )
    assert done.returncode == 0, done.stderr
    names = ("OpenAIChatModel", "OpenAIResponsesModel", "AnthropicModel", "ChatOpenAI", "ChatOpenAI", "litellm")
    assert done.stdout.splitlines() == [*(f"{name} {END}" for name in names), "calls 18"]


@pytest.mark.parametrize("python", [PYTHON, PLACES / "agents/bin/python"], ids=["newest", "before"])
def test_the_official_clients_parse_every_event(python: Path, tmp_path: Path) -> None:
    if not python.exists():
        pytest.skip("this client is not there: scripts/test --clients installs it")
    with scripted([["Bash", {"command": "ls"}]], tmp_path) as url:
        program = REPO / "tests/clients/programs/official_clients.py"
        done = subprocess.run([python, program, url], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    message, response = told["anthropic"], told["openai"]
    assert message["events"] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert (message["blocks"], message["input"]) == (["text", "tool_use"], {"command": "ls"})
    assert message["whole"] == [{"command": "ls"}, "tool_use"]
    assert message["errors"] == ["invalid_request_error"] * 2
    assert message["counted"] > 5
    assert response["events"][:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert response["events"][-1] == "response.completed"
    assert (response["items"], response["input"]) == (["message", "function_call"], {"command": "ls"})
    assert response["read"] < 40
    assert response["refused"] == "previous_response_not_found"
