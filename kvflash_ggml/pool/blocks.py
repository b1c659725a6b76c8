"""The free blocks of a pool."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence


class Blocks:
    """Hands out blocks: of the free ones, the first in `order` (0, 1, 2, ... by default).

    Which are free decides alone, so a restored session goes on in the places of the saved one, and a text that was cut
    and grows again is in order again.

    Kept apart from the page table because several sequences can share one pool.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None) -> None:
        order = range(count) if order is None else order
        assert sorted(order) == list(range(count)), "order must name every block once"
        self.count = count
        self._order = list(order)
        self._rank = {block: -rank for rank, block in enumerate(order)}
        self._free = self._order[::-1]

    def __len__(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def claim(self, block: int) -> None:
        """Take this very block."""
        self._free.remove(block)

    def give(self, block: int) -> None:
        assert 0 <= block < self.count, f"there is no block {block}"
        assert block not in self._free, f"block {block} is not taken"
        insort(self._free, block, key=self._rank.__getitem__)

    def reset(self) -> None:
        self._free = self._order[::-1]

    def free(self) -> frozenset[int]:
        return frozenset(self._free)
