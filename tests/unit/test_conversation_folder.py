"""Where a server keeps conversations: its folder, and how many files it may open."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_model import FakeModel, FakePrompts

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.server.run import serve
from kvflash_ggml.server.settings import ServerSettings
from kvflash_ggml.snapshot.container import MAGIC
from kvflash_ggml.store.swapped import Conversation, ConversationFolder, SwapStore


def test_what_a_killed_server_left_unfinished_goes(tmp_path: Path) -> None:
    swapped = tmp_path / "parked"
    swapped.mkdir()
    old, new, other = (swapped / name for name in (".c-1.kvs.ab.part", ".c-2.kvs.ab.part", "notes.txt"))
    for path in (old, new, other):
        path.write_bytes(bytes(MAGIC) + b"the rest")
    for path in (old, other):
        os.utime(path, (time.time() - 3600,) * 2)
    ConversationFolder(tmp_path)
    assert sorted(swapped.iterdir()) == [new, other]


def test_two_servers_may_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch = Path.touch

    def beside_another(path: Path) -> None:
        touch(path)
        path.unlink()

    monkeypatch.setattr(Path, "touch", beside_another)
    ConversationFolder(tmp_path)
    assert not list((tmp_path / "parked").iterdir())


@pytest.fixture
def few_files() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_may_open_many_files(few_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    (tmp_path / "no folder").touch()
    settings = ServerSettings(alias="fake", session_dir=tmp_path / "no folder")
    with pytest.raises(ConfigError), socket.socket() as sock:
        serve(FakeModel(), FakePrompts(), settings, sock, found=print, ready=print)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_files, few_files)


def test_a_file_that_another_server_deletes_meanwhile(tmp_path: Path) -> None:
    folder = ConversationFolder(tmp_path)
    for salt in ("", "aa", "bb"):
        folder.named("one", salt).touch()
    os.utime(folder.named("one", "aa"), (time.time() + 60,) * 2)

    def may(salt: str) -> bool:
        if salt == "aa":
            folder.named("one", salt).unlink()
        return salt != ""

    assert folder.find("one", may) == (folder.named("one", "bb"), "bb")


def test_a_folder_that_the_system_deletes_is_made_again(tmp_path: Path) -> None:
    """That of `serve --models-dir` lies among the temporary files, unless another one is named."""
    swapped: Any = SimpleNamespace(tokens=np.arange(9, dtype=np.int32), places=None, parts=dict, release=list)
    store = SwapStore(
        capacity=1 << 30, folder=ConversationFolder(tmp_path / "all"), read=lambda path: swapped,
        write=lambda swapped, path, sync: path.write_bytes(b"1"),
    )  # fmt: skip
    one = Conversation(tokens=swapped.tokens)
    store.put(one, swapped, 0.0)
    shutil.rmtree(tmp_path / "all")
    assert store.store(one)
    assert one.stored is not None
    assert one.stored.path.read_bytes() == b"1"
