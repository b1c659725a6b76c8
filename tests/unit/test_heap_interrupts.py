"""Ctrl-C at every line of what moves page images about: no place has two pages, no bytes are lost, no lease goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.fake_engine import PAGE_BYTES, FakeHost
from support.interrupter import Interrupter, signalled

from kvflash_ggml.host import slabs
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import NOWHERE, PageImage
from kvflash_ggml.host.store import HostStore

FILES = tuple(f"host/{name}.py" for name in ("heap", "image", "slabs", "store"))


class Stored:
    """An image in a file, full of one number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def read_into(self, image: memoryview) -> None:
        image[:] = bytes([self.value]) * PAGE_BYTES


class World:
    """Five pages in a memory of three, the rest on the disk, and some that are still in their files."""

    def __init__(self, folder: Path) -> None:
        self.heap = PageHeap(FakeHost(), PAGE_BYTES, limit=3 * PAGE_BYTES, spill=folder)
        self.values: dict[PageImage, int] = {}
        self.pages = [self.write(value) for value in range(1, 6)]
        self.filed = [PageImage(source=Stored(value)) for value in range(20, 23)]
        self.values.update((page, page.source.value) for page in self.filed)  # type: ignore[union-attr]
        self.store = HostStore(self.heap)
        for chunk, page in enumerate(self.pages):
            self.store.put(chunk, page)

    def write(self, value: int) -> PageImage:
        (page,) = self.heap.new(1)
        with self.heap.lease([page]):
            self.heap.view(page)[:] = bytes([value]) * PAGE_BYTES
        self.values[page] = value
        return page

    def read(self, page: PageImage) -> None:
        with self.heap.lease([page]) as (address,):
            assert page.address == address
            assert set(self.heap.view(page)) == {self.values[page]}

    @property
    def live(self) -> list[PageImage]:
        """Pages with a holder."""
        return [*self.pages, *self.filed]

    def check_live(self, where: str) -> None:
        self.check(self.live, where)

    def check(self, live: list[PageImage], where: str) -> None:
        heap = self.heap
        assert not heap._leases.threads, f"{where}: a lease goes on"
        assert [set(heap.bytes_of(page)) for page in live] == [{self.values[page]} for page in live], where
        for kind in ("address", "place"):
            places = [getattr(page, kind) for page in live if getattr(page, kind) not in (0, NOWHERE)]
            assert len(places) == len(set(places)), f"{where}: two pages at one {kind}"
            free = [at for _, at in heap._slabs._free] if kind == "address" else heap._spill._free
            assert not set(places) & set(free), where


def let_go(world: World) -> None:
    """Pages are let go of, made, spilled and brought back."""
    heap, pages = world.heap, world.pages
    for chunk in (0, 4):
        world.store.drop(chunk)
    heap.release(pages.pop())
    heap.release(pages.pop(0))
    for _ in range(2):
        heap.release(heap.new(1)[0])
    for page in reversed(pages):
        world.read(page)


def lease(world: World) -> None:
    """One in another, some that do not all fit, pages whose last holder lets go of them meanwhile."""
    heap, pages = world.heap, world.pages
    with heap.lease(pages[:2]) as two, heap.lease_some(pages) as most:
        assert most[:2] == two
        assert len(most) == 3
        world.store.drop(0)
        heap.release(pages.pop(0))
        heap.bytes_of(pages[-1])
    with world.store.allocate([10]) as (address,):
        heap.view(world.store.page(10))[:] = bytes([9]) * PAGE_BYTES
        world.store.in_use([10], 0)
        assert world.store.page(10).address == address
    with world.store.lease_some([3, 10, 1]):
        pass


def load(world: World) -> None:
    """Pages come from their files, more than fit."""
    world.heap.load(world.filed)
    with world.heap.lease_some([*world.filed, *world.pages]):
        pass
    world.heap.release(world.filed.pop())


@pytest.mark.slow
@pytest.mark.parametrize("work", [let_go, lease, load])
def test_every_line(work: Callable[[World], None], tmp_path: Path) -> None:
    k, done = 0, False
    while not done:
        k += 1
        with mock.patch.object(slabs, "SLAB_BYTES", 2 * PAGE_BYTES):
            world = World(tmp_path)
            done = not Interrupter(k, FILES).run(partial(work, world), partial(world.check_live, f"line {k}"))
            live = world.live
            live += [world.write(value) for value in (100, 101)]
            for page in np.random.default_rng(k).permutation(np.array(live, object)):
                world.read(page)
            world.check(live, f"line {k}")
            world.heap.close()
    assert k > 150


@pytest.mark.slow
@pytest.mark.parametrize("work", [let_go, lease])
def test_real_signals(work: Callable[[World], None], tmp_path: Path) -> None:
    """Not in `load`, which starts threads: the standard library's own locks are not safe from signals."""
    hits = 0
    with mock.patch.object(slabs, "SLAB_BYTES", 2 * PAGE_BYTES):
        for seconds in np.random.default_rng(0).uniform(1e-5, 2e-3, 400):
            world = World(tmp_path)
            hits += signalled(partial(work, world), partial(world.check_live, f"after {seconds} s"), float(seconds))
            world.heap.close()
    assert hits
