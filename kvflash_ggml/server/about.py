"""`/health`, `/props`, `/v1/models`: describe the server and its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .. import __version__
from .errors import ApiError, shutting_down
from .front import Front
from .intake import Intake
from .usage import generation_settings


async def health(front: Intake, request: HttpRequest) -> Response:
    """Say whether requests are taken: 503 while the server ends."""
    if front.draining:
        raise shutting_down()
    return JSONResponse({"status": "ok"})


async def version(front: Intake, request: HttpRequest) -> Response:
    """Tell the version of this package."""
    return JSONResponse({"version": __version__})


async def props(front: Front, request: HttpRequest) -> Response:
    """Describe the model, its template and the settings that requests have unless they say otherwise."""
    model, settings = front.scheduler.model, front.settings
    usual = generation_settings(settings.sampling, settings.default_tokens)
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": model.n_ctx, "params": usual},
            "total_slots": len(front.scheduler.slots),
            "model_alias": settings.alias,
            "chat_template": front.prompts.template or "",
            "build_info": f"kvflash_ggml {__version__}",
            "modalities": {"vision": front.prompts.sees, "audio": front.prompts.hears},
            **front.prompts.facts,
        }
    )


async def models(front: Front, request: HttpRequest) -> Response:
    """List the models, or describe one."""
    meta = {**front.prompts.facts, "n_ctx": front.scheduler.model.n_ctx}
    aliases = [front.settings.alias, *front.settings.aliases]
    return listed(request, [entry(front.settings.alias, front.created, meta, aliases=aliases)])


def entry(name: str, created: int, meta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Describe a model as OpenAI's clients know it, with what llama-server tells besides."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvflash_ggml", "meta": dict(meta), **more}


def _anthropics(entry: dict[str, Any]) -> dict[str, Any]:
    """Translate an entry into what Anthropic's clients know."""
    made = datetime.fromtimestamp(entry["created"], timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    n_ctx = entry["meta"].get("n_ctx")  # none of a model that is not loaded
    bounds = {"max_input_tokens": n_ctx, "max_tokens": n_ctx}
    return {"type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": made, **bounds}


def listed(request: HttpRequest, entries: Sequence[dict[str, Any]]) -> Response:
    """List all models, or the one that is asked for. ApiError if there is no such model."""
    wanted = request.path_params.get("model") or None  # the slash behind the list asks for no model
    anthropics = "anthropic-version" in request.headers
    if wanted is None and anthropics:
        names = [one["id"] for one in entries]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return JSONResponse({"data": [_anthropics(one) for one in entries], "has_more": False, **ends})
    if wanted is None:
        # Codex asks with its version, and wants what it knows of models of its own
        codex: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
        return JSONResponse({"object": "list", "data": [*entries], **codex})
    for one in entries:
        if wanted in (one["id"], *one.get("aliases", ())):
            return JSONResponse(_anthropics(one) if anthropics else one)
    raise unknown(wanted, [one["id"] for one in entries])


def unknown(wanted: str, names: Sequence[str]) -> ApiError:
    """Make the error for a name that no model has."""
    served = ", ".join(repr(name[:80]) for name in names[:8]) + ", ..." * (len(names) > 8)
    message = f"there is no model {wanted[:80]!r}: {served or 'none'} {'are' if len(names) > 1 else 'is'} served"
    return ApiError(404, message, code="model_not_found", param="model")
