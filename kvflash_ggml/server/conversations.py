"""`/kvflash/...`: shows what the server holds, and acts on conversations."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..batching.messages import Access
from ..batching.model import Residency
from ..errors import KVFlashError
from ..store.swapped import Conversation
from .errors import ApiError, invalid
from .front import Front

_OF_TEXT = {"length": 0, "chunks": 0, "resident": 0, "evicted_mass": None}
_OF_NEWEST = ("read_exactly", "answered_exactly", "drafted", "accepted", "replaced")
"""Counters of a model that concern the current text, with their values without one; and the newest request."""


async def state(front: Front, request: HttpRequest) -> Response:
    """Report the pool, the queue and the counters, without texts."""
    return JSONResponse(snapshot(front, front.access(request))[0])


def snapshot(front: Front, access: Access) -> tuple[dict[str, Any], Residency]:
    """Return the state of the server without texts, and what is resident of the current one, if `access` may see it."""
    scheduler, slot = front.scheduler, front.scheduler.slot
    model, counts, swapped = slot.model, scheduler.counts, scheduler.swapped
    running = [one.id for one in scheduler.running if access.may(one.salt)]
    reading = [(one.id, *read) for one, read in scheduler.reading if access.may(one.salt)]
    seen = scheduler.conversations.seen(access, lambda: (model.counters(), model.residency(), slot.conversation))
    pool, now, at_hand = seen or ({**model.counters(), **_OF_TEXT}, Residency(), None)
    if access.owner:
        pool = {name: value for name, value in pool.items() if name not in _OF_NEWEST}
    reported = {
        "model": front.settings.alias,
        "n_ctx": scheduler.model.n_ctx,
        "pool": dict(pool),
        "queue": {
            "running": running[-1] if running else None,
            "waiting": len(scheduler.waiting),
            "put_aside": scheduler.put_aside,  # for readers who have enough for now
        },
        "reading": [dict(zip(("id", "done", "total"), one, strict=True)) for one in reading],
        "conversations": {
            **scheduler.conversations.places(access),
            "parked_bytes": None if access.owner else swapped.size,
        },
        "seat": {
            "conversation": None if at_hand is None else at_hand.id,
            "name_digest": _digest(at_hand),
            "parks": counts.swapped_out,
            "resumes": counts.resumes,
            "forks": counts.forks,
            "lost": counts.lost,
        },
        "draining": front.draining,
    }
    return reported, now


async def conversations(front: Front, request: HttpRequest) -> Response:
    """List the kept conversations."""
    access = front.access(request)
    known = await front.engine(lambda: front.scheduler.conversations.describe(access), looks=True)
    return JSONResponse({"data": known})


async def erase(front: Front, request: HttpRequest) -> Response:
    """Forget a conversation."""
    id, access = request.path_params["id"], front.access(request)
    if not await front.engine(lambda: front.scheduler.conversations.erase(id, access)):
        raise _unknown(id)
    front.items.forget(id)
    return JSONResponse({"id": id, "deleted": True})


async def action(front: Front, http: HttpRequest) -> Response:
    """Do one action: park (swap out to memory), save (write to the folder) or pin (keep tokens on the device)."""
    id, what = http.path_params["id"], http.path_params["action"]
    scheduler, access = front.scheduler, front.access(http)
    try:
        if what == "park":
            found = await front.engine(lambda: scheduler.conversations.swap_out(id, access))
        elif what == "save":
            if scheduler.folder is None:
                raise ApiError(501, "conversations are saved in --session-dir: start the server with it")
            found = await front.engine(lambda: scheduler.conversations.save(id, access))
        elif what == "pin":
            lo, hi = _range(await front.body(http))
            found = await front.engine(lambda: scheduler.conversations.pin(id, lo, hi, access))
        else:
            raise ApiError(404, "what can be done is park, save and pin")
    except KVFlashError as err:
        raise ApiError(400, str(err)) from None
    if not found:
        raise _unknown(id)
    return JSONResponse({"id": id, what: True})


def _digest(conversation: Conversation | None) -> str | None:
    """Return a digest of the name: who knows the name recognises it, and nobody else learns it."""
    if conversation is None or conversation.name is None:
        return None
    return hashlib.sha256(conversation.name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _range(data: dict[str, Any]) -> tuple[int, int]:
    lo, hi = data.get("lo"), data.get("hi")
    if type(lo) is type(hi) is int and 0 <= lo < hi:
        return lo, hi
    raise invalid("lo", "a pin is {lo, hi}: tokens from lo to before hi")


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"no conversation {id[:80]!r} is known, or it is not at hand", code="no_conversation")
