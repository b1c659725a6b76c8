"""Places for page images: how much memory is made for them, and which are taken first."""

from __future__ import annotations

import pytest

from kvflash_ggml.host import slabs
from kvflash_ggml.host.slabs import Slabs

PAGE = 10


class Memory:
    """Host memory that remembers what it was asked for, and lies below what it gave before, as a system maps it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.next = 1 << 40

    def alloc(self, size: int) -> int:
        self.asked.append(size)
        self.next -= 2 * size
        return self.next

    def free(self, address: int) -> None: ...

    def view(self, address: int, size: int) -> memoryview:
        raise NotImplementedError

    def wait(self, ticket: int) -> None: ...


@pytest.fixture
def memory() -> Memory:
    return Memory()


def sizes(monkeypatch: pytest.MonkeyPatch, slab: int, largest: int) -> None:
    """Of slabs, in pages."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", slab * PAGE)
    monkeypatch.setattr(slabs, "MAX_SLAB_BYTES", largest * PAGE)


def test_the_lowest_address_is_taken_first(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, 4, 4)
    places = Slabs(memory, PAGE, None)
    first = [places.take() for _ in range(4)]
    assert first == list(range(first[0], first[0] + 4 * PAGE, PAGE))
    for address in (first[2], first[0], first[3]):
        places.give_back(address)
    assert [places.take() for _ in range(3)] == [first[0], first[2], first[3]]
    places.close()


def test_what_is_new_is_touched_last(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """However high its slab lies, a place that was in use before one that never was."""
    sizes(monkeypatch, 3, 3)
    places = Slabs(memory, PAGE, None)
    first = [places.take() for _ in range(3)]
    second = places.take()
    assert second < first[0]
    for address in (second, first[2], first[0]):
        places.give_back(address)
    assert [places.take() for _ in range(4)] == [first[0], first[2], second, second + PAGE]
    places.close()


@pytest.mark.parametrize(
    ("most", "want"), [(None, [4] * 32 + [4, 4, 4, 4, 4, 4, 4, 4, 5]), (21, [4] * 5 + [1]), (3, [3])]
)
def test_slabs_are_made_up_to_a_ceiling(
    most: int | None, want: list[int], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes(monkeypatch, 4, 16)
    places = Slabs(memory, PAGE, most)
    taken = [places.take() for _ in range(sum(want) - want[-1] + 1 if most is None else most)]
    assert 0 not in taken
    assert len(set(taken)) == len(taken)
    if most is not None:
        assert places.take() == 0
    places.close()
    assert [size // PAGE for size in memory.asked][: len(want)] == want


@pytest.mark.parametrize("needed", [1, 100, 1000, 5000])
def test_little_is_made_beyond_what_is_needed(needed: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that has just been begun, and the one ahead: each of the first one's size, or a 32nd of those before."""
    sizes(monkeypatch, 8, 64)
    places = Slabs(memory, PAGE, None)
    for _ in range(needed):
        places.take()
    places.close()
    made = sum(memory.asked) // PAGE
    assert needed < made < needed + 2 * max(8, needed // 32)
    assert max(memory.asked) == {1: 8, 100: 8, 1000: 31, 5000: 64}[needed] * PAGE


def test_where_few_pages_are_needed_slabs_stay_small(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device does nothing else while memory is page-locked: an answer would wait for it."""
    sizes(monkeypatch, 8, 64)
    places = Slabs(memory, PAGE, None)
    taken = [places.take(few=True) for _ in range(8 + 3 * 2)]
    taken += [places.take() for _ in range(2 + 16)]
    places.close()
    assert len(set(taken)) == len(taken)
    assert [size // PAGE for size in memory.asked][:6] == [8, 2, 2, 2, 2, 8]
