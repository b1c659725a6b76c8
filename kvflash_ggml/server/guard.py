"""Checks keys, host names and origins before anything else sees a request, logs refusals, and answers failures."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import requestlog
from .errors import ApiError
from .intake import KEY, TAKEN, client_of
from .settings import LOOPBACK, ServerSettings

logger = logging.getLogger("kvflash_ggml")

OPEN_PATHS = frozenset(("/health", "/v1/health", "/ping", "/", "/favicon.ico"))
"""Answered without a key, and to pages of any origin."""

MAX_BODIES = 4
"""Bytes of one client's bodies whose requests have not ended, in multiples of `max_body`."""


class Guard:
    """ASGI middleware. Keys are compared as digests, all of them and in constant time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.keys]
        self._held: Counter[str] = Counter()  # bytes of bodies, by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is not None and (origin in self._settings.cors or "*" in self._settings.cors)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if message["status"] >= 400 and TAKEN not in scope:  # the scheduler logs what it has taken
                    key, model = scope.get(KEY, ""), self._settings.alias
                    requestlog.refused(scope["method"], scope["path"], key, message["status"], model)
                out = MutableHeaders(scope=message)
                out["X-Content-Type-Options"] = "nosniff"
                if allowed and origin is not None:
                    out["Access-Control-Allow-Origin"] = origin
                    out["Access-Control-Expose-Headers"] = "*"
                    out.add_vary_header("Origin")
            await send(message)

        try:
            self._check_host(headers)
            if scope["method"] == "OPTIONS":
                await self._preflight(scope["path"], headers, allowed)(scope, receive, answer)
                return
            self._check_origin(scope["path"], headers, allowed)
            scope[KEY] = self._key(scope["path"], headers)
        except ApiError as err:
            await err.response(scope["path"])(scope, receive, answer)
            return
        client, held = client_of(scope), 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            held += size
            self._held[client] += size
            self._check_bodies(self._held[client])
            return message

        try:
            await self._app(scope, counted, answer)
        except Exception as err:
            if begun:
                raise
            logger.error("%.16s %.100a", scope["method"], scope["path"], exc_info=err)
            failure = ApiError(500, "the server failed at this request: its log says why", code="internal_error")
            await failure.response(scope["path"])(scope, receive, answer)
        finally:
            self._held[client] -= held
            if not self._held[client]:
                del self._held[client]

    def _check_bodies(self, held: int) -> None:
        limit = MAX_BODIES * self._settings.max_body
        if held > limit:
            raise ApiError(
                429,
                f"the unfinished requests of this client have {held} bytes of bodies, and {limit} is the most: wait "
                f"for answers, or start the server with a larger --max-body",
                code="bodies",
                retry_after_s=1,
            )

    def _check_host(self, headers: Headers) -> None:
        """Refuse other host names at an open server: a foreign page's name may lead to this machine."""
        if self._settings.keys or not self._settings.loopback:
            return
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name.strip("[]") not in LOOPBACK:
            raise ApiError(403, "this server answers to loopback names only: give it a key to open it", code="host")

    def _check_origin(self, path: str, headers: Headers, allowed: bool) -> None:
        """Refuse pages of other origins unless they are allowed: browsers send some of their requests unasked."""
        if path in OPEN_PATHS or allowed or "*" in self._settings.cors:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is None:  # an older browser, or a name without TLS; or no browser
            host = headers.get("host", "").lower()
            own = f"http://{host.removesuffix(':80')}", f"https://{host.removesuffix(':443')}"
            other = origin is not None and origin.lower() not in own
        else:
            other = site not in ("same-origin", "none")
        if other:
            raise ApiError(
                403,
                f"a page of {(origin or 'another origin')[:100]} may not ask this server, only its own page may: start "
                f"the server with --cors-origins and the origin of that page",
                code="origin",
            )

    def _key(self, path: str, headers: Headers) -> str:
        """Return a short digest of the key; "" on an open server. ApiError for a wrong key."""
        if not self._digests:
            return ""
        bearer = headers.get("authorization", "")
        given = bearer[7:].strip() if bearer[:7].lower() == "bearer " else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
        valid = False
        for one in self._digests:
            valid |= hmac.compare_digest(one, digest)
        if valid:
            return digest.hex()[:16]
        if path in OPEN_PATHS or (path == "/metrics" and self._settings.public_metrics):
            return ""
        raise ApiError(
            401, "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
        )

    def _preflight(self, path: str, headers: Headers, allowed: bool) -> Response:
        if not allowed or "access-control-request-method" not in headers:
            return ApiError(403, "browsers may not ask from this origin: --cors-origins", code="cors").response(path)
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, DELETE",
                # OpenAI's and Anthropic's clients send a dozen of their own; "*" would leave Authorization out
                "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
                "Access-Control-Max-Age": "600",
            },
        )
