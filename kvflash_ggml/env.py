"""Every environment variable this package reads, typed, in one place.

Command-line options have a variable of their own each, named `KVFLASH_` plus the option (Click's convention). Those of
the pool are read here too, for programs that run with `install` or `kvflash-run exec`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import notation
from .errors import ConfigError

# keyword, its variable, and how that is read; several pins are separated by spaces
VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "kvflash": ("KVFLASH_POOL", notation.pool),
    "kvflash_policy": ("KVFLASH_POLICY", str),
    "kvflash_drafter": ("KVFLASH_DRAFTER", Path),
    "kvflash_tau": ("KVFLASH_TAU", int),
    "kvflash_pins": ("KVFLASH_PIN", lambda text: tuple(notation.pin(word) for word in text.split())),
    "kvflash_host_limit": ("KVFLASH_HOST_LIMIT", notation.ceiling),
    "kvflash_spill": ("KVFLASH_SPILL", Path),
    "kvflash_calibrate": ("KVFLASH_CALIBRATE", notation.calibrate),
    "kvflash_deterministic": ("KVFLASH_DETERMINISTIC", notation.switch),
    "kvflash_reading": ("KVFLASH_READING", str),
    "kvflash_stage": ("KVFLASH_STAGE", notation.size),
    "kvflash_answer": ("KVFLASH_ANSWER", str),
    "kvflash_repair": ("KVFLASH_REPAIR", int),
    "kvflash_spec": ("KVFLASH_SPEC", str),
    "kvflash_cache": ("KVFLASH_CACHE", Path),
    "kvflash_cache_size": ("KVFLASH_CACHE_SIZE", notation.size),
}


def cache_dir() -> Path:
    """The user's cache folder of this package, below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvflash_ggml"


def heads_dir() -> Path:
    """KVFLASH_HEADS: folder where the retrieval heads of models are kept, instead of one in the cache folder."""
    return _path("KVFLASH_HEADS") or cache_dir() / "heads"


def lib_path() -> Path | None:
    """KVFLASH_LIB_PATH: folder of the native libraries, instead of the one in the package."""
    return _path("KVFLASH_LIB_PATH")


def sdist() -> Path | None:
    """KVFLASH_SDIST: a copy of the pinned source of llama-cpp-python, instead of one in the cache folder."""
    return _path("KVFLASH_SDIST")


def llama_source() -> Path | None:
    """KVFLASH_LLAMA_SOURCE: a llama.cpp checkout of one's own, instead of the pinned source."""
    return _path("KVFLASH_LLAMA_SOURCE")


def allow_cpu() -> bool:
    """KVFLASH_ALLOW_CPU=1: layers asked for run on the CPU, with a warning, where this build cannot use the GPU."""
    return os.environ.get("KVFLASH_ALLOW_CPU", "") == "1"


def install() -> bool:
    """KVFLASH_INSTALL=1, which `kvflash-run exec` sets: `llama_cpp.Llama` is replaced where llama_cpp is imported."""
    return os.environ.get("KVFLASH_INSTALL", "") == "1"


def pool_options() -> dict[str, Any]:
    """What the variables of the pool's options say, by keyword; nothing without a pool. ConfigError names a bad one."""
    values = {keyword: _read(name, convert) for keyword, (name, convert) in VARIABLES.items()}
    if values["kvflash"] is None:
        return {}
    return {keyword: value for keyword, value in values.items() if value is not None}


def _read(name: str, convert: Callable[[str], Any]) -> Any:
    text = os.environ.get(name)
    try:
        return convert(text) if text else None
    except ValueError as err:
        raise ConfigError(f"{name}: {err}") from err


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
