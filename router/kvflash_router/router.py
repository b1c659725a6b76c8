"""A server of several models: loads the model that a request names, and forwards the request to its process."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvflash_ggml.server import about, documents, events, forms, markdown, ollama, openapi
from kvflash_ggml.server.app import ANSWERS, RERANK, ROUTES, guarded
from kvflash_ggml.server.errors import ApiError, invalid
from kvflash_ggml.server.guard import OPEN_PATHS
from kvflash_ggml.server.intake import KEY, TAKEN, Intake, disconnected
from kvflash_ggml.server.run import run
from kvflash_ggml.server.schema import named
from kvflash_ggml.server.settings import ServerSettings

from . import model_folder
from .engines import Engines, ModelServer, Plan
from .forward import forward, knows
from .model_folder import FolderModel, Purpose

logger = logging.getLogger("kvflash_ggml")

LATEST = ":latest"
"""What Ollama's clients put behind a name."""

_OLLAMAS = ("/api/chat", "/api/generate")
"""Where a request for nothing, which is kept for no time, unloads a model."""

_AT_ONCE = (0, "0", "0s", "0m", "0h")
"""Ollama's clients write a time as seconds, or as a duration."""

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class Router(Intake):
    """Serves the models of a folder, which is read again for each list.

    n_ctx: tokens of the context that each model is loaded with; 0 for the length it was trained for.
    """

    def __init__(self, folder: Path, settings: ServerSettings, engines: Engines, n_ctx: int = 0) -> None:
        super().__init__(settings)
        self.folder = folder
        self.engines = engines
        self.n_ctx = n_ctx

    async def models(self, http: HttpRequest) -> dict[str, FolderModel]:
        """Return the models by name, in their order."""
        try:
            return await self.work(http, model_folder.models, self.folder)
        except OSError as err:
            raise ApiError(503, f"the folder of the models cannot be read: {err.strerror}", code="no_models") from None

    async def model(self, http: HttpRequest, wanted: Any) -> FolderModel:
        """Find the model of a name. Without one, of the models for what is asked, the one that was used last, or the
        first that has not failed to load.

        ApiError if there is none.
        """
        models, engines = await self.models(http), self.engines
        if wanted in (None, ""):
            fit = [name for name in models if await self.purpose(http, models[name]) == _purpose(http.url.path)]
            usual = [engines.loading, *(one.model.name for one in reversed(engines.all_loaded)), engines.last]
            usual += sorted(fit or models, key=lambda name: "failed" in engines.status(name))
            name = next((name for name in usual if name in (fit or models)), None)
            if name is None:
                raise ApiError(503, "there is no model: put a .gguf file into the folder", code="no_models")
            return models[name]
        if not isinstance(wanted, str):
            raise invalid("model", f"it is {named(wanted)}, and must be a text")
        found = models.get(wanted) or models.get(wanted.removesuffix(LATEST))
        if found is None:
            raise about.unknown(wanted, [*models])
        return found

    async def purpose(self, http: HttpRequest, model: FolderModel) -> Purpose:
        """Return what a model's file says that it is for."""
        return (await self.head(http, model)).purpose

    async def head(self, http: HttpRequest, model: FolderModel) -> model_folder.Head:
        return await self.work(http, model_folder.head, model)


def _purpose(path: str) -> Purpose:
    """Return what a model must be for that answers at a path."""
    return "rank" if path in RERANK else "embed" if "embed" in path else "answer"


class Forwarded(Response):
    """The answer of a model's process. model: it gets a turn first.

    None for a process at one of `ports`, whatever it does: the first that does not say 404, or else the last.
    """

    def __init__(
        self, router: Router, body: bytes | bytearray, model: FolderModel | None, ports: Sequence[int] = ()
    ) -> None:
        self.status_code = 200
        self.background = None
        self._router, self._body, self._model, self._ports = router, body, model, ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, send))
        left = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait([answering, left], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            left.cancel()
            answering.cancel()
            with suppress(asyncio.CancelledError, ApiError, OSError):
                await answering

    async def _answer(self, scope: Scope, send: Send) -> None:
        if self._model is None:
            *others, last = self._ports
            for port in others:
                with suppress(ApiError):  # its process has ended
                    if await self._forward(scope, send, port, unless=404):
                        return
            await self._forward(scope, send, last)
            return
        async with self._router.engines.turn(self._model) as loaded:
            await self._forward(scope, send, loaded.engine.port)

    async def _forward(self, scope: Scope, send: Send, port: int, unless: int | None = None) -> bool:
        """Return False for an answer with the status `unless`, which is not sent."""
        scope[TAKEN] = True  # the process logs it
        try:
            return await forward(scope, send, self._body, port=port, unless=unless)
        except ApiError:
            del scope[TAKEN]  # there is none
            raise
        except ConnectionError as err:  # the answer is left without its end, so that the client sees that
            logger.error("%s", err)
            return True


def make_router(router: Router) -> Any:
    """Make all endpoints, behind the guard. Answers wait for their model; what looks on never loads one."""

    def route(path: str, endpoint: Callable[[Router, HttpRequest], Awaitable[Response]], *methods: str) -> Route:
        return Route(path, partial(endpoint, router), methods=list(methods) or ["GET"])

    return guarded(
        [
            route("/", events.page),
            route("/kvflash/markdown", markdown.markdown, "POST"),
            route("/kvflash/pdf", documents.pdf, "POST"),
            *(route(path, about.health) for path in ("/health", "/v1/health")),
            route("/ping", about.health, "GET", "POST"),
            route("/version", about.version),
            route("/openapi.json", _describe),
            *(route(path, _list) for path in ("/v1/models", "/v1/models/{model:path}", "/models")),
            route("/models/load", _load, "POST"),
            route("/models/unload", _unload, "POST"),
            route("/api/version", ollama.version),
            route("/api/tags", _tags),
            route("/api/ps", _ps),
            route("/api/show", _show, "POST"),
            *(route(path, _answer, "POST") for path in ANSWERS),
            route("/{path:path}", _look, *_METHODS),
        ],
        router.settings,
    )


async def _answer(router: Router, request: HttpRequest) -> Response:
    router.admit()
    form = openapi.takes_form(ANSWERS[request.url.path])
    body = await router.received(request, *([forms.MEDIA_TYPE] if form else []))
    asked = await router.work(request, router.parsed, request, body, form=form)
    asked = asked if isinstance(asked, dict) else {}
    wanted = asked.get("model")
    model = await router.model(request, await _keeper(router, request, asked) if wanted in (None, "") else wanted)
    if request.url.path in _OLLAMAS and asked.get("keep_alive") in _AT_ONCE and not _says(asked):
        router.engines.unload(model.name)
        return ollama.silent(model.name, "unload", generate=request.url.path == "/api/generate")
    return Forwarded(router, body, model)


async def _keeper(router: Router, request: HttpRequest, asked: dict[str, Any]) -> str | None:
    """Return the loaded model that keeps the response from which a request goes on; None for no such model."""
    id = asked.get("previous_response_id")
    if isinstance(id, str):
        for one in reversed(router.engines.all_loaded):
            if await knows(request.scope, f"/v1/responses/{id}", port=one.engine.port):
                return one.model.name
    return None


def _says(asked: dict[str, Any]) -> bool:
    return bool(asked.get("prompt") or asked.get("messages") or asked.get("suffix"))


async def _look(router: Router, request: HttpRequest) -> Response:
    """Answer what asks about a loaded model, or changes its conversations: the one used last, unless one is named.

    Where that one does not know what is asked for, as a response by its id, the others are asked.
    """
    if request.url.path in OPEN_PATHS:  # without a key nothing is told, read or handed on
        raise HTTPException(404)
    engines, wanted = router.engines, request.query_params.get("model")
    if router.settings.keys and not request.scope.get(KEY):  # public metrics: no name is looked up, or told
        wanted = None
    loaded = [*reversed(engines.all_loaded)]
    if wanted:
        loaded = [*filter(None, [engines.find((await router.model(request, wanted)).name)])]
    if not loaded:
        message = f"{wanted[:80]!r} is not loaded" if wanted else "no model is loaded"
        raise ApiError(503, f"{message}: ask it something, or POST its name to /models/load", code="not_loaded")
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    body = b"" if empty else await router.received(request)
    return Forwarded(router, body, None, [one.engine.port for one in loaded])


async def _model(router: Router, request: HttpRequest) -> FolderModel:
    asked = await router.body(request)
    wanted = asked.get("model") or asked.get("name")
    if not wanted:
        raise invalid("model", "it is missing: name one of /v1/models")
    return await router.model(request, wanted)


async def _load(router: Router, request: HttpRequest) -> Response:
    """Load a model."""
    router.admit()
    async with router.engines.turn(await _model(router, request)):
        return JSONResponse({"success": True})


async def _unload(router: Router, request: HttpRequest) -> Response:
    """Unload a model once its answers have ended."""
    return JSONResponse({"success": router.engines.unload((await _model(router, request)).name)})


# --- what there is


async def _describe(router: Router, request: HttpRequest) -> Response:
    own = (("POST", "/models/load", _load), ("POST", "/models/unload", _unload))
    return JSONResponse(await router.work(request, openapi.document, (*ROUTES, *own), router.settings))


async def _list(router: Router, request: HttpRequest) -> Response:
    entries = []
    for name, model in (await router.models(request)).items():
        head, loaded = await router.head(request, model), router.engines.find(name)
        n_ctx = router.n_ctx if loaded is None else loaded.engine.n_ctx
        meta = {**head.facts, "n_ctx_train": head.n_ctx, **({"n_ctx": n_ctx} if n_ctx else {})}
        status = router.engines.status(name)
        entries.append(about.entry(name, model.changed // 1_000_000_000, meta, status=status))
    return about.listed(request, entries)


async def _tags(router: Router, request: HttpRequest) -> Response:
    models = (await router.models(request)).values()
    return JSONResponse({"models": [await _tag(router, request, model) for model in models]})


async def _tag(router: Router, request: HttpRequest, model: FolderModel) -> dict[str, Any]:
    return ollama.entry(model.name, model.changed / 1e9, (await router.head(request, model)).facts)


async def _ps(router: Router, request: HttpRequest) -> Response:
    found = []
    for one in router.engines.all_loaded:
        left = router.engines.left(one)
        until = ollama.NEVER if left is None else ollama.rfc3339(time.time() + left)
        entry = await _tag(router, request, one.model)
        found.append({**entry, "expires_at": until, "context_length": one.engine.n_ctx})
    return JSONResponse({"models": found})


async def _show(router: Router, request: HttpRequest) -> Response:
    model = await _model(router, request)
    head, loaded = await router.head(request, model), router.engines.find(model.name)
    n_ctx = router.n_ctx or head.n_ctx if loaded is None else loaded.engine.n_ctx
    entry = await _tag(router, request, model)
    able = {"insert": head.fills, "embedding": head.purpose == "embed"}
    return JSONResponse(ollama.shown(entry, head.facts, template=head.template, n_ctx=n_ctx, able=able))


# --- its life


def serve(
    folder: Path,
    settings: ServerSettings,
    sock: socket.socket,
    start: Callable[[FolderModel, Mapping[str, int]], Coroutine[Any, Any, ModelServer]],
    *,
    plan: Callable[[FolderModel, Mapping[str, int]], Coroutine[Any, Any, Plan]] | None,
    at_once: int,
    n_ctx: int,
    idle_s: float | None,
    ready: Callable[[str], None],
    abandon: Callable[[], None],
) -> None:
    """Serve the models of a folder until SIGTERM or SIGINT. Those loaded end their answers and are unloaded then.

    sock: of `listen`. n_ctx: see `Router`. start, plan, at_once, idle_s: see `Engines`. ready, abandon: see `run`.
    """

    async def whole() -> None:
        engines = Engines(
            start,
            plan=plan,
            at_once=at_once,
            most=settings.max_queue,
            wait_s=settings.queue_timeout_s,
            idle_s=idle_s,
        )
        router = Router(folder, settings, engines, n_ctx)

        async def drain() -> None:
            router.draining = True
            await engines.close()

        try:
            await run(make_router(router), settings, sock, ready=ready, drain=drain, abandon=abandon)
        finally:
            await engines.close()
            router.close()

    asyncio.run(whole())
