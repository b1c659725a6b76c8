"""Ctrl-C while an answer is computed: the first stops the answer, the second ends the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopAnswer(KeyboardInterrupt):
    """The first Ctrl-C, raised where nothing is half done."""


class Interrupt:
    """Inside the `with`, the first Ctrl-C only sets `requested`; a second raises KeyboardInterrupt.

    An exception in the middle of a step could leave the cache and its page table in disagreement.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._mine = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._mine:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise StopAnswer if Ctrl-C was pressed."""
        if self.requested:
            raise StopAnswer

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
