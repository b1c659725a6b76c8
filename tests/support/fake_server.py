"""A server on a model made of a few lines: everything but the socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvflash_ggml.batching.messages import Request, Usage
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.server.app import make_app
from kvflash_ggml.server.front import Front
from kvflash_ggml.server.metrics import Metrics
from kvflash_ggml.server.settings import ServerSettings
from kvflash_ggml.store.swapped import ConversationFolder

from .asgi import Client, Reply
from .fake_model import FakeModel, FakePrompts


class Server:
    """Requests go to `client`; `run` starts and ends the scheduler around them. model, prompts: may be real ones."""

    seconds = 120.0
    """For all requests of `run`."""

    def __init__(
        self,
        model: Any = None,
        prompts: Any = None,
        *,
        limits: Limits | None = None,
        folder: Path | None = None,
        embedder: Any = None,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request, Usage, str], None] | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.prompts = model or FakeModel(), prompts or FakePrompts()
        self.settings = ServerSettings(alias="fake", **settings)
        metrics = Metrics()
        kept = None if folder is None else ConversationFolder(folder)
        self.scheduler = Scheduler(self.model, limits=limits, folder=kept, on_end=on_end or metrics.ended, clock=clock)
        metrics.attach(self.scheduler)
        self.front = Front(self.settings, self.scheduler, self.prompts, embedder)
        self.app = make_app(self.front, metrics)
        self.client = Client(self.app)

    def run(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            return await asyncio.wait_for(work(self.client), self.seconds)

        self.scheduler.start()
        try:
            return asyncio.run(whole())
        finally:
            self.front.close()
            self.scheduler.close()
            assert getattr(self.model, "held", 0) == 0

    def post(self, path: str, data: Any, **headers: str) -> Reply:
        reply = self.run(lambda client: client.post(path, data, **headers))
        assert isinstance(reply, Reply)
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        reply = self.run(lambda client: client.get(path, **headers))
        assert isinstance(reply, Reply)
        return reply
