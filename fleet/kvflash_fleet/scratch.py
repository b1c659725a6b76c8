"""A folder for what passes through: it goes with its process, or with the next one after a crash."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

from kvflash_ggml import system
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.files import is_abandoned


class ScratchFolder:
    """A folder of this process in the temporary folder. Any thread uses it.

    When it is made, those of processes that have died are deleted, from an age of a minute on: a younger one may not be
    locked yet. prefix: how the names of all of them begin. ConfigError if somebody else locks it.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._making = threading.Lock()
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if not left.is_symlink() and is_abandoned(left / ".lock"):
                shutil.rmtree(left, ignore_errors=True)
        self._make()

    def _make(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix=self._prefix))
        self._lock = system.open_file(self._path / ".lock", os.O_RDWR | os.O_CREAT)
        if not system.try_lock(self._lock):
            raise ConfigError(f"{self._path} was locked by another process as soon as it was made: start again")

    @property
    def path(self) -> Path:
        """The folder. It is another one when the system has deleted it, as it deletes old temporary files. OSError."""
        with self._making:
            if not (self._path / ".lock").exists():
                before = self._lock
                self._make()
                os.close(before)
            return self._path

    def close(self) -> None:
        """Delete it."""
        os.close(self._lock)
        shutil.rmtree(self._path, ignore_errors=True)
