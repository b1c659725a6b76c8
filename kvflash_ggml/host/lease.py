"""Leases: whoever reads or writes page images in memory has one, and they stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from types import TracebackType
from weakref import ref

from ..errors import HostMemoryError
from .image import PageImage


class AllLeased(HostMemoryError):
    """There is no room now. There may be once another thread's lease has ended."""


class Lease:
    """Keeps pages in memory, at the addresses that it gives: a context manager, to be entered once.

    They stay there also if they are released meanwhile. It ends with its `with`, or, if an interrupt comes in between,
    with the object. wanted: the pages. least: as many of the first are enough.
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
        self.pages: set[PageImage] = set()  # that may not move; none before it begins and once it has ended
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
    """Those that last. Whoever uses it has a lock; a lease may end without it. ended: how many have ended with it."""

    def __init__(self) -> None:
        self.ended = 0
        self._leases: list[ref[Lease]] = []  # a WeakSet is not made for several threads

    def __iter__(self) -> Iterator[Lease]:
        return (lease for each in self._leases if (lease := each()) is not None and lease.pages)

    def __contains__(self, page: PageImage) -> bool:
        return any(page in lease.pages for lease in self)

    @property
    def pages(self) -> set[PageImage]:
        """All pages that are leased."""
        return set().union(*(lease.pages for lease in self))

    @property
    def threads(self) -> set[int]:
        """The threads that have some."""
        return {lease.thread for lease in self}

    def add(self, lease: Lease) -> None:
        self._leases = [each for each in self._leases if each() is not None]
        self._leases.append(ref(lease))
