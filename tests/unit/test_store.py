"""Page images in host memory, on disk and in the file they came from, and who holds them."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_host import POISON, FakeHost

from kvflash_ggml.errors import ConfigError, HostMemoryError, SnapshotError
from kvflash_ggml.host import slabs
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import NOWHERE, Lease, PageImage
from kvflash_ggml.host.store import HostStore

PAGE = 100
SLAB = 3
SEEDS = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", SLAB * PAGE + 50)


@pytest.fixture
def memory() -> FakeHost:
    return FakeHost()


@pytest.fixture
def build(memory: FakeHost, tmp_path: Path) -> Iterator[Any]:
    stores = []

    def make(pages: int | None = None, *, spill: bool = False, slack: int = 0) -> HostStore:
        limit = None if pages is None else pages * PAGE + slack
        stores.append(store_of(memory, limit=limit, spill=tmp_path if spill else None))
        return stores[-1]

    yield make
    for store in stores:
        close(store)
    assert not memory.slabs, "memory was not given back"
    assert not list(tmp_path.iterdir()), "something is left in the spill folder"


def store_of(memory: FakeHost, *, limit: int | None = None, spill: Path | None = None) -> HostStore:
    return HostStore(PageHeap(memory, PAGE, limit=limit, spill=spill))


def close(store: HostStore) -> None:
    store.clear()
    store.heap.close()


def write(store: HostStore, memory: FakeHost, chunk: int, ticket: int = 0) -> bytes:
    data = bytes([chunk % 256]) * PAGE
    with store.allocate([chunk]) as (address,):
        memory.view(address, PAGE)[:] = data
        store.in_use([chunk], ticket)
    store.filled([chunk], ticket)
    return data


def allocate(store: HostStore, chunks: Sequence[int]) -> list[int]:
    with store.allocate(chunks) as addresses:
        return addresses


def fetch(store: HostStore, chunk: int) -> bytes:
    """The image, by way of its memory."""
    with store.lease([chunk]):
        return bytes(store.heap.view(store.page(chunk)))


def settle(store: HostStore) -> None:
    if store.heap._slabs._next is not None:
        with contextlib.suppress(HostMemoryError):
            store.heap._slabs._next.result()


def test_images_come_back(build: Any, memory: FakeHost) -> None:
    store = build()
    data = {chunk: write(store, memory, chunk) for chunk in range(10)}
    for chunk in (3, 9, 0):
        assert store.bytes_of(chunk) == data[chunk]
        assert fetch(store, chunk) == data[chunk]
    assert sorted(store) == list(range(10))
    assert 5 in store
    assert 10 not in store
    assert store.heap.host_bytes == 10 * PAGE
    assert store.heap.spilled_bytes == 0


def test_neighbours_in_the_text_are_neighbours_in_memory(build: Any) -> None:
    a, b, c = allocate(build(), [0, 1, 2])
    assert (b - a, c - b) == (PAGE, PAGE)


def test_a_chunk_has_one_image(build: Any) -> None:
    store = build()
    store.allocate([1])
    with pytest.raises(AssertionError, match="has an image"):
        store.allocate([1])


@pytest.mark.parametrize(("pages", "slack"), [(1, 0), (2, 99), (3, 0), (4, 0), (7, 5), (9, 0)])
def test_the_ceiling_is_reached_and_not_passed(build: Any, memory: FakeHost, pages: int, slack: int) -> None:
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
    assert len(allocate(store, [1, 2, 3])) == 3


def test_a_ceiling_below_one_page_is_an_error_at_use(build: Any) -> None:
    for spill in (False, True):
        with pytest.raises(HostMemoryError):
            build(0, spill=spill, slack=50).allocate([0])


def test_the_longest_waiting_is_spilled(build: Any, memory: FakeHost, tmp_path: Path) -> None:
    store = build(4, spill=True)
    data = {chunk: write(store, memory, chunk) for chunk in range(4)}
    fetch(store, 0)
    data[4] = write(store, memory, 4)
    assert [chunk for chunk in store if store.page(chunk).place != NOWHERE] == [1]
    assert (store.heap.host_bytes, store.heap.spilled_bytes) == (4 * PAGE, PAGE)
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
    spill = store.heap._spill
    assert os.fstat(spill._file.fileno()).st_size <= 4 * PAGE


def test_a_page_is_reused_only_after_its_transfer(build: Any, memory: FakeHost) -> None:
    store = build(2, spill=True)
    write(store, memory, 0, ticket=7)
    write(store, memory, 1, ticket=8)
    assert store.ticket(0) == 7
    write(store, memory, 2, ticket=9)
    assert set(memory.waits) == {7}  # before it went to the disk
    assert store.ticket(0) == 0
    store.drop(1)
    assert set(memory.waits) == {7, 8}
    assert store.ticket(1) == 0
    store.bytes_of(2)
    assert set(memory.waits) == {7, 8, 9}
    del memory.waits[:]
    store.clear()
    assert memory.waits == [9]


def test_closing_waits_too(memory: FakeHost) -> None:
    store = store_of(memory)
    write(store, memory, 0, ticket=3)
    store.heap.close()
    assert memory.waits == [3]
    assert not memory.slabs
    store.heap.close()


def test_refused_memory_is_an_error_and_may_be_had_later(build: Any, memory: FakeHost) -> None:
    store = build()
    memory.refuse_alloc = True
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="could not get"):
            store.allocate([0])
    memory.refuse_alloc = False
    store.allocate(range(10, 13))
    settle(store)
    memory.refuse_alloc = True
    write(store, memory, 0)
    store.allocate([1, 2])  # this slab was made ahead
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
    store = store_of(memory)
    write(store, memory, 0)
    settle(store)
    memory.refuse_alloc = True
    store.allocate([1, 2, 3])
    settle(store)
    close(store)
    assert not memory.slabs


def test_a_spill_folder_that_is_not_there(memory: FakeHost, tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(ConfigError, match="missing is no folder"):
        store_of(memory, limit=PAGE, spill=folder)
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="missing is no folder"):
        store_of(memory, limit=PAGE, spill=folder)
    folder.unlink()
    folder.mkdir()
    store = store_of(memory, limit=PAGE, spill=folder)
    folder.rmdir()
    data = write(store, memory, 0)
    with pytest.raises(HostMemoryError, match="missing"):
        store.allocate([1])
    assert store.bytes_of(0) == data
    close(store)


def test_a_full_disk_costs_no_image(build: Any, memory: FakeHost) -> None:
    store = build(1, spill=True)
    data = {chunk: write(store, memory, chunk) for chunk in range(3)}
    store.drop(0)  # its place in the file is free, the one of chunk 1 behind it is not
    store.heap._spill._file = disk = Disk(store.heap._spill._file)
    disk.trouble = True
    with pytest.raises(HostMemoryError, match="No space"):
        store.allocate([3])
    disk.trouble = False
    for chunk in (3, 4):
        data[chunk] = write(store, memory, chunk)
    assert [store.bytes_of(chunk) for chunk in (1, 2, 3, 4)] == [data[c] for c in (1, 2, 3, 4)]


@pytest.mark.parametrize("how", ["bit", "hole"])
def test_a_spilled_page_that_has_changed_is_not_believed(how: str, build: Any, memory: FakeHost) -> None:
    store = build(1, spill=True)
    data = {chunk: write(store, memory, chunk) for chunk in (1, 2, 3)}
    store.heap._spill._file.seek(0)
    store.heap._spill._file.write(b"\xff" if how == "bit" else bytes(PAGE))
    for read in (partial(fetch, store), store.bytes_of):
        with pytest.raises(SnapshotError, match="damaged"):
            read(1)
    assert not store.heap.readable(store.page(1))
    assert [store.bytes_of(chunk) for chunk in (2, 3)] == [data[2], data[3]]


def test_groups_that_fit(build: Any) -> None:
    assert list(build(2).heap.fitting([1, 2, 3, 4, 5])) == [[1, 2], [3, 4], [5]]
    assert list(build().heap.fitting([1, 2, 3])) == [[1, 2, 3]]
    assert list(build(9).heap.fitting([])) == []


# --- several holders


def test_a_page_lives_as_long_as_somebody_holds_it(build: Any, memory: FakeHost) -> None:
    text = build(4)
    other = HostStore(text.heap)
    data = write(text, memory, 0)
    page = text.page(0)
    other.put(7, page)
    kept = text.heap.retain(page)
    text.drop(0)
    assert other.bytes_of(7) == text.heap.bytes_of(kept) == data
    with pytest.raises(AssertionError, match="has an image"):
        other.put(7, page)
    other.clear()
    assert text.heap.bytes_of(kept) == data
    assert text.heap.host_bytes == PAGE
    text.heap.release(kept)
    assert text.heap.host_bytes == 0
    with pytest.raises(AssertionError):
        text.heap.release(kept)
    assert sorted(allocate(text, range(4))) == sorted({text.page(chunk).address for chunk in range(4)})


def test_a_spilled_page_that_is_held_twice_has_one_place(build: Any, memory: FakeHost) -> None:
    store = build(1, spill=True)
    data = write(store, memory, 0)
    kept = store.heap.retain(store.page(0))
    write(store, memory, 1)
    assert store.heap.spilled_bytes == PAGE
    store.drop(0)
    assert store.heap.bytes_of(kept) == data
    assert store.heap.spilled_bytes == PAGE
    store.heap.release(kept)
    assert store.heap.spilled_bytes == 0


# --- pages of a file


class Origin:
    """A page image in a file (host.image.PageSource)."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.trouble = False
        self.reads = 0

    def read_into(self, image: memoryview) -> None:
        self.reads += 1
        if self.trouble:
            image[: PAGE // 2] = bytes(PAGE // 2)  # half of it was read
            raise SnapshotError("the file is damaged")
        image[:] = self.data


def test_a_page_of_a_file_is_read_when_it_is_needed(build: Any, memory: FakeHost) -> None:
    store = build()
    origin = Origin(b"o" * PAGE)
    page = PageImage(source=origin)
    store.put(3, page)
    store.heap.release(page)
    assert (store.heap.host_bytes, origin.reads) == (0, 0)
    assert store.bytes_of(3) == origin.data
    assert (store.heap.host_bytes, origin.reads) == (0, 1)
    assert fetch(store, 3) == origin.data
    fetch(store, 3)
    assert store.bytes_of(3) == origin.data
    assert (store.heap.host_bytes, origin.reads) == (PAGE, 2)


def test_pages_of_a_file_leave_first_and_are_not_spilled(build: Any, memory: FakeHost) -> None:
    """Also without a spill folder: the file has them."""
    for spill in (False, True):
        store = build(2, spill=spill)
        data = write(store, memory, 0)
        page = PageImage(source=Origin(b"o" * PAGE))
        store.put(1, page)
        fetch(store, 1)
        write(store, memory, 2)
        assert (page.address, page.place) == (0, NOWHERE)
        assert store.heap.spilled_bytes == 0
        assert store.bytes_of(0) == data
        assert store.bytes_of(1) == b"o" * PAGE
    with pytest.raises(HostMemoryError):
        build(0, slack=50).heap.lease([page]).__enter__()


@pytest.mark.parametrize(("pages", "spill"), [(1, True), (2, True), (2, False), (3, False)])
def test_pages_that_are_fetched_together_stay_together(build: Any, memory: FakeHost, pages: int, spill: bool) -> None:
    """Of two pages of a file the first must not make room for the second, before anybody has read it."""
    store = build(pages, spill=spill)
    own = {chunk: write(store, memory, chunk) for chunk in range(pages if spill else 1)}
    for chunk in range(10, 14):
        page = PageImage(source=Origin(bytes([chunk]) * PAGE))
        store.put(chunk, page)
        store.heap.release(page)
    left, groups = [10, 11, 0, 12, 13], []
    while left:
        with store.lease_some(left) as addresses:
            assert len(set(addresses)) == len(addresses) > 0
            for chunk, address in zip(left, addresses, strict=False):
                assert bytes(memory.view(address, PAGE)) == bytes([chunk]) * PAGE
        groups.append(len(addresses))
        left = left[len(addresses) :]
    assert max(groups) == (pages if spill or pages > 2 else 2)
    assert store.bytes_of(0) == own[0]


def test_a_damaged_file_costs_no_memory(build: Any, memory: FakeHost) -> None:
    store = build(1)
    origin = Origin(b"o" * PAGE)
    store.put(0, PageImage(source=origin))
    origin.trouble = True
    for _ in range(5):
        with pytest.raises(SnapshotError):
            fetch(store, 0)
        with pytest.raises(SnapshotError):
            store.bytes_of(0)
    assert store.heap.host_bytes == 0
    origin.trouble = False
    assert fetch(store, 0) == origin.data


def test_threads_share_a_heap(build: Any, memory: FakeHost) -> None:
    """One reads the text, one writes a snapshot, one scores: nobody sees the bytes of another page."""
    store = build(5, spill=True)
    heap = store.heap
    for chunk in range(12):
        write(store, memory, chunk)
    wrong: list[object] = []
    changing = threading.Lock()

    def look(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                chunk = rng.randrange(12)
                with changing:
                    page = heap.retain(store.page(chunk))
                if rng.random() < 0.5:
                    with heap.lease([page]) as (address,):
                        data = bytes(memory.view(address, PAGE))
                else:
                    data = heap.bytes_of(page)
                if data != bytes([chunk]) * PAGE:
                    wrong.append((chunk, data))
                heap.release(page)
        except BaseException as err:
            wrong.append(err)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = random.Random(9)
    for _ in range(300):
        chunk = rng.randrange(12)
        with changing:
            store.drop(chunk)
            write(store, memory, chunk)
    for thread in threads:
        thread.join()
    assert not wrong
    assert heap.host_bytes + heap.spilled_bytes == 12 * PAGE


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
    """The model: chunk -> bytes for two texts, pages that snapshots hold, and leases with what they were given."""

    @initialize(limit=st.sampled_from([2, 1, 3, 5, 7, None]), spill=st.booleans())
    def begin(self, limit: int | None, spill: bool) -> None:
        self.memory = FakeHost()
        self.limit = limit
        folder = Path(tempfile.gettempdir()) if spill else None
        self.heap = PageHeap(self.memory, PAGE, limit=None if limit is None else limit * PAGE, spill=folder)
        self.spill = spill
        self.stores = [HostStore(self.heap), HostStore(self.heap)]
        self.models: list[dict[int, PageImage]] = [{}, {}]
        self.held: list[PageImage] = []
        self.leases: list[tuple[Lease, dict[PageImage, int]]] = []
        self.data: dict[PageImage, bytes] = {}
        self.busy: dict[int, int] = {}  # address -> the transfer that must be over before it is used again
        self.serial = 0

    # --- what the model says

    def live(self) -> set[PageImage]:
        return {*self.models[0].values(), *self.models[1].values(), *self.held}

    def leased(self) -> set[PageImage]:
        """Pages that may not leave, whoever holds them."""
        return {page for _, addresses in self.leases for page in addresses}

    def must_stay(self) -> int:
        """Pages that nothing but memory can hold, or that are leased."""
        stay = {page for page in self.live() if page.source is None and page.place == NOWHERE}
        return len(stay | self.leased())

    def image(self) -> bytes:
        self.serial += 1
        return self.serial.to_bytes(4, "little") * (PAGE // 4)

    @contextlib.contextmanager
    def trouble(self, on: bool) -> Iterator[None]:
        """The disk fails: the spill file, and the files that pages came from."""
        spill = self.heap._spill
        if spill is not None and spill._file is not None and not isinstance(spill._file, Disk):
            spill._file = Disk(spill._file)  # type: ignore[assignment]
        ill = [spill and spill._file, *(page.source for page in self.live())] if on else []
        for each in ill:
            if each is not None:
                each.trouble = True  # type: ignore[union-attr]
        yield
        for each in ill:
            if each is not None:
                each.trouble = False  # type: ignore[union-attr]

    def pick(self, seed: int, most: int = 5) -> list[PageImage]:
        """Some pages, in any order, the ones that are not in memory rather than others."""
        rng = random.Random(seed)
        pages = sorted(self.live(), key=lambda page: self.data[page])
        away = [page for page in pages if not page.address]
        pages = away if away and rng.random() < 0.5 else pages
        return rng.sample(pages, min(len(pages), rng.randint(1, most)))

    # --- what may happen

    @rule(
        which=st.integers(0, 1),
        chunks=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=3),
        trouble=st.booleans(),
        transfer=st.booleans(),
    )
    def allocate(self, which: int, chunks: list[int], trouble: bool, transfer: bool) -> None:
        store, model = self.stores[which], self.models[which]
        chunks = [chunk for chunk in chunks if chunk not in model]
        fits = self.limit is None or self.must_stay() + len(chunks) <= self.limit
        with self.trouble(trouble):
            try:
                addresses = allocate(store, chunks)
            except HostMemoryError:
                assert self.limit is not None
                assert not fits
                assert trouble or not self.spill or len(chunks) + len(self.leased()) > self.limit
                return
        assert fits or self.spill
        assert len(set(addresses)) == len(chunks)
        for chunk, address in zip(chunks, addresses, strict=True):
            if address in self.busy:
                assert self.busy.pop(address) in self.memory.waits, "the memory is still being read"
            page = model[chunk] = store.page(chunk)
            self.data[page] = self.image()
            self.memory.view(address, PAGE)[:] = self.data[page]
            if transfer:
                store.in_use([chunk], self.serial)
                self.busy[address] = self.serial

    @rule(which=st.integers(0, 1), chunk=st.integers(0, 30), keep=st.booleans())
    def adopt_from_a_file(self, which: int, chunk: int, keep: bool) -> None:
        if chunk in self.models[which]:
            return
        data = self.image()
        page = PageImage(source=Origin(data))
        self.stores[which].put(chunk, page)
        self.models[which][chunk] = page
        self.data[page] = data
        if keep:
            self.held.append(page)
        else:
            self.heap.release(page)

    @precondition(lambda self: self.live())
    @rule(seed=SEEDS, which=st.integers(0, 1), chunk=st.integers(0, 30))
    def adopt(self, seed: int, which: int, chunk: int) -> None:
        if chunk not in self.models[which]:
            (page,) = self.pick(seed, 1)
            self.stores[which].put(chunk, page)
            self.models[which][chunk] = page

    @precondition(lambda self: self.live())
    @rule(seed=SEEDS)
    def retain(self, seed: int) -> None:
        for page in self.pick(seed):
            assert self.heap.retain(page) is page
            self.held.append(page)

    @precondition(lambda self: self.held)
    @rule(seed=SEEDS)
    def release(self, seed: int) -> None:
        """In any order, and not the one they were taken in."""
        rng = random.Random(seed)
        rng.shuffle(self.held)
        for _ in range(rng.randint(1, len(self.held))):
            self.heap.release(self.held.pop())

    @precondition(lambda self: self.live())
    @rule(seed=SEEDS, trouble=st.booleans())
    def read(self, seed: int, trouble: bool) -> None:
        for page in self.pick(seed):
            if trouble:
                with self.trouble(True), contextlib.suppress(HostMemoryError, SnapshotError):
                    assert self.heap.bytes_of(page) == self.data[page]
            assert self.heap.bytes_of(page) == self.data[page]

    @precondition(lambda self: self.live())
    @rule(seed=SEEDS, trouble=st.booleans())
    def lease(self, seed: int, trouble: bool) -> None:
        for page in self.pick(seed):
            spare = self.limit is None or len(self.leased()) < self.limit
            room = self.limit is None or self.must_stay() < self.limit or (self.spill and spare) or bool(page.address)
            with self.trouble(trouble):
                try:
                    with self.heap.lease([page]) as (address,):
                        assert bytes(self.memory.view(address, PAGE)) == self.data[page]
                except (HostMemoryError, SnapshotError):
                    assert trouble or not room
                    continue
            assert room
            self.holds()

    @precondition(lambda self: self.live())
    @rule(seed=SEEDS)
    def lease_some(self, seed: int) -> None:
        pages = self.pick(seed)
        together = [len(self.leased() | set(pages[:n])) for n in range(1, len(pages) + 1)]
        fit = sum(self.limit is None or count <= self.limit for count in together)
        lease = self.heap.lease_some(pages)
        try:
            addresses = lease.__enter__()
        except HostMemoryError:
            assert self.must_stay() == self.limit
            assert not self.spill or fit == 0
            return
        assert 0 < len(addresses) <= fit
        assert self.limit is not None or len(addresses) == len(pages)
        assert not self.spill or len(addresses) == fit
        for page, address in zip(pages, addresses, strict=False):
            assert bytes(self.memory.view(address, PAGE)) == self.data[page]
        self.leases.append((lease, dict(zip(pages, addresses, strict=False))))

    @precondition(lambda self: self.leases)
    @rule(seed=SEEDS)
    def end_a_lease(self, seed: int) -> None:
        lease, _ = self.leases.pop(seed % len(self.leases))
        lease.__exit__(None, None, None)

    @precondition(lambda self: self.models[0] or self.models[1])
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([i for i in (0, 1) if self.models[i]]))
        chunk = data.draw(st.sampled_from(sorted(self.models[which])))
        self.stores[which].drop(chunk)
        del self.models[which][chunk]
        self.stores[which].drop(chunk)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        self.stores[which].clear()
        self.models[which].clear()

    # --- what is always so

    @invariant()
    def holds(self) -> None:
        live, heap = self.live(), self.heap
        for store, model in zip(self.stores, self.models, strict=True):
            assert {chunk: store.page(chunk) for chunk in store} == model
        for page in live:
            owners = sum(p is page for model in self.models for p in model.values())
            assert page.holders == owners + self.held.count(page)
            assert page.address or page.place != NOWHERE or page.source is not None, "an image is lost"
            assert page.place == NOWHERE or not page.address, "a place in the file is wasted"
            if page.address:
                assert bytes(self.memory.view(page.address, PAGE)) == self.data[page]
        for _, addresses in self.leases:
            for page, address in addresses.items():
                assert page.address == address, "it has moved while it was leased"
                assert bytes(self.memory.view(address, PAGE)) == self.data[page]
        inside = {page for page in live | self.leased() if page.address}
        assert set(heap._pages) == inside
        assert heap.host_bytes == len(inside) * PAGE
        assert heap.spilled_bytes == sum(page.place != NOWHERE for page in live) * PAGE
        places = [page.place for page in live if page.place != NOWHERE]
        if heap._spill is not None:
            assert sorted([*places, *heap._spill._free]) == list(range(heap._spill._places))
        if self.limit is not None:
            assert self.memory.allocated <= self.limit * PAGE

    def teardown(self) -> None:
        if hasattr(self, "heap"):
            while self.leases:
                self.end_a_lease(0)
            for page in self.live():
                assert self.heap.bytes_of(page) == self.data[page]
            for page in self.held:
                self.heap.release(page)
            for store in self.stores:
                store.clear()
            assert self.heap.host_bytes == self.heap.spilled_bytes == 0
            self.heap.close()
            assert not self.memory.slabs


TestStore = StoreMachine.TestCase
if not settings.get_current_profile_name().endswith("long"):
    TestStore.settings = settings(max_examples=settings().max_examples * 5 // 2, stateful_step_count=40)


def test_fresh_memory_is_not_zero(memory: FakeHost) -> None:
    """The fake would hide a page that nobody filled, otherwise."""
    assert memory.view(memory.alloc(4), 4)[0] == POISON
    memory.slabs.clear()
