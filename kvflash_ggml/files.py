"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from .errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise ConfigError if a file could not be made at `path`. Leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file to write")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}: name a file in a folder that exists and can be written"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there. Raises OSError, and leaves what was there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # as open() would have made it
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
