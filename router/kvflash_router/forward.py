"""Forwards a request to another process of this machine, and streams the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import quote

import h11
from starlette.types import Message, Scope, Send

from kvflash_ggml.server.errors import ApiError

_READ = 64 << 10

_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
"""Headers of one connection."""

_OURS = frozenset((b"host", b"content-length", b"expect", b"origin", b"forwarded"))
"""Headers of a request that are written anew, or were checked before."""


async def forward(scope: Scope, send: Send, body: bytes | bytearray, *, port: int, unless: int | None = None) -> bool:
    """Send a request to a port of loopback, and its answer to `send`. Cancelled, the other process sees a client leave.

    unless: an answer of this status is not sent; False is returned then. ApiError if nothing is answered there.
    ConnectionError if the answer ends too early.
    """
    began = False
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        raise _gone() from None
    try:
        async for event in _answer(reader, writer, _request(scope, len(body), port), body):
            if isinstance(event, h11.Response):
                if event.status_code == unless:
                    return False
                began = True
                headers = [(name, value) for name, value in event.headers if name not in (*_HOP, b"date")]
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True
    except h11.RemoteProtocolError as err:
        if not began:
            raise _gone() from None
        raise ConnectionError("the model's process has ended within an answer") from err
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _request(scope: Scope, size: int, port: int) -> h11.Request:
    """Make the same request. The client's address goes with it, since limits are by client."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _HOP | _OURS and not name.startswith((b"sec-fetch-", b"x-forwarded-"))
    ]
    client = (scope.get("client") or ("",))[0]
    headers += [
        (b"host", b"127.0.0.1:%d" % port),
        (b"connection", b"close"),
        (b"content-length", b"%d" % size),
        *([(b"x-forwarded-for", client.encode())] if client else []),
    ]
    query = scope["query_string"]
    target = quote(scope["path"], errors="replace").encode() + (b"?" + query if query else b"")
    return h11.Request(method=scope["method"], target=target, headers=headers)


async def knows(scope: Scope, path: str, *, port: int) -> bool:
    """Ask a port of loopback for a path, on behalf of a request, and tell whether it answers with 200."""

    async def read(message: Message) -> None:
        seen.append(message.get("status"))

    seen: list[int | None] = []
    asked = {**scope, "method": "GET", "path": path, "query_string": b""}
    with suppress(ApiError, ConnectionError):
        await forward(asked, read, b"", port=port)
    return seen[:1] == [200]


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: h11.Request, body: bytes | bytearray
) -> AsyncIterator[h11.Event]:
    """Yield the events of an answer, to its end. RemoteProtocolError if there is none, or not all of it."""
    connection = h11.Connection(h11.CLIENT)
    writer.write(connection.send(request) or b"")
    writer.write(connection.send(h11.Data(data=bytes(body))) or b"")
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    with suppress(ConnectionError):  # it may have answered before it has read all
        await writer.drain()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await reader.read(_READ))
            except ConnectionError:
                connection.receive_data(b"")
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return
        elif isinstance(event, h11.Response | h11.Data):
            yield event


def _gone() -> ApiError:
    return ApiError(503, "the model's process has ended: ask again, and it is loaded again", code="ended")
