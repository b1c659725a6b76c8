"""Bounds the head of a request, and the time to send it and to read the answer. `intake.py` bounds bodies."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .. import system
from .errors import ApiError

MAX_HEAD = 16 << 10
"""Bytes. h11 has the same bound, but only for heads that come in several reads."""

_HEAD_END = re.compile(rb"\n\r?\n")


class Connection(H11Protocol):
    """stall_s: for the head of a request, for the rest of a body whose request has been answered, and for a client that
    takes nothing of what is written for it.
    """

    stall_s = 60.0
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_client()

    def data_received(self, data: bytes) -> None:
        late = self._answered()
        super().data_received(data)
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

    def handle_events(self) -> None:
        """Refuse a head that is too long before it is parsed: 250 KiB of short headers take the loop 0.1 s."""
        begun = self.conn.trailing_data[0] if self.conn.their_state is h11.IDLE else b""
        if len(begun) > MAX_HEAD and not _HEAD_END.search(begun, 0, MAX_HEAD):
            self._refuse(431, f"the head of a request has more than {MAX_HEAD} bytes: send fewer headers", "head")
        else:
            super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP. Behind an answer nothing can be said; within one they are left unread."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        elif self.conn.our_state is h11.SEND_BODY:
            self.flow.pause_reading()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answered():
            self._await_client()
        self._await_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _await_reader(self) -> None:
        """From when nothing more is written. A connection that is closed ends when all that is written is read."""
        if self.transport.get_write_buffer_size() and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.stall_s, self._look_at_reader, self._unread())

    def _look_at_reader(self, before: int) -> None:
        self._unread_timer = None
        if self._unread() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _unread(self) -> int:
        """Bytes that the client has not taken: here, and in the kernel, which asks for more only after a megabyte."""
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
        """Does a body come that nobody waits for?"""
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete

    def _keep_alive(self) -> None:
        """As behind an answer: data that came has ended the wait that uvicorn began there."""
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
    """Connections with this bound, for `uvicorn.Config(http=...)`."""
    return type("BoundedConnection", (Connection,), {"stall_s": stall_s})
