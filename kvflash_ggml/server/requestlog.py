"""Logs one line of JSON a request, without text or key."""

from __future__ import annotations

import json
import logging
from typing import Any

from ..batching.messages import Request, Usage

NAME = "kvflash_ggml.requests"

logger = logging.getLogger(NAME)


def ended(request: Request, usage: Usage, reason: str, model: str = "") -> None:
    """Log a request that the scheduler has taken. model: its name, here as below; "" where several are served."""
    if not logger.isEnabledFor(logging.INFO):
        return
    made = usage.generated
    line = {
        "id": request.id,
        "model": model,
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
    write(line, logging.WARNING if request.left_out else logging.INFO)


def refused(method: str, path: str, key: str, status: int, model: str = "") -> None:
    """Log a request that got no answer from the model but an error. Bounded and in ASCII, without query or body."""
    write({"method": method[:16], "path": path[:100], "model": model, "key": key[:8], "status": status})


def write(line: dict[str, Any], level: int = logging.INFO) -> None:
    """Log a line of JSON, without a model that has no name."""
    if not line["model"]:
        del line["model"]
    logger.log(level, "%s", json.dumps(line).replace("\x7f", "\\u007f"))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
