"""Some bytes of a swapped-out session, in memory or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..arrays import Buffer


class Blob(Protocol):
    """Some bytes, in memory or in a file."""

    @property
    def size(self) -> int: ...

    def read(self) -> Buffer:
        """Read the bytes. SnapshotError if they are in a file and damaged."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A blob in memory, or on its way there: `data` is whole when all its pieces are copied."""

    data: Buffer
    pieces: Sequence[Future[None]] = field(default=(), compare=False)

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> Buffer:
        for piece in self.pieces:
            piece.result()
        return self.data


def in_memory(blob: Blob) -> Bytes:
    """Return a blob in memory: the same one, or what is read of a file. SnapshotError if that is damaged."""
    return blob if isinstance(blob, Bytes) else Bytes(blob.read())
