"""`/kvflash/events`: streams what is resident and what moves; and the page that shows it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..batching.messages import Access
from ..batching.model import Residency
from ..constants import CHUNK
from .conversations import snapshot
from .errors import ApiError
from .exchange import frame
from .front import Front
from .intake import KEY, Intake, disconnected

MAX_VIEWERS = 16
"""Streams of one key, so that no key locks out another."""

PAUSE_S = 0.25
"""Between two states that a viewer is sent."""

PING_S = 15.0
PING = b": ping\n\n"


def state(front: Front, access: Access) -> dict[str, Any]:
    """Return what a viewer is told: the server, and the map of the text at hand. No text."""
    server, now = snapshot(front, access)
    return {**server, "map": _map(now), "speed": front.speed()}


def _map(now: Residency) -> dict[str, Any]:
    chunks = -(-now.length // CHUNK)
    bits = np.zeros(chunks, np.bool_)
    bits[[chunk for chunk in now.resident if chunk < chunks]] = True
    recalled = [
        [chunk] if why is None else [chunk, why.layer, why.head, why.token, round(why.share, 4), int(why.follows)]
        for chunk, why in now.recalled.items()
        if chunk < chunks
    ]
    return {
        "number": now.number,
        "length": now.length,
        "chunks": chunks,
        "resident": base64.b64encode(np.packbits(bits).tobytes()).decode(),
        "recalled": recalled,
        "evicted_mass": now.evicted_mass,
        "generating": now.generating,
    }


async def events(front: Front, request: HttpRequest) -> Response:
    """Stream the state and the map of the text at hand, at most four times a second."""
    key = request.scope.get(KEY, "")
    if front.viewers[key] >= MAX_VIEWERS:
        message = f"{front.viewers[key]} streams of this key are open, and {MAX_VIEWERS} may be: close one"
        raise ApiError(429, message, code="viewers", retry_after_s=30)
    return Viewer(front, key, front.access(request))


class Viewer(Response):
    """Sends the whole state whenever it has changed, but not more often than a person can see."""

    media_type = "text/event-stream"

    def __init__(self, front: Front, key: str, access: Access) -> None:
        self.status_code = 200
        self.background = None
        self._front = front
        self._key = key
        self._access = access
        self.init_headers({"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._look_on(1)
        left = asyncio.ensure_future(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last, quiet = b"", 0.0
            while not left.done() and not self._front.draining:
                data, quiet = frame(state(self._front, self._access)), quiet + PAUSE_S
                if data != last or quiet >= PING_S:
                    body, last, quiet = data if data != last else PING, data, 0.0
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait([left], timeout=PAUSE_S)
            if not left.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return
        finally:
            self._look_on(-1)
            left.cancel()

    def _look_on(self, more: int) -> None:
        self._front.viewers[self._key] += more
        for slot in self._front.scheduler.slots:
            slot.model.explain(self._front.viewers.total() > 0)


async def words(front: Front, request: HttpRequest) -> Response:
    """Return the beginning of a chunk's text, for a client that knows the name of the conversation at hand and may see
    it.
    """
    name, chunk = request.query_params.get("conversation", ""), request.query_params.get("chunk", "")
    start = int(chunk) * CHUNK if chunk.isdecimal() and len(chunk) <= 9 else None
    scheduler = front.scheduler
    slot = scheduler.slot
    running = scheduler.conversations.seen(front.access(request), lambda: slot.conversation)
    if not name or start is None or running is None or running.name != name:
        raise ApiError(404, "that conversation is not at hand", code="no_conversation")
    tokens = slot.model.tokens[start : start + CHUNK].tolist()
    if slot.conversation is not running:
        raise ApiError(404, "that conversation is not at hand", code="no_conversation")
    text = front.prompts.detokenize(tokens).decode("utf-8", "replace")
    return JSONResponse({"chunk": int(chunk), "text": text})


# --- the page


@cache
def _page() -> tuple[bytes, str]:
    """Return the page, and a policy under which nothing runs in it but what it came with."""
    text, style, script = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js")
    )
    text = text.replace("/* page.css */", style, 1).replace("/* page.js */", script, 1)
    hashes = {kind: _hashes(text, kind) for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hashes(text: str, kind: str) -> str:
    found = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


async def page(front: Intake, request: HttpRequest) -> Response:
    """Serve the chat page."""
    if request.method == "HEAD":  # so clients see whether a server is there
        return Response()
    if not front.settings.page:
        raise ApiError(404, "there is no page: the server was started with --no-page")
    body, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")
