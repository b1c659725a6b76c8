"""Remembers where a calibration would take too long, so that no process begins one in vain."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .. import env
from ..files import write_atomically
from ..native import library, trial

AGAIN = 7 * 86400.0
"""Seconds after which it is tried again though nothing has changed: the machine may have had other work."""


def circumstances(llm: Any) -> str:
    """What decides how long a calibration takes. llm: a `llama_cpp.Llama`."""
    facts = {
        "threads": llm.context_params.n_threads_batch,
        "layers on a device": llm.model_params.n_gpu_layers,
        "cpu": trial.cpu().get("model name"),
        "build": library.build_info(),
    }
    return json.dumps(facts, sort_keys=True)


def is_known(identity: str, here: str) -> bool:
    """Was it too slow for this model, here and lately? identity: see Subject. here: circumstances."""
    path = _path(identity)
    try:
        lately = time.time() - path.stat().st_mtime < AGAIN
        return lately and path.read_bytes() == here.encode()
    except OSError:
        return False


def remember(identity: str, here: str) -> None:
    """OSError if that cannot be written."""
    path = _path(identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, here)


def _path(identity: str) -> Path:
    return env.heads_dir() / f"{identity}.slow"
