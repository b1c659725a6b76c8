"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvflash_ggml.cli.model import in_words
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.files import check_writable, replacing, write_atomically


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_rights_that_the_user_asks_for(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", "text")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask
        assert os.umask(mask) == mask, "the mask of the whole process was changed"
    finally:
        os.umask(before)


def test_what_was_there_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("half, and not in bytes")  # type: ignore[arg-type]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(tmp_path / "missing" / "file.html", "text")
    assert raised.value.filename == str(tmp_path / "missing" / "file.html")


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.EFBIG, r"File too large\. Files there have a largest size: .* \(ulimit -f\)\."),
        (errno.ENOSPC, r"No space left on device\. Make room there\."),
    ],
)
def test_a_file_that_takes_no_more_is_named_with_what_helps(tmp_path: Path, number: int, helps: str) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as raised, replacing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert re.fullmatch(f"{re.escape(str(tmp_path / 'file'))}: {helps}", in_words(raised.value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sync", [True, False])
def test_nobody_waits_for_the_disk_who_need_not(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    with replacing(tmp_path / "file", sync=sync) as file:
        file.write(b"new")
    assert bool(waited) == sync
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor is a device: the administrator's /dev/full would be a file then."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ConfigError, match=f"{name} is a pipe or a device: name a file to write"):
            check_writable(tmp_path / name)
        with pytest.raises(OSError, match="it is a pipe or a device"), replacing(tmp_path / name):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_two_can_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as two:
        one.write(b"one")
        two.write(b"two")
    assert path.read_text() == "one", "the one that was done last"
    assert list(tmp_path.iterdir()) == [path]


def test_the_move_is_guarded(tmp_path: Path) -> None:
    path, steps = tmp_path / "file", []

    @contextmanager
    def guard() -> Iterator[None]:
        steps.append(path.exists())
        yield
        steps.append(path.exists())

    with replacing(path, guard=guard) as file:
        file.write(b"x")
    assert steps == [False, True]
