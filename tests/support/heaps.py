"""Heaps of page images in small slabs, on memory of a host that is none, and images whose bytes are all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from kvflash_ggml.host import slabs
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import NOWHERE, PageImage

from .fake_engine import PAGE_BYTES as PAGE
from .fake_host import FakeHost


@contextmanager
def heaps(folder: Path) -> Iterator[Callable[..., PageHeap]]:
    """Makes them, and closes them; nobody may have a lease of one then. pages: as many fit, None for no ceiling."""
    made: list[PageHeap] = []

    def make(pages: int | None = None, *, spill: bool = True) -> PageHeap:
        limit = None if pages is None else pages * PAGE
        made.append(PageHeap(FakeHost(), PAGE, limit=limit, spill=folder if spill else None))
        return made[-1]

    with mock.patch.object(slabs, "SLAB_BYTES", 2 * PAGE):
        yield make
        for heap in made:
            assert not heap._leases.threads
            heap.close()


def write(heap: PageHeap, *values: int) -> list[PageImage]:
    """Pages of one value each."""
    pages = []
    for value in values:
        pages += heap.new(1)
        with heap.lease(pages[-1:]):
            heap.view(pages[-1])[:] = bytes([value]) * PAGE
    return pages


def spilled(pages: list[PageImage]) -> list[bool]:
    """Which of them are in the spill file?"""
    return [page.place != NOWHERE for page in pages]
