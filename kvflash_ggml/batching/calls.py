"""Work that other threads ask of the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..errors import KVFlashError

T = TypeVar("T")


class Calls:
    """Work in the order in which it came. Any thread adds, and the engine's thread runs.

    door: held while something comes in, so that all that came before `closed` is told how it ended. waiting: the work,
    each with whether it changes nothing. wake: called behind each addition.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.door = threading.Lock()
        self.closed = False
        self._wake = wake
        self.waiting: deque[tuple[bool, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def check_open(self) -> None:
        """Raise KVFlashError once nothing may come in any more. The caller holds `door`."""
        if self.closed:
            raise KVFlashError("the server is shutting down: try again later")

    def add(self, work: Callable[[], T], *, looks: bool) -> Future[T]:
        """Return the future of some work. looks: it changes nothing."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as err:
                future.set_exception(err)

        with self.door:
            try:
                self.check_open()
                self.waiting.append((looks, run))
            except KVFlashError as err:
                future.set_exception(err)
        self._wake()
        return future

    def run(self, *, changes: bool) -> None:
        """Do the work that came; without `changes` only up to the first that may change something."""
        while self.waiting and (changes or self.waiting[0][0]):
            self.waiting.popleft()[1]()
