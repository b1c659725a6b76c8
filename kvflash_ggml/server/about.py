"""What the server tells of itself: `/health`, `/props`, `/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .. import __version__
from .errors import ApiError
from .front import Front


async def health(front: Front, request: HttpRequest) -> Response:
    if front.draining:
        return ApiError(503, "the server is shutting down", code="draining", retry_after_s=30).response(
            request.url.path
        )
    return JSONResponse({"status": "ok"})


async def props(front: Front, request: HttpRequest) -> Response:
    model = front.scheduler.model
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": model.n_ctx},
            "total_slots": 1,
            "model_alias": front.settings.alias,
            "chat_template": front.prompts.template or "",
            "build_info": f"kvflash_ggml {__version__}",
            "modalities": {"vision": False, "audio": False},
            **front.prompts.facts,
        }
    )


async def models(front: Front, request: HttpRequest) -> Response:
    entry = {
        "id": front.settings.alias,
        "object": "model",
        "created": front.created,
        "owned_by": "kvflash_ggml",
        "meta": {**front.prompts.facts, "n_ctx": front.scheduler.model.n_ctx},
    }
    wanted = request.path_params.get("model")
    if wanted is None:
        # Codex asks with its version, and wants what it knows of models of its own
        codex: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
        return JSONResponse({"object": "list", "data": [entry], **codex})
    if wanted != entry["id"]:
        raise ApiError(404, f"there is no model {wanted[:80]!r}: {entry['id']!r} is served", code="model_not_found")
    return JSONResponse(entry)
