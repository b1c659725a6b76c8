"""Where the bytes of a container come from: a file, or memory.

Files are read by position rather than mapped. A page goes from the file to page-locked memory in one copy, only what is
asked for is read, and a file that somebody cuts short while it is open is an error here instead of a killed process.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path
from typing import Protocol

from ..errors import SnapshotError

MAX_AT_ONCE = 1 << 30
"""Linux reads at most 2 GiB in one call."""


class Source(Protocol):
    """name: for messages. size: in bytes."""

    name: str
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`. SnapshotError if that is not to be had."""
        ...


class FileSource:
    """An open file. It can be deleted or replaced meanwhile: what was opened stays readable.

    It is closed with the last page or section that comes from it: nobody else knows when that is.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
            weakref.finalize(self, os.close, self._handle)
            status = os.fstat(self._handle)
        except (OSError, ValueError) as err:
            raise SnapshotError(f"cannot open {path}: {getattr(err, 'strerror', None) or err}") from err
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(f"{path} is no snapshot: it is not a regular file")
        self.size = status.st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        while out:
            try:
                read = os.preadv(self._handle, [out[:MAX_AT_ONCE]], offset)
            except OSError as err:
                raise SnapshotError(f"cannot read {self.name}: {err.strerror or err}") from err
            if not read:
                raise SnapshotError(f"{self.name} has been cut short: it ends before byte {offset + len(out)}")
            offset += read
            out = out[read:]


class BytesSource:
    """A container in memory."""

    def __init__(self, data: bytes) -> None:
        self.name = "the state"
        self.size = len(data)
        self._data = memoryview(data)

    def read_into(self, offset: int, out: memoryview) -> None:
        part = self._data[offset : offset + len(out)]
        if len(part) != len(out):
            raise SnapshotError(f"{self.name} ends before byte {offset + len(out)}")
        out[:] = part
