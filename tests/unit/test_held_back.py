"""What a thread uses is not freed before the thread has done with it, whatever Ctrl-C interrupts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from traceback import walk_stack
from typing import Any

import pytest
from support.saving import make, snapshot_store, text

from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.restore import state
from kvflash_ggml.threads import Worker, held_back


def interrupted(close: Callable[[], None]) -> None:
    """Ctrl-C while it closes, which is raised."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever another test has left
    try:
        with pytest.raises(KeyboardInterrupt):
            close()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """From a thread that is waited for: once it is, Ctrl-C; and some time in which nobody must go on."""
    main = threading.main_thread().ident
    assert main is not None
    while "join" not in {frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[main])}:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


def test_a_snapshot_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Event()

    def slow(_handle: int) -> None:
        begun.set()
        interrupt()

    session = make()
    extend(session, text(300))
    store = snapshot_store(session)
    monkeypatch.setattr(os, "fsync", slow)
    done = store.save(state(session), tmp_path / "x", compress=False)
    assert begun.wait(30)
    interrupted(store.close)
    assert done.done()
    session.close()


def test_work_of_a_worker_is_waited_for() -> None:
    begun = Event()

    def slow() -> None:
        begun.set()
        interrupt()

    worker = Worker("test")
    done: Future[Any] = worker.submit(slow)
    assert begun.wait(30)
    interrupted(worker.close)
    assert done.done()
    worker.close()


def test_a_handler_of_the_program_is_put_back_and_called() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: called.append(number))
    try:
        handler = signal.getsignal(signal.SIGINT)
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert not called
        assert (called, signal.getsignal(signal.SIGINT)) == ([signal.SIGINT], handler)
    finally:
        signal.signal(signal.SIGINT, before)
