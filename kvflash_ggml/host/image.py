"""One page image, wherever it is, and the reading of those that come from files, several at a time."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

READERS = min(8, os.cpu_count() or 1)
"""Images that are read at once: checksums take longer than reading."""

NOWHERE = -1
"""The place of an image that is not in the spill file."""

UNFILLED = -1
"""In place of the transfer that fills an image, while there is none."""


class PageSource(Protocol):
    """An image in a file. Raises SnapshotError if it cannot be read or is damaged."""

    def read_into(self, image: memoryview) -> None: ...


class PageImage:
    """One image: in memory at `address`, or in the spill file at `place`, or only in its `source`.

    fresh: it has no bytes yet. ticket: of the last transfer that fills or reads it, to be set during a lease. filled:
    of the one that fills it, 0 if it came from elsewhere, UNFILLED before that is known.
    """

    __slots__ = ("address", "filled", "fresh", "holders", "place", "source", "ticket")

    def __init__(self, *, source: PageSource | None = None, fresh: bool = False) -> None:
        self.address = 0
        self.place = NOWHERE
        self.source = source
        self.fresh = fresh
        self.ticket = 0
        self.filled = 0
        self.holders = 1


class Read(NamedTuple):
    """An image that comes from its source to a place in memory, which is nobody else's until it is `done`."""

    page: PageImage
    address: int
    done: Future[None]


class Readers:
    """Threads that read images, while memory for the next ones is made."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None  # few leases need any

    def begin(self, source: PageSource, image: memoryview) -> Future[None]:
        """Fill `image`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="kvflash-load")
        return self._pool.submit(source.read_into, image)

    def end(self) -> None:
        """Wait for them."""
        if self._pool is not None:
            self._pool.shutdown()
