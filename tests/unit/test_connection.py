"""Clients that send slowly, or not at all, by sockets."""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest import mock

import h11
import pytest
import uvicorn
from support.fake_model import FakeModel, FakePrompts
from uvicorn.server import ServerState

from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.server import connection, exchange
from kvflash_ggml.server.app import make_app
from kvflash_ggml.server.connection import MAX_EVENTS, MAX_HEAD, bounded
from kvflash_ggml.server.front import Front
from kvflash_ggml.server.metrics import Metrics
from kvflash_ggml.server.settings import ServerSettings

STALL_S = 0.3
LOOK_S = STALL_S / 30


class Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(LOOK_S if timeout is None else min(timeout, LOOK_S))


class Loop(asyncio.SelectorEventLoop):
    """Its clock stands still while the machine leaves it no time, or what is sent in time comes too late."""

    def __init__(self) -> None:
        self._looked, self._now = time.monotonic(), 0.0
        super().__init__(Selector())

    def time(self) -> float:
        looked, self._looked = self._looked, time.monotonic()
        self._now += min(self._looked - looked, 2 * LOOK_S)
        return self._now


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASK = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
)


class Client:
    """A connection, read as things come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._came, self._task = bytearray(), asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(OSError):
            while data := await self._reader.read(1 << 16):
                self._came += data

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def pause(self) -> None:
        """Read no more."""
        self._task.cancel()

    async def take(self, count: int) -> None:
        """Read so much and no more."""
        self._came += await self._reader.readexactly(count)

    def resume(self) -> None:
        self._task = asyncio.create_task(self._read())

    async def drip(self, data: bytes) -> None:
        """A byte at a time, each well in time, until something comes, or the connection ends."""
        for i in range(len(data)):
            if self._came or self._task.done():
                return
            await self.send(data[i : i + 1])
            await asyncio.sleep(STALL_S / 10)

    def end(self) -> None:
        """Say that nothing more is sent."""
        self._writer.write_eof()

    async def reply(self) -> tuple[int, Any]:
        """The next one, with all of its body."""
        while True:
            head, _, body = bytes(self._came).partition(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            size = 0 if found is None else int(found[1])
            if size and len(body) >= size:
                del self._came[: len(head) + 4 + size]
                return int(head.split()[1]), json.loads(body[:size])
            assert not self._task.done(), "the connection has ended"
            await asyncio.sleep(0.01)

    async def until(self, data: bytes) -> None:
        while data not in self._came:
            await asyncio.sleep(0.01)

    async def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        await self._task
        return bytes(self._came)

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await self._task


def run(
    work: Callable[[Callable[[], Any]], Awaitable[None]], *, keep_alive_s: float = 60, model: FakeModel | None = None
) -> None:
    scheduler = Scheduler(model or FakeModel())
    front = Front(ServerSettings(alias="fake", stall_timeout_s=STALL_S), scheduler, FakePrompts())
    app, state = make_app(front, Metrics()), ServerState()

    async def whole() -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=keep_alive_s)
        config.load()
        made = bounded(STALL_S)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: made(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        @asynccontextmanager
        async def connect() -> AsyncIterator[Client]:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            try:
                yield client
            finally:
                await client.close()

        connect.open = state.connections  # type: ignore[attr-defined]
        await asyncio.wait_for(work(connect), 60)
        server.close()
        await server.wait_closed()

    scheduler.start()
    try:
        with mock.patch("asyncio.events.new_event_loop", Loop):
            asyncio.run(whole())
    finally:
        front.close()
        scheduler.close()


def test_a_head_that_comes_slowly() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await client.drip(HEALTH)
            status, body = await client.reply()
            assert (status, body["error"]["type"]) == (408, "timeout_error")
            assert await client.rest() == b""

    run(work)


def test_a_head_that_comes_slowly_behind_an_answer() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await client.send(HEALTH)
            assert (await client.reply())[0] == 200
            await asyncio.sleep(2 * STALL_S)
            await client.send(HEALTH)
            assert (await client.reply())[0] == 200, "a connection may be idle for longer"
            await client.drip(HEALTH)
            assert (await client.reply())[0] == 408

    run(work)


def test_a_connection_that_says_nothing() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            assert await client.rest() == b""

    run(work)


def test_a_body_that_comes_slowly() -> None:
    """Each of its bytes comes in time."""

    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await client.send(ASK)
            await client.drip(b" " * 1000)
            status, body = await client.reply()
            assert (status, body["error"]["code"]) == (408, "timeout")
            await client.drip(b" " * 1000)
            assert await client.rest() == b"", "nor does it go on"

    run(work)


def test_a_body_that_nobody_wants() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await client.send(ASK.replace(b"completions", b"nothing"))
            assert (await client.reply())[0] == 404
            await client.drip(b" " * 1000)
            assert await client.rest() == b""

    run(work)


async def with_late_body(client: Client) -> None:
    """A body of 1,000 bytes comes to its end behind its answer."""
    await client.send(ASK.replace(b"completions", b"nothing").replace(b"1000000", b"1000"))
    assert (await client.reply())[0] == 404
    await asyncio.sleep(0.6 * STALL_S)
    await client.send(b" " * 1000)


def test_idle_behind_a_late_body() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await with_late_body(client)
            await asyncio.sleep(2 * STALL_S)
            await client.send(HEALTH)
            assert (await client.reply())[0] == 200, "it is idle, and no body is late any more"

    run(work)


def test_idle_for_too_long_behind_a_late_body() -> None:
    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await with_late_body(client)
            assert await client.rest() == b""

    run(work, keep_alive_s=STALL_S)


def test_a_head_behind_a_late_body() -> None:
    """It has all of its own time."""

    async def work(connect: Callable[[], Any]) -> None:
        async with connect() as client:
            await with_late_body(client)
            await client.send(HEALTH[:9])
            await asyncio.sleep(0.6 * STALL_S)
            await client.send(HEALTH[9:])
            assert (await client.reply())[0] == 200
            await client.drip(HEALTH)
            assert (await client.reply())[0] == 408

    run(work)


LARGE = json.dumps({"content": "a" * (4 << 20)}).encode()
ASK_MUCH = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(LARGE)
) + LARGE


def test_a_client_that_reads_nothing_of_an_answer() -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            client.pause()
            await client.send(ASK_MUCH)
            while not connect.open:
                await asyncio.sleep(0.01)
            while connect.open:
                await asyncio.sleep(0.01)
            client.resume()

    run(work)


def test_a_client_that_reads_an_answer_slowly() -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            client.pause()
            await client.send(ASK_MUCH)
            for _ in range(8):
                await asyncio.sleep(STALL_S / 2)
                await client.take(1 << 18)
            client.resume()
            status, body = await client.reply()
            assert (status, len(body["tokens"])) == (200, 4 << 20)

    run(work)


@pytest.mark.parametrize("reads", [(100 << 10,), (9 << 10, 9 << 10)])
@pytest.mark.parametrize("before", [b"", HEALTH])
def test_a_head_that_is_too_long(reads: tuple[int, ...], before: bytes) -> None:
    """In one read or in several, and behind another request."""

    async def work(connect: Any) -> None:
        async with connect() as client:
            begin, *others = (b"a" * size for size in reads)
            await client.send(before + HEALTH[:-2] + b"X-Long: " + begin + b"\r\n\r\n" * (not others))
            for more in others:
                await asyncio.sleep(0.02)
                await client.send(more)
            if before:
                assert (await client.reply())[0] == 200
            status, body = await client.reply()
            assert (status, body["error"]["code"]) == (431, "head")
            assert "16384 bytes" in body["error"]["message"]

    run(work)


def test_bytes_that_nobody_expects_within_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The answer goes on: old clients send a line end behind a body."""

    async def work(connect: Any) -> None:
        async with connect() as client:
            await client.send(HEALTH.replace(b"/health", b"/kvflash/events")[:-2] + b"Connection: close\r\n\r\n")
            await client.until(b"data: ")
            for _ in range(2):
                await client.send(b"\r\n")
                await asyncio.sleep(0.1)
            assert connect.open

    run(work)
    assert "data_received" not in caplog.text, "asyncio logs what fails there, and cuts the answer"


def test_bytes_that_nobody_expects_behind_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            head = ASK.replace(b"completions", b"nothing").replace(
                b"Content-Length: 1000000", b"Transfer-Encoding: chunked"
            )
            await client.send(head)
            assert (await client.reply())[0] == 404
            await client.send(b"this is no chunk\r\n")
            assert await client.rest() == b""

    run(work)
    assert "data_received" not in caplog.text


def test_a_head_that_has_the_most_bytes() -> None:
    head = HEALTH[:-2] + b"X-Long: %s\r\n\r\n"
    head %= b"a" * (MAX_HEAD - len(head) + 2)

    async def work(connect: Any) -> None:
        async with connect() as client:
            await client.send(head + HEALTH)
            for _ in range(2):
                assert (await client.reply())[0] == 200

    assert len(head) == MAX_HEAD
    run(work)


CHUNKED = ASK.replace(b"Content-Length: 1000000", b"Transfer-Encoding: chunked")


class Work:
    """What h11 parses: events of all connections, and the most between two turns of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = self.most = 0
        parse = h11.Connection.next_event

        def counted(conn: h11.Connection) -> Any:
            event = parse(conn)
            self.events += event not in (h11.NEED_DATA, h11.PAUSED)
            return event

        monkeypatch.setattr(h11.Connection, "next_event", counted)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                before = self.events
                await asyncio.sleep(0)
                self.most = max(self.most, self.events - before)

        task = asyncio.create_task(watch())
        yield
        task.cancel()


BODY = b'{"prompt": "a", "max_tokens": 1}' + b" " * 20_000


def chunks(body: bytes) -> bytes:
    """Each with one byte."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (CHUNKED + chunks(BODY), 1),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + chunks(BODY), 1),
        (
            CHUNKED.replace(b"Content-Type", b"Connection: upgrade\r\nUpgrade: websocket\r\nContent-Type")
            + chunks(BODY),
            1,
        ),
        (HEALTH * 500, 500),
        ((CHUNKED + chunks(BODY[:40])) * 20, 20),
    ],
    ids=["chunks", "HTTP/1.0", "upgrade", "pipelined", "chunks, pipelined"],
)
def test_a_turn_of_the_loop_parses_little(monkeypatch: pytest.MonkeyPatch, sent: bytes, answers: int) -> None:
    """And yet all of it is answered."""
    work = Work(monkeypatch)

    async def ask(connect: Any) -> None:
        async with connect() as client, work.watched():
            await client.send(sent)
            for _ in range(answers):
                status, body = await client.reply()
                assert status == 200, body

    run(ask)
    assert work.events >= min(len(BODY), 2 * answers)
    assert work.most <= 2 * MAX_EVENTS, "what has come, and what waited behind an answer"


@pytest.mark.parametrize("path", [b"nothing", b"completions"])
def test_chunks_of_a_refused_request_are_not_parsed(monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    work = Work(monkeypatch)
    head = CHUNKED.replace(b"completions", path).replace(b"application/json", b"text/plain")

    async def ask(connect: Any) -> None:
        async with connect() as client, work.watched():
            await client.send(head + chunks(b"a" * 200_000))
            assert (await client.reply())[0] in (404, 415)
            assert await client.rest() == b"", "it can send no other request"

    run(ask)
    assert work.events <= 10 * MAX_EVENTS


@pytest.mark.parametrize("size", [MAX_HEAD // 2, 100 << 10])
def test_trailers(size: int) -> None:
    """As many bytes as a head may have, in one read too."""

    async def ask(connect: Any) -> None:
        async with connect() as client:
            body = BODY[:40]
            trailers = b"a:b\r\n" * (size // 5)
            await client.send(CHUNKED + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers))
            if size < MAX_HEAD:
                assert (await client.reply())[0] == 200
            else:
                assert (await client.rest()).startswith(b"HTTP/1.1 400 ")

    run(ask)


@pytest.mark.parametrize("path", [b"nothing", b"completions"])
@pytest.mark.parametrize("wrong", [b"zz\r\n", b"-1\r\na\r\n", b"0x1\r\na\r\n", b"1\r\nabc\r\n", b"0\r\nbad\r\n\r\n"])
def test_a_body_that_is_no_http(caplog: pytest.LogCaptureFixture, path: bytes, wrong: bytes) -> None:
    """It is refused, and the log has no traceback."""

    async def ask(connect: Any) -> None:
        async with connect() as client:
            await client.send(CHUNKED.replace(b"completions", path) + wrong)
            assert (await client.rest()).startswith(b"HTTP/1.1 400 ")

    run(ask)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_for_websockets_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(connect: Any) -> None:
        async with connect() as client:
            await client.send(HEALTH[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert (await client.reply())[0] == 200

    run(ask)
    assert not caplog.records


# --- clients that say that they send nothing more


GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


def posted(*, stream: bool = False, version: str = "1.1") -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": stream})
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The model waits for it before each step."""
    for module in (connection, exchange):
        monkeypatch.setattr(module, "PROBE_S", STALL_S / 10)
    return threading.Event()


@pytest.mark.parametrize(
    ("sent", "meanwhile", "answers"),
    [
        (posted(), GO_ON, [b"HTTP/1.1 200"]),
        (posted(stream=True), b": ", [b"HTTP/1.1 200", b"data: [DONE]"]),
        (posted(version="1.0"), b"", [b"HTTP/1.1 200"]),
        (posted() * 2, b"", [b"HTTP/1.1 200", b"HTTP/1.1 200"]),
    ],
    ids=["whole", "stream", "HTTP/1.0", "two"],
)
def test_a_client_that_has_sent_all_gets_its_answers(
    sent: bytes, meanwhile: bytes, answers: list[bytes], gate: threading.Event
) -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            await client.send(sent)
            client.end()
            await client.until(meanwhile)
            gate.set()
            came = await client.rest()
            for answer in answers:
                assert answer in came
                came = came.partition(answer)[2]
            assert (GO_ON in came) is False

    run(work, model=FakeModel(on_step=gate.wait))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_is_not_computed_for(stream: bool, gate: threading.Event) -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            await client.send(posted(stream=stream))
            while not connect.open:
                await asyncio.sleep(0.01)
        while connect.open:
            await asyncio.sleep(0.01)
        gate.set()

    run(work, model=FakeModel(on_step=gate.wait))


def test_a_request_that_is_cut_off_has_no_answer(gate: threading.Event) -> None:
    async def work(connect: Any) -> None:
        async with connect() as client:
            await client.send(posted()[:-1])
            client.end()
            assert await client.rest() == b""

    run(work)
