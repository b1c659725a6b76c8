"""Bytes that are put aside, in memory or in a file."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ..arrays import Buffer


class Blob(Protocol):
    """Some bytes, in memory or in a file."""

    @property
    def size(self) -> int: ...

    def read(self) -> Buffer:
        """SnapshotError if they are in a file and damaged."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """A blob in memory."""

    data: Buffer

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        return self.data


@dataclass(frozen=True, slots=True)
class Copied:
    """A blob that is on its way to memory."""

    size: int
    copy: Future[Buffer]

    def read(self) -> Buffer:
        return self.copy.result()
