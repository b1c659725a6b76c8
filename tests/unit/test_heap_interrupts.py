"""Ctrl-C at every line of what moves page images about: no place has two pages, and no bytes are lost."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
from fake_engine import PAGE_BYTES, FakeHost
from interrupter import Interrupter

from kvflash_ggml.host import heap as heap_module
from kvflash_ggml.host.heap import NOWHERE, Page, PageHeap


def write(heap: PageHeap, page: Page, value: int) -> None:
    heap.view(page)[:] = bytes([value]) * PAGE_BYTES


def read(heap: PageHeap, page: Page) -> set[int]:
    return set(heap.bytes_of(page))


def work(heap: PageHeap, pages: list[Page]) -> None:
    """Pages are let go of, made, spilled and brought back."""
    heap.release(pages.pop())
    heap.release(pages.pop(0))
    for _ in range(3):
        heap.release(heap.new(1)[0])
    for page in [*pages, *reversed(pages)]:
        heap.fetch(page)


def test_every_line(tmp_path: Path) -> None:
    k, done = 0, False
    while not done:
        k += 1
        with mock.patch.object(heap_module, "SLAB_BYTES", 3 * PAGE_BYTES):
            heap = PageHeap(FakeHost(), PAGE_BYTES, limit=4 * PAGE_BYTES, spill=tmp_path)
            pages: list[Page] = []
            for value in range(1, 8):
                pages += heap.new(1)
                write(heap, pages[-1], value)
            values = {page: value for value, page in enumerate(pages, 1)}
            done = not Interrupter(k, ("host/heap.py",)).run(lambda heap=heap, pages=pages: work(heap, pages))
            fresh = []
            for value in range(100, 103):
                fresh += heap.new(1)
                write(heap, fresh[-1], value)
                values[fresh[-1]] = value
            live = [*pages, *fresh]
            assert [read(heap, page) for page in live] == [{values[page]} for page in live], f"line {k}"
            for page in np.random.default_rng(k).permutation(np.array(live, object)):
                heap.fetch(page)
            assert [read(heap, page) for page in live] == [{values[page]} for page in live], f"line {k}"
            for kind in ("address", "place"):
                places = [getattr(page, kind) for page in live if getattr(page, kind) not in (0, NOWHERE)]
                assert len(places) == len(set(places)), f"line {k}: two pages at one {kind}"
            heap.close()
    assert k > 200
