"""The environment variables that are no options, typed, in one place. Those of options are in `settings.py`."""

from __future__ import annotations

import os
from pathlib import Path


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


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
