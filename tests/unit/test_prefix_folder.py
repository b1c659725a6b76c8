"""A folder of prefixes to which others can write too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.prefix_texts import make_heap, make_tier, put, text

from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.store.disk import DiskTier

SYSTEM, A = (1, 640), (2, 200)


@pytest.fixture
def heap() -> PageHeap:
    return make_heap()


@pytest.fixture
def tier(tmp_path: Path, heap: PageHeap) -> DiskTier:
    return make_tier(tmp_path, heap)


@pytest.mark.parametrize("what", ["link", "dangling", "pipe", "folder"])
def test_what_lies_in_place_of_the_lock_is_left_alone(
    what: str, tier: DiskTier, tmp_path: Path, heap: PageHeap
) -> None:
    """A link is not followed, a pipe is not waited for: the text is not stored, and the error says so."""
    tokens = text(SYSTEM, A)
    lock, precious = tmp_path / ".lock", tmp_path / "precious"
    lock.unlink(missing_ok=True)
    if what == "link":
        precious.write_text("of somebody")
        lock.symlink_to(precious)
    elif what == "dangling":
        lock.symlink_to(precious)
    elif what == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(OSError, match="lock"):
        put(tier, heap, tokens)
    assert precious.exists() == (what == "link")
    assert what != "link" or precious.read_text() == "of somebody"
    (lock.rmdir if what == "folder" else lock.unlink)()
    put(tier, heap, tokens)
    assert tier.find(tokens) is not None


def test_files_of_others_are_not_even_looked_at(
    tier: DiskTier, tmp_path: Path, heap: PageHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    (home,) = {file.parent for file in tmp_path.glob("*/*.segment")}
    for i in range(50):
        (home / f"foreign-{i}").write_text("x")
    looked: list[str] = []
    scandir = os.scandir

    class Spy:
        """A directory entry that notes when it is looked at."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name = entry.name
            self._entry = entry

        def is_file(self, **kwargs: Any) -> bool:
            looked.append(self.name)
            return self._entry.is_file(**kwargs)

    @contextlib.contextmanager
    def spying(path: Path) -> Iterator[Iterator[Spy]]:
        with scandir(path) as entries:
            yield map(Spy, entries)

    monkeypatch.setattr(os, "scandir", spying)
    assert tier.find(tokens) is not None
    monkeypatch.undo()
    assert looked
    assert not [name for name in looked if name.startswith("foreign")]
