"""A thread that does one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import get_ident

from ..interrupts import held_back


class Worker:
    """The thread begins with the first work and ends with `close`, not when the last reference goes."""

    def __init__(self, name: str) -> None:
        self._thread: int | None = None
        # the bound method keeps the executor alive: if it were collected, queued work would be lost
        self._executor = ThreadPoolExecutor(1, name, initializer=self._begin)

    def _begin(self) -> None:
        self._thread = get_ident()

    @property
    def is_here(self) -> bool:
        """Whether the caller is on this thread. A garbage collector may be anywhere."""
        return get_ident() == self._thread

    def submit(self, work: Callable[..., object], *args: object) -> Future:  # type: ignore[type-arg]
        """Run work after all earlier work."""
        return self._executor.submit(work, *args)

    def finish(self, close: Callable[[], None], then: ExitStack) -> None:
        """Run both on the thread after all earlier work. Their errors are logged."""
        then.callback(close)
        self.submit(then.close).add_done_callback(Future.result)

    def close(self) -> None:
        """Do all submitted work, and end. Waits for it, except on this thread."""
        with held_back():
            self._executor.shutdown(wait=not self.is_here)
