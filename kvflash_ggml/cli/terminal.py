"""The terminal: detects one, writes dim notes to stderr, and draws the progress line."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from .. import system

_REDRAW_S = 0.1
_ERASE = "\r\x1b[K"
_SAMPLES = 4  # of a reading's time, before it is told
_LONG_S = 30.0  # a reading that takes longer names the option that is faster


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise SystemExit at a signal that ends a program, so that nothing is left behind. From the main thread.

    A signal that is ignored stays so: that is what nohup asks for.
    """
    ours = [number for number in system.END_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None where the caller has closed it, as services do


def stdin_is_terminal() -> bool:
    return _is_terminal(sys.stdin)


def stdout_is_terminal() -> bool:
    return _is_terminal(sys.stdout)


def stderr_is_terminal() -> bool:
    """Report whether stderr is a terminal that can redraw a line."""
    return _is_terminal(sys.stderr) and not is_dumb()


def is_dumb() -> bool:
    """Report whether the terminal shows control codes instead of obeying them."""
    return os.environ.get("TERM") == "dumb"


def note(text: str) -> None:
    """Print one line on stderr, dim on a terminal."""
    click.secho(text, err=True, dim=True)


def print_piece(text: str) -> None:
    """Print a piece of the answer on stdout, and flush."""
    click.echo(text, nl=False)


def end_answer(text: str, *, streamed: bool) -> None:
    """Print the rest of the answer on stdout: all of it, or the end of its last line."""
    click.echo("" if streamed else text, nl=bool(text) and not text.endswith("\n"))


def size_text(size: int) -> str:
    """Return bytes for people, as 55.9 MiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} bytes"


@contextmanager
def typed_lines_kept() -> Iterator[None]:
    """Keep the lines that were typed ahead, which a terminal drops at Ctrl-C."""
    if not stdin_is_terminal():
        yield
        return
    with system.typed_lines_kept(sys.stdin):
        yield


@contextmanager
def busy(text: str, *, shown: bool) -> Iterator[None]:
    """Show a line on stderr during work that reports no progress."""
    if shown:
        click.secho(f"{text} ...", err=True, dim=True, nl=False)
    try:
        yield
    finally:
        if shown:
            click.echo(_ERASE, err=True, nl=False)


def time_text(seconds: float) -> str:
    """Return seconds as 1:05, or 1:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class ReadingTime:
    """Predicts how long a text takes to read, from its first steps.

    A token costs a constant, and a part for each token that it sees: n tokens take a n + b n^2 seconds.
    Least squares over the samples give a and b.
    """

    def __init__(self) -> None:
        self._s2 = self._s3 = self._s4 = self._t1 = self._t2 = 0.0
        self.samples = 0

    def add(self, n: int, seconds: float) -> None:
        """Add a sample: the first n tokens took this many seconds."""
        self._s2 += n**2
        self._s3 += n**3
        self._s4 += n**4
        self._t1 += n * seconds
        self._t2 += n**2 * seconds
        self.samples += 1

    def seconds(self, n: int, *, seen: int | None = None) -> float:
        """Return the time of n tokens, each of which sees all before it, or `seen` tokens at most. Needs a sample."""
        a, b = self._costs()
        seen = n if seen is None else min(seen, n)
        return a * n + b * (seen**2 + 2 * seen * (n - seen))

    def _costs(self) -> tuple[float, float]:
        determinant = self._s2 * self._s4 - self._s3**2
        if determinant > 1e-9 * self._s2 * self._s4:
            a = (self._t1 * self._s4 - self._t2 * self._s3) / determinant
            b = (self._t2 * self._s2 - self._t1 * self._s3) / determinant
            if a < 0:
                return 0.0, self._t2 / self._s4
            if b >= 0:
                return a, b
        return self._t1 / self._s2, 0.0


class Progress:
    """Percent, speed and time left of some work, redrawn in place, and erased at the end of a `with`.

    unit: of what is counted; "MiB" of bytes. pool: tokens of the pool that reads, None without one. exact: a token of a
    prompt sees more than the pool; if that takes long, the line names the faster option.
    """

    def __init__(
        self,
        *,
        shown: bool,
        doing: str = "reading the prompt",
        unit: str = "tokens",
        pool: int | None = None,
        exact: bool = False,
    ) -> None:
        self._shown = shown
        self._doing = doing
        self._unit = unit
        self._pool = pool
        self._exact = exact
        self._time = ReadingTime()
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
        if done:
            self._time.add(done, now - self._start)
        if not self._shown or total < 2 or (now - self._drawn_at < _REDRAW_S and self._drawn):
            return
        speed = f"{done / max(now - self._start, 1e-9):.0f} {'t/s' if self._unit == 'tokens' else f'{self._unit}/s'}"
        text = f"{self._doing}: {100 * done // total:3d}% of {total} {self._unit}, {speed}{self._left(done, total)}"
        click.secho(f"{_ERASE}{text}", err=True, dim=True, nl=False)
        self._drawn_at, self._drawn = now, True

    def _left(self, done: int, total: int) -> str:
        """Return the time that is left, once there are enough samples."""
        if self._time.samples < _SAMPLES:
            return ""
        seen = None if self._exact else self._pool
        whole = self._time.seconds(total, seen=seen)
        text = f", {time_text(whole - self._time.seconds(done, seen=seen))} left"
        if self._exact and self._pool is not None and self._pool < total and whole > _LONG_S:
            text += f" (--kvflash-reading pool: {time_text(self._time.seconds(total, seen=self._pool))} in all)"
        return text

    def erase(self) -> None:
        if self._drawn:
            click.echo(_ERASE, err=True, nl=False)
        self._drawn = False
