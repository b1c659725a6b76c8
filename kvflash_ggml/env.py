"""The environment variables that are no options, typed, in one place. Those of options are in `settings.py`."""

from __future__ import annotations

import os
from pathlib import Path

from . import notation
from .errors import ConfigError

_READ_BY_C = {"KVFLASH_KERNELS": ("stock",), "KVFLASH_LANE": ("stream", "sync")}
_DAY = 24 * 60 * 60


def cache_dir() -> Path:
    """Return the user's cache folder of this package, below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvflash_ggml"


def heads_dir() -> Path:
    """Return KVFLASH_HEADS: the folder where retrieval heads of models are kept. Unset, it is in the cache folder."""
    return _path("KVFLASH_HEADS") or cache_dir() / "heads"


def lib_path() -> Path | None:
    """Return KVFLASH_LIB_PATH: the folder of the native libraries, instead of the one in the package."""
    return _path("KVFLASH_LIB_PATH")


def sdist() -> Path | None:
    """Return KVFLASH_SDIST: a copy of the pinned source of llama-cpp-python, instead of one in the cache folder."""
    return _path("KVFLASH_SDIST")


def llama_source() -> Path | None:
    """Return KVFLASH_LLAMA_SOURCE: a llama.cpp checkout of one's own, instead of the pinned source."""
    return _path("KVFLASH_LLAMA_SOURCE")


def allow_cpu() -> bool:
    """Read KVFLASH_ALLOW_CPU: with 1, layers asked for run on the CPU if the build cannot use the GPU. It warns."""
    return _switch("KVFLASH_ALLOW_CPU")


def install() -> bool:
    """Read KVFLASH_INSTALL: with 1, importing llama_cpp replaces `llama_cpp.Llama`. `kvflash-run exec` sets it."""
    return _switch("KVFLASH_INSTALL")


def check() -> None:
    """Raise ConfigError for a wrong value of a switch here, or of a variable that C++ reads and would ignore."""
    allow_cpu()
    install()
    for name, words in _READ_BY_C.items():
        value = os.environ.get(name)
        if value and value not in words:
            raise ConfigError(f"{name}={value!r}: it is {' or '.join(words)}; correct it, or unset it")
    seconds = os.environ.get("KVFLASH_RPC_TIMEOUT")
    if seconds and not (seconds.isdecimal() and 1 <= int(seconds) <= _DAY):
        raise ConfigError(
            f"KVFLASH_RPC_TIMEOUT={seconds!r}: it is a whole number of seconds from 1 to {_DAY}; correct it, or unset"
            " it for 120 seconds"
        )


def _switch(name: str) -> bool:
    try:
        return notation.switch(os.environ.get(name) or "0")
    except ValueError as err:
        raise ConfigError(f"{name}={os.environ[name]!r}: it is 1 or 0; correct it, or unset it") from err


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
