"""The blocks of a pool, and whose they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Owner(Protocol):
    """A page table on the pool."""

    @property
    def held(self) -> frozenset[int]:
        """The blocks that its text is in."""
        ...


class BlockAllocator:
    """Says which blocks are free for whom: of those, the first in `order` (0, 1, 2, ... by default).

    It remembers who there is, and nothing of what they hold: each owner says that itself. So no interrupt can make the
    two disagree, and a restored text goes on in the blocks of the saved one. Owners may hold a block together; it is
    free when the last of them has let go.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None) -> None:
        order = range(count) if order is None else order
        assert sorted(order) == list(range(count)), "order must name every block once"
        self.count = count
        self._order = list(order)
        self._owners: list[Owner] = []

    def join(self, owner: Owner) -> None:
        """From here on the owner's blocks are taken."""
        self._owners.append(owner)

    def leave(self, owner: Owner) -> None:
        """The owner's blocks are free, unless others hold them too."""
        self._owners = [other for other in self._owners if other is not owner]

    def quota(self, owner: Owner) -> int:
        """How many blocks the owner could have at most: all that no other holds alone."""
        others = self._others(owner)
        return self.count - (len(others - owner.held) if others else 0)

    def free(self, owner: Owner, taken: Collection[int]) -> list[int]:
        """The blocks that others do not hold and that are not among `taken`, in the order they are handed out."""
        out = self._others(owner).union(taken)
        return [block for block in self._order if block not in out]

    def _others(self, owner: Owner) -> frozenset[int]:
        return frozenset[int]().union(*(other.held for other in self._owners if other is not owner))
