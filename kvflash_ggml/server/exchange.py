"""One request and its client: takes events of the scheduler, cancels when the client leaves, writes the answer."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ..batching.messages import CANCELLED, Event, Failed, Finished, Logprob, Piece, Request
from ..batching.queue import QueueFull
from ..batching.scheduler import Scheduler
from ..chat.reader import AnswerReader
from ..chat.values import Delta, Said
from ..errors import KVFlashError
from .errors import ApiError, from_failure
from .intake import PROBE_S
from .usage import report, timings, together, usage

MAX_HELD = 1 << 20
"""Bytes, about, held for a client that does not read. Its answer is swapped out then, until half of them are left."""

LONG = 32 << 10
"""Characters of an answer. The loop makes the frames of a shorter one, which take it 1 ms, and at the end 10 ms.

A thread makes those of a longer one: the parser reads all of it again, and the check at the end takes 0.1 s for 256 Ki.
"""

PARTED = 5
"""Lists and objects within each other whose parts are encoded by themselves: down to the tokens of a choice."""

DONE = b"data: [DONE]\n\n"


class AnswerWriter(ABC):
    """Writes the events of one request as its interface has them: as frames of a stream, or as one JSON value.

    asked: the request. reader: tells content, reasoning and calls of the answer apart.
    """

    media_type = "text/event-stream"
    """Of a stream."""

    def __init__(self, asked: Any, reader: AnswerReader | None = None) -> None:
        self._asked = asked
        self._reader = reader or AnswerReader()
        self._left_out = 0
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []

    def tell(self, left_out: int) -> None:
        """Have the answer say that messages were left out of its prompt."""
        self._left_out = left_out

    # --- as a whole

    def take(self, event: Event) -> None:
        """Keep an event for `choice`."""
        if isinstance(event, Piece):
            self._text.append(event.text)
            self._logprobs += event.logprobs

    @abstractmethod
    def choice(self, finished: Finished) -> dict[str, Any]:
        """Return this answer. Called once."""

    def whole(self, choices: Sequence[dict[str, Any]], finished: Finished) -> Any:
        """Return the value of all answers of the request; finished: of all of them together."""
        return {**choices[0], **self._report(finished)}

    def response(self, value: Any, headers: Mapping[str, str]) -> Response:
        """Return the answer with the value of `whole`. Called on a thread."""
        return LongJSON(value, headers=dict(headers))

    def _said(self, finished: Finished) -> Said:
        self._reader.push("".join(self._text), end=True, stopped=finished.reason == "stop")
        return self._reader.said

    def _report(self, finished: Finished) -> dict[str, Any]:
        """Return `kvflash` of the answer, for clients that ask for it."""
        return report(self._asked.kvflash.report, finished, self._left_out)

    # --- as a stream

    def opening(self) -> bytes:
        """Return the frames before any event."""
        return b""

    @abstractmethod
    def frames(self, event: Event) -> Iterable[bytes]:
        """Return the frames of an event."""

    def ending(self, finished: Finished) -> Iterable[bytes]:
        """Return the frames behind the last of several answers; finished: of all of them together."""
        return ()

    def ping(self, doing: str) -> bytes:
        """Return what keeps a connection open while nothing is said. doing: see `Scheduler.doing`."""
        return f": {doing}\n\n".encode()

    def failed(self, error: ApiError) -> bytes:
        """Return the last frames of a stream that cannot come to its end."""
        return frame(error.body) + DONE

    def _deltas(self, event: Event) -> list[Delta]:
        """Return what an event adds to the answer."""
        if isinstance(event, Piece):
            return self._reader.push(event.text)
        if isinstance(event, Finished):
            return self._reader.push("", end=True, stopped=event.reason == "stop")
        return []


class ChoiceAnswer(AnswerWriter):
    """One of several choices of OpenAI's older interfaces. base: the fields that the whole answer begins with."""

    def __init__(self, asked: Any, reader: AnswerReader | None = None, *, base: dict[str, Any], index: int) -> None:
        super().__init__(asked, reader)
        self._base = self._chunk = base
        self._index = index

    def whole(self, choices: Sequence[dict[str, Any]], finished: Finished) -> dict[str, Any]:
        return {
            **self._base,
            "choices": [*choices],
            "usage": usage(finished.usage),
            "timings": timings(finished),
            **self._report(finished),
        }

    def ending(self, finished: Finished) -> Iterator[bytes]:
        options, shown = self._asked.stream_options, self._report(finished)
        last = {**self._chunk, "choices": [], "timings": timings(finished), **shown}
        if options is not None and options.include_usage:
            yield frame({**last, "usage": usage(finished.usage)})
        elif shown or self._asked.timings_per_token:
            yield frame(last)
        yield DONE


class Inbox:
    """Carries events from the engine's thread to the loop that it is made in.

    on_room: called on the loop when the inbox is not full any more.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_room = on_room
        self._events: deque[Event] = deque()
        self._put = self._taken = 0  # bytes, each counted on its own thread
        self._full = False
        self._ready = asyncio.Event()
        self._late = asyncio.Event()
        self._most_s: float | None = None  # of a wait

    def put(self, event: Event) -> None:
        """Add an event, from any thread. One that comes after the loop has ended is dropped."""
        self._put += _size(event)
        self._events.append(event)
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            return

    def full(self) -> bool:
        """Report whether the client has enough to read for now. Called on the engine's thread."""
        held = self._put - self._taken
        self._full = held > (MAX_HELD // 2 if self._full else MAX_HELD)
        return self._full

    async def get(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if none comes in time, or to `hurry`."""
        # a timer and not wait_for, which makes a task for each token
        late = self._late = asyncio.Event()
        if timeout_s is not None and self._most_s is not None:
            timeout_s = min(timeout_s, self._most_s)
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._time_is_up, late)
        while not self._events and not late.is_set():
            self._ready.clear()
            if not self._events:  # one that came meanwhile has set it before it was cleared
                await self._ready.wait()
        if timer is not None:
            timer.cancel()
        if not self._events:
            return None
        event = self._events.popleft()
        self._taken += _size(event)
        if self._full and self._put - self._taken <= MAX_HELD // 2:
            self._on_room()
        return event

    def hurry(self, most_s: float) -> None:
        """End this wait for an event, and each later one after so many seconds."""
        self._most_s = most_s
        self._time_is_up(self._late)

    def _time_is_up(self, late: asyncio.Event) -> None:
        late.set()
        self._ready.set()


def _size(event: Event) -> int:
    """Return about how many bytes the frame of an event has."""
    tokens = sum(1 + len(one.top) for one in event.logprobs) if isinstance(event, Piece) else 0
    return 256 + 128 * tokens + (len(event.text) if isinstance(event, Piece) else 0)


def submitted(scheduler: Scheduler, requests: Sequence[Request], receive: Receive) -> list[Exchange]:
    """Queue all requests. ApiError if there is no room for all of them; none is queued then."""
    inboxes = [Inbox(on_room=scheduler.wake) for _ in requests]
    try:
        scheduler.submit_together(
            [(request, inbox.put, inbox.full) for request, inbox in zip(requests, inboxes, strict=True)]
        )
    except QueueFull as err:
        raise ApiError(429, str(err), code="queue_full", retry_after_s=err.retry_after_s) from None
    except KVFlashError as err:
        raise ApiError(503, str(err), code="shutdown", retry_after_s=scheduler.retry_after_s) from None
    return [Exchange(scheduler, *one, receive) for one in zip(requests, inboxes, strict=True)]


class Exchange:
    """A submitted request. Its maker reads it to its end, or closes it."""

    def __init__(self, scheduler: Scheduler, request: Request, inbox: Inbox, receive: Receive) -> None:
        self._scheduler = scheduler
        self.request = request
        self._inbox = inbox
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        """Cancel the request when its client leaves. One that sends nothing more may have: writing to it tells."""
        while (await receive())["type"] != "http.disconnect":
            self._inbox.hurry(PROBE_S)
        self.cancel()

    @property
    def doing(self) -> str:
        return self._scheduler.doing(self.request)

    def cancel(self) -> None:
        self._scheduler.cancel(self.request.id)
        self._inbox.put(Failed(code=CANCELLED, message="the client has left"))

    async def events(self, *, ping_s: float | None = None) -> AsyncIterator[Event | None]:
        """Yield all events, and None where none has come for `ping_s`. The last event is Finished or Failed."""
        try:
            while True:
                event = await self._inbox.get(ping_s)
                if event is None and ping_s is None:
                    continue
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Stop watching the client, and cancel the request if it still runs."""
        self._watcher.cancel()
        self._scheduler.cancel(self.request.id)

    def error(self, failed: Failed) -> ApiError:
        return from_failure(failed, retry_after_s=self._scheduler.retry_after_s)


class EventStream(Response):
    """Streams answers in frames, one answer after the other. An error is the last frame.

    each: answers to a prompt. work: runs a function on a thread. A client that takes nothing for `stall_s` is given up.
    The headers go out at once, so that no proxy cuts the connection while a long prompt is read.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        answers: Sequence[AnswerWriter],
        *,
        each: int,
        ping_s: float,
        stall_s: float,
        work: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.media_type = answers[0].media_type
        self.background = None
        self._exchanges = exchanges
        self._answers = answers
        self._each = each
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._work = work
        self._stalled = False
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if await self._all(send):
                return
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return  # the client is gone
        except asyncio.CancelledError:
            if not self._stalled:
                raise
        finally:
            for exchange in self._exchanges:
                exchange.close()

    async def _all(self, send: Send) -> bool:
        """Send all frames, up to the end or a failure. Return whether the client has left."""
        ended = []
        for exchange, answer in zip(self._exchanges, self._answers, strict=True):
            size, parked = 0, False
            await self._bytes(send, answer.opening())
            async for event in exchange.events(ping_s=self._ping_s):
                doing = exchange.doing if event is None or parked else ""
                if parked and doing != "parked":
                    await self._bytes(send, answer.ping("resumed"))
                    parked = False
                if event is None:
                    await self._bytes(send, answer.ping(doing))
                    parked = doing == "parked"
                    continue
                size += len(event.text) if isinstance(event, Piece) else 0
                if isinstance(event, Failed):
                    if event.code != CANCELLED:
                        await self._bytes(send, await self._made(size, partial(answer.failed, exchange.error(event))))
                    return event.code == CANCELLED
                await self._bytes(send, await self._made(size, partial(_joined, answer, event)))
                if isinstance(event, Finished):
                    ended.append(event)
        await self._bytes(send, b"".join(answer.ending(together(ended, each=self._each))))
        return False

    async def _made(self, size: int, make: Callable[[], bytes]) -> bytes:
        """Make frames of an answer that has `size` characters by now: of a long one on a thread."""
        return make() if size < LONG else await self._work(make)

    async def _bytes(self, send: Send, data: bytes) -> None:
        if data:
            await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._give_up, task)
        try:
            await send(message)
        finally:
            timer.cancel()

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        """Cancel the answer of a client that does not read."""
        self._stalled = True
        task.cancel()


def _joined(answer: AnswerWriter, event: Event) -> bytes:
    return b"".join(answer.frames(event))


def frame(value: Any, kind: str = "") -> bytes:
    """Return one event of a stream. kind: of the event; it is in the value too then."""
    if not kind:
        return f"data: {dumps(value)}\n\n".encode()
    return f"event: {kind}\ndata: {dumps({'type': kind, **value})}\n\n".encode()


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class LongJSON(JSONResponse):
    """JSON that may be long, in parts: no other thread runs while one is encoded. Make it on a thread."""

    def render(self, content: Any) -> bytes:
        return _in_parts(content, PARTED).encode()


def _in_parts(value: Any, depth: int) -> str:
    if depth and isinstance(value, dict):
        return f"{{{','.join(f'{dumps(name)}:{_in_parts(one, depth - 1)}' for name, one in value.items())}}}"
    if depth and isinstance(value, list) and value and isinstance(value[0], dict | list):
        return f"[{','.join(_in_parts(one, depth - 1) for one in value)}]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def collected(exchanges: Sequence[Exchange], answers: Sequence[AnswerWriter]) -> list[Finished]:
    """Give all answers their events, one after the other, and return the end of each. ApiError if one fails."""
    ended: list[Finished] = []
    try:
        for exchange, answer in zip(exchanges, answers, strict=True):
            async for event in exchange.events():
                if isinstance(event, Failed):
                    raise exchange.error(event)
                assert event is not None
                answer.take(event)
                if isinstance(event, Finished):
                    ended.append(event)
    finally:
        for exchange in exchanges:
            exchange.close()
    return ended


def whole(answers: Sequence[AnswerWriter], ended: Sequence[Finished], *, each: int) -> Any:
    """Return all answers as one value. each: answers to a prompt."""
    choices = [answer.choice(end) for answer, end in zip(answers, ended, strict=True)]
    return answers[0].whole(choices, together(ended, each=each))
