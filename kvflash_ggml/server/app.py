"""The application: routes paths to endpoints, and turns errors into answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..batching.encoder import EmbeddingModel
from . import (
    about,
    anthropic,
    chat,
    completions,
    conversations,
    documents,
    embeddings,
    events,
    fields,
    llamacpp,
    markdown,
    metrics,
    ollama,
    openapi,
    responses,
    transcriptions,
)
from .errors import ApiError
from .front import Front
from .guard import Guard
from .metrics import Metrics
from .openapi import Described, Endpoint
from .settings import ServerSettings

FRONTS = ("/v1", "")
"""Some programs write the version, others leave it out."""

NOT_HERE = {
    "/api/pull": "fetch a model with kvflash-run pull, and start a server with it",
    "/v1/audio/speech": "this server makes text only",
    "/v1/audio/translations": "ask for it in prompt of /v1/audio/transcriptions",
    "/v1/images/generations": "this server makes text only",
}
"""What clients may look for, and what to do instead."""

RERANK = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")

READS: Mapping[str, Endpoint] = {
    "/v1/embeddings": embeddings.embeddings,
    "/embeddings": embeddings.embeddings,
    "/embedding": embeddings.embeddings,
    **dict.fromkeys(RERANK, embeddings.rerank),
    "/api/embed": embeddings.ollama_embed,
    "/api/embeddings": embeddings.ollama_prompt,
    "/tokenize": llamacpp.tokenize,
    "/detokenize": llamacpp.detokenize,
}
"""What an encoder answers too."""

ANSWERS: Mapping[str, Endpoint] = {
    **READS,
    **{f"{front}/chat/completions": chat.chat for front in FRONTS},
    **{f"{front}/chat/completions/input_tokens": chat.input_tokens for front in FRONTS},
    **{f"{front}/messages": anthropic.messages for front in FRONTS},
    **{f"{front}/messages/count_tokens": anthropic.count_tokens for front in FRONTS},
    **{f"{front}/responses": responses.responses for front in FRONTS},
    **{f"{front}/responses/input_tokens": responses.input_tokens for front in FRONTS},
    **{f"{front}/audio/transcriptions": transcriptions.transcriptions for front in FRONTS},
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/v1/completions": completions.completions,
    "/apply-template": llamacpp.apply_template,
    "/completion": llamacpp.completion,
    "/completions": llamacpp.completion,
    "/infill": llamacpp.infill,
}
"""What is posted for a model to answer."""


async def describe(front: Front, request: Request) -> Response:
    """Describe every endpoint, as OpenAPI 3.1."""
    return JSONResponse(await front.work(request, openapi.document, ROUTES, front.settings))


ROUTES: Sequence[Described] = (
    *(("POST", path, endpoint) for path, endpoint in ANSWERS.items()),
    ("GET", "/api/version", ollama.version),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.ps),
    ("POST", "/api/show", ollama.show),
    ("GET", "/v1/models", about.models),
    ("GET", "/v1/models/{model:path}", about.models),
    ("GET", "/models", about.models),
    *(("GET", f"{front}/responses/{{id}}", responses.retrieve) for front in FRONTS),
    *(("DELETE", f"{front}/responses/{{id}}", responses.erase) for front in FRONTS),
    ("GET", "/health", about.health),
    ("GET", "/v1/health", about.health),
    ("GET", "/ping", about.health),
    ("POST", "/ping", about.health),
    ("GET", "/version", about.version),
    ("GET", "/openapi.json", describe),
    ("GET", "/metrics", metrics.show),
    ("GET", "/props", about.props),
    ("GET", "/slots", llamacpp.slots),
    ("GET", "/tokenizer_info", llamacpp.tokenizer_info),
    ("POST", "/slots/{id}", llamacpp.slot_action),
    ("GET", "/", events.page),
    ("GET", "/kvflash/state", conversations.state),
    ("GET", "/kvflash/events", events.events),
    ("GET", "/kvflash/words", events.words),
    ("POST", "/kvflash/markdown", markdown.markdown),
    ("POST", "/kvflash/pdf", documents.pdf),
    ("GET", "/kvflash/conversations", conversations.conversations),
    ("DELETE", "/kvflash/conversations/{id}", conversations.erase),
    ("POST", "/kvflash/conversations/{id}/{action}", conversations.action),
)
"""All that is served."""


def make_app(front: Front, metrics: Metrics) -> Starlette:
    """Make the application of all endpoints, behind the guard."""
    logged: set[tuple[str, ...]] = set()

    def route(method: str, path: str, endpoint: Endpoint) -> Route:
        kind = openapi.takes(endpoint)

        async def call(request: Request) -> Response:
            given = () if kind is None else (await front.asked(request, kind),)
            response = await endpoint(front, request, *given)
            fields.tell(request, response, logged, front.settings.alias)
            return response

        return Route(path, call, methods=[method])

    def refusing(path: str, instead: str) -> Route:
        async def call(front: Front, request: Request) -> Response:
            raise ApiError(501, f"{path} is not served: {instead}", code="not_served")

        return route("POST", path, call)

    refused = dict(NOT_HERE)
    if isinstance(front.scheduler.model, EmbeddingModel):
        refused |= dict.fromkeys(ANSWERS.keys() - READS.keys(), "this model writes no text: ask /v1/embeddings")
    first = (refusing(path, instead) for path, instead in refused.items())
    app = guarded([*first, *(route(*one) for one in ROUTES)], front.settings)
    app.state.metrics = metrics
    return app


def guarded(routes: Sequence[Route], settings: ServerSettings) -> Starlette:
    """Make an application of these routes, behind the guard."""
    return Starlette(
        routes=routes,
        middleware=[
            *([Middleware(Below, prefix=settings.api_prefix)] if settings.api_prefix else []),
            Middleware(Guard, settings=settings),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


class Below:
    """ASGI middleware: all that is served lies below this path, and there is nothing elsewhere."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._prefix:  # relative addresses of the page need the slash
                await RedirectResponse(f"{path}/")(scope, receive, send)
                return
            if not path.startswith(f"{self._prefix}/"):
                elsewhere = ApiError(404, f"everything is below {self._prefix}").response(path)
                await elsewhere(scope, receive, send)
                return
            scope = {**scope, "path": path[len(self._prefix) :]}
        await self._app(scope, receive, send)


async def _api_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, ApiError)
    return err.renamed(request.scope.get(fields.NAMES, {})).response(request.url.path)


async def _http_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    said = {404: f"there is nothing at {request.url.path[:100]}", 405: f"{request.method} is not for this path"}
    answer = ApiError(err.status_code, said.get(err.status_code, str(err.detail))).response(request.url.path)
    answer.headers.update(err.headers or {})
    return answer
