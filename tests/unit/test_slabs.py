"""Places for page images: which of them are used first."""

from __future__ import annotations

import pytest

from kvflash_ggml.host import slabs
from kvflash_ggml.host.slabs import Slabs

PAGE = 64


class Downwards:
    """Memory that lies below what was given before, as the system maps it."""

    def __init__(self) -> None:
        self.next = 1 << 40

    def alloc(self, size: int) -> int:
        self.next -= 2 * size
        return self.next

    def free(self, address: int) -> None: ...

    def view(self, address: int, size: int) -> memoryview:
        raise NotImplementedError

    def wait(self, ticket: int) -> None: ...


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Slabs:
    """Three pages a slab."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 3 * PAGE)
    monkeypatch.setattr(slabs, "MAX_SLAB_BYTES", 3 * PAGE)
    return Slabs(Downwards(), PAGE, None)


def test_pages_of_a_prompt_lie_side_by_side(places: Slabs) -> None:
    taken = [places.take() for _ in range(6)]
    first, second = taken[0], taken[3]
    assert taken == [first, first + PAGE, first + 2 * PAGE, second, second + PAGE, second + 2 * PAGE]
    assert second < first
    places.close()


def test_what_is_new_is_touched_last(places: Slabs) -> None:
    """However high its slab lies, a place that was in use before one that never was."""
    first = [places.take() for _ in range(3)]
    second = places.take()
    for address in (second, first[2], first[0]):
        places.give_back(address)
    assert [places.take() for _ in range(4)] == [first[0], first[2], second, second + PAGE]
    places.close()
