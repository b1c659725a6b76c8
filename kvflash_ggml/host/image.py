"""One page image, wherever it is, and leases of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from threading import get_ident
from types import TracebackType
from typing import NamedTuple, Protocol
from weakref import ref

from .. import system
from ..errors import HostMemoryError

READERS = min(8, system.cores())
"""Images that are read at once: checksums take longer than reading."""

NOWHERE = -1
"""The place of an image that is not in the spill file."""

UNFILLED = -1
"""Stands for the transfer that fills an image while there is none."""


class PageSource(Protocol):
    """An image in a file. Raises SnapshotError if it cannot be read or is damaged."""

    def read_into(self, image: memoryview) -> None: ...


class PageImage:
    """One image: in memory at `address`, in the spill file at `place`, or only in its `source`.

    fresh: it has no bytes yet. ticket: its last transfer, to be set during a lease. filled: the transfer that fills it,
    0 if its bytes came from elsewhere, UNFILLED before that is known.
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
    """An image that is being read from its source into a place in memory. Nothing else uses the place until `done`."""

    page: PageImage
    address: int
    done: Future[None]


class AllLeased(HostMemoryError):
    """There is no room now, but another thread's lease may end."""


class Lease:
    """Keeps pages in memory, at the addresses that it gives: a context manager, to be entered once.

    The pages stay in memory even if they are released meanwhile. The lease ends with its `with`, or with the object if
    an interrupt comes in between. wanted: the pages. least: how many of the first pages are enough.
    """

    def __init__(
        self,
        wanted: Sequence[PageImage],
        least: int,
        begin: Callable[[Lease], list[int]],
        end: Callable[[Lease], None],
    ) -> None:
        self.wanted = wanted
        self.least = least
        self.thread = get_ident()
        self.pages: set[PageImage] = set()  # pages that may not move; none before the lease begins and after it ends
        self._begin = begin
        self._end = end

    def __enter__(self) -> list[int]:
        self.thread = get_ident()
        try:
            return self._begin(self)
        except BaseException:
            self._end(self)
            raise

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._end(self)


class Leases:
    """The leases that have not ended. Callers hold a lock; a lease may end without it. ended: how many have ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._leases: list[ref[Lease]] = []  # a WeakSet is not made for several threads

    def __iter__(self) -> Iterator[Lease]:
        return (lease for each in self._leases if (lease := each()) is not None and lease.pages)

    def __contains__(self, page: PageImage) -> bool:
        return any(page in lease.pages for lease in self)

    @property
    def pages(self) -> set[PageImage]:
        """All leased pages."""
        return set().union(*(lease.pages for lease in self))

    @property
    def threads(self) -> set[int]:
        """The threads that hold a lease."""
        return {lease.thread for lease in self}

    def add(self, lease: Lease) -> None:
        self._leases = [each for each in self._leases if each() is not None]
        self._leases.append(ref(lease))
