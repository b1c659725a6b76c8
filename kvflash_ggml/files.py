"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from . import system
from .errors import ConfigError

PART = ".part"
"""How files end that are being written."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing, which come without a name."""

ABANDONED_AFTER_SECONDS = 60
"""Age from which an unfinished file that no process writes may be deleted."""


def check_writable(path: Path) -> None:
    """Raise ConfigError if a file could not be made at `path`. Leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file to write")
    if _is_special(path):
        raise ConfigError(f"{path} is a pipe or a device: name a file to write")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}: name a file in a folder that exists and can be written"
        ) from error


@contextlib.contextmanager
def replacing(
    path: Path, *, guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext, sync: bool = True
) -> Iterator[BinaryIO]:
    """Open a file beside `path`, and move it there once it is complete and on the disk. guard: entered for the move.

    sync: without it nobody waits for the disk, and a loss of power may damage the file. Raises OSError, and what was
    there stays as it was, however this process ends. A pipe or a device is refused: the move would take its place.
    """
    if _is_special(path):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    part = path.parent / f".{path.name}.{secrets.token_hex(4)}{PART}"
    try:
        opened = part.open("xb")
    except OSError as error:
        error.filename = str(path)  # the name that was asked for
        raise
    with opened as file:
        with contextlib.suppress(OSError):  # tells whoever tidies up that it is not abandoned
            system.try_lock(file.fileno())
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            if not system.RENAMES_OPEN_FILES:
                file.close()
            with guard():
                part.replace(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                part.unlink()
            if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
                error.filename = str(path)
            raise
    if sync:
        _sync_folder(path.parent)


def is_abandoned(part: Path) -> bool:
    """Return whether the process that wrote this unfinished file has died: it is a minute old, and nobody locks it."""
    try:
        return time.time() - part.lstat().st_mtime > ABANDONED_AFTER_SECONDS and not being_written(part)
    except OSError:
        return False


def being_written(part: Path) -> bool:
    """Tell whether a process is writing this unfinished file. `replacing` holds a lock on it meanwhile."""
    try:
        handle = system.open_file(part, follow=False)  # perhaps a link or a pipe
        try:
            return not system.try_lock(handle, shared=True)
        finally:
            os.close(handle)
    except OSError:
        return True


def write_atomically(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there. Raises OSError, and leaves what was there."""
    with replacing(path) as file:
        file.write(text.encode())


def _is_special(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


def _sync_folder(folder: Path) -> None:
    """Make the new name last. Some file systems cannot, and lose nothing but that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
