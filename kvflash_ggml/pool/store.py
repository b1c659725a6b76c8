"""Page images in host memory: raw cache bytes of paged-out chunks, in page-locked slabs where the backend has them.

A page is written once, when its chunk is sealed, and read back bit for bit. Beyond the ceiling, the pages that have
waited longest go to an unlinked file in the spill folder, or `HostMemoryError` is raised.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Protocol, TypeVar

from ..errors import HostMemoryError

SLAB_BYTES = 64 << 20

T = TypeVar("T")


class HostMemory(Protocol):
    """Where slabs come from. `view` gives writable bytes of an address."""

    def alloc(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def view(self, address: int, size: int) -> memoryview: ...
    def wait(self, ticket: int) -> None: ...


class HostStore:
    """Maps a chunk to its page image.

    memory: source of slabs. page_bytes: size of one image. limit: ceiling in bytes, None for none. spill: folder.
    """

    def __init__(self, memory: HostMemory, page_bytes: int, *, limit: int | None, spill: Path | None) -> None:
        self.page_bytes = page_bytes
        self.limit = limit
        self.spill_folder = spill
        self._memory = memory
        self._slabs: list[int] = []
        self._most = None if limit is None else limit // page_bytes
        self._made = 0  # pages in the slabs
        self._free: list[int] = []
        self._pages: OrderedDict[int, int] = OrderedDict()  # chunk -> address, the longest-waiting first
        self._tickets: dict[int, int] = {}  # chunk -> transfer that fills the page
        self._spilled: dict[int, int] = {}  # chunk -> place in the file
        self._spill_free: list[int] = []
        self._file: FileIO | None = None
        # page-locking memory takes longer than copying into it, so the next slab is made ahead of need
        self.lock = RLock()  # pages are read by a scoring thread too
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="kvflash-host")
        self._next: Future[int] | None = None

    # --- queries

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._pages or chunk in self._spilled

    def __iter__(self) -> Iterator[int]:
        yield from self._pages
        yield from self._spilled

    @property
    def host_bytes(self) -> int:
        """Bytes of page images in memory."""
        return len(self._pages) * self.page_bytes

    @property
    def spilled_bytes(self) -> int:
        return len(self._spilled) * self.page_bytes

    def ticket(self, chunk: int) -> int:
        """The transfer after which the chunk's image is whole; 0 if it has been for long."""
        return self._tickets.get(chunk, 0)

    def fitting(self, pages: Sequence[T]) -> Iterator[Sequence[T]]:
        """The pages in groups whose images fit in memory at the same time."""
        size = max(1, len(pages) if self._most is None else min(len(pages), self._most))
        for at in range(0, len(pages), size):
            yield pages[at : at + size]

    # --- changes

    def allocate(self, chunks: Sequence[int]) -> list[int]:
        """Addresses for new images of the chunks: all of them, or HostMemoryError and none."""
        done: list[int] = []
        with self.lock:
            try:
                for chunk in chunks:
                    assert chunk not in self, f"chunk {chunk} has an image"
                    done.append(self._page())
            except HostMemoryError:
                self._free.extend(reversed(done))
                raise
            self._pages.update(zip(chunks, done, strict=True))
        return done

    def written(self, chunk: int, ticket: int) -> None:
        """The transfer `ticket` fills the image."""
        self._tickets[chunk] = ticket

    def fetch(self, chunk: int) -> int:
        """The address of the image, read back from the spill file if it was there."""
        with self.lock:
            if chunk in self._spilled:
                address = self._page()
                try:
                    self._read_spilled(chunk, address)
                except BaseException:
                    self._free.append(address)
                    raise
                self._pages[chunk] = address
            self._pages.move_to_end(chunk)
            return self._pages[chunk]

    def bytes_of(self, chunk: int) -> bytes:
        """A copy of the image, once its transfer is done."""
        with self.lock:
            self._memory.wait(self.ticket(chunk))
            return bytes(self._memory.view(self.fetch(chunk), self.page_bytes))

    def drop(self, chunk: int) -> None:
        """Forget the image, if there is one."""
        with self.lock:
            if chunk in self._pages:
                self._memory.wait(self._tickets.pop(chunk, 0))
                self._free.append(self._pages.pop(chunk))
            elif chunk in self._spilled:
                self._spill_free.append(self._spilled.pop(chunk))

    def clear(self) -> None:
        for chunk in list(self):
            self.drop(chunk)

    def close(self) -> None:
        """Give all memory and the spill file back."""
        self.clear()
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

    def _page(self) -> int:
        if not self._free:
            if self._slab_pages() > 0:
                self._add_slab()
            else:
                self._spill_oldest()
        return self._free.pop()

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

    # --- spill

    def _spill_oldest(self) -> None:
        if self.spill_folder is None or not self._pages:
            raise HostMemoryError(
                f"the paged-out chunks need more than host_limit = {self.limit} bytes ({self.page_bytes} bytes a "
                f"chunk): raise host_limit, give a spill folder, or use a larger pool"
            )
        chunk, address = next(iter(self._pages.items()))
        self._memory.wait(self._tickets.pop(chunk, 0))
        place = self._spill_free[-1] if self._spill_free else len(self._spilled)
        data = self._memory.view(address, self.page_bytes)
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
        if self._spill_free:
            self._spill_free.pop()
        del self._pages[chunk]
        self._spilled[chunk] = place
        self._free.append(address)

    def _read_spilled(self, chunk: int, address: int) -> None:
        assert self._file is not None
        data = self._memory.view(address, self.page_bytes)
        try:
            self._file.seek(self._spilled[chunk] * self.page_bytes)
            while data:
                read = self._file.readinto(data)
                if not read:
                    raise OSError("the spill file was cut short")
                data = data[read:]
        except OSError as err:
            raise HostMemoryError(f"could not read chunk {chunk} back from {self.spill_folder}: {err}") from err
        self._spill_free.append(self._spilled.pop(chunk))
