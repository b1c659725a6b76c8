"""Copies of recurrent state and sliding windows: on the host, through page-locked memory, or kept on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from ..arrays import Buffer, room_for
from ..errors import HostMemoryError
from ..state.blob import Blob, Bytes, in_memory
from ..state.statistics import Row
from ..threads import Worker

if TYPE_CHECKING:
    from ..native.engine import PagedEngine

logger = logging.getLogger("kvflash_ggml")

LEAST = 4 << 20
"""Bytes. A smaller copy is faster than handing it to a thread."""

THREADS = 4
"""One thread copies 5 GB/s to memory that was touched before, and half of that to other memory."""


class StateCopies:
    """Copies states and puts them back. The first large copy allocates page-locked memory for one state; `close` frees
    it. From there threads copy the state to its place, behind the compute.

    workers: do the copying. A garbage collector may run on their threads when it closes this.
    """

    def __init__(self, engine: PagedEngine, seq: int) -> None:
        self.workers = [Worker("kvflash-copy") for _ in range(THREADS)]
        self._engine = engine
        self._seq = seq
        self._address = self._size = 0
        self._newest: Callable[[], Blob | None] = lambda: None  # the blob whose bytes are in the page-locked memory

    def copy(self) -> Blob:
        """Return the present state. SnapshotError if that fails."""
        engine = self._engine
        size = engine.state_size(seq=self._seq) if engine.info.asynchronous else 0
        if not self._is_free(size):
            return Bytes(engine.get_state(seq=self._seq))
        data = room_for(size)
        try:
            sent = engine.send_state(self._address, size, seq=self._seq)
            copied = Bytes(data, self._spread(engine.view(self._address, size), data, sent))
        except BaseException:
            engine.synchronize()  # the device may write to the memory yet
            raise
        self._newest = ref(copied)  # weak, since it is large
        return copied

    def put(self, blob: Blob, end: int) -> None:
        """Put back a state of a text before position `end`. SnapshotError, and no state, if it does not fit.

        It allocates nothing: a device takes one state from other memory in less time than it takes to page-lock memory.
        """
        engine, blob = self._engine, in_memory(blob)
        if blob is not self._newest() and blob.size <= self._size and self._is_free(blob.size):
            wait(self._spread(blob.read(), engine.view(self._address, blob.size)))
            self._newest = ref(blob)
        data = engine.view(self._address, blob.size) if blob is self._newest() else blob.read()
        engine.set_state(data, end, seq=self._seq)

    def _is_free(self, size: int) -> bool:
        """Make page-locked memory for `size` bytes free, and return whether there is any."""
        if size < LEAST:
            return False
        wait([worker.submit(lambda: None) for worker in self.workers])  # also for work that an interrupt left there
        self._newest = lambda: None
        if self._size < size:
            self._free()
            self._address = self._engine.alloc(size)
            self._size = size if self._address else 0
        return self._size > 0

    def _spread(self, source: Buffer, target: memoryview, sent: int = 0) -> Sequence[Future[None]]:
        """Copy a piece on each thread, once the transfer `sent` is done."""

        def copy(target: Row, source: Row) -> None:
            self._engine.wait(sent)
            np.copyto(target, source)  # releases the interpreter

        a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
        step = -(-len(a) // THREADS)
        starts = range(0, len(a), step)
        return [
            worker.submit(copy, b[at : at + step], a[at : at + step])
            for worker, at in zip(self.workers, starts, strict=False)
        ]

    def _free(self) -> None:
        address, self._address, self._size = self._address, 0, 0
        if address:
            self._engine.free(address)

    def close(self) -> None:
        """Wait for the copies, and free their memory."""
        for worker in self.workers:
            worker.close()
        self._free()


# --- states before draft rows


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """copy: the state on the host; None if the device keeps it, until the device keeps another one."""

    copy: Buffer | None


class DeviceStates:
    """Saves states of an engine, and puts them back. A device keeps one state of each sequence."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine = engine
        self._on_host = False
        self._newest: dict[int, SavedState] = {}

    def keep(self, seq: int) -> SavedState:
        """Save the present state of a sequence. On a device nothing waits for it."""
        if not self._on_host:
            try:
                self._newest.pop(seq, None)
                self._engine.keep_state(seq=seq)
                self._newest[seq] = kept = SavedState(None)
                return kept
            except HostMemoryError as err:
                self._on_host = True  # for good: another try at each draft would take time
                logger.warning("recurrent state is copied to the host and back at each draft that needs it: %s", err)
        return SavedState(self._engine.get_state(seq=seq))

    def put(self, kept: SavedState, length: int, seq: int) -> None:
        """Put back the state of a sequence of `length` tokens, as often as needed. On SnapshotError there is no
        state.
        """
        end = self._engine.end(length, seq=seq)
        if kept.copy is not None:
            self._engine.set_state(kept.copy, end, seq=seq)
            return
        assert kept is self._newest.get(seq), "the device keeps another state by now"
        self._engine.put_state(end, seq=seq)
