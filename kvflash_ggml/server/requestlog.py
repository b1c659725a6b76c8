"""Logs one line of JSON a request, without text or key."""

from __future__ import annotations

import json
import logging

from ..batching.messages import Request, Usage

NAME = "kvflash_ggml.requests"

logger = logging.getLogger(NAME)


def ended(request: Request, usage: Usage, reason: str) -> None:
    """Log a request that the scheduler has taken."""
    if not logger.isEnabledFor(logging.INFO):
        return
    made = usage.generated
    line = {
        "id": request.id,
        "key": request.key[:8],
        "prompt": len(request.tokens),  # also where the client left before they were read
        "cached": usage.cached,
        "generated": made,
        "queue_ms": _ms(usage.queue_s),
        "restore_ms": _ms(usage.restore_s),
        "ttft_ms": _ms(usage.queue_s + usage.restore_s + usage.prompt_s),
        "itl_ms": _ms(usage.generation_s / (made - 1)) if made > 1 else None,
        "finish": reason,
    }
    if usage.missed is not None:
        line["missed"] = f"message {usage.missed.message} differs from token {usage.missed.at_token} on"
    if request.left_out:
        line["left_out"] = f"{request.left_out} oldest messages: the context has no room for them"
    logger.log(logging.WARNING if request.left_out else logging.INFO, "%s", json.dumps(line))


def refused(method: str, path: str, key: str, status: int) -> None:
    """Log a request that got no answer from the model but an error. Bounded and in ASCII, without query or body."""
    line = {"method": method[:16], "path": path[:100], "key": key[:8], "status": status}
    logger.info("%s", json.dumps(line).replace("\x7f", "\\u007f"))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
