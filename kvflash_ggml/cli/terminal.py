"""The terminal: who is one, dim notes on stderr, and the progress line."""

from __future__ import annotations

import os
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click

_REDRAW_S = 0.1
_ERASE = "\r\x1b[K"


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None where the caller has closed it, as services do


def stdin_is_terminal() -> bool:
    return _is_terminal(sys.stdin)


def stdout_is_terminal() -> bool:
    return _is_terminal(sys.stdout)


def stderr_is_terminal() -> bool:
    """One on which a line can be redrawn."""
    return _is_terminal(sys.stderr) and not is_dumb()


def is_dumb() -> bool:
    """Does the terminal show control codes instead of doing what they say?"""
    return os.environ.get("TERM") == "dumb"


def note(text: str) -> None:
    """One line on stderr, dim on a terminal."""
    click.secho(text, err=True, dim=True)


def print_piece(text: str) -> None:
    """A piece of the answer on stdout, flushed."""
    click.echo(text, nl=False)


def end_answer(text: str, *, streamed: bool) -> None:
    """What is still missing of the answer on stdout: all of it, or the end of its last line."""
    click.echo("" if streamed else text, nl=bool(text) and not text.endswith("\n"))


def size_text(size: int) -> str:
    """Bytes for people: 55.9 MiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} bytes"


@contextmanager
def typed_lines_kept() -> Iterator[None]:
    """Ctrl-C does not throw away the lines that were typed ahead, as a terminal does otherwise."""
    if not stdin_is_terminal():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    changed = [*before]
    changed[3] |= termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def busy(text: str, *, shown: bool) -> Iterator[None]:
    """A line on stderr while something is done that cannot tell how far it is."""
    if shown:
        click.secho(f"{text} ...", err=True, dim=True, nl=False)
    try:
        yield
    finally:
        if shown:
            click.echo(_ERASE, err=True, nl=False)


class Progress:
    """Percent and speed of some work, redrawn in place, and erased at the end of a `with`.

    unit: of what is counted; bytes that are shown as "MiB".
    """

    def __init__(self, *, shown: bool, doing: str = "reading the prompt", unit: str = "tokens") -> None:
        self._shown = shown
        self._doing = doing
        self._unit = unit
        self._start = time.perf_counter()
        self._drawn_at = 0.0
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self.erase()

    def update(self, done: int, total: int) -> None:
        if self._unit == "MiB":
            done, total = done >> 20, total >> 20
        now = time.perf_counter()
        if not self._shown or total < 2 or (now - self._drawn_at < _REDRAW_S and self._drawn):
            return
        speed = f"{done / max(now - self._start, 1e-9):.0f} {'t/s' if self._unit == 'tokens' else f'{self._unit}/s'}"
        text = f"{self._doing}: {100 * done // total:3d}% of {total} {self._unit}, {speed}"
        click.secho(f"{_ERASE}{text}", err=True, dim=True, nl=False)
        self._drawn_at, self._drawn = now, True

    def erase(self) -> None:
        if self._drawn:
            click.echo(_ERASE, err=True, nl=False)
        self._drawn = False
