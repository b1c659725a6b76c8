"""A server that nobody asks sleeps, and yet ends at once."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from unittest import mock
from urllib.request import urlopen

import pytest
from support.fake_model import FakeModel, FakePrompts
from support.served import answer

from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.server.run import listen, serve
from kvflash_ggml.server.settings import ServerSettings


class Selector(selectors.DefaultSelector):
    """Ends the server once the loop would sleep until something comes, or wakes up by itself too often."""

    def __init__(self) -> None:
        super().__init__()
        self.end, self.looks, self.slept = -1, 0, False

    def select(self, timeout: float | None = None) -> Any:
        if self.end >= 0:
            self.looks += timeout != 0
            self.slept = self.slept or timeout is None
            if self.slept or self.looks > 20:
                os.close(self.end)
                self.end = -1
        return super().select(timeout)


def test_the_loop_sleeps_until_something_comes() -> None:
    selector = Selector()
    reads, writes = os.pipe()
    dates: list[str] = []

    def ask(url: str) -> None:
        for end in (-1, writes):
            selector.end = end
            with urlopen(f"{url}/health", timeout=60) as answered:
                dates.append(answered.headers["Date"])

    def ready(url: str) -> None:
        threading.Thread(target=ask, args=(url,)).start()

    settings = ServerSettings(alias="fake", port=0)
    with (
        os.fdopen(reads, "rb") as until,
        listen(settings) as sock,
        mock.patch("asyncio.events.new_event_loop", return_value=asyncio.SelectorEventLoop(selector)),
    ):
        serve(FakeModel(), FakePrompts(), settings, sock, found=lambda count: None, ready=ready, until=until)
    assert selector.slept, "it wakes up although nobody asks"
    assert abs(parsedate_to_datetime(dates[0]) - datetime.now(timezone.utc)) < timedelta(minutes=5)


def test_the_engine_sleeps_until_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    asleep = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name == "kvflash-engine":
                waits.append(timeout)
                asleep.set()
            return super().wait(timeout)

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Event", Event)
        scheduler = Scheduler(FakeModel(reply=lambda prompt: b"abc"))
    scheduler.start()
    try:
        assert asleep.wait(60)
        asleep.clear()
        assert answer(scheduler, list(b"prompt"))
        assert asleep.wait(60)
    finally:
        scheduler.close()
    assert set(waits) == {None}
