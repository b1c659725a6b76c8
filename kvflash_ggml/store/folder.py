"""A folder of files that several processes may share: conversations and prefixes are kept in one each.

Files appear by renaming (`files.replacing`) and go by deleting. What has been opened stays readable.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

from .. import system
from ..errors import ConfigError
from ..files import PART, being_written

logger = logging.getLogger("kvflash_ggml")

PATIENCE = 30
"""Seconds to wait for other processes."""

ABANDONED_AFTER_SECONDS = 60
"""Seconds after which an unfinished file that nobody writes belongs to a process that has died."""


class Folder:
    """Files whose names match `names`. Other files are left alone, and so are links and pipes of such names.

    what: it holds, for messages. inside: where the files lie, "." for the folder itself and "*" for its subfolders.
    Unfinished files of processes that have died are deleted here. ConfigError if the folder cannot be made.
    """

    def __init__(self, path: Path, names: re.Pattern[str], *, what: str, inside: str = ".") -> None:
        self.path = path
        self._names = names
        self._what = what
        self._inside = inside
        self._failing = set[str]()
        self.make(path)
        for left in self.unfinished():
            stat = file_stat(left)
            if stat and time.time() - stat.st_mtime > ABANDONED_AFTER_SECONDS and not being_written(left):
                self.delete(left)

    def make(self, path: Path) -> None:
        """Make the folder or a subfolder, if it is not there. ConfigError if it cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise self.error(err) from err

    def error(self, err: OSError) -> ConfigError:
        """What to raise where the folder cannot be used."""
        return ConfigError(
            f"cannot keep {self._what} in {self.path}: {err.strerror or err}: name a folder that can be written"
        )

    @property
    def free(self) -> int:
        """Bytes that its disk still takes."""
        return shutil.disk_usage(self.path).free

    def files(self, folder: Path) -> list[tuple[Path, re.Match[str]]]:
        """The files in the folder or a subfolder, by name. One that is not there has none. OSError."""
        try:
            with os.scandir(folder) as entries:
                # the name first: there may be many files of others
                named = ((entry, self._names.fullmatch(entry.name)) for entry in entries)
                ours = [(folder / e.name, match) for e, match in named if match and e.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(ours, key=lambda one: one[0])

    def unfinished(self) -> Iterator[Path]:
        """Files that are being written, or were when their process died."""
        return self.path.glob(f"{self._inside}/.*{PART}")

    def delete(self, path: Path) -> None:
        """A disk that fails leaves the file there. The next start finds it again."""
        try:
            path.unlink(missing_ok=True)
        except OSError as err:
            self.failed(f"files in {path.parent} cannot be deleted", err)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other thread or process adds or evicts files meanwhile. Ends with the process, however that ends.

        TimeoutError if another process keeps it for PATIENCE seconds, OSError if there is something else of that name.
        """
        path = self.path / ".lock"
        # others may be able to write to the folder: a link is not followed, a pipe not waited for
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
        """Warn that something cannot be written. A full disk stays full: say so once, until `wrote`."""
        if what not in self._failing:
            self._failing.add(what)
            logger.warning("%s: %s", what, why)

    def wrote(self, what: str) -> None:
        """The next failure is worth a warning again."""
        self._failing.discard(what)


class ScratchFolder:
    """A folder of this process in the temporary folder.

    When it is made, those that processes have left that died are deleted. prefix: how the names of all of them begin.
    """

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if not left.is_symlink() and not being_written(left / ".lock"):
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = system.open_file(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        system.try_lock(self._lock)

    def close(self) -> None:
        """Delete it."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def disk_is_full(err: Exception) -> bool:
    """Is this what failed, or why it did?"""
    cause = err if isinstance(err, OSError) else err.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}


def file_stat(path: Path) -> os.stat_result | None:
    """None if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat()
    return None
