"""Bytes that are put aside, in memory or in a file."""

from __future__ import annotations

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
