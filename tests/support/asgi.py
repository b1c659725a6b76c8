"""An application without a socket: requests go in, and what it sends comes out as it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What has been sent so far. gate: cleared, the client does not read."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def json(self) -> Any:
        return json.loads(bytes(self.body))

    @property
    def frames(self) -> list[Any]:
        """The events of a stream; the mark at its end as text."""
        data = [line[6:] for line in bytes(self.body).decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


class Call:
    """One request under way."""

    def __init__(self, app: Any, scope: dict[str, Any], body: bytes) -> None:
        self.reply = Reply()
        self._changed = asyncio.Event()
        self._left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._body: bytes | None = body
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._left.is_set():
            raise OSError("the client has left")
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.reply.ended = not message.get("more_body", False)
        self._changed.set()

    def leave(self) -> None:
        self._left.set()

    async def until(self, condition: Callable[[Reply], bool]) -> Reply:
        while not condition(self.reply):
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)
        return self.reply

    async def done(self) -> Reply:
        # not by wait_for, whose TimeoutError is an OSError: the reply would have the status 0, and nobody knew why
        ended, _ = await asyncio.wait([self.task], timeout=60)
        assert ended, "no end within a minute"
        with suppress(OSError):
            await self.task
        return self.reply


class Client:
    """Speaks to an application. headers: of every request."""

    def __init__(self, app: Any, **headers: str) -> None:
        self._app = app
        self.headers = {"host": "127.0.0.1:8080", **{k.replace("_", "-"): v for k, v in headers.items()}}

    def call(self, method: str, path: str, data: Any = None, *, raw: bytes | None = None, **headers: str) -> Call:
        sent = {**self.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
        body = raw if raw is not None else b"" if data is None else json.dumps(data).encode()
        if body:
            sent.setdefault("content-type", "application/json")
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080),
        }  # fmt: skip
        return Call(self._app, scope, body)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.call("GET", path, **headers).done()

    async def post(self, path: str, data: Any = None, **more: Any) -> Reply:
        return await self.call("POST", path, data, **more).done()


@asynccontextmanager
async def closing(value: Any) -> AsyncIterator[Any]:
    try:
        yield value
    finally:
        value.close()
