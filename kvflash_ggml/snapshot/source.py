"""Where the bytes of a container come from: a file, or memory.

Files are read by position rather than mapped. A page goes from the file to page-locked memory in one copy, only what is
asked for is read, and a file that somebody cuts short while it is open is an error here instead of a killed process.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Protocol

from ..errors import SnapshotError

MOST_AT_ONCE = 1 << 30
"""Linux reads at most 2 GiB in one call."""


class Source(Protocol):
    """name: for messages. size: in bytes."""

    name: str
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`. SnapshotError if that is not to be had."""
        ...


class FileSource:
    """An open file. It can be deleted or replaced meanwhile: what was opened stays readable."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._file = FileIO(path)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as err:
            raise SnapshotError(f"cannot open {path}: {err.strerror or err}") from err

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()  # as long as anybody may read from it, it is open

    def read_into(self, offset: int, out: memoryview) -> None:
        try:
            while out:
                read = os.preadv(self._file.fileno(), [out[:MOST_AT_ONCE]], offset)
                if not read:
                    raise SnapshotError(f"{self.name} has been cut short: it ends before byte {offset + len(out)}")
                offset += read
                out = out[read:]
        except (OSError, ValueError) as err:
            raise SnapshotError(f"cannot read {self.name}: {err}") from err


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
