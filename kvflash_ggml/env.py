"""Every environment variable this package reads, typed, in one place.

Command-line options have a variable of their own each, named `KVFLASH_` plus the option (Click's convention).
"""

from __future__ import annotations

import os
from pathlib import Path


def lib_path() -> Path | None:
    """KVFLASH_LIB_PATH: folder of the native libraries, instead of the one in the package."""
    return _path("KVFLASH_LIB_PATH")


def allow_cpu() -> bool:
    """KVFLASH_ALLOW_CPU=1: layers asked for on a build without a GPU backend run on the CPU, with a warning."""
    return os.environ.get("KVFLASH_ALLOW_CPU", "") == "1"


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
