"""Unknown fields of requests: drops those without effect, and names the others in a header."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from . import requestlog

HEADER = "X-KVFlash-Ignored"

IGNORED = "kvflash.ignored"
"""Where in a request's scope the names are."""

NAMES = "kvflash.names"
"""In the scope of a request that became a chat: what the client calls the fields of that."""

MAX_TOLD = 16
MAX_NAME = 48

MAX_NOTED = 128
"""Letters of a name that is noted: a tool's can fill a body, and the log remembers what it has told."""

MAX_LOGGED = 1 << 10
"""Requests that differ in what was ignored of them; what further ones have is logged each time."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "do_sample": (True,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "length_penalty": (1,),
    "min_keep": (0,),
    "modalities": (["text"],),
    "n_cmpl": (1,),
    "n_keep": (0,),
    "penalize_nl": (False,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "none"),
    "return_progress": (False,),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "top_a": (0,),
    "use_beam_search": (False,),
}
"""Fields of other servers, with the values that ask for what is done here anyway. Another value changes the answer."""

COMPANIONS = frozenset(("smoothing_curve",))
"""Fields that mean nothing without one of those."""


def told(name: str, value: Any) -> str | None:
    """Say what a client is told of an unknown field: its name, with a value that matters; None for nothing."""
    if name in COMPANIONS:
        return None
    if name not in NEUTRAL:
        return name[:MAX_NAME] or '""'  # a header that ends with a blank cannot be sent
    if any(value == usual for usual in NEUTRAL[name]):
        return None
    return f"{name}={value}"[:MAX_NAME] if isinstance(value, str | int | float) else f"{name}=..."


def note(request: HttpRequest, names: Sequence[str]) -> None:
    """Add names of what was left out of a request: items, blocks and tools of kinds that are not known."""
    noted, said = request.scope.get(IGNORED, ()), request.scope.get(NAMES, {})
    parts = (name.partition(".") for name in names)
    more = ((said.get(a, a) + dot + b)[:MAX_NOTED] for a, dot, b in parts)
    request.scope[IGNORED] = list(dict.fromkeys((*noted, *more)))


def tell(request: HttpRequest, response: Response, logged: set[tuple[str, ...]], model: str) -> None:
    """Name what was ignored of a request, in a header of its answer, and once in the log.

    logged: what has been logged already, which is added to: agents send the same again and again. model: its name.
    """
    names: Sequence[str] = request.scope.get(IGNORED, ())
    if not names:
        return
    shown = [quote(name, safe="=[]:") for name in names[:MAX_TOLD]]
    more = len(names) - MAX_TOLD
    response.headers[HEADER] = ", ".join([*shown, f"and {more} more"] if more > 0 else shown)
    key = (request.scope["path"], *shown)
    if key in logged:
        return
    if len(logged) < MAX_LOGGED:
        logged.add(key)
    level = logging.WARNING if any("=" in name for name in names) else logging.INFO
    line = {"path": request.scope["path"], "model": model, "ignored": shown, "count": len(names)}
    requestlog.write(line, level)
