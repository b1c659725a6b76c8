"""Receives requests: reads and parses their bodies, on threads of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from . import bodies, forms
from .errors import OLLAMAS_PATH, ApiError, blaming, shutting_down
from .settings import ServerSettings

T = TypeVar("T")

THREADS = 4
"""For bodies, templates, tokenising and grammars: nothing that depends on a body runs on the loop."""

EACH = THREADS // 2
"""Threads that one client may hold, by its key or else its address: the others come to theirs."""

FETCHING = 2
"""Threads for files that requests name, one of them for a client: slow hosts keep no other work waiting."""

MAX_FETCHES = 8
"""Requests of one client that fetch or wait for it, since each holds its body; of all clients four times as many."""

SLOWEST = 16 << 10
"""Bytes a second of a body, beyond the time that a client may take anyway."""

PROBE_S = 1.0
"""From one look at a client that has sent its last byte to the next: has it left, or does it wait for its answer?"""

KEY = "kvflash.key"
"""Where in a request's scope its key's digest is."""

TAKEN = "kvflash.taken"
"""In the scope of a request that the scheduler has taken, which logs how it ends."""


class Intake:
    """What takes requests. values: of a body, at most. `draining`: nothing new is taken."""

    def __init__(self, settings: ServerSettings, *, values: int = bodies.MAX_VALUES) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.draining = False
        self._values = values
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvflash-front")
        self._fetching = ThreadPoolExecutor(FETCHING, thread_name_prefix="kvflash-fetch")
        self._fetches: Counter[str] = Counter()  # requests that fetch or wait for it, by client
        self._turns: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()

    async def work(
        self, http: HttpRequest, function: Callable[..., T], *args: Any, fetches: bool = False, **more: Any
    ) -> T:
        """Run on a thread, for the client of a request. What a user can do wrong there is his error.

        fetches: on one of those for files that the request names; ApiError if too many requests wait for them.
        """
        client = client_of(http.scope)
        mine, whole = (self._fetches[client], MAX_FETCHES), (self._fetches.total(), 4 * MAX_FETCHES)
        for whose, (count, limit) in (("this client's", mine), ("all clients'", whole)):
            if fetches and count >= limit:
                message = f"{count} of {whose} requests fetch files, and {limit} is the most: send data URLs, or wait"
                raise ApiError(429, message, code="fetches", retry_after_s=5)
        loop, threads = asyncio.get_running_loop(), self._fetching if fetches else self._threads
        each = asyncio.Semaphore(1 if fetches else EACH)
        turns = self._turns.setdefault((client, fetches), each)
        self._fetches[client] += fetches
        try:
            async with turns:
                with blaming(None):
                    return await loop.run_in_executor(threads, lambda: function(*args, **more))
        finally:
            self._fetches[client] -= fetches
            self._fetches += Counter()  # drops clients that fetch nothing

    async def body(self, request: HttpRequest) -> dict[str, Any]:
        """Read the JSON object of a body. ApiError for a body that is too large, too slow, or none."""
        data = await self.work(request, self.loads, await self.received(request))
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        return data

    def loads(self, data: bytearray | bytes) -> Any:
        """Parse the JSON that a client has sent. ApiError for too many, or for none."""
        try:
            return bodies.loads(data, most=self._values)
        except bodies.Refused as err:
            raise ApiError(400, f"the body is refused: {err}", code="invalid_value") from None
        except ValueError as err:
            raise ApiError(400, f"the body is no JSON: {str(err)[:200]}", code="invalid_json") from None

    def parsed(self, request: HttpRequest, data: bytearray | bytes, *, form: bool) -> Any:
        """Parse the JSON or the form that a client has sent. ApiError for too much, or for none."""
        if not form:
            return self.loads(data)
        try:
            return forms.parsed(data, request.headers.get("content-type", ""))
        except ValueError as err:
            raise ApiError(400, str(err), code="invalid_form") from None

    async def received(self, request: HttpRequest, wanted: str = "application/json") -> bytearray:
        """Read a body of this media type. ApiError for another type, and for a body too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # curl sends another kind unless it is told, as in Ollama's own documentation; the guard keeps foreign pages out
        if kind != wanted and not request.url.path.startswith(OLLAMAS_PATH):
            raise ApiError(415, f"the body must be {wanted}", code="content_type")
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            message = f"the body is encoded as {encoding[:40]!r}, and identity is all that is read: send it as it is"
            raise ApiError(415, message, code="content_encoding")
        limit, stall_s, data = self.settings.max_body, self.settings.stall_timeout_s, bytearray()
        size = int(request.headers.get("content-length", 0))  # h11 takes digits alone
        began, parts = time.monotonic(), request.stream()
        try:
            while True:
                if max(size, len(data)) > limit:
                    raise ApiError(413, f"the body has more than {limit} bytes: --max-body", code="body_too_large")
                left = stall_s + len(data) / SLOWEST - (time.monotonic() - began)
                part = await asyncio.wait_for(anext(parts, None), min(left, stall_s))
                if part is None:
                    break
                data += part
        except ClientDisconnect:
            raise ApiError(400, "the body ended too early", code="invalid_json") from None
        except (TimeoutError, asyncio.TimeoutError):
            raise ApiError(408, "the body did not come to its end in time: --stall-timeout", code="timeout") from None
        return data

    def admit(self) -> None:
        """Raise ApiError while the server is draining."""
        if self.draining:
            raise shutting_down()

    def close(self) -> None:
        for threads in (self._threads, self._fetching):
            threads.shutdown(wait=False, cancel_futures=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left, or has said that it sends nothing more: the message behind its last one."""
    more = True
    while more and (message := await receive())["type"] != "http.disconnect":
        more = message.get("more_body", False)
    if not more:
        await receive()


def client_of(scope: Scope) -> str:
    """Return whose request it is: the digest of its key, or else its address."""
    return str(scope.get(KEY) or (scope.get("client") or ("",))[0])
