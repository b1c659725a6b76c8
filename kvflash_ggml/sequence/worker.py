"""A thread that does one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import get_ident

from ..interrupts import held_back


class Worker:
    """The thread begins with the first work, and ends with `close`, not when nobody knows it any more."""

    def __init__(self, name: str) -> None:
        self._thread: int | None = None
        # the thread keeps `_begin`, and so the executor: if a garbage collector took that, further work would be lost
        self._executor = ThreadPoolExecutor(1, name, initializer=self._begin)

    def _begin(self) -> None:
        self._thread = get_ident()

    @property
    def is_here(self) -> bool:
        """Is the caller on its thread? A garbage collector may be anywhere."""
        return get_ident() == self._thread

    def submit(self, work: Callable[..., object], *args: object) -> Future:  # type: ignore[type-arg]
        """Do it after all that was submitted before."""
        return self._executor.submit(work, *args)

    def finish(self, close: Callable[[], None], then: ExitStack) -> None:
        """Do both on its thread, once it has done what it was given. What they raise is logged."""
        then.callback(close)
        self.submit(then.close).add_done_callback(Future.result)

    def close(self) -> None:
        """Do what was submitted, and end. Waits for that, but for a caller on its thread."""
        with held_back():
            self._executor.shutdown(wait=not self.is_here)
