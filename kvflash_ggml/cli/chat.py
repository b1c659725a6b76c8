"""The chat at the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import logs
from ..errors import ContextFull
from .answer import Message, TimedAnswer, ask, finish_preview
from .model import first_seed, in_words
from .options import OutputOptions, SamplingOptions
from .prompt import as_typed, read_text, with_media
from .report import closing_line, residency
from .terminal import (
    end_answer,
    note,
    print_piece,
    stderr_is_terminal,
    stdin_is_terminal,
    stdout_is_terminal,
    typed_lines_kept,
)

if TYPE_CHECKING:
    from ..llama.llama import Llama

HELP = """\
/exit       leave (so does Ctrl-D)
/clear      forget the conversation
/regen      answer the last message again
/read FILE  put a file before the next message
/image FILE put an image before the next message
/audio FILE put a sound before the next message
/stats      speed, residency, pages
\"\"\"         begins and ends a message of several lines
Ctrl-C      stops the answer; twice at a prompt, or in an answer, leaves"""

_QUOTES = '"""'


class Chat:
    """One conversation. Answers go to stdout, everything else to stderr. media: files before the first message."""

    def __init__(
        self,
        llm: Llama,
        *,
        sampling: SamplingOptions,
        output: OutputOptions,
        system: str | None,
        media: Sequence[Path] = (),
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._output = output
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._seed = first_seed(sampling.seed)
        self._documents: list[str] = []
        self._media = list(media)
        self._last: TimedAnswer | None = None
        self._warned = False
        self._commands = {
            "/clear": self._clear,
            "/regen": self._regen,
            "/read": self._read,
            "/image": self._attach,
            "/audio": self._attach,
            "/stats": self._stats,
            "/help": self._help,
        }

    def run(self, first: str | None = None) -> None:
        """Chat until /exit, Ctrl-D or a second Ctrl-C (KeyboardInterrupt)."""
        _use_line_editing()
        if not self._output.quiet and stdin_is_terminal():
            note("/help lists the commands, Ctrl-D leaves")
        if first is not None:
            self._say(first)
        while True:
            try:
                line = _read_message()
            except EOFError:
                if stdin_is_terminal():
                    click.echo(err=True)
                return
            except KeyboardInterrupt:
                self._interrupted_at_prompt()
                continue
            self._warned = False
            try:
                line = as_typed(line, "the message") or ""
            except ValueError as error:
                click.secho(f"Error: {error}", err=True, fg="red")
                continue
            if not line.strip():
                continue
            if not self._handle(line):
                return

    def _handle(self, line: str) -> bool:
        """Answer a message, or do what a command says. False ends the chat."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/") or "\n" in line:
            self._say(line)
        elif word in ("/exit", "/bye"):
            return False
        elif word in self._commands:
            self._commands[word](rest.strip())
        else:
            note(f"{word} is not a command; /help lists them")
        return True

    def _say(self, text: str) -> None:
        try:
            content = with_media(self._media, "\n\n".join([*self._documents, text]))
        except (OSError, ValueError) as error:
            click.secho(f"Error: {in_words(error)}", err=True, fg="red")
            return
        finally:
            self._documents.clear()
            self._media.clear()
        self._messages.append({"role": "user", "content": content})
        self._answer()

    @logs.held()
    def _answer(self) -> bool:
        """Answer the last message. Without an answer, the message is taken back."""
        try:
            with typed_lines_kept():
                answer = ask(
                    self._llm,
                    self._messages,
                    sampling=self._sampling,
                    seed=self._seed,
                    emit=print_piece if self._output.stream else None,
                    show_progress=stderr_is_terminal() and not self._output.quiet,
                )
        except (ContextFull, ValueError, RuntimeError, MemoryError) as error:
            self._messages.pop()
            click.secho(f"Error: {in_words(error)}", err=True, fg="red")
            return False
        if answer.interrupted and not answer.text:
            self._messages.pop()
            note("stopped; the message is taken back")
            return False
        self._seed = (self._seed + 1) & 0xFFFFFFFF
        end_answer(answer.text, streamed=self._output.stream)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._last = answer
        if not self._output.quiet:
            note(closing_line(answer, self._llm.kvflash))
        if self._llm.kvflash is not None and self._llm.kvflash.last.previewed:
            finish_preview(self._llm, shown=stderr_is_terminal() and not self._output.quiet)
        return True

    def _interrupted_at_prompt(self) -> None:
        if self._warned:
            raise KeyboardInterrupt
        self._warned = True
        click.echo(err=True)
        note("Ctrl-C again, Ctrl-D or /exit leaves")

    # --- commands

    def _help(self, rest: str) -> None:
        note(HELP)

    def _clear(self, rest: str) -> None:
        self._messages = list(self._opening)
        self._documents.clear()
        self._media.clear()
        self._last = None
        note("the conversation is forgotten")

    def _regen(self, rest: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            note("there is no answer to regenerate")
            return
        answer = self._messages.pop()
        question = self._messages[-1]
        if not self._answer():
            self._messages += [question, answer]

    def _read(self, rest: str) -> None:
        names = _split(rest)
        if len(names) != 1:
            note("usage: /read FILE")
            return
        try:
            text = read_text(Path(names[0]).expanduser())
        except (OSError, ValueError) as error:
            click.secho(f"Error: {in_words(error)}", err=True, fg="red")
            return
        self._documents.append(text.removesuffix("\n"))
        note(f"{names[0]}: {len(text)} characters, put before your next message")

    def _attach(self, rest: str) -> None:
        names = _split(rest)
        if len(names) != 1 or self._llm.chat_handler is None:
            usage = "usage: /image FILE, /audio FILE"
            note(usage if self._llm.chat_handler else "images and sound need the model's projector: --mmproj FILE")
        elif not (path := Path(names[0]).expanduser()).is_file():
            click.secho(f"Error: {path} is no file", err=True, fg="red")
        else:
            self._media.append(path)
            note(f"{path}: put before your next message")

    def _stats(self, rest: str) -> None:
        stats = self._llm.kvflash
        if self._last is not None:
            note(closing_line(self._last, stats))
        elif stats is not None:
            note(" | ".join(residency(stats)))
        else:
            note("nothing has been answered yet")
        if stats is not None:
            note(stats.banner())
            note(
                f"recalled {_mib(stats.bytes_in)}, copied {_mib(stats.bytes_out)};"
                f" host {_mib(stats.host_bytes)}, device {_mib(stats.device_bytes)}"
            )


def _read_message() -> str:
    """Read one line, or the lines between two triple quotes."""
    line = _read_line("> ")
    if not line.lstrip().startswith(_QUOTES):
        return line
    lines = [line.lstrip().removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(_read_line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip("\n")


def _read_line(mark: str) -> str:
    if stdin_is_terminal() and stdout_is_terminal():
        return input(mark)
    if stdin_is_terminal():
        click.echo(mark, err=True, nl=False)  # stdout is a pipe: only answers go there
    line = "" if sys.stdin is None else sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _use_line_editing() -> None:
    if stdin_is_terminal():
        with suppress(ImportError):
            import readline  # noqa: F401  importing it gives input() history and editing


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
