"""Ctrl-C, held back where it must not come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


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
