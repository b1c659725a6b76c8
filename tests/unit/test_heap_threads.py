"""Threads that lease, make, release, spill and read pages, against a plain model: a page is a number."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_host import FakeHost

from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.host import slabs
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import NOWHERE, PageImage

PAGE = 64
TURNS = 120
THREADS = 4


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Stored:
    """An image in a file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read_into(self, image: memoryview) -> None:
        image[:] = bytes([self.number]) * PAGE


class Model:
    """Which pages are there, and what each is full of. A page is taken out before its last holder lets go of it."""

    def __init__(self, heap: PageHeap) -> None:
        self.heap = heap
        self.lock = threading.Lock()
        self.pages: dict[PageImage, int] = {}
        self.serial = 0

    def put(self, page: PageImage, number: int) -> None:
        with self.lock:
            self.pages[page] = number

    def number(self) -> int:
        with self.lock:
            self.serial += 1
            return self.serial % 251

    def some(self, rng: random.Random, most: int) -> dict[PageImage, int]:
        """Retained, so that they are there until they are released."""
        with self.lock:
            chosen = rng.sample(list(self.pages.items()), min(len(self.pages), rng.randint(1, most)))
            return {self.heap.retain(page): number for page, number in chosen}

    def take(self, rng: random.Random) -> PageImage:
        with self.lock:
            page = rng.choice(list(self.pages))
            del self.pages[page]
            return page


def use(model: Model, seed: int, most: int) -> None:
    rng, heap = random.Random(seed), model.heap

    def look(address: int) -> bytes:
        return bytes(heap._memory.view(address, PAGE))

    for _ in range(TURNS):
        what = rng.choice(["lease", "some", "some", "make", "file", "read", "load"])
        if what in ("make", "file"):
            number = model.number()
            if what == "make":
                (page,) = heap.new(1)
                with heap.lease([page]):
                    heap.view(page)[:] = bytes([number]) * PAGE
            else:
                page = PageImage(source=Stored(number))
            model.put(page, number)
            heap.release(model.take(rng))
            continue
        pages = model.some(rng, 1 if what == "lease" else most)
        wanted = list(pages)
        early = rng.random() < 0.3
        if what in ("lease", "some"):
            with heap.lease(wanted) if what == "lease" else heap.lease_some(wanted) as addresses:
                assert len(set(addresses)) == len(addresses) > 0
                if early:
                    for page in wanted:
                        heap.release(page)
                for _ in range(3):
                    threading.Event().wait(0)
                    for page, address in zip(wanted, addresses, strict=False):
                        assert look(address) == bytes([pages[page]]) * PAGE
                        assert page.address == address
        elif what == "read":
            for page in wanted:
                assert heap.bytes_of(page) == bytes([pages[page]]) * PAGE
        else:
            heap.load(wanted)
        if not (early and what in ("lease", "some")):
            for page in wanted:
                heap.release(page)


@settings(max_examples=12, deadline=None)
@given(limit=st.sampled_from([None, 1, 2, 3, 5, 9]), seed=st.integers(0, 1 << 16), first=st.integers(1, 10))
def test_nobody_sees_the_bytes_of_another_page(
    limit: int | None, seed: int, first: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "SLAB_BYTES", 2 * PAGE)
        check(limit, seed, first, tmp_path_factory.getbasetemp())


def check(limit: int | None, seed: int, first: int, folder: Path) -> None:
    memory = FakeHost()
    heap = PageHeap(memory, PAGE, limit=None if limit is None else limit * PAGE, spill=folder)
    model = Model(heap)
    for _ in range(first):
        number = model.number()
        model.put(PageImage(source=Stored(number)), number)
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(use, model, seed + n, 6) for n in range(THREADS)]:
            done.result()
    assert not heap._leases.threads
    assert not heap._reads
    assert all(page.holders == 1 for page in model.pages)
    assert {page: set(heap.bytes_of(page)) for page in model.pages} == {p: {n} for p, n in model.pages.items()}
    inside = [page for page in model.pages if page.address]
    assert set(heap._pages) == set(inside)
    assert len({page.address for page in inside}) == len(inside)
    assert len(inside) + len(heap._slabs._free) == heap._slabs._made
    places = [page.place for page in model.pages if page.place != NOWHERE]
    assert heap._spill is not None
    assert sorted([*places, *heap._spill._free]) == list(range(heap._spill._places))
    if limit is not None:
        assert memory.most <= limit * PAGE
    for page in model.pages:
        heap.release(page)
    assert (heap.host_bytes, heap.spilled_bytes) == (0, 0)
    heap.close()
    assert not memory.slabs


def test_a_memory_of_one_page_serves_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is leased most of the time, and everybody has to wait for everybody."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", PAGE)
    check(1, 7, 5, tmp_path)


def test_without_a_spill_folder_who_finds_no_room_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * PAGE)
    heap = PageHeap(FakeHost(), PAGE, limit=4 * PAGE, spill=None)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            try:
                pages = heap.new(rng.randint(1, 3))
            except HostMemoryError:
                continue
            with heap.lease(pages):
                for page in pages:
                    heap.view(page)[:] = bytes([seed]) * PAGE
            assert all(heap.bytes_of(page) == bytes([seed]) * PAGE for page in pages)
            for page in pages:
                heap.release(page)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(use, seed) for seed in range(3)]:
            done.result()
    assert heap.host_bytes == 0
    assert len(heap._slabs._free) == heap._slabs._made == 4
    heap.close()
