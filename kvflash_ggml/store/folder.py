"""A folder of files that processes share: there is one for conversations, and one for prefixes.

Files appear by renaming (`files.replacing`). An open file stays readable when it is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

from .. import system
from ..errors import ConfigError
from ..files import PART, is_abandoned

logger = logging.getLogger("kvflash_ggml")

PATIENCE = 30
"""Seconds to wait for other processes."""


class Folder:
    """Files whose names match `names`. Other files are left alone, and so are links and pipes of such names.

    what: its content, for messages. inside: "." if the files lie in the folder itself, "*" for its subfolders.
    Deletes unfinished files of processes that have died. ConfigError if the folder cannot be made.
    """

    def __init__(self, path: Path, names: re.Pattern[str], *, what: str, inside: str = ".") -> None:
        self.path = path
        self._names = names
        self._what = what
        self._inside = inside
        self._failing = set[str]()
        self.make(path)
        for left in self.unfinished():
            if is_abandoned(left):
                self.delete(left)

    def make(self, path: Path) -> None:
        """Make the folder or a subfolder, if it is not there. ConfigError if it cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise self.error(err) from err

    def error(self, err: OSError) -> ConfigError:
        """Return the error for a folder that cannot be used."""
        return ConfigError(
            f"cannot keep {self._what} in {self.path}: {err.strerror or err}: name a folder that can be written"
        )

    @property
    def free(self) -> int:
        """Free bytes of its disk."""
        return shutil.disk_usage(self.path).free

    def files(self, folder: Path) -> list[tuple[Path, re.Match[str]]]:
        """Return the files in the folder or a subfolder, sorted by name; none if it is missing. OSError."""
        try:
            with os.scandir(folder) as entries:
                # the name first: there may be many other files
                named = ((entry, self._names.fullmatch(entry.name)) for entry in entries)
                ours = [(folder / e.name, match) for e, match in named if match and e.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(ours, key=lambda one: one[0])

    def unfinished(self) -> Iterator[Path]:
        """Yield files that are being written, or were when their process died."""
        return self.path.glob(f"{self._inside}/.*{PART}")

    def delete(self, path: Path) -> None:
        """Delete a file, if it is there. If that fails, warn and leave it."""
        try:
            path.unlink(missing_ok=True)
        except OSError as err:
            self.failed(f"files in {path.parent} cannot be deleted", err)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and processes from adding and evicting files. A lock ends with its process.

        TimeoutError if another process holds it for PATIENCE seconds, OSError if `.lock` is no file.
        """
        path = self.path / ".lock"
        # the folder may be hostile: follow no link, and wait for no pipe
        file = system.open_file(path, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            if not S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{path} is no file: delete it")
            deadline = time.monotonic() + PATIENCE
            while not system.try_lock(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.path} has been locked by somebody else for {PATIENCE} s")
                time.sleep(0.02)
            yield
        finally:
            os.close(file)

    def failed(self, what: str, why: object) -> None:
        """Warn of a failure, once until `wrote`: a full disk stays full."""
        if what not in self._failing:
            self._failing.add(what)
            logger.warning("%s: %s", what, why)

    def wrote(self, what: str) -> None:
        """Warn of the next failure again."""
        self._failing.discard(what)


def disk_is_full(err: Exception) -> bool:
    """Return whether this error, or its cause, is a full disk or quota."""
    cause = err if isinstance(err, OSError) else err.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}


def file_stat(path: Path) -> os.stat_result | None:
    """Return the state of a file; None if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat()
    return None
