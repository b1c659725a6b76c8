"""Which chunk of the text has which page image on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .heap import PageHeap
from .image import UNFILLED, Lease, PageImage


class HostStore:
    """Maps a chunk to its page image, and retains it. The images themselves belong to the heap.

    This is the one record of the chunks on the host: their image is filled, or a transfer behind the compute will fill
    it. An image that waits for `filled` does not count.

    One thread changes the map. Other threads may read it, and get a LookupError for a chunk that is dropped meanwhile.
    """

    def __init__(self, heap: PageHeap) -> None:
        self.heap = heap
        self._pages: dict[int, PageImage] = {}

    def __contains__(self, chunk: int) -> bool:
        page = self._pages.get(chunk)
        return page is not None and page.filled != UNFILLED

    def __iter__(self) -> Iterator[int]:
        """Yield the chunks that have an image, filled or not."""
        return iter(self._pages)

    def page(self, chunk: int) -> PageImage:
        return self._pages[chunk]

    def pages(self) -> list[PageImage]:
        """Return all retained images."""
        return list(self._pages.values())

    def ticket(self, chunk: int) -> int:
        """Return the transfer after which the chunk's image is whole; 0 if no transfer has to be waited for."""
        page = self._pages.get(chunk)
        return 0 if page is None else page.ticket

    def allocate(self, chunks: Sequence[int]) -> Lease:
        """Return a lease of new images of the chunks, to be written in it: all of them, or HostMemoryError and none."""
        assert self._pages.keys().isdisjoint(chunks), "a chunk has an image"
        pages = self.heap.new(len(chunks))
        for page in pages:
            page.filled = UNFILLED
        self._pages.update(zip(chunks, pages, strict=True))
        return self.heap.lease(pages)

    def put(self, chunk: int, page: PageImage) -> None:
        """Retain an image that has other holders too."""
        assert chunk not in self._pages, "a chunk has an image"
        self._pages[chunk] = self.heap.retain(page)

    def filled(self, chunks: Sequence[int], ticket: int) -> None:
        """Note that the transfer `ticket` fills the images: from now on the host has these chunks."""
        for chunk in chunks:
            self._pages[chunk].filled = ticket

    def in_use(self, chunks: Sequence[int], ticket: int) -> None:
        """Note that the transfer `ticket` fills or reads the images. Call it during their lease."""
        for chunk in chunks:
            self._pages[chunk].ticket = ticket

    def lease(self, chunks: Sequence[int]) -> Lease:
        """Return a lease of the chunks' images. See `PageHeap.lease`."""
        return self.heap.lease([self._pages[chunk] for chunk in chunks])

    def lease_some(self, chunks: Sequence[int]) -> Lease:
        """Return a lease of the first images, as many as fit in memory together, at least one."""
        return self.heap.lease_some([self._pages[chunk] for chunk in chunks])

    def bytes_of(self, chunk: int) -> bytes:
        """Return a copy of the image, once its transfer is done."""
        return self.heap.bytes_of(self._pages[chunk])

    def drop(self, chunk: int) -> None:
        """Release the image, if there is one."""
        page = self._pages.pop(chunk, None)
        if page is not None:
            self.heap.release(page)

    def clear(self) -> None:
        for chunk in list(self):
            self.drop(chunk)
