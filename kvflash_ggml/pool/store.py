"""Page images in host memory: raw cache bytes of paged-out chunks, in page-locked slabs where the backend has them.

A page is written once, when its chunk is sealed, and read back bit for bit. Beyond the ceiling, the pages that have
waited longest go to an unlinked file in the spill folder, or `HostMemoryError` is raised.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

from ..errors import HostMemoryError

SLAB_BYTES = 64 << 20


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
        self._slab_pages = max(1, SLAB_BYTES // page_bytes)
        if limit is not None:
            self._slab_pages = max(1, min(self._slab_pages, limit // page_bytes))
        self._free: list[int] = []
        self._pages: OrderedDict[int, int] = OrderedDict()  # chunk -> address, the longest-waiting first
        self._tickets: dict[int, int] = {}  # chunk -> transfer that fills the page
        self._spilled: dict[int, int] = {}  # chunk -> place in the file
        self._spill_free: list[int] = []
        self._file: BinaryIO | None = None
        # page-locking memory takes longer than copying into it, so the next slab is made ahead of need
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

    # --- changes

    def allocate(self, chunks: Sequence[int]) -> list[int]:
        """Addresses for new images of the chunks: all of them, or HostMemoryError and none."""
        done: list[int] = []
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
        if chunk in self._spilled:
            address = self._page()
            self._read_spilled(chunk, address)
            self._pages[chunk] = address
        self._pages.move_to_end(chunk)
        return self._pages[chunk]

    def bytes_of(self, chunk: int) -> bytes:
        """A copy of the image, once its transfer is done."""
        self._memory.wait(self.ticket(chunk))
        return bytes(self._memory.view(self.fetch(chunk), self.page_bytes))

    def drop(self, chunk: int) -> None:
        """Forget the image, if there is one."""
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
            if self._may_grow():
                self._add_slab(self._next.result() if self._next else self._new_slab())
                self._next = self._ahead.submit(self._new_slab) if self._may_grow() else None
            else:
                self._spill_oldest()
        return self._free.pop()

    def _may_grow(self) -> bool:
        if self.limit is None:
            return True
        return (len(self._slabs) + 1) * self._slab_pages * self.page_bytes <= self.limit

    def _new_slab(self) -> int:
        size = self._slab_pages * self.page_bytes
        address = self._memory.alloc(size)
        if not address:
            raise HostMemoryError(
                f"could not get {size >> 20} MiB of host memory for paged-out chunks: free memory, set a lower "
                f"host_limit together with a spill folder, or use a smaller context"
            )
        return address

    def _add_slab(self, address: int) -> None:
        self._slabs.append(address)
        pages = range(address, address + self._slab_pages * self.page_bytes, self.page_bytes)
        self._free.extend(reversed(pages))  # neighbours in the text become neighbours in memory

    # --- spill

    def _spill_oldest(self) -> None:
        if self.spill_folder is None or not self._pages:
            raise HostMemoryError(
                f"the paged-out chunks need more than host_limit = {self.limit} bytes ({self.page_bytes} bytes a "
                f"chunk): raise host_limit, give a spill folder, or use a larger pool"
            )
        chunk, address = next(iter(self._pages.items()))
        self._memory.wait(self._tickets.pop(chunk, 0))
        if self._file is None:
            # without a name, so that nothing is left behind however the process ends
            self._file = tempfile.TemporaryFile(dir=self.spill_folder)  # noqa: SIM115
        place = self._spill_free.pop() if self._spill_free else len(self._spilled)
        try:
            self._file.seek(place * self.page_bytes)
            self._file.write(self._memory.view(address, self.page_bytes))
        except OSError as err:
            raise HostMemoryError(f"could not write a chunk to {self.spill_folder}: {err}") from err
        del self._pages[chunk]
        self._spilled[chunk] = place
        self._free.append(address)

    def _read_spilled(self, chunk: int, address: int) -> None:
        assert self._file is not None
        place = self._spilled[chunk]
        self._file.seek(place * self.page_bytes)
        read = self._file.readinto(self._memory.view(address, self.page_bytes))  # type: ignore[attr-defined]
        if read != self.page_bytes:
            self._free.append(address)
            raise HostMemoryError(f"the spill file in {self.spill_folder} was cut short at chunk {chunk}")
        self._spill_free.append(self._spilled.pop(chunk))
