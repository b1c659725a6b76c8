"""Page images in host memory and on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import POISON, FakeHost
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.pool import store as store_module
from kvflash_ggml.pool.store import HostStore

PAGE = 100
SLAB = 3


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SLAB_BYTES", SLAB * PAGE + 50)


@pytest.fixture
def memory() -> FakeHost:
    return FakeHost()


@pytest.fixture
def build(memory: FakeHost, tmp_path: Path) -> Iterator[Any]:
    stores = []

    def make(pages: int | None = None, *, spill: bool = False, slack: int = 0) -> HostStore:
        limit = None if pages is None else pages * PAGE + slack
        stores.append(HostStore(memory, PAGE, limit=limit, spill=tmp_path if spill else None))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
    assert not memory.slabs, "memory was not given back"
    assert not list(tmp_path.iterdir()), "something is left in the spill folder"


def write(store: HostStore, memory: FakeHost, chunk: int, ticket: int = 0) -> bytes:
    (address,) = store.allocate([chunk])
    data = bytes([chunk % 256]) * PAGE
    memory.view(address, PAGE)[:] = data
    if ticket:
        store.written(chunk, ticket)
    return data


def settle(store: HostStore) -> None:
    if store._next is not None:
        with contextlib.suppress(HostMemoryError):
            store._next.result()


def test_images_come_back(build: Any, memory: FakeHost) -> None:
    store = build()
    data = {chunk: write(store, memory, chunk) for chunk in range(10)}
    for chunk in (3, 9, 0):
        assert store.bytes_of(chunk) == data[chunk]
        assert bytes(memory.view(store.fetch(chunk), PAGE)) == data[chunk]
    assert sorted(store) == list(range(10))
    assert 5 in store
    assert 10 not in store
    assert store.host_bytes == 10 * PAGE
    assert store.spilled_bytes == 0


def test_neighbours_in_the_text_are_neighbours_in_memory(build: Any) -> None:
    a, b, c = build().allocate([0, 1, 2])
    assert (b - a, c - b) == (PAGE, PAGE)


def test_a_chunk_has_one_image(build: Any) -> None:
    store = build()
    store.allocate([1])
    with pytest.raises(AssertionError, match="chunk 1"):
        store.allocate([1])


@pytest.mark.parametrize(("pages", "slack"), [(1, 0), (2, 99), (3, 0), (4, 0), (7, 5), (9, 0)])
def test_the_ceiling_is_reached_and_not_passed(
    build: Any, memory: FakeHost, pages: int, slack: int
) -> None:
    store = build(pages, slack=slack)
    for chunk in range(pages):
        write(store, memory, chunk)
    with pytest.raises(HostMemoryError, match=f"host_limit = {pages * PAGE + slack} bytes"):
        store.allocate([pages])
    assert memory.most <= pages * PAGE + slack
    store.drop(0)
    write(store, memory, pages)
    assert sorted(store) == list(range(1, pages + 1))


def test_all_or_none(build: Any, memory: FakeHost) -> None:
    store = build(4)
    write(store, memory, 0)
    with pytest.raises(HostMemoryError):
        store.allocate([1, 2, 3, 4])
    assert list(store) == [0]
    assert len(store.allocate([1, 2, 3])) == 3


def test_a_ceiling_below_one_page_is_an_error_at_use(build: Any) -> None:
    for spill in (False, True):
        with pytest.raises(HostMemoryError):
            build(0, spill=spill, slack=50).allocate([0])


def test_the_longest_waiting_is_spilled(build: Any, memory: FakeHost, tmp_path: Path) -> None:
    store = build(4, spill=True)
    data = {chunk: write(store, memory, chunk) for chunk in range(4)}
    store.fetch(0)
    data[4] = write(store, memory, 4)
    assert list(store._spilled) == [1]
    assert (store.host_bytes, store.spilled_bytes) == (4 * PAGE, PAGE)
    assert not list(tmp_path.iterdir()), "the spill file has a name"
    for chunk, want in data.items():
        assert store.bytes_of(chunk) == want
    assert memory.most <= 4 * PAGE


def test_places_in_the_file_are_used_again(build: Any, memory: FakeHost) -> None:
    store = build(1, spill=True)
    for chunk in range(50):
        write(store, memory, chunk)
        if chunk > 2:
            store.drop(chunk - 2)
    assert store._file is not None
    assert os.fstat(store._file.fileno()).st_size <= 4 * PAGE


def test_a_page_is_reused_only_after_its_transfer(build: Any, memory: FakeHost) -> None:
    store = build(2, spill=True)
    write(store, memory, 0, ticket=7)
    write(store, memory, 1, ticket=8)
    assert store.ticket(0) == 7
    write(store, memory, 2, ticket=9)
    assert memory.waits == [7]  # before it went to the disk
    assert store.ticket(0) == 0
    store.drop(1)
    assert memory.waits == [7, 8]
    assert store.ticket(1) == 0
    store.bytes_of(2)
    assert memory.waits == [7, 8, 9]
    store.clear()
    assert memory.waits == [7, 8, 9, 9]


def test_closing_waits_too(memory: FakeHost) -> None:
    store = HostStore(memory, PAGE, limit=None, spill=None)
    write(store, memory, 0, ticket=3)
    store.close()
    assert memory.waits == [3]
    assert not memory.slabs
    store.close()


def test_refused_memory_is_an_error_and_may_be_had_later(build: Any, memory: FakeHost) -> None:
    store = build()
    memory.refuse_alloc = True
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="could not get"):
            store.allocate([0])
    memory.refuse_alloc = False
    write(store, memory, 0)
    settle(store)
    memory.refuse_alloc = True
    store.allocate(range(1, 6))  # this slab was made ahead
    settle(store)
    with pytest.raises(HostMemoryError):
        store.allocate([6])
    memory.refuse_alloc = False
    write(store, memory, 6)
    assert store.bytes_of(0) == bytes(PAGE)


def test_a_slab_refused_ahead_of_need_is_no_error(build: Any, memory: FakeHost) -> None:
    store = build()
    write(store, memory, 0)
    settle(store)
    memory.refuse_alloc = True
    store.allocate([1, 2, 3])
    settle(store)
    memory.refuse_alloc = False
    store.allocate([4, 5, 6, 7])


def test_closing_after_refused_memory(memory: FakeHost) -> None:
    store = HostStore(memory, PAGE, limit=None, spill=None)
    write(store, memory, 0)
    settle(store)
    memory.refuse_alloc = True
    store.allocate(range(1, 6))
    settle(store)
    store.close()
    assert not memory.slabs


def test_a_spill_folder_that_is_not_there(memory: FakeHost, tmp_path: Path) -> None:
    store = HostStore(memory, PAGE, limit=PAGE, spill=tmp_path / "missing")
    data = write(store, memory, 0)
    with pytest.raises(HostMemoryError, match="missing"):
        store.allocate([1])
    assert store.bytes_of(0) == data
    store.close()


def test_a_full_disk_costs_no_image(build: Any, memory: FakeHost) -> None:
    store = build(1, spill=True)
    data = {chunk: write(store, memory, chunk) for chunk in range(3)}
    store.drop(0)  # its place in the file is free, the one of chunk 1 behind it is not
    store._file = disk = Disk(store._file)
    disk.trouble = True
    with pytest.raises(HostMemoryError, match="No space"):
        store.allocate([3])
    disk.trouble = False
    for chunk in (3, 4):
        data[chunk] = write(store, memory, chunk)
    assert [store.bytes_of(chunk) for chunk in (1, 2, 3, 4)] == [data[c] for c in (1, 2, 3, 4)]


def test_groups_that_fit(build: Any) -> None:
    assert list(build(2).fitting([1, 2, 3, 4, 5])) == [[1, 2], [3, 4], [5]]
    assert list(build().fitting([1, 2, 3])) == [[1, 2, 3]]
    assert list(build(9).fitting([])) == []


class Disk:
    """A file whose writes and reads can be made to fail."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.trouble = False

    def write(self, data: Any) -> int:
        if self.trouble:
            raise OSError(28, "No space left on device")
        return int(self.real.write(memoryview(data)[:33]))  # writes may be short

    def readinto(self, data: Any) -> int:
        return 0 if self.trouble else int(self.real.readinto(memoryview(data)[:33]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class StoreMachine(RuleBasedStateMachine):
    """The model: chunk -> bytes."""

    @initialize(limit=st.one_of(st.none(), st.integers(1, 7)), spill=st.booleans())
    def begin(self, limit: int | None, spill: bool) -> None:
        self.memory = FakeHost()
        self.limit = limit
        folder = Path(tempfile.gettempdir()) if spill else None
        self.store = HostStore(
            self.memory, PAGE, limit=None if limit is None else limit * PAGE, spill=folder
        )
        self.spill = spill
        self.model: dict[int, bytes] = {}
        self.serial = 0

    def _disk(self) -> Disk | None:
        if self.store._file is not None and not isinstance(self.store._file, Disk):
            self.store._file = Disk(self.store._file)  # type: ignore[assignment]
        return self.store._file  # type: ignore[return-value]

    @rule(
        chunks=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=4),
        trouble=st.booleans(),
    )
    def allocate(self, chunks: list[int], trouble: bool) -> None:
        chunks = [chunk for chunk in chunks if chunk not in self.model]
        disk = self._disk()
        if disk is not None:
            disk.trouble = trouble
        try:
            addresses = self.store.allocate(chunks)
        except HostMemoryError:
            assert self.limit is not None
            assert len(self.model) + len(chunks) > self.limit
            assert trouble or not self.spill or len(chunks) > self.limit
        else:
            assert len(set(addresses)) == len(chunks)
            for chunk, address in zip(chunks, addresses, strict=True):
                self.serial += 1
                self.model[chunk] = self.serial.to_bytes(4, "little") * (PAGE // 4)
                self.memory.view(address, PAGE)[:] = self.model[chunk]
        if disk is not None:
            disk.trouble = False

    @precondition(lambda self: self.model)
    @rule(data=st.data(), trouble=st.booleans())
    def read(self, data: st.DataObject, trouble: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.model)))
        disk = self._disk()
        if disk is not None and trouble:
            disk.trouble = True
            with contextlib.suppress(HostMemoryError):
                assert self.store.bytes_of(chunk) == self.model[chunk]
            disk.trouble = False
        assert self.store.bytes_of(chunk) == self.model[chunk]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.model)))
        self.store.drop(chunk)
        del self.model[chunk]
        self.store.drop(chunk)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @invariant()
    def holds(self) -> None:
        assert set(self.store) == set(self.model)
        assert self.store.host_bytes + self.store.spilled_bytes == len(self.model) * PAGE
        if self.limit is not None:
            assert self.memory.allocated <= self.limit * PAGE
        for chunk, address in self.store._pages.items():
            assert bytes(self.memory.view(address, PAGE)) == self.model[chunk]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for chunk, want in self.model.items():
                assert self.store.bytes_of(chunk) == want
            self.store.close()
            assert not self.memory.slabs


TestStore = StoreMachine.TestCase


def test_fresh_memory_is_not_zero(memory: FakeHost) -> None:
    """The fake would hide a page that nobody filled, otherwise."""
    assert memory.view(memory.alloc(4), 4)[0] == POISON
    memory.slabs.clear()
