"""Copies of what is not pooled, to page-locked memory at once, and behind the compute to where they stay."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Buffer, room_for
from ..state.blob import Blob, Bytes, Copied
from .worker import Worker

if TYPE_CHECKING:
    from ..native.engine import Engine

LEAST = 4 << 20
"""Bytes. Smaller ones are copied sooner than handed to a thread."""


class StateCopies:
    """Makes them. The first large one makes the page-locked memory, the size of a state; `close` frees it.

    Memory is touched for the first time where a copy stays: a device that is read straight to there is kept waiting for
    most of a tenth of a second by the state of a large model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker = Worker("kvflash-copy")
        self._address = self._size = 0
        self._newest: Copied | None = None  # its bytes are in the page-locked memory, which its copy reads

    def copy(self) -> Blob:
        """What is not pooled, as it is now. SnapshotError if that fails."""
        engine = self._engine
        size = engine.state_size() if engine.info.asynchronous else 0
        if size < LEAST or not self._has_room(size):
            return Bytes(engine.get_state())
        staged = engine.view(self._address, size)
        engine.read_state(staged)
        self._newest = Copied(size, self._worker.submit(_copied, staged, room_for(size)))
        return self._newest

    def read(self, blob: Blob) -> Buffer:
        """Its bytes, until the next copy is made: those in page-locked memory, from where a device has them sooner."""
        return self._engine.view(self._address, blob.size) if blob is self._newest else blob.read()

    def _has_room(self, size: int) -> bool:
        """Is there page-locked memory for so many bytes that nobody reads any more?"""
        newest, self._newest = self._newest, None
        if newest is not None:
            wait([newest.copy])
        if self._size < size:
            self._free()
            self._address = self._engine.alloc(size)
            self._size = size if self._address else 0
        return self._size > 0

    def _free(self) -> None:
        address, self._address, self._size = self._address, 0, 0
        if address:
            self._engine.free(address)

    def close(self) -> None:
        self._worker.close()
        self._free()


def _copied(staged: memoryview, room: memoryview) -> memoryview:
    np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(staged, np.uint8))  # others run meanwhile
    return room
