"""Ctrl-C at a line of one's choice, and a call from another thread after it."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import kvflash_ggml

ROOT = Path(kvflash_ggml.__file__).parent

T = TypeVar("T")

WAIT_SECONDS = 60
"""For a call on another thread. One that waits for a lock that nobody gives back waits for ever."""


def elsewhere(call: Callable[[], T]) -> T:
    """The result of a call on another thread, or its error. AssertionError if the call does not end."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)  # one that hangs does not keep the process
    thread.start()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive(), "a call on another thread waits: the interrupted one has kept a lock"
    if errors:
        raise errors[0]
    return results[0]


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line that is run in some of our files.

    Two events are not counted: the one of a `with` line where Python leaves the block, and the one of a bare `try:`.
    CPython handles signals at the start of a function, after a call and at a jump back. None of these lies between a
    block and the `__enter__` or `__exit__` of a lock that is written in C. So no signal makes `with lock:` keep the
    lock, but a tracer that raises there would. `signalled` sends a real signal.
    """

    def __init__(self, k: int, files: tuple[str, ...]) -> None:
        self.left = k
        assert all((ROOT / file).is_file() for file in files)
        self.files = {str(ROOT / file) for file in files}
        self.stack: list[str] = []

    def run(self, work: Callable[[], object], then: Callable[[], object]) -> bool:
        """False if the work was done before. Either way another thread calls `then`, which sees locks that were kept.

        Their errors are raised here.
        """
        interrupted = False
        sys.settrace(self._enter)
        try:
            work()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        elsewhere(then)
        return interrupted

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "line" and frame.f_lasti not in _unreachable(frame.f_code)
        if self.left == 0:
            at: FrameType | None = frame
            while at is not None and len(self.stack) < 16:
                self.stack.append(at.f_code.co_name)
                at = at.f_back
            raise KeyboardInterrupt
        return self._line


def signalled(work: Callable[[], object], then: Callable[[], object], seconds: float) -> bool:
    """Send a real signal during the work, after so many seconds. Otherwise as `Interrupter.run`."""
    interrupted, working = False, True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if working:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        working = False
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    elsewhere(then)
    return interrupted


@cache
def _unreachable(code: CodeType) -> frozenset[int]:
    """Offsets of a function where a tracer is called, and no signal is handled."""
    starts = dict(dis.findlinestarts(code))
    stretches: list[tuple[int, list[dis.Instruction]]] = []  # instructions in a row of one line
    for at in dis.get_instructions(code):
        if not stretches or starts.get(at.offset, stretches[-1][0]) != stretches[-1][0]:
            stretches.append((starts.get(at.offset, 0), []))
        stretches[-1][1].append(at)
    entering = [any(at.opname in _ENTERS for at in found) for _, found in stretches]
    entered = {line for (line, _), enters in zip(stretches, entering, strict=True) if enters}
    offsets = {at.offset for _, found in stretches for at in found if at.opname == "NOP"}
    for (line, found), enters in zip(stretches, entering, strict=True):
        if line in entered and not enters:
            offsets.update(at.offset for at in found)
    return frozenset(offsets)


_ENTERS = ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL")
"""Of several versions of Python."""
