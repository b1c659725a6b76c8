"""Bounds the head of a request, the time to send it and to read the answer, and the work between two turns of the loop.

`intake.py` bounds bodies.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from .. import system
from .errors import ApiError
from .intake import PROBE_S

MAX_HEAD = 16 << 10
"""Bytes of a head, and of the trailers behind a body. h11 bounds only those that come in several reads."""

MAX_EVENTS = 16
"""Events of one connection in a turn of the loop. A read of 256 KiB has 43,000 where each chunk has one byte."""

_HEAD_END = re.compile(rb"\n\r?\n")


class _Parser(h11.Connection):
    """Asks for more data once it has returned `left` events, whatever it holds."""

    left = 0

    def next_event(self) -> Any:
        if not self.left:
            return h11.NEED_DATA
        event = super().next_event()
        if event is not h11.NEED_DATA and event is not h11.PAUSED:
            self.left -= 1
        return event


class _Flow(FlowControl):
    """Reads while uvicorn wants data, and nothing that came is left to parse."""

    behind = False

    def resume_reading(self) -> None:
        self.read_paused = False
        if not self.behind:
            self._transport.resume_reading()

    def look(self, behind: bool) -> None:
        self.behind = behind
        if behind:
            self._transport.pause_reading()
        elif not self.read_paused:
            self._transport.resume_reading()


class Connection(H11Protocol):
    """stall_s: for the head of a request, for the rest of a body whose request has been answered, and for a client that
    takes nothing of what is written for it.
    """

    stall_s = 60.0
    flow: _Flow
    conn: _Parser
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _turn: asyncio.Handle | None = None
    _deaf = False
    _ended = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Parser(h11.SERVER, MAX_HEAD)
        self._unparsed = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._await_client()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        late = self._answered()
        self._unset_keepalive_if_required()
        self._unparsed += data
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_unread()  # more is written meanwhile
        idle, begun = self.conn.their_state is h11.IDLE, bool(self.conn.trailing_data[0])
        if late and idle:  # that body has come to its end: what follows has time of its own
            self._stop()
            if not begun:
                self._keep_alive()
        if (idle and begun) or self._answered():
            self._await_client()
        else:
            self._stop()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection of a client that has sent all of its request, and awaits the answer.

        A client that has left looks the same, until something is written: then its system resets the connection. With
        TLS the transport cannot stay open.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return None
        self._ended = True
        cycle.message_event.set()  # who streams an answer writes something
        self._probe(cycle)
        return True

    def _probe(self, cycle: Any) -> None:
        """Write what a client passes over before its answer, and again in a while. HTTP/1.0 has nothing like it."""
        if cycle.response_started or self.transport.is_closing() or cycle.scope["http_version"] == "1.0":
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        self.loop.call_later(PROBE_S, self._probe, cycle)

    def handle_events(self) -> None:
        """Parse what has come, up to `MAX_EVENTS`. For the rest the loop comes back, and nothing is read meanwhile."""
        if self._turn is not None:
            return
        self.conn.left = MAX_EVENTS
        while not self.transport.is_closing():
            begun = self.conn.trailing_data[0] if self.conn.their_state is h11.IDLE else b""
            if len(begun) > MAX_HEAD and not _HEAD_END.search(begun, 0, MAX_HEAD):
                # before it is parsed: 250 KiB of short headers take the loop 0.1 s
                self._refuse(431, f"the head of a request has more than {MAX_HEAD} bytes: send fewer headers", "head")
                return
            super().handle_events()
            state = self.conn.their_state
            if state is h11.ERROR:
                self._unparsed.clear()
            waits = state not in (h11.IDLE, h11.SEND_BODY) and bool(self.conn.trailing_data[0])  # for an answer
            if not self._unparsed or not self.conn.left or waits:
                break
            self.conn.receive_data(bytes(self._unparsed[:MAX_HEAD]))
            del self._unparsed[:MAX_HEAD]
        if not self.conn.left:
            self._turn = self.loop.call_soon(self._go_on)
        self.flow.look(bool(self._unparsed) or not self.conn.left)

    def _go_on(self) -> None:
        self._turn = None
        self.data_received(b"")

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP. Behind an answer nothing can be said; within one they are left unread."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            if self.cycle is not None:  # what it would answer comes too late
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        elif self.conn.our_state is h11.SEND_BODY:
            self.flow.pause_reading()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended and self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # no other request is on its way
        if self._answered():
            self._await_client()
            if any(name == b"transfer-encoding" for name, _ in self.headers) and self.transport.can_write_eof():
                self._hear_no_more()
        self._await_reader()

    def _hear_no_more(self) -> None:
        """Say that this was the last answer, and drop the rest of the body unparsed.

        Its chunks could cost a core. Closing at once would reset the connection, perhaps before the answer is read.
        """
        self._deaf = True
        self._unparsed.clear()
        if self._turn is not None:
            self._turn.cancel()
        self.flow.look(False)
        self.transport.write_eof()

    def _should_upgrade(self) -> bool:
        """Answer a request for WebSockets as if it had not asked. uvicorn logs two lines for each."""
        return False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _await_reader(self) -> None:
        """Await the client from when nothing more is written. A closed connection ends when all of it is read."""
        if self.transport.get_write_buffer_size() and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.stall_s, self._look_at_reader, self._unread())

    def _look_at_reader(self, before: int) -> None:
        self._unread_timer = None
        if self._unread() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _unread(self) -> int:
        """Count bytes that the client has not taken: here, and in the kernel, which asks for more only after a
        megabyte.
        """
        sock = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size() + system.unsent_bytes(sock)

    def _stop_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_unread()
        super().connection_lost(exc)

    def _answered(self) -> bool:
        """Tell whether a body comes that nobody waits for."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete

    def _keep_alive(self) -> None:
        """Wait as behind an answer: data that came has ended the wait that uvicorn began there."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _await_client(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.stall_s, self._time_is_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        begun, _ = self.conn.trailing_data
        if self.conn.their_state is h11.IDLE and begun:
            self._refuse(408, "the head of a request did not come to its end in time: --stall-timeout", "timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        answer = ApiError(status, message, code=code).response("")
        answer.headers["Connection"] = "close"
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(first + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def bounded(stall_s: float) -> type[Connection]:
    """Make the class of connections with this bound, for `uvicorn.Config(http=...)`."""
    return type("BoundedConnection", (Connection,), {"stall_s": stall_s})
