"""Page images: raw cache bytes of chunks, in memory, in a spill file, or still in the file they come from.

A page is written once and read back bit for bit. It may have several holders: the running text, a snapshot that is
being written, swapped-out texts. Beyond the ceiling, the pages that waited longest go to the spill file. They are
checked when they come back; a damaged page raises `SnapshotError`. A page that came from a file is read only when it is
needed, and is never spilled.

A lease of a page gives the address of its image, to read or write it. One lock guards the books and the spill file. No
foreign code runs under it, and no other file is read under it.

An interrupt can come between any two statements. It may lose a place in memory or in the spill file for good, but the
order of statements keeps all bytes, and no place gets two pages.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from ..errors import HostMemoryError, SnapshotError
from . import slabs
from .image import NOWHERE, READERS, AllLeased, Lease, Leases, PageImage, Read
from .slabs import HostMemory, Slabs

if TYPE_CHECKING:
    from .spill import SpillFile

T = TypeVar("T")

FEW = 2
"""New pages at once that count as few: an answer makes one after the other, a prompt many. Of a file, a streamed step
reads many.
"""

POLL_SECONDS = 0.001
"""Time between two checks whether a lease has ended: a lease that ends with its object notifies nobody."""


class PageHeap:
    """All page images of one model, for any thread.

    memory: source of slabs. page_bytes: size of one image. limit: ceiling in bytes, None for no ceiling. spill: folder.
    """

    def __init__(self, memory: HostMemory, page_bytes: int, *, limit: int | None, spill: Path | None) -> None:
        self.page_bytes = page_bytes
        self.limit = limit
        self._memory = memory
        self.max_images = None if limit is None else limit // page_bytes
        """Images that fit in memory at the same time; None without a ceiling."""
        self._spill: SpillFile | None = None
        if spill is not None:
            from .spill import SpillFile  # here: most page images stay in memory

            self._spill = SpillFile(spill, page_bytes)
        self._slabs = Slabs(memory, page_bytes, self.max_images)
        self._pages: OrderedDict[PageImage, None] = OrderedDict()  # in memory, the longest-waiting first
        self._orphans: list[PageImage] = []  # pages without a holder, discarded when their leases end
        self._leases = Leases()
        self._reads: list[Read] = []  # under way
        self._reclaimers: list[Callable[[], bool]] = []
        self._closed = False
        self._lock = RLock()

    # --- queries

    @property
    def host_bytes(self) -> int:
        """Bytes of page images in memory."""
        return len(self._pages) * self.page_bytes

    def room(self) -> int:
        """Return the bytes under the ceiling that no page image takes; without a ceiling more than there can be."""
        return (1 << 63 if self.limit is None else self.limit) - self.host_bytes

    @property
    def spilled_bytes(self) -> int:
        return 0 if self._spill is None else self._spill.used * self.page_bytes

    @property
    def spills(self) -> bool:
        """Whether pages that leave memory go to a file. False while its disk is full."""
        return self._spill is not None and not self._spill.full

    def fitting(self, pages: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield the pages in groups whose images fit in memory at the same time."""
        size = max(1, len(pages) if self.max_images is None else min(len(pages), self.max_images))
        for at in range(0, len(pages), size):
            yield pages[at : at + size]

    # --- holders

    def new(self, count: int) -> list[PageImage]:
        """Return new pages in memory, to be written: all of them, or HostMemoryError and none."""
        pages = [PageImage(fresh=True) for _ in range(count)]
        try:
            with self.lease(pages):
                return pages
        except BaseException:
            for page in reversed(pages):
                self.release(page)
            raise

    def retain(self, page: PageImage) -> PageImage:
        """Add a holder to the page."""
        with self._lock:
            assert page.holders > 0, "a page that has been released"
            page.holders += 1
        return page

    def release(self, page: PageImage) -> None:
        """Remove a holder. The last one frees the page's memory, or the page's last lease does if it ends later."""
        with self._lock:
            assert page.holders > 0, "a page that has been released"
            page.holders -= 1
            if page.holders or self._closed:
                return
            if page in self._leases:
                self._orphans.append(page)
            else:
                self._discard(page)

    def add_reclaimer(self, reclaim: Callable[[], bool]) -> None:
        """Call `reclaim`, from any thread, when memory is full. It frees something and returns True, or returns
        False.
        """
        self._reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[], bool]) -> None:
        """Do not call `reclaim` any more. It may be removed twice."""
        with contextlib.suppress(ValueError):
            self._reclaimers.remove(reclaim)

    # --- leases

    def lease(self, pages: Sequence[PageImage]) -> Lease:
        """Return a lease of all these images.

        Entering it raises HostMemoryError if they do not fit in memory together, any error of `PageSource`,
        SnapshotError for a damaged spill file, and LookupError for a page without a holder. It waits for leases of
        other threads if it must, and if this thread has no other lease.
        """
        return Lease(pages, len(pages), self._begin, self._end)

    def lease_some(self, pages: Sequence[PageImage]) -> Lease:
        """Return a lease of the first of these images: as many as fit in memory together, at least one."""
        return Lease(pages, min(1, len(pages)), self._begin, self._end)

    def load(self, pages: Sequence[PageImage]) -> None:
        """Bring pages from their sources into memory. They stay until other pages need the room.

        Raises the errors of a lease. Then the heap is sound, and some of the pages are in memory.
        """
        waiting = [page for page in pages if not page.address and page.source is not None]
        while waiting:
            with self.lease_some(waiting) as images:
                waiting = waiting[len(images) :]

    def view(self, page: PageImage) -> memoryview:
        """Return the writable bytes of a leased page."""
        return self._memory.view(page.address, self.page_bytes)

    def bytes_of(self, page: PageImage) -> bytes:
        """Return a copy of the image, once its transfer is done. The page stays where it is, and needs no room in
        memory.
        """
        lease = self.lease(())
        with self._lock:
            source = page.source
            if page.address:
                self._leases.add(lease)
                lease.pages.add(page)
            elif page.place != NOWHERE:
                data = bytearray(self.page_bytes)
                self._spilled.read(page.place, memoryview(data))
                return bytes(data)
        try:
            if lease.pages:
                self._memory.wait(page.ticket)
                return bytes(self.view(page))
        finally:
            self._end(lease)
        if source is None:
            raise LookupError("the page image has been released, or was never written")
        data = bytearray(self.page_bytes)
        source.read_into(memoryview(data))
        return bytes(data)

    def readable(self, page: PageImage) -> bool:
        """Return whether the image can be read. An image in memory can."""
        if page.address:
            return True
        try:
            self.bytes_of(page)
        except (SnapshotError, HostMemoryError):
            return False
        return True

    def close(self) -> None:
        """Free all memory and the spill file. Pages are void afterwards. No lease may be open."""
        with self._lock:
            for page in self._pages:
                self._memory.wait(page.ticket)
            wait(read.done for read in self._reads)
            self._closed = True
            self._pages.clear()
            self._orphans.clear()
            self._slabs.close()
            if self._spill is not None:
                self._spill.close()

    # --- how a lease begins and ends

    def _begin(self, lease: Lease) -> list[int]:
        with self._lock:
            self._leases.add(lease)
        while True:
            ended = self._leases.ended
            try:
                return self._bring(lease)
            except AllLeased:
                self._end(lease)  # other leases may wait for its pages
                if not self._wait_for_another(lease.thread, ended + 1):
                    raise

    def _end(self, lease: Lease) -> None:
        lease.pages.clear()  # at once, so that an interrupt cannot end half of the lease
        with self._lock:
            self._leases.ended += 1
            self._discard_orphans()

    def _wait_for_another(self, thread: int, ended: int) -> bool:
        """Wait until as many leases have ended. Returns False if this thread has a lease that others may wait for."""
        while self._leases.ended == ended:
            with self._lock:
                busy = self._leases.threads
            if not busy or thread in busy:
                return not busy
            time.sleep(POLL_SECONDS)
        return True

    def _bring(self, lease: Lease) -> list[int]:
        """Bring the first pages of the lease to memory, as many as fit together, but `lease.least` at the least."""
        count = self._pin_present(lease)
        if count == len(lease.wanted):
            return [page.address for page in lease.wanted]
        # several threads read images while memory for the next ones is made
        readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvflash-load")
        reads: list[Future[None]] = []
        try:
            for page in lease.wanted[count:]:
                try:
                    read = self._pin(page, lease, readers)
                except HostMemoryError:
                    lease.pages.discard(page)
                    if count < lease.least:
                        raise
                    break
                count += 1
                if read is not None:
                    reads.append(read)
        finally:
            readers.shutdown()
            with self._lock:
                self._end_reads()
        for read in reads:
            read.result()
        return [page.address for page in lease.wanted[:count]]

    def _pin_present(self, lease: Lease) -> int:
        """Lease the pages in memory, up to the first that is elsewhere: a score of a long text wants thousands of
        them.
        """
        count = 0
        with self._lock:
            for page in lease.wanted:
                if not (page.holders and page.address):
                    break
                self._keep(page, lease)
                count += 1
        return count

    def _pin(self, page: PageImage, lease: Lease, readers: Executor) -> Future[None] | None:
        """Bring a page to memory, where it stays for the lease, or begin to read it from its source."""
        if page in lease.pages:
            return None
        with self._lock:
            if not page.holders:
                raise LookupError("the page image has been released")
            if page.address:
                self._keep(page, lease)
                return None
            lease.pages.add(page)
        address = self._room(page, lease)
        if not address:
            return None
        image = self._memory.view(address, self.page_bytes)
        with self._lock:
            if page.address:  # another thread was faster
                self._slabs.give_back(address)
            elif page.place != NOWHERE:
                try:
                    self._spilled.read(page.place, image)
                except BaseException:
                    self._slabs.give_back(address)
                    raise
                self._loaded(page, address)
                self._free_place(page)
            elif page.fresh:
                self._loaded(page, address)
                page.fresh = False
            else:
                assert page.source is not None, "a page without bytes"
                read = readers.submit(page.source.read_into, image)
                self._reads.append(Read(page, address, read))
                return read
        return None

    # --- the books; callers hold the lock, except for _room and _reclaim

    def _keep(self, page: PageImage, lease: Lease) -> None:
        """Lease a page in memory, as the newest one."""
        lease.pages.add(page)
        self._pages[page] = None  # an interrupt may have kept it from the books
        self._pages.move_to_end(page)

    def _loaded(self, page: PageImage, address: int) -> None:
        page.address = address
        self._pages[page] = None

    def _end_reads(self) -> None:
        """Count pages that have been read as in memory, whichever lease asked for them."""
        for read in [read for read in self._reads if read.done.done()]:
            self._reads.remove(read)
            page, wanted = read.page, read.page.holders or read.page in self._leases
            if wanted and not page.address and read.done.exception() is None:
                self._loaded(page, read.address)
                if self.max_images is None:  # it stays in memory, and its file can be closed
                    page.source = None
            else:
                self._slabs.give_back(read.address)

    def _unload(self, page: PageImage) -> None:
        self._memory.wait(page.ticket)
        page.ticket = 0
        self._pages.pop(page, None)
        address, page.address = page.address, 0
        self._slabs.give_back(address)

    def _discard(self, page: PageImage) -> None:
        """Free everything of a page that nobody needs any more."""
        if page.address:
            self._unload(page)
        if page.place != NOWHERE:
            self._free_place(page)
        page.source = None

    def _discard_orphans(self) -> None:
        for page in [page for page in self._orphans if page not in self._leases]:
            self._orphans.remove(page)
            self._discard(page)

    def _room(self, page: PageImage, lease: Lease) -> int:
        """Return a free address; 0 if another thread has brought the page to memory."""
        few = len(lease.wanted) <= (FEW if page.fresh else slabs.MAX_SLAB_BYTES // self.page_bytes)
        while not page.address:
            try:
                with self._lock:
                    self._end_reads()
                    self._discard_orphans()
                    address = self._slabs.take(few=few)
                if not address and not self._reclaim():
                    with self._lock:
                        if not page.address:  # otherwise this might evict for nothing
                            address = self._slabs.take(few=few) or self._evict(lease.thread)
            except HostMemoryError:
                if not self._reclaim():
                    raise
                continue
            if address:
                return address
        return 0

    def _reclaim(self) -> bool:
        """Let a reclaimer free something; False if there is nothing to free."""
        return any(reclaim() for reclaim in tuple(self._reclaimers))

    def _evict(self, thread: int) -> int:
        """Evict a page from memory and return its address: the oldest with a source, or else the oldest, spilled."""
        others = self._leases.threads - {thread}  # before the pages: a lease can end in between
        leased = self._leases.pages
        able = [page for page in self._pages if page not in leased]
        page = next((page for page in able if page.source is not None), None)
        if page is None:
            if self._spill is None or not able:
                raise (AllLeased if others else HostMemoryError)(
                    f"the paged-out chunks need more than host_limit = {self.limit} bytes ({self.page_bytes} bytes a "
                    f"chunk): raise host_limit, give a spill folder, or use a larger pool"
                )
            page = able[0]
            self._memory.wait(page.ticket)
            page.place = self._spill.write(self.view(page))
        self._unload(page)
        return self._slabs.take()

    def _free_place(self, page: PageImage) -> None:
        place, page.place = page.place, NOWHERE
        self._spilled.give_back(place)

    @property
    def _spilled(self) -> SpillFile:
        assert self._spill is not None, "a page has a place in it"
        return self._spill
