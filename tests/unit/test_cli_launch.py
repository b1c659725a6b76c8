"""`kvflash-run launch` on a server and programs made of a few lines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from kvflash_ggml.cli import main
from kvflash_ggml.cli.launch import PROGRAMS, Served

FILES = {name: name for name in PROGRAMS} | {"qwen-code": "qwen"}


class Models(BaseHTTPRequestHandler):
    """Tells of a model those who have the key."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if known and self.path == "/v1/models" else 401)
        self.end_headers()
        models = [
            {"id": "other", "meta": {"n_ctx_train": 9}},
            {"id": "unloaded", "meta": {"n_ctx": 8192}, "status": {"value": "unloaded"}},
            {"id": "mine", "meta": {"n_ctx_train": 9, "n_ctx": 65536}},
        ]
        self.wfile.write(json.dumps({"data": models}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that write down how they were started, and end with 7."""
    for name in FILES.values():
        (tmp_path / name).write_text(
            '#!/bin/sh\n{ echo "$@"; env; for one in "$@" "$CRUSH_GLOBAL_DATA"; do [ -d "$one" ] && '
            'find "$one" -type f -print -exec cat {} +; done; } > "$0.said"\nexit 7\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def run(*line: str) -> Result:
    return CliRunner().invoke(main, ["launch", *line], prog_name="kvflash-run")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_told_of_the_server(program: str, url: str, programs: Path) -> None:
    result = run("--url", f"{url}/v1", "--api-key", "secret", program, "--", "-p", "go")
    assert result.exit_code == 7, result.output
    said = (programs / f"{FILES[program]}.said").read_text()
    first = said.splitlines()[0]
    assert first.endswith("-p go")
    assert url in said
    assert "mine" in said
    assert "secret" in said
    assert url in result.output
    assert sorted(path.name for path in programs.iterdir() if path.suffix) == [f"{FILES[program]}.said"]


def test_a_dry_run_starts_nothing(url: str, programs: Path) -> None:
    result = run("--url", url, "--api-key", "secret", "--dry-run", "claude")
    assert result.exit_code == 0
    assert f"ANTHROPIC_BASE_URL={url}" in result.output
    assert "secret" not in result.output
    assert not (programs / "claude.said").exists()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_dry_run_wants_no_program(program: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("--url", url, "--api-key", "secret", "--dry-run", program)
    assert result.exit_code == 0, result.output
    assert f"{url}" in result.output
    assert f"there is no program {FILES[program]!r} on the PATH: {PROGRAMS[program].install}" in result.output


@pytest.mark.parametrize(("port", "shown"), [((), "PORT"), (("--port", "0"), "PORT"), (("--port", "8099"), "8099")])
def test_a_dry_run_loads_no_model(port: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the same each time: what the model's file and the variables of the server say."""
    model = Path(__file__).parents[1] / "models/recall-qwen3-q8_0.gguf"
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: pytest.fail("it starts something"))
    said = [run(*port, "-m", str(model), "--dry-run", "codex", "--", "exec") for _ in range(2)]
    assert said[0].exit_code == 0, said[0].output
    assert said[0].output == said[1].output
    assert f"kvflash-run serve {model} --host 127.0.0.1 -q --port {port[-1] if port else 0}\n" in said[0].output
    assert f'base_url="http://127.0.0.1:{shown}/v1"' in said[0].output
    assert "-c model_context_window=131072" in said[0].output
    assert 'model="recall-qwen3-q8_0"' in said[0].output
    monkeypatch.setenv("KVFLASH_CTX_SIZE", "16300")
    monkeypatch.setenv("KVFLASH_ALIAS", "mine,other")
    told = run("-m", str(model), "--dry-run", "claude").output
    assert "ANTHROPIC_MODEL=mine\n" in told
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=16384\n" in told
    monkeypatch.delenv("KVFLASH_CTX_SIZE")
    refused = run("-m", __file__, "--dry-run", "claude")
    assert (refused.exit_code, "KVFLASH_CTX_SIZE" in refused.output) == (1, True)


@pytest.mark.parametrize(("program", "file"), [("crush", "crush.json"), ("cline", "settings/providers.json")])
def test_files_of_a_program_go_with_it(program: str, file: str, url: str, programs: Path) -> None:
    """They have no key, which a process that is killed would leave behind."""
    result = run("--url", url, "--api-key", "secret", program)
    said = (programs / f"{program}.said").read_text()
    (folder,) = re.findall(rf"^(\S+)/{file}$", said, re.MULTILINE)
    written = said.partition(f"{folder}/{file}\n")[2]
    assert f"FOLDER/{file}: {written}" in result.output
    assert json.loads(written)
    assert "65536" in written
    assert "secret" not in written
    assert not Path(folder).exists()


def test_what_codex_is_told_is_toml(url: str) -> None:
    result = run("--url", url, "--api-key", "secret", "--dry-run", "codex")
    assert f"""model_providers.kvflash.base_url="{url}/v1\"""" in result.output
    assert "model_context_window=65536" in result.output


def test_the_key_is_shown_nowhere(url: str) -> None:
    for program in PROGRAMS:
        assert "secret" not in run("--url", url, "--api-key", "secret", "--dry-run", program).output


def test_options_may_stand_behind_the_program(url: str, programs: Path) -> None:
    """Up to a double dash; what launch does not know is the program's there too."""
    result = run("claude", "--url", url, "--dry-run", "-p", "go", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("claude -p go\n")
    assert not (programs / "claude.said").exists()
    assert run("claude", "-p", "--url", url, "--api-key", "secret", "--", "--dry-run", "--port", "x").exit_code == 7
    assert (programs / "claude.said").read_text().splitlines()[0] == "-p --dry-run --port x"
    assert run("claude", "--port", "99999").exit_code == 2


def test_a_later_double_dash_is_the_programs(url: str, programs: Path) -> None:
    run("--url", url, "--api-key", "secret", "claude", "--", "-p", "--", "-x")
    assert (programs / "claude.said").read_text().splitlines()[0] == "-p -- -x"


def test_a_program_that_a_signal_ends(url: str, programs: Path) -> None:
    (programs / "claude").write_text("#!/bin/sh\nkill -KILL $$\n")
    assert run("--url", url, "--api-key", "secret", "claude").exit_code == 128 + 9


def test_a_server_of_another_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-none\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        result = run("--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--dry-run", "claude")
        thread.join()
    assert "kvflash-run serve MODEL" in result.output


@pytest.mark.parametrize("end", ["TERM", "HUP"])
def test_a_server_of_its_own_does_not_stay(end: str, url: str, programs: Path) -> None:
    server = programs / "server"
    server.write_text(f'#!/bin/sh\necho $$ > "$0.said"\necho "serving mine at {url}" >&2\nexec sleep 60\n')
    server.chmod(0o755)
    (programs / "claude").write_text(f"#!/bin/sh\nsleep 1\nkill -{end} $PPID\nexec sleep 60\n")
    as_usual = f"import signal; signal.signal(signal.SIG{end}, signal.SIG_DFL)"  # these tests may run under nohup
    code = f"{as_usual}; import sys; sys.executable = {str(server)!r}; from kvflash_ggml.cli import main; main()"
    line = [sys.executable, "-c", code, "launch", "--api-key", "secret", "-m", str(server), "claude"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 128 + getattr(signal, f"SIG{end}"), ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((programs / "server.said").read_text()), 0)


def test_a_port(url: str, programs: Path) -> None:
    """Of a server that runs, or of one that is started."""
    port = url.rpartition(":")[2]
    result = run("--port", port, "--api-key", "secret", "--dry-run", "claude")
    assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{port}" in result.output
    server = programs / "server"
    server.write_text(f'#!/bin/sh\necho "$@" > "$0.said"\necho "serving mine at {url}" >&2\nexec sleep 60\n')
    server.chmod(0o755)
    with mock.patch.object(sys, "executable", str(server)):
        assert run("--port", "8099", "--api-key", "secret", "-m", str(server), "claude").exit_code == 7
    assert (programs / "server.said").read_text().rstrip().endswith("--port 8099")


@pytest.mark.parametrize("other", [("--port", "8099"), ("-m", __file__)])
def test_an_address_that_is_given_twice(other: tuple[str, str], url: str) -> None:
    result = run("--url", url, *other, "--dry-run", "claude")
    assert (result.exit_code, "leave out" in result.output) == (2, True)


def test_a_variable_gives_way_to_the_command_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port, told = url.rpartition(":")[2], ("--api-key", "secret", "--dry-run", "claude")
    monkeypatch.setenv("KVFLASH_PORT", "9")
    assert f"ANTHROPIC_BASE_URL={url}" in run("--url", url, *told).output
    monkeypatch.setenv("KVFLASH_URL", "http://127.0.0.1:9")
    assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{port}" in run("--port", port, *told).output


def test_without_a_server(url: str, programs: Path) -> None:
    for line in (("--url", "http://127.0.0.1:9"), ("--url", url, "--api-key", "wrong")):
        result = run(*line, "claude")
        assert result.exit_code == 1
        assert "kvflash-run serve MODEL" in result.output


def test_a_program_that_is_not_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("--url", url, "--api-key", "secret", "claude")
    assert result.exit_code == 2
    assert "npm install -g @anthropic-ai/claude-code" in result.output
    assert run("--url", url, "emacs").exit_code == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_of_agents_has_what_is_set(program: str) -> None:
    names = {"claude": "Claude Code", "codex": "Codex", "opencode": "OpenCode", "qwen-code": "Qwen Code"}
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")
    name = names.get(program, program)
    row = next(line for line in page.splitlines() if line.lower().startswith(f"| {name.lower()} | `/v1"))
    told = PROGRAMS[program].tells(Served(url="http://127.0.0.1:8080", key="k", model="m", n_ctx=4096))
    words = [word for word in told.arguments if word.startswith("-")]
    assert {one for one in (*told.environment, *told.files, *words) if one not in row} == set()
