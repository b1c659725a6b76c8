"""Page images: raw cache bytes of chunks, in page-locked slabs where the backend has them.

A page is written once and read back bit for bit. It may be held by several owners: the text that is being read, a
snapshot that is being written, texts that are kept for later. Beyond the ceiling, the pages that have waited longest
go to an unlinked file in the spill folder, and are checked when they come back, or `HostMemoryError` is raised. A page
that came from a file is not read before it is needed, and needs no spilling.

An interrupt can come between any two statements. They are in an order in which it may lose a place in memory or in the
file for good, but no bytes, and no place has two pages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import FileIO
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Protocol, TypeVar

from ..errors import ConfigError, HostMemoryError, SnapshotError

SLAB_BYTES = 64 << 20
NOWHERE = -1
READERS = min(8, os.cpu_count() or 1)
"""Pages that are read at once: checksums take longer than reading."""

T = TypeVar("T")


class HostMemory(Protocol):
    """Where slabs come from. `view` gives writable bytes of an address."""

    def alloc(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def view(self, address: int, size: int) -> memoryview: ...
    def wait(self, ticket: int) -> None: ...


class PageSource(Protocol):
    """An image in a file. Raises SnapshotError if it cannot be read or is damaged."""

    def read_into(self, image: memoryview) -> None: ...


class Page:
    """One image: in memory at `address`, or in the spill file at `place`, or only in its `source`.

    checksum: of the image in the spill file.
    """

    __slots__ = ("address", "checksum", "holders", "place", "source", "ticket")

    def __init__(self, *, address: int = 0, source: PageSource | None = None) -> None:
        self.address = address
        self.place = NOWHERE
        self.checksum = 0
        self.source = source
        self.ticket = 0  # the last transfer that fills or reads it
        self.holders = 1


class PageHeap:
    """All page images of one model.

    memory: source of slabs. page_bytes: size of one image. limit: ceiling in bytes, None for none. spill: folder.
    lock: held while addresses are in use, since pages are read by a scoring thread and a writing thread too.
    """

    def __init__(self, memory: HostMemory, page_bytes: int, *, limit: int | None, spill: Path | None) -> None:
        if spill is not None and not (spill.is_dir() and os.access(spill, os.W_OK | os.X_OK)):
            raise ConfigError(f"spill = {spill} is no folder that can be written to: make it, or name another")
        self.page_bytes = page_bytes
        self.limit = limit
        self.spill_folder = spill
        self.lock = RLock()
        self._memory = memory
        self._slabs: list[int] = []
        self._most = None if limit is None else limit // page_bytes
        self._made = 0  # pages in the slabs
        self._free: list[int] = []
        self._pages: OrderedDict[Page, None] = OrderedDict()  # those in memory, the longest-waiting first
        self._spilled = 0
        self._places = 0  # in the spill file
        self._free_places: list[int] = []
        self._file: FileIO | None = None
        # page-locking memory takes longer than copying into it, so the next slab is made ahead of need
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="kvflash-host")
        self._next: Future[int] | None = None
        self._closed = False
        self.reclaim: Callable[[], bool] | None = None  # lets go of something that is only kept for later

    # --- queries

    @property
    def host_bytes(self) -> int:
        """Bytes of page images in memory."""
        return len(self._pages) * self.page_bytes

    @property
    def spilled_bytes(self) -> int:
        return self._spilled * self.page_bytes

    def fitting(self, pages: Sequence[T]) -> Iterator[Sequence[T]]:
        """The pages in groups whose images fit in memory at the same time."""
        size = max(1, len(pages) if self._most is None else min(len(pages), self._most))
        for at in range(0, len(pages), size):
            yield pages[at : at + size]

    # --- changes

    def new(self, count: int) -> list[Page]:
        """Pages in memory, to be written: all of them, or HostMemoryError and none."""
        done: list[int] = []
        with self.lock:
            try:
                for _ in range(count):
                    done.append(self._room())
            except BaseException:
                self._free.extend(reversed(done))
                raise
            pages = [Page(address=address) for address in done]
            self._pages.update(dict.fromkeys(pages))
        return pages

    def hold(self, page: Page) -> Page:
        """Another owner of the page."""
        with self.lock:
            page.holders += 1
        return page

    def release(self, page: Page) -> None:
        """One owner less; the last one gives its memory back."""
        with self.lock:
            assert page.holders > 0
            page.holders -= 1
            if page.holders or self._closed:
                return
            if page.address:
                self._unload(page)
            if page.place != NOWHERE:
                self._free_place(page)
            page.source = None

    def fetch(self, page: Page) -> int:
        """The address of the image, read back from its file if it was there. Valid while the lock is held."""
        return self._fetch(page, beside=0)

    def fetch_some(self, pages: Sequence[Page]) -> list[int]:
        """Addresses of the first pages, as many as fit in memory together, at least one. Valid while the lock is held.

        HostMemoryError if not even one does.
        """
        addresses: list[int] = []
        with self.lock:
            if self._most is None:  # else reading ahead could push out what has just been read
                self.load(pages)
            for page in pages:
                try:
                    addresses.append(self._fetch(page, beside=len(addresses)))
                except HostMemoryError:
                    if not addresses:
                        raise
                    break
        return addresses

    def _fetch(self, page: Page, *, beside: int) -> int:
        """beside: so many pages, those fetched last, stay in memory."""
        with self.lock:
            if not page.address:
                address = self._room(beside)
                try:
                    self._read(page, self._memory.view(address, self.page_bytes))
                except BaseException:
                    self._free.append(address)
                    raise
                self._loaded(page, address)
                if page.place != NOWHERE:
                    self._free_place(page)
            self._pages[page] = None
            self._pages.move_to_end(page)
            return page.address

    def load(self, pages: Sequence[Page]) -> None:
        """Bring pages from their sources into memory, several at a time. They stay until others need the room.

        Raises what `PageSource` does, and HostMemoryError; the heap is sound then, and some of the pages are in memory.
        """
        waiting = [page for page in pages if not page.address and page.source is not None]
        for group in self.fitting(waiting):
            with self.lock, ThreadPoolExecutor(READERS, thread_name_prefix="kvflash-load") as readers:
                reads: list[tuple[Page, int, Future[None]]] = []
                try:
                    for page in group:  # memory is made while the pages before are read
                        address = self._room()
                        image = self._memory.view(address, self.page_bytes)
                        assert page.source is not None
                        reads.append((page, address, readers.submit(page.source.read_into, image)))
                finally:
                    wait(read for _, _, read in reads)
                    for page, address, read in reads:
                        if read.exception() is None:
                            self._loaded(page, address)
                        else:
                            self._free.append(address)
                for _, _, read in reads:
                    read.result()

    def _loaded(self, page: Page, address: int) -> None:
        """The image has been read. Without a ceiling it stays in memory, and its file can be closed."""
        page.address = address
        if self._most is None:
            page.source = None
        self._pages[page] = None

    def view(self, page: Page) -> memoryview:
        """Writable bytes of a page that is in memory."""
        return self._memory.view(page.address, self.page_bytes)

    def bytes_of(self, page: Page) -> bytes:
        """A copy of the image, once its transfer is done. The page stays where it is."""
        with self.lock:
            if page.address:
                self._memory.wait(page.ticket)
                return bytes(self.view(page))
            data = bytearray(self.page_bytes)
            self._read(page, memoryview(data))
            return bytes(data)

    def readable(self, page: Page) -> bool:
        """Can the image be had? One in memory can."""
        if page.address:
            return True
        try:
            self.bytes_of(page)
        except (SnapshotError, HostMemoryError):
            return False
        return True

    def close(self) -> None:
        """Give all memory and the spill file back. Pages are void after this."""
        for page in self._pages:
            self._memory.wait(page.ticket)
        self._pages.clear()
        self._closed = True
        self._ahead.shutdown()
        if self._next is not None:
            with contextlib.suppress(HostMemoryError):
                self._slabs.append(self._next.result())
            self._next = None
        for address in self._slabs:
            self._memory.free(address)
        self._slabs.clear()
        self._free.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- memory

    def _room(self, beside: int = 0) -> int:
        """An address that is free now. The last pages used, so many, keep theirs."""
        if not self._free and self._slab_pages() > 0:
            try:
                self._add_slab()
            except HostMemoryError:
                if not self._reclaim():
                    raise
        if not self._free and not self._reclaim():
            self._make_room(beside)
        return self._free.pop()

    def _reclaim(self) -> bool:
        """Let go of what is only kept for later until there is room; False if that gives none."""
        while not self._free and self.reclaim is not None and self.reclaim():
            pass
        return bool(self._free)

    def _unload(self, page: Page) -> None:
        self._memory.wait(page.ticket)
        page.ticket = 0
        self._pages.pop(page, None)
        address, page.address = page.address, 0
        self._free.append(address)

    def _slab_pages(self) -> int:
        """Pages of the next slab; 0 if the ceiling allows none."""
        pages = max(1, SLAB_BYTES // self.page_bytes)
        return pages if self._most is None else min(pages, self._most - self._made)

    def _new_slab(self, pages: int) -> int:
        size = pages * self.page_bytes
        address = self._memory.alloc(size)
        if not address:
            raise HostMemoryError(
                f"could not get {size >> 20} MiB of host memory for paged-out chunks: free memory, set a lower "
                f"host_limit together with a spill folder, or use a smaller context"
            )
        return address

    def _add_slab(self) -> None:
        count = self._slab_pages()
        ahead, self._next = self._next, None
        # what was refused ahead of need may be had now
        refused = ahead is None or ahead.exception() is not None
        address = self._new_slab(count) if refused or ahead is None else ahead.result()
        self._slabs.append(address)
        self._made += count
        pages = range(address, address + count * self.page_bytes, self.page_bytes)
        self._free.extend(reversed(pages))  # neighbours in the text become neighbours in memory
        if self._slab_pages() > 0:
            self._next = self._ahead.submit(self._new_slab, self._slab_pages())

    # --- files

    def _make_room(self, beside: int) -> None:
        """One page leaves memory: the oldest that can be read again from where it came, or the oldest, spilled."""
        able = len(self._pages) - beside
        page = next((page for page in islice(self._pages, able) if page.source is not None), None)
        if page is None:
            page = self._spill_oldest(able)
        self._unload(page)

    def _spill_oldest(self, able: int) -> Page:
        if self.spill_folder is None or able < 1:
            raise HostMemoryError(
                f"the paged-out chunks need more than host_limit = {self.limit} bytes ({self.page_bytes} bytes a "
                f"chunk): raise host_limit, give a spill folder, or use a larger pool"
            )
        page = next(iter(self._pages))
        self._memory.wait(page.ticket)
        place = self._free_places[-1] if self._free_places else self._places
        data = self.view(page)
        page.checksum = zlib.crc32(data)
        try:
            if self._file is None:
                # without a name, so that nothing is left behind however the process ends; without a buffer, so that a
                # full disk shows here and not at some later call
                self._file = tempfile.TemporaryFile(buffering=0, dir=self.spill_folder)  # noqa: SIM115
            self._file.seek(place * self.page_bytes)
            while data:
                data = data[self._file.write(data) :]
        except OSError as err:
            raise HostMemoryError(f"could not write a chunk to {self.spill_folder}: {err}") from err
        if self._free_places:
            self._free_places.pop()
        else:
            self._places += 1
        self._spilled += 1
        page.place = place
        return page

    def _free_place(self, page: Page) -> None:
        place, page.place = page.place, NOWHERE
        self._spilled -= 1
        self._free_places.append(place)

    def _read(self, page: Page, image: memoryview) -> None:
        if page.place == NOWHERE:
            assert page.source is not None, "a page without bytes"
            page.source.read_into(image)
            return
        assert self._file is not None
        rest = image
        try:
            self._file.seek(page.place * self.page_bytes)
            while rest:
                read = self._file.readinto(rest)
                if not read:
                    raise OSError("the spill file was cut short")
                rest = rest[read:]
        except OSError as err:
            raise HostMemoryError(f"could not read a chunk back from {self.spill_folder}: {err}") from err
        if zlib.crc32(image) != page.checksum:
            raise SnapshotError(
                f"a chunk in the spill file in {self.spill_folder} is damaged: read the text again, and check the disk"
            )
