"""Bytes that are put aside, in memory or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from ..arrays import Buffer


class Blob(Protocol):
    """Some bytes, in memory or in a file."""

    @property
    def size(self) -> int: ...

    def read(self) -> Buffer:
        """SnapshotError if they are in a file and damaged."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A blob in memory."""

    data: Buffer

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        return self.data


@dataclass(frozen=True, eq=False)
class Copied:
    """A blob on its way to memory: `data` is whole when all its pieces are copied."""

    data: Buffer
    pieces: Sequence[Future[None]]

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        for piece in self.pieces:
            piece.result()
        return self.data


def is_in_memory(blob: Blob | None) -> TypeGuard[Blob]:
    """Or on its way there, and not in a file?"""
    return isinstance(blob, Bytes | Copied)


def in_memory(blob: Blob) -> Blob:
    """The blob itself if it is there, else what is read. SnapshotError if that is damaged."""
    return blob if is_in_memory(blob) else Bytes(blob.read())
