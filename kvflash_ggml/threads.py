"""A thread that does one thing after the other, a result that is there, and Ctrl-C held back while threads end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import current_thread, get_ident, main_thread
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


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


def done(value: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


@contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, as where threads end whose memory is freed next.

    Until Python 3.13 an interrupted `Thread.join` says of a thread that runs that it has ended. So nobody could wait
    for it again. Other threads than the main one get no Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *call: came.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
