"""Page images that go to a disk which takes no more of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.heaps import PAGE, heaps, spilled, write

from kvflash_ggml.errors import HostMemoryError


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Any]:
    with heaps(tmp_path) as make:
        yield make


class Full:
    """Grows no more."""

    def __init__(self, file: Any) -> None:
        self.seek, self.readinto, self._file, self._size = (
            file.seek,
            file.readinto,
            file,
            os.fstat(file.fileno()).st_size,
        )

    def write(self, image: memoryview) -> int:
        if self._file.tell() >= self._size:
            raise OSError(28, "No space left on device")
        return int(self._file.write(image))


def test_no_more_is_let_go_of_than_a_full_disk_needs(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes leaves its places in the file to others."""
    heap = build(2)
    kept = [write(heap, value, value) for value in (1, 2, 3)]
    wanted = write(heap, 4, 5)
    assert all(map(all, map(spilled, kept)))

    def let_go() -> bool:
        for page in (gone := kept.pop(0) if not heap.spills and kept else []):
            heap.release(page)
        return bool(gone)

    heap.add_reclaimer(let_go)
    with monkeypatch.context() as patch:
        patch.setattr(heap._spill, "_file", Full(heap._spill._file))
        wanted += write(heap, 6, 7)
    assert len(kept) == 2
    assert [set(heap.bytes_of(page)) for page in wanted] == [{4}, {5}, {6}, {7}]


def test_a_folder_that_has_gone_is_told_once(build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not the name of each file that could not be made in it."""
    heap = build(1)
    write(heap, 1)
    tmp_path.rmdir()
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="No such file"):
            heap.new(1)
    assert caplog.text.count("No such file") == 1
    tmp_path.mkdir()


def test_what_is_kept_for_later_is_let_go_of_while_a_disk_is_full(
    build: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heap = build(2)
    pages = write(heap, 1, 2, 3)
    kept = write(heap, 4, 5, 6)
    heap.add_reclaimer(lambda: not heap.spills and bool(kept) and (heap.release(kept.pop()) or True))
    before = heap.spilled_bytes
    write(heap, 7)
    assert (len(kept), heap.spilled_bytes) == (3, before + PAGE), "there is room on the disk"

    with monkeypatch.context() as patch:
        patch.setattr(heap._spill, "_file", Full(heap._spill._file))
        write(heap, 8, 9)
        assert len(kept) < 3
        with pytest.raises(HostMemoryError, match="No space left"):
            write(heap, 10, 11, 12)
        assert not heap.spills
    assert not kept
    assert caplog.text.count("No space left") == 1
    write(heap, 13, 14)
    assert heap.spills
    assert [set(heap.bytes_of(page)) for page in pages] == [{1}, {2}, {3}], "nothing that is wanted is lost"


def test_the_page_that_waited_longest_is_spilled(build: Any) -> None:
    heap = build(2)
    first, second = write(heap, 1, 2)
    with heap.lease([first]):
        pass
    write(heap, 3)
    assert spilled([first, second]) == [False, True], "a lease makes a page the newest"
