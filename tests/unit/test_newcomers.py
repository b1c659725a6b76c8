"""What a person types who has not read the manual."""

from __future__ import annotations

import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support.fake_llama import REPLY, Stage, interrupt_at, staged

from kvflash_ggml.cli import chat, model, prompt, terminal
from kvflash_ggml.cli.main import main
from kvflash_ggml.cli.options import LogOptions
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.gguf import reader


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.delenv("KVFLASH_MODEL", raising=False)
    yield from staged(monkeypatch)


# --- verbs and models


@pytest.mark.parametrize(("word", "hint"), [("docter", "did you mean doctor?"), ("chat", "Verbs are ")])
def test_a_mistyped_verb_is_no_model(cli: Stage, word: str, hint: str) -> None:
    result = cli(word, "m.gguf")
    assert (result.exit_code, cli.made) == (2, [])
    assert f"{word!r} is neither a verb nor a model file" in result.stderr
    assert hint in result.stderr


def test_a_word_may_be_a_model_or_a_prompt(cli: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("hello", "-m", "m.gguf").stdout == REPLY + "\n"
    monkeypatch.chdir(tmp_path)
    Path("model").touch()
    assert cli("model", "hello").exit_code == 0
    assert cli.settings["model_path"] == "model"
    monkeypatch.setenv("KVFLASH_MODEL", "m.gguf")
    assert cli("hello").exit_code == 0


def test_python_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvflash_ggml", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvflash_ggml", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvflash-run ")


INTERRUPTED = """
import sys
import kvflash_ggml

class Finder:
    def find_spec(self, name, *_):
        if name == "kvflash_ggml.cli." + sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from kvflash_ggml.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("module", ["main", "run", "serve"])
def test_ctrl_c_while_it_imports(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module, "m.gguf"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


STARTED = """
import os, signal, sys
name, handler, folder = sys.argv[1:4]
sys.argv[1:] = ["--version"]
signal.signal(signal.SIGINT, getattr(signal, handler))
sys.path.insert(0, folder)
import _kvflash_ggml_startup

class Finder:
    def find_spec(self, wanted, *_):
        if wanted == name:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
_kvflash_ggml_startup.run()
"""


@pytest.mark.parametrize("module", ["kvflash_ggml", "kvflash_ggml.config", "kvflash_ggml.cli.main"])
@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_command_begins(module: str, handler: str, code: int) -> None:
    line = [sys.executable, "-c", STARTED, module, handler, str(Path(__file__).parents[2] / "startup")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout != "") == (code, "", code == 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"lmgg\x01", "older than GGUF"),
        (b"Some text", "it begins with b'Some'"),
        (b"PK\x03\x04", "is not a GGUF file"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"Failed to load model from file: {path}.*{why}"):
        reader.check(path)


def test_a_model_whose_name_is_no_text() -> None:
    with pytest.raises(ConfigError, match=r"m\\udcf6.gguf' has a name that is not UTF-8: rename it, or link to it"):
        reader.check(Path(os.fsdecode(b"m\xf6.gguf")))


@pytest.mark.parametrize("line", [["--version"], ["list"]])
def test_a_disk_that_is_full(line: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvflash_ggml", *line], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr.strip()) == (1, "Error: [Errno 28] No space left on device")


def test_a_log_file_on_a_full_disk(cli: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """What logs goes on: a server's thread, too."""
    model.log_to_stderr(LogOptions(log_file=Path("/dev/full")))
    for text in ("one", "two"):
        logging.getLogger("kvflash_ggml").warning(text)
    assert capsys.readouterr().err.splitlines() == [
        "kvflash: warning: one",
        "kvflash: --log-file /dev/full: No space left on device: nothing more is written there",
        "kvflash: warning: two",
    ]


def test_a_log_on_a_closed_pipe(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    monkeypatch.setattr(closed, "write", lambda text: (_ for _ in ()).throw(BrokenPipeError))
    monkeypatch.setattr(sys, "stderr", closed)
    model.log_to_stderr(LogOptions())
    logging.getLogger("kvflash_ggml").warning("a text")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder: give the path of a \.gguf file"):
        reader.check(tmp_path)
    for name in "abcd":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"give one of its files, a\.gguf, b\.gguf, c\.gguf, \.\.\.$"):
        reader.check(tmp_path)
    reader.check(tmp_path / "a.gguf")
    reader.check(tmp_path / "missing.gguf")


def test_the_architecture_of_a_file(tmp_path: Path) -> None:
    models = Path(__file__).parents[1] / "models"
    assert reader.architecture(models / "recall-dflash.gguf") == "dflash"
    assert reader.architecture(models / "recall-qwen35-q8_0.gguf") == "qwen35"
    start = (models / "recall-dflash.gguf").read_bytes()[:100]
    path = tmp_path / "model.gguf"
    for data in (b"", b"GGUF", start[:50], start.replace(b"arch", b"hcra"), start[:60] + b"\xff" * 8 + start[68:]):
        path.write_bytes(data)
        assert reader.architecture(path) in (None, "")


# --- prompts


def test_a_prompt_in_another_locale(cli: Stage) -> None:
    typed = "Wörter 😀".encode()
    for option in ((), ("-p",), ("-f", os.devnull, "-p")):
        assert cli("m.gguf", *option, typed.decode("ascii", "surrogateescape")).exit_code == 0
        assert cli.request[-1]["content"].strip() == "Wörter 😀"
    assert cli("m.gguf", "hi", "-s", typed.decode("ascii", "surrogateescape")).exit_code == 0
    assert cli.request[0]["content"] == "Wörter 😀"


@pytest.mark.parametrize(("arguments", "what"), [(("{}",), "the prompt"), (("hi", "-s", "{}"), "the system message")])
def test_a_prompt_that_is_no_text(cli: Stage, arguments: tuple[str, ...], what: str) -> None:
    result = cli("m.gguf", *(word.format("caf\udce9") for word in arguments))
    assert (result.exit_code, result.stdout, cli.made) == (1, "", [])
    assert f"Error: {what} is not UTF-8 text (byte 3)" in result.stderr


def test_a_message_that_is_no_text(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["caf\udce9", "W\udcc3\udcb6rter", "/exit"])
    monkeypatch.setattr(chat, "_read_line", lambda mark: next(lines))
    result = cli("m.gguf", "-cnv")
    assert "Error: the message is not UTF-8 text (byte 3)" in result.stderr
    assert [messages[-1]["content"] for messages, _ in cli.made[0].requests] == ["Wörter"]


def test_a_pipe_in_another_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, text in (("é\r\n".encode(), "é"), (b"\xe9", None)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii", "surrogateescape"))
        if text is None:
            with pytest.raises(ValueError, match=r"stdin is not UTF-8 text \(byte 0\)"):
                prompt.read_prompt(None, None, None, use_stdin=True)
        else:
            assert prompt.read_prompt(None, None, None, use_stdin=True) == text


def test_streams_that_the_caller_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert not terminal.stdin_is_terminal()
    assert not terminal.stdout_is_terminal()
    assert not terminal.stderr_is_terminal()
    assert prompt.read_prompt("hi", None, None, use_stdin=True) == "hi"
    with pytest.raises(EOFError):
        chat._read_line("> ")


@pytest.mark.parametrize(("term", "codes"), [("xterm", True), ("dumb", False)])
def test_a_terminal_without_codes(cli: Stage, monkeypatch: pytest.MonkeyPatch, term: str, codes: bool) -> None:
    monkeypatch.setenv("TERM", term)
    result = CliRunner().invoke(main, ["m.gguf", "hello"], color=True)
    assert (result.exit_code, "\x1b" in result.stderr) == (0, codes)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert terminal.stderr_is_terminal() is codes


# --- the keyboard


def test_ctrl_c_in_an_answer_does_not_count_at_the_prompt(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "C", "/exit"])

    def read(mark: str) -> str:
        line = next(lines)
        if line == "C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(chat, "_read_line", read)
    result = cli("m.gguf", "-cnv", on_token=interrupt_at(2))
    assert result.exit_code == 0
    assert "Ctrl-C again" in result.stderr


def test_ctrl_c_leaves_what_was_typed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()

    def drops() -> bool:
        return not termios.tcgetattr(theirs)[3] & termios.NOFLSH

    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert drops()
        with terminal.typed_lines_kept():
            assert not drops()
        assert drops()
        os.close(ours)
