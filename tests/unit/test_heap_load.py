"""Pages of a snapshot's file come into memory several at a time, or not at all."""

from __future__ import annotations

import threading

import pytest

from kvflash_ggml.errors import HostMemoryError, SnapshotError
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import PageImage

PAGE = 64


class Memory:
    """Slabs of Python bytes."""

    def __init__(self) -> None:
        self.slabs: dict[int, bytearray] = {}
        self.next = 1 << 20

    def alloc(self, size: int) -> int:
        address, self.next = self.next, self.next + (1 << 30)
        self.slabs[address] = bytearray(size)
        return address

    def free(self, address: int) -> None:
        del self.slabs[address]

    def view(self, address: int, size: int) -> memoryview:
        base = max(x for x in self.slabs if x <= address)
        return memoryview(self.slabs[base])[address - base : address - base + size]

    def wait(self, ticket: int) -> None: ...


class Stored:
    """A page image full of one number; `damaged` ones cannot be read."""

    def __init__(self, number: int, *, damaged: bool = False) -> None:
        self.number = number
        self.damaged = damaged
        self.reads = 0

    def read_into(self, image: memoryview) -> None:
        self.reads += 1
        if self.damaged:
            raise SnapshotError("damaged")
        image[:] = bytes([self.number]) * len(image)


def make(count: int, *, most: int | None = None, damaged: int = -1) -> tuple[PageHeap, list[PageImage], list[Stored]]:
    heap = PageHeap(Memory(), PAGE, limit=None if most is None else most * PAGE, spill=None)
    stored = [Stored(n, damaged=n == damaged) for n in range(count)]
    return heap, [PageImage(source=x) for x in stored], stored


def test_each_page_is_read_once() -> None:
    heap, pages, stored = make(20)
    heap.load(pages)
    heap.load(pages)
    assert [bytes(heap.view(page)) for page in pages] == [bytes([n]) * PAGE for n in range(20)]
    assert [x.reads for x in stored] == [1] * 20
    assert heap.host_bytes == 20 * PAGE
    heap.close()


def test_more_than_fit_are_all_read_and_the_last_stay() -> None:
    heap, pages, stored = make(10, most=4)
    heap.load(pages)
    assert heap.host_bytes <= 4 * PAGE
    assert [x.reads for x in stored] == [1] * 10
    for n, page in enumerate(pages):
        with heap.lease([page]):
            assert bytes(heap.view(page)) == bytes([n]) * PAGE
    heap.close()


def test_a_damaged_page_is_told_and_the_rest_stay_sound() -> None:
    heap, pages, stored = make(10, damaged=3)
    with pytest.raises(SnapshotError, match="damaged"):
        heap.load(pages)
    assert not pages[3].address
    free = len({page.address for page in pages if page.address})
    assert free * PAGE == heap.host_bytes
    stored[3].damaged = False
    heap.load(pages)
    assert bytes(heap.view(pages[3])) == bytes([3]) * PAGE
    for page in pages:
        heap.release(page)
    assert heap.host_bytes == 0
    heap.close()


def test_without_room_nothing_is_lost() -> None:
    heap, pages, _ = make(4, most=2)
    written = heap.new(2)  # they came from no file, and may not leave
    with pytest.raises(HostMemoryError):
        heap.load(pages)
    assert heap.host_bytes == 2 * PAGE
    heap.release(written[0])
    heap.load(pages[:1])
    assert bytes(heap.view(pages[0])) == bytes(PAGE)
    heap.close()


def test_pages_are_read_by_other_threads() -> None:
    heap, _, _ = make(0)
    seen: set[int] = set()

    class Here(Stored):
        def read_into(self, image: memoryview) -> None:
            seen.add(threading.get_ident())

    heap.load([PageImage(source=Here(n)) for n in range(4)])
    assert threading.get_ident() not in seen
    heap.close()


def test_pages_of_a_file_and_of_an_answer_take_small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt are many, side by side."""
    monkeypatch.setattr("kvflash_ggml.host.slabs.SLAB_BYTES", 8 * PAGE)
    heap, pages, _ = make(8 + 4)
    heap.load(pages)
    for _ in range(2):
        heap.new(1)
    heap.new(12)
    sizes = [len(slab) // PAGE for slab in heap._memory.slabs.values()]  # type: ignore[attr-defined]
    heap.close()
    assert sizes[:6] == [8, 2, 2, 2, 2, 8]


def test_pages_of_a_file_that_are_streamed_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflash_ggml.host.slabs.SLAB_BYTES", 8 * PAGE)
    monkeypatch.setattr("kvflash_ggml.host.slabs.MAX_SLAB_BYTES", 16 * PAGE)
    heap, pages, _ = make(24)
    with heap.lease(pages):
        sizes = [len(slab) // PAGE for slab in heap._memory.slabs.values()]  # type: ignore[attr-defined]
    heap.close()
    assert sizes[:3] == [8, 8, 8]
