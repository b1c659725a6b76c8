"""Which chunk of the text has which page image on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import RLock

from .heap import Page, PageHeap


class HostStore:
    """Maps a chunk to its page image, and holds it. The images themselves belong to the heap."""

    def __init__(self, heap: PageHeap) -> None:
        self.heap = heap
        self._pages: dict[int, Page] = {}

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._pages

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    @property
    def lock(self) -> RLock:
        """To be held while addresses are in use."""
        return self.heap.lock

    def page(self, chunk: int) -> Page:
        return self._pages[chunk]

    def pages(self) -> list[Page]:
        """All images it holds."""
        return list(self._pages.values())

    def ticket(self, chunk: int) -> int:
        """The transfer after which the chunk's image is whole; 0 if it has been for long."""
        page = self._pages.get(chunk)
        return 0 if page is None else page.ticket

    def allocate(self, chunks: Sequence[int]) -> list[int]:
        """Addresses for new images of the chunks: all of them, or HostMemoryError and none."""
        assert not any(chunk in self for chunk in chunks), "a chunk has an image"
        with self.lock:
            pages = self.heap.new(len(chunks))
            self._pages.update(zip(chunks, pages, strict=True))
            return [page.address for page in pages]

    def put(self, chunk: int, page: Page) -> None:
        """Hold an image that others hold too."""
        assert chunk not in self, "a chunk has an image"
        self._pages[chunk] = self.heap.hold(page)

    def written(self, chunk: int, ticket: int) -> None:
        """The transfer `ticket` fills or reads the image."""
        self._pages[chunk].ticket = ticket

    def fetch(self, chunk: int) -> int:
        """The address of the image, read back from its file if it was there. KeyError if there is none."""
        with self.lock:
            return self.heap.fetch(self._pages[chunk])

    def fetch_some(self, chunks: Sequence[int]) -> list[int]:
        """The same for the first chunks, as many as fit in memory together, at least one."""
        with self.lock:
            return self.heap.fetch_some([self._pages[chunk] for chunk in chunks])

    def bytes_of(self, chunk: int) -> bytes:
        """A copy of the image, once its transfer is done."""
        with self.lock:
            return self.heap.bytes_of(self._pages[chunk])

    def drop(self, chunk: int) -> None:
        """Let go of the image, if there is one."""
        with self.lock:
            page = self._pages.pop(chunk, None)
            if page is not None:
                self.heap.release(page)

    def clear(self) -> None:
        for chunk in list(self):
            self.drop(chunk)
