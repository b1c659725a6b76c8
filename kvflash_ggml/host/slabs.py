"""Memory for page images: places in page-locked slabs, where the backend has them, made ahead of need."""

from __future__ import annotations

import bisect
import contextlib
import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Protocol

from ..errors import HostMemoryError

SLAB_BYTES = 64 << 20
"""Of a slab, at least: pages side by side move in one copy."""

MAX_SLAB_BYTES = 512 << 20

GROWTH = 1 / 32
"""Of all slabs before it, a slab's size where that is more. One has been begun, and one is made ahead of need: both are
page-locked, and little beside what is needed.
"""

FEW_SHARE = 1 / 4
"""Of SLAB_BYTES, what is made where a few pages are needed: a device does nothing else while memory is page-locked, and
that takes as long as many tokens of an answer for a large slab."""


HandOver = Callable[[Sequence[int]], None]
"""Makes the slabs at these addresses another memory's."""


class HostMemory(Protocol):
    """Where slabs come from. `view` gives writable bytes of an address."""

    def alloc(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def view(self, address: int, size: int) -> memoryview: ...
    def wait(self, ticket: int) -> None: ...


class Slabs:
    """Addresses of `page_bytes` bytes each, at most `most` of them, None for no ceiling. Whoever uses it has a lock."""

    def __init__(self, memory: HostMemory, page_bytes: int, most: int | None) -> None:
        self._memory = memory
        self._page_bytes = page_bytes
        self._most = most
        self._slabs: list[int] = []
        self._made = 0  # pages in the slabs
        self._starts: list[tuple[int, int]] = []  # of slabs, and which each is in the order they were made, sorted
        # a heap, of the slab's number and the address: neighbours in the text become neighbours in memory, again and
        # again, and of a slab that has not been needed yet nothing is touched
        self._free: list[tuple[int, int]] = []
        # page-locking memory takes longer than copying into it, so the next slab is made ahead of need
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="kvflash-host")
        self._next: Future[int] | None = None
        self._next_pages = 0

    def take(self, *, few: bool = False) -> int:
        """A free address; 0 if the ceiling allows no more. HostMemoryError if memory is refused.

        few: not many more will be needed soon, and they need not lie side by side.
        """
        if not self._free:
            if self._slab_pages() == 0:
                return 0
            self._add_slab(few=few)
        return heapq.heappop(self._free)[1]

    def give_back(self, address: int) -> None:
        _, number = self._starts[bisect.bisect(self._starts, address, key=itemgetter(0)) - 1]
        heapq.heappush(self._free, (number, address))

    def move(self, memory: HostMemory, hand_over: HandOver) -> None:
        """Take further slabs from there, which has those that were made after `hand_over`."""
        slabs = [*self._slabs]
        if self._next is not None and self._next.exception() is None:
            slabs.append(self._next.result())
        hand_over(slabs)
        self._memory = memory

    def close(self) -> None:
        """Free all memory."""
        self._ahead.shutdown()
        if self._next is not None:
            with contextlib.suppress(HostMemoryError):
                self._slabs.append(self._next.result())
            self._next = None
        for address in self._slabs:
            self._memory.free(address)
        self._slabs.clear()
        self._starts.clear()
        self._free.clear()

    def _slab_pages(self, *, few: bool = False) -> int:
        """Pages of the next slab; 0 if the ceiling allows none."""
        size = min(max(SLAB_BYTES, int(GROWTH * self._made * self._page_bytes)), MAX_SLAB_BYTES)
        pages = max(1, (int(FEW_SHARE * SLAB_BYTES) if few else size) // self._page_bytes)
        return pages if self._most is None else min(pages, self._most - self._made)

    def _add_slab(self, *, few: bool) -> None:
        ahead, self._next = self._next, None
        if ahead is None or ahead.exception() is not None:  # what was refused ahead of need may be had now
            count = self._slab_pages(few=few and self._made > 0)
            address = self._new_slab(count)
        else:
            count, address = self._next_pages, ahead.result()
        number = len(self._slabs)
        self._slabs.append(address)
        bisect.insort(self._starts, (address, number))
        self._made += count
        for page in range(address, address + count * self._page_bytes, self._page_bytes):
            heapq.heappush(self._free, (number, page))
        if self._slab_pages() > 0:
            self._next_pages = self._slab_pages(few=few)
            self._next = self._ahead.submit(self._new_slab, self._next_pages)

    def _new_slab(self, pages: int) -> int:
        size = pages * self._page_bytes
        address = self._memory.alloc(size)
        if not address:
            raise HostMemoryError(
                f"could not get {size >> 20} MiB of host memory for paged-out chunks: free memory, set a lower "
                f"host_limit together with a spill folder, or use a smaller context"
            )
        return address
