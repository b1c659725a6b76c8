"""Host memory in slabs of numpy bytes, which are poisoned whenever nobody has written them."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

POISON = 0xDD


class FakeHost:
    """Host memory in slabs with made-up addresses (store.HostMemory)."""

    def __init__(self) -> None:
        self.slabs: dict[int, Bytes] = {}
        self.waits: list[int] = []
        self.refuse_alloc = False
        self.most = 0
        self._next = 1 << 20
        self._lock = threading.RLock()  # the store asks for slabs from a thread of its own, others read them

    @property
    def allocated(self) -> int:
        with self._lock:
            return sum(len(slab) for slab in self.slabs.values())

    def alloc(self, size: int) -> int:
        if self.refuse_alloc:
            return 0
        with self._lock:
            address, self._next = self._next, self._next + size + (1 << 12)
            self.slabs[address] = np.full(size, POISON, np.uint8)
            self.most = max(self.most, self.allocated)
        return address

    def free(self, address: int) -> None:
        with self._lock:
            self.slabs.pop(address).fill(POISON)

    def bytes_at(self, address: int, size: int) -> Bytes:
        with self._lock:
            slabs = list(self.slabs.items())
        for base, slab in slabs:
            if base <= address and address + size <= base + len(slab):
                return slab[address - base : address - base + size]
        raise AssertionError(f"{size} bytes at {address} are not ours")

    def view(self, address: int, size: int) -> memoryview:
        return memoryview(self.bytes_at(address, size))

    def wait(self, ticket: int) -> None:
        self.waits.append(ticket)
