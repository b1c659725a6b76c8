"""`/kvflash/...`: what the server holds, and what can be done with a conversation."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.shelf import Conversation
from ..errors import KVFlashError
from .errors import ApiError
from .front import Front


async def state(front: Front, request: HttpRequest) -> Response:
    return JSONResponse(snapshot(front))


def snapshot(front: Front) -> dict[str, Any]:
    """The server as it is, without any text."""
    scheduler = front.scheduler
    running, seat, shelf = scheduler.running, scheduler.seat, scheduler.shelf
    return {
        "model": front.settings.alias,
        "n_ctx": scheduler.model.n_ctx,
        "pool": dict(scheduler.model.counters()),
        "queue": {
            "running": None if running is None else running.id,
            "waiting": len(scheduler.waiting),
            "put_aside": scheduler.put_aside,  # for readers who have enough for now
        },
        "conversations": {**scheduler.places(), "parked_bytes": shelf.size},
        "seat": {
            "conversation": None if seat.conversation is None else seat.conversation.id,
            "name_digest": _digest(seat.conversation),
            "parks": seat.counts.parks,
            "resumes": seat.counts.resumes,
            "forks": seat.counts.forks,
            "lost": seat.counts.lost,
        },
        "draining": front.draining,
    }


async def conversations(front: Front, request: HttpRequest) -> Response:
    return JSONResponse({"data": await front.engine(front.scheduler.conversations)})


async def erase(front: Front, request: HttpRequest) -> Response:
    id = request.path_params["id"]
    if not await front.engine(lambda: front.scheduler.erase(id)):
        raise _unknown(id)
    return JSONResponse({"id": id, "deleted": True})


async def action(front: Front, http: HttpRequest) -> Response:
    """park: from the device to memory. save: to the folder. pin: keep a range on the device, of the text at hand."""
    id, what = http.path_params["id"], http.path_params["action"]
    scheduler = front.scheduler
    try:
        if what == "park":
            known = await front.engine(lambda: scheduler.park(id))
        elif what == "save":
            if scheduler.folder is None:
                raise ApiError(501, "conversations are saved in --session-dir: start the server with it")
            known = await front.engine(lambda: scheduler.save(id))
        elif what == "pin":
            lo, hi = _range(await front.body(http))
            known = await front.engine(lambda: scheduler.pin(id, lo, hi))
        else:
            raise ApiError(404, "what can be done is park, save and pin")
    except KVFlashError as err:
        raise ApiError(400, str(err)) from None
    if not known:
        raise _unknown(id)
    return JSONResponse({"id": id, what: True})


def _digest(conversation: Conversation | None) -> str | None:
    """Whoever knows the name sees that it is at hand; nobody else learns it."""
    if conversation is None or conversation.name is None:
        return None
    return hashlib.sha256(conversation.name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _range(data: Any) -> tuple[int, int]:
    if isinstance(data, dict):
        lo, hi = data.get("lo"), data.get("hi")
        if isinstance(lo, int) and isinstance(hi, int) and 0 <= lo < hi:
            return lo, hi
    raise ApiError(400, "a pin is {lo, hi}: tokens from lo to before hi", param="lo")


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"no conversation {id[:80]!r} is known, or it is not at hand", code="no_conversation")
