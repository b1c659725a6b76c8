"""The blocks of a pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Blocks:
    """Says which blocks come next: of the free ones, the first in `order` (0, 1, 2, ... by default).

    Which are taken decides alone, so a restored session goes on in the places of the saved one, and a text that was cut
    and grows again is in order again. It remembers nothing: the page table says which blocks are taken.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None) -> None:
        order = range(count) if order is None else order
        assert sorted(order) == list(range(count)), "order must name every block once"
        self.count = count
        self._order = list(order)

    def free(self, taken: Collection[int]) -> list[int]:
        """All blocks but those, in the order in which they are handed out."""
        taken = frozenset(taken)
        return [block for block in self._order if block not in taken]
