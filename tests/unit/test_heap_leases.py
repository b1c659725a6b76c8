"""Leases: pages that stay where they are, whoever lets go of them and whoever needs room."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.heaps import PAGE, heaps, spilled, write
from support.saving import Digest

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.host import heap as heap_module
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import PageImage
from kvflash_ggml.sequence.prefill import extend

PATIENCE = 60  # seconds after which something that should have happened never will


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Any]:
    with heaps(tmp_path) as make:
        yield make


def value(heap: PageHeap, address: int) -> int:
    (value,) = set(heap._memory.view(address, PAGE))
    return value


def test_a_leased_page_stays(build: Any) -> None:
    heap = build(3)
    pages = write(heap, 1, 2, 3)
    with heap.lease(pages[:2]) as addresses:
        pages += write(heap, 4, 5, 6)
        assert spilled(pages) == [False, False, True, True, True, False]
        assert [value(heap, address) for address in addresses] == [1, 2]
    pages += write(heap, 7)
    assert spilled(pages[:2]) == [True, False]


def test_each_lease_counts(build: Any) -> None:
    heap = build(2)
    pages = write(heap, 1, 2)
    with heap.lease(pages[:1]) as (one,):
        with heap.lease([pages[0]]) as (two,), heap.lease_some(pages) as some:
            assert one == two == some[0]
        pages += write(heap, 3, 4)
        assert value(heap, one) == 1
    assert spilled(pages) == [False, True, True, False]


def test_a_page_that_is_released_meanwhile_lives_as_long_as_its_last_lease(build: Any) -> None:
    heap = build(2, spill=False)
    (page,) = write(heap, 1)
    with heap.lease([page]) as (address,):
        with heap.lease([page]):
            heap.release(page)
        (other,) = write(heap, 2)
        with pytest.raises(HostMemoryError, match="raise host_limit"):
            heap.new(1)
        assert value(heap, address) == 1
        assert heap.host_bytes == 2 * PAGE
    assert heap.host_bytes == PAGE
    assert write(heap, 3)[0].address == address
    assert heap.bytes_of(other) == bytes([2]) * PAGE


def test_a_page_that_is_leased_after_a_spill_gives_its_place_back_when_released(build: Any) -> None:
    heap = build(1)
    one, other = write(heap, 1, 2)
    with heap.lease([one]):
        heap.release(one)
    heap.release(other)
    assert (heap.host_bytes, heap.spilled_bytes) == (0, 0)


def test_what_has_been_released_cannot_be_had(build: Any) -> None:
    heap = build()
    (page,) = write(heap, 1)
    with heap.lease([page]):
        heap.release(page)
        with pytest.raises(LookupError, match="has been released"), heap.lease([page]):
            pass
    with pytest.raises(LookupError, match="has been released"):
        heap.bytes_of(page)
    for call in (heap.retain, heap.release):
        with pytest.raises(AssertionError):
            call(page)


def test_more_than_fit(build: Any) -> None:
    heap = build(3)
    pages = write(heap, 1, 2, 3, 4, 5)
    with heap.lease_some(pages) as addresses:
        assert [value(heap, address) for address in addresses] == [1, 2, 3]
    with pytest.raises(HostMemoryError, match="raise host_limit"), heap.lease(pages):
        pass
    assert not heap._leases.threads
    with heap.lease(pages[2:]) as addresses:
        assert [value(heap, address) for address in addresses] == [3, 4, 5]
        with pytest.raises(HostMemoryError), heap.lease_some(pages):
            pass
    with heap.lease_some([]) as addresses:
        assert addresses == []


def test_a_lease_ends_with_its_object(build: Any) -> None:
    heap = build(1)
    pages = write(heap, 1)
    heap.lease(pages).__enter__()
    gc.collect()
    assert not heap._leases.threads
    write(heap, 2)
    assert spilled(pages) == [True]


# --- other threads


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread waits for a lease."""
    waits, sleep = threading.Event(), heap_module.time.sleep

    def wait(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(heap_module.time, "sleep", wait)
    return waits


@pytest.mark.parametrize("work", ["new", "lease", "some"])
def test_who_needs_room_waits_for_the_lease_of_another_thread(work: str, build: Any, waits: threading.Event) -> None:
    heap = build(2)
    pages = write(heap, 1, 2, 3, 4)
    calls: dict[str, Callable[[], object]] = {
        "new": lambda: heap.new(1),
        "lease": lambda: heap.lease(pages[2:]).__enter__(),
        "some": lambda: heap.lease_some(pages[2:]).__enter__(),
    }
    with ThreadPoolExecutor(1) as other:
        with heap.lease(pages[:2]) as addresses:
            asked = other.submit(calls[work])
            assert waits.wait(PATIENCE)
            assert not asked.done()
            assert [value(heap, address) for address in addresses] == [1, 2]
        assert asked.result(PATIENCE)


def test_two_that_are_in_the_way_of_each_other(build: Any) -> None:
    """Each wants two pages of a memory of three: neither keeps one and waits for the other's."""
    heap = build(3)
    pages = write(heap, 1, 2, 3, 4)

    def take(mine: list[PageImage]) -> None:
        for _ in range(200):
            with heap.lease(mine) as addresses:
                assert [bytes([value(heap, address)]) * PAGE for address in addresses] == [*map(heap.bytes_of, mine)]

    with ThreadPoolExecutor(2) as others:
        for done in [others.submit(take, pages[:2]), others.submit(take, pages[2:])]:
            done.result(PATIENCE)


def test_a_thread_with_a_lease_waits_for_nobody(build: Any) -> None:
    """The other one may wait for it."""
    heap = build(2)
    pages = write(heap, 1, 2, 3)
    begun, go = threading.Event(), threading.Event()

    def lease() -> None:
        with heap.lease(pages[:1]):
            begun.set()
            assert go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as other:
        done = other.submit(lease)
        assert begun.wait(PATIENCE)
        with heap.lease(pages[1:2]):
            with pytest.raises(HostMemoryError):
                heap.new(1)
            go.set()
            done.result(PATIENCE)
            assert heap.new(1)


class Slow:
    """An image in a file on a slow disk."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def read_into(self, image: memoryview) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        image[:] = bytes([9]) * PAGE


@pytest.mark.parametrize("read", ["bytes_of", "load"])
def test_while_a_file_is_read_others_get_memory(read: str, build: Any) -> None:
    heap = build(2)
    source = Slow()
    page = PageImage(source=source)
    calls: dict[str, Callable[[], object]] = {
        "bytes_of": lambda: heap.bytes_of(page),
        "load": lambda: heap.load([page]),
    }
    with ThreadPoolExecutor(2) as others:
        try:
            reads: Future[Any] = others.submit(calls[read])
            assert source.begun.wait(PATIENCE)
            (new,) = others.submit(write, heap, 1).result(PATIENCE)
        finally:
            source.go.set()
        reads.result(PATIENCE)
    assert heap.bytes_of(page) == bytes([9]) * PAGE
    assert heap.bytes_of(new) == bytes([1]) * PAGE


def test_two_threads_that_read_the_same_file(build: Any) -> None:
    """Each into memory of its own, and one of them gives it back."""
    heap = build()
    source = Slow()
    page = PageImage(source=source)
    with ThreadPoolExecutor(2) as others:
        loads = [others.submit(heap.load, [page]) for _ in range(2)]
        assert source.begun.wait(PATIENCE)
        source.go.set()
        for load in loads:
            load.result(PATIENCE)
    assert heap.host_bytes == PAGE
    assert len(heap._slabs._free) + 1 == heap._slabs._made


# --- reclaimers


def test_reclaimers_are_asked_one_after_the_other_until_there_is_room(build: Any) -> None:
    heap = build(2, spill=False)
    pages = write(heap, 1, 2)
    asked: list[str] = []

    def reclaimer(name: str, kept: list[PageImage]) -> Callable[[], bool]:
        def reclaim() -> bool:
            asked.append(name)
            if not kept:
                return False
            heap.release(kept.pop())
            return True

        heap.add_reclaimer(reclaim)
        return reclaim

    reclaimer("one", pages[:1])
    two = reclaimer("two", pages[1:])
    heap.new(1)
    assert asked == ["one"]
    heap.new(1)
    assert asked == ["one", "one", "two"]
    for _ in range(2):
        heap.remove_reclaimer(two)
    with pytest.raises(HostMemoryError):
        heap.new(1)
    assert asked == ["one", "one", "two", "one", "one"], "before a page has to leave, and where none can"


# --- a decode step beside a scoring thread


class Shortlist(Digest):
    """Scores chunks by their real keys, as many as there are in a shortlist."""

    def open(self, keys: Any, n_chunks: int) -> None:
        super().open(keys, n_chunks)
        self.reader = keys
        self.on = False

    def score(self, request: Any) -> Any:
        if self.on:
            self.reader.score_keys(range(4), request)
        return np.zeros(request.n_chunks, np.float32)


@pytest.mark.parametrize("limit", [None, 8])
def test_a_chunk_is_sealed_while_a_shortlist_is_scored(limit: int | None, tmp_path: Path) -> None:
    engine = FakeEngine(512, 128, query_rows=4, asynchronous=True)
    inside, go = threading.Event(), threading.Event()

    def score_keys(heads: Any, images: list[int], *_: Any) -> Any:
        inside.set()
        assert go.wait(PATIENCE)
        return np.zeros((1, len(images)), np.float32)

    engine.score_keys = score_keys  # type: ignore[attr-defined]
    config = KVFlashConfig(pool=512, tail=2, tau=64, host_limit=limit and limit * PAGE, spill=limit and tmp_path)
    scorer = Shortlist()
    session = make_session(engine, config, n_ctx=2048, n_batch=128, n_ubatch=128, scorer=scorer)  # type: ignore[arg-type]
    extend(session, np.arange(682, dtype=np.int32))
    scorer.on = True
    before, sealed = session.paging.page_outs, session.length // CHUNK

    def generate(count: int) -> None:
        for token in range(count):
            extend(session, np.array([token], np.int32))

    with ThreadPoolExecutor(1) as caller:
        try:
            generate(16)  # and a look is taken, which is used 16 tokens later
            assert inside.wait(PATIENCE)
            caller.submit(generate, 7).result(PATIENCE)
            assert session.length // CHUNK == sealed + 1
            assert session.paging.page_outs == before + 1
            assert sealed in session.store
            assert session.store.heap._leases.threads, "it was not scoring all the while"
        finally:
            go.set()
    session.close()
