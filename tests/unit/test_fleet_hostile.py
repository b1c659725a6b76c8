"""A store that servers share, and that somebody has damaged, or that fails at the worst moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from support.fake_objects import MemoryObjects

from kvflash_fleet import shared as shared_module
from kvflash_fleet.objects import MAX_OBJECT, FolderObjects, Listed, RemoteObjects, TimedObjects
from kvflash_fleet.shared import Draft, Head, SharedTexts, begin_of, parse_name
from kvflash_fleet.takeover import SharedSwapStore
from kvflash_ggml.cli.main import main
from kvflash_ggml.errors import KVFlashError, SnapshotError
from kvflash_ggml.files import being_written
from kvflash_ggml.store.swapped import Conversation

MODEL = "0123456789abcdef" * 2
TEXT = np.arange(600, dtype=np.int32) % 90 + 33
ID = "c-0123456789abcdef"


def publish(texts: SharedTexts, path: Path, tokens: Any, base: Head | None = None) -> Head:
    path.write_bytes(np.asarray(tokens, np.int32).tobytes())
    draft = Draft(id=ID, salt="", prompt=1, places=None, tokens=np.asarray(tokens, np.int32), base=base)
    return texts.publish(draft, path)


class Away:
    """Fails the first operation of a kind that comes after `armed`."""

    def __init__(self, what: str, armed: str) -> None:
        self.what, self.armed = what, armed
        self.on = self.ended = False

    def __call__(self, what: str, name: str) -> None:
        if self.on and what == self.what and not self.ended:
            self.ended = True
            raise OSError("no route to host")
        self.on |= what == self.armed


class Parked:
    places = None
    tokens = TEXT

    def parts(self) -> Any:
        return iter(())

    def release(self) -> None:
        pass


def store_of(objects: MemoryObjects, **settings: Any) -> SharedSwapStore:
    return SharedSwapStore(
        SharedTexts(objects), capacity=1 << 30, at_hand=list, read=lambda path: Parked(),
        write=lambda swapped, path, sync: path.write_bytes(swapped.tokens.tobytes()),
        **{"wake": lambda: None, **settings},
    )  # fmt: skip


def test_a_state_whose_writing_failed_is_erased_too() -> None:
    """The head was created, and what came after it failed. Nobody else may find the text once it is erased."""
    objects = MemoryObjects(Away("list", armed="create"))
    store = store_of(objects)
    one = Conversation(tokens=TEXT)
    store.put(one, Parked(), 0.0)
    assert not store.store(one)
    assert [name for name in objects.all if name.startswith("heads/")], "it is there, though the server does not know"
    store.erase(one)
    assert [name for name in objects.all if name.startswith("heads/")] == []
    store.close()


def test_the_states_before_a_failed_one_are_erased_too() -> None:
    """The text goes on under another identity, because the next name of its own may have been used."""
    objects = MemoryObjects()
    store = store_of(objects, clock=iter(range(0, 10**6, 1000)).__next__)
    one = Conversation(tokens=TEXT)
    away = Away("create", armed="create")
    for more, fails in ([], False), ([1], True), ([2], False):
        if one in store:
            store.take(one)
        swapped: Any = SimpleNamespace(tokens=np.append(TEXT, np.int32(more)), places=None, parts=dict, release=list)
        store.put(one, swapped, 0.0)
        away.on = fails
        objects.before = away if fails else lambda what, name: None
        assert store.store(one) is not fails
    heads = [name for name in map(parse_name, objects.all) if name is not None and name.marks is None]
    assert len({head.id for head in heads}) == 2
    store.erase(one)
    assert [name for name in objects.all if name.startswith("heads/")] == []
    store.close()


def test_a_name_that_others_may_have_seen_is_not_used_again(tmp_path: Path) -> None:
    """Another server may go on from what was there for a moment, and would replace what is written now."""
    objects = MemoryObjects(Away("list", armed="create"))
    texts = SharedTexts(objects)
    with pytest.raises(OSError, match="no route"):
        publish(texts, tmp_path / "out", TEXT)
    (name,) = [name for name in objects.all if name.startswith("heads/")]
    seen = SharedTexts(objects).read(begin_of(TEXT, ""), ID, 1)
    objects.delete(name)  # as a store does that answers after its time limit
    mine = publish(texts, tmp_path / "out", [*TEXT, 1])
    theirs = publish(SharedTexts(objects), tmp_path / "out", [*TEXT, 2], base=seen)
    assert set(SharedTexts(objects).latest(mine.begin)) == {mine.id, theirs.id}
    assert mine.id != theirs.id


def test_a_write_that_is_repeated_keeps_its_name(tmp_path: Path) -> None:
    objects = MemoryObjects(Away("list", armed="create"))
    objects.create_now = lambda name, data: objects.all.setdefault(name, (data, 0.0))[0] == data  # type: ignore[method-assign]
    texts = SharedTexts(objects)
    with pytest.raises(OSError, match="no route"):
        publish(texts, tmp_path / "out", TEXT)
    assert publish(texts, tmp_path / "out", TEXT).id == ID


def test_an_erase_that_failed_can_be_repeated() -> None:
    objects = MemoryObjects()
    store = store_of(objects)
    one = Conversation(tokens=TEXT)
    store.put(one, Parked(), 0.0)
    assert store.store(one)
    objects.before = Away("list", armed="list")
    objects.before.on = True
    with pytest.raises(KVFlashError, match="could not be erased"):
        store.erase(one)
    assert one in store, "else nobody could name it again"
    store.erase(one)
    assert one not in store
    assert [name for name in objects.all if name.startswith("heads/")] == []
    store.close()


def test_what_is_created_too_late_is_deleted_when_the_store_works_again(caplog: pytest.LogCaptureFixture) -> None:
    goes_on, tries = threading.Event(), list[str]()

    def before(what: str, name: str) -> None:
        assert goes_on.wait(60)
        if what == "delete":
            tries.append(name)
            if len(tries) < 3:
                raise OSError("no route to host")

    objects = MemoryObjects(before)
    timed = TimedObjects(objects, name="/mnt/texts", limit_s=0.01, rest_s=0.01)
    with pytest.raises(TimeoutError):
        timed.create("a", b"1")
    (thread,) = timed._hanging
    goes_on.set()
    thread.join(60)
    assert (tries, objects.all) == (["a"] * 3, {})
    assert [line for line in caplog.messages if "a was written too late" in line] == [caplog.messages[0]]


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    """A server would take the texts that it misses for erased ones, and forget them."""
    objects = FolderObjects(tmp_path)
    assert objects.list("heads/a") == []
    (tmp_path / "heads").touch()
    with pytest.raises(NotADirectoryError):
        objects.list("heads/a")


def test_an_object_of_any_size_costs_little_memory(tmp_path: Path) -> None:
    texts = SharedTexts(FolderObjects(tmp_path / "store"))
    head = publish(texts, tmp_path / "out", TEXT)
    os.truncate(tmp_path / "store" / head.name, 1 << 42)
    os.truncate(tmp_path / "store" / "blocks" / head.blocks[0], 1 << 42)
    assert len(FolderObjects(tmp_path / "store").get(head.name)) == MAX_OBJECT + 1
    with pytest.raises(SnapshotError, match="does not match its checksum"):
        texts.read(head.begin, head.id, head.number)
    with pytest.raises(SnapshotError, match="is damaged"):
        texts.fetch(head, tmp_path / "in")


class BadFiles:
    """A file system of `fsspec` with a server behind it, which fails in one folder. A range of nothing is refused."""

    files: ClassVar = {"root/heads/b/one": b"1", "root/heads/b/none~00000001": b"", "root/heads/c/two": b"22"}
    fails = "root/heads/c"

    def invalidate_cache(self) -> None:
        pass

    def cat_file(self, path: str, end: int) -> bytes:
        if not self.files[path]:
            raise OSError("[Errno 22] The requested range is not satisfiable")
        return self.files[path][:end]

    def size(self, path: str) -> int:
        return len(self.files[path])

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:
        if path == self.fails:
            raise OSError("connection lost")
        names = [name for name in self.files if name.startswith(f"{path}/")]
        if not names:
            raise FileNotFoundError(path)
        inside = {f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in names}
        types = {name: "file" if name in self.files else "directory" for name in inside}
        return [{"name": n, "type": t, "size": len(self.files.get(n, b"")), "mtime": 5.0} for n, t in types.items()]

    def find(self, path: str, *, detail: bool) -> dict[str, Any]:
        """As `fsspec` has it: of folders that cannot be read it says nothing."""
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            for info in self.ls(path, detail=True):
                found |= {info["name"]: info} if info["type"] == "file" else self.find(info["name"], detail=True)
        return found


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> RemoteObjects:
    core = SimpleNamespace(url_to_fs=lambda url: (BadFiles(), "root"))
    monkeypatch.setitem(sys.modules, "fsspec", SimpleNamespace(core=core))
    return RemoteObjects("sftp://host/root")


def test_a_remote_folder_that_cannot_be_read_is_not_empty(remote: RemoteObjects) -> None:
    """Else a server forgets its texts, and `prune` deletes blocks of heads that it does not see."""
    assert [one.name for one in remote.list("heads/b")] == ["heads/b/none~00000001", "heads/b/one"]
    assert remote.list("heads/a") == []
    for prefix in ("heads/c", ""):
        with pytest.raises(OSError, match="connection lost"):
            remote.list(prefix)


def test_a_remote_object_that_is_empty_is_read(remote: RemoteObjects) -> None:
    """A head that lost its bytes is damaged. It must not stop the search as a store that fails does."""
    assert (remote.get("heads/b/none~00000001"), remote.get("heads/b/one")) == (b"", b"1")
    with pytest.raises(SnapshotError, match="does not match its checksum"):
        SharedTexts(remote).read("b", "none", 1)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize("make", [dangling, os.mkfifo, os.mkdir])
def test_links_pipes_and_folders_are_no_objects(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Of a link to nothing the survey would try for ever, a pipe would let it wait, and a folder end a search."""
    texts = SharedTexts(FolderObjects(tmp_path / "store" / MODEL))
    head = publish(texts, tmp_path / "out", TEXT)
    folder = (tmp_path / "store" / MODEL / head.name).parent
    make(folder / f"{ID.replace('0', 'f')}~00000001")
    (block,) = (tmp_path / "store" / MODEL / "blocks").iterdir()
    block.unlink()
    make(block)
    assert texts.latest(head.begin) == {ID: 1}
    with pytest.raises(SnapshotError, match="has gone from the store"):
        texts.fetch(head, tmp_path / "in")
    assert not FolderObjects(tmp_path / "store" / MODEL).create(f"blocks/{block.name}", b"1")
    result = CliRunner().invoke(main, ["store", "ls", "--json", str(tmp_path / "store")])
    assert ID in result.stdout


def test_a_text_larger_than_the_disk_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk would stop other transfers, and this one would fill it again at each turn. The store keeps it."""
    objects, ended = MemoryObjects(), threading.Event()
    head = publish(SharedTexts(objects), tmp_path / "out", TEXT)
    store = store_of(objects, wake=ended.set)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=head.size - 1))
    for searches in (1, 2):
        ended.clear()
        assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=0)
        assert ended.wait(60)
        assert store.collect()
        assert (searches, store.counts.taken, len(store)) == (searches, 0, 0)
    assert [line for line in caplog.messages if "it is larger than the free" in line] == [caplog.messages[0]]
    assert head.name in objects.all
    store.close()


def test_a_scratch_folder_that_the_system_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of the temporary folder takes that of a server that has been idle for days."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    objects, ended = MemoryObjects(), threading.Event()
    publish(SharedTexts(objects), tmp_path / "out", TEXT)
    store = store_of(objects, wake=ended.set)
    (first,) = tmp_path.glob("kvflash-store-*")
    shutil.rmtree(first)
    assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=0)
    assert ended.wait(60)
    assert store.collect()
    assert store.counts.taken == 1
    (second,) = tmp_path.glob("kvflash-store-*")
    assert being_written(second / ".lock"), "others would take it for that of a dead process"
    shutil.rmtree(second)
    one = Conversation(tokens=TEXT + np.int32(1))
    store.put(one, Parked(), 0.0)
    assert store.store(one)
    store.close()
    assert list(tmp_path.glob("kvflash-store-*")) == []


def test_a_listing_that_misses_a_text_does_not_erase_it(tmp_path: Path) -> None:
    """A folder is not listed at one moment: a state that is replaced meanwhile may be missed, and so may the next."""
    ended = threading.Event()

    class Late(MemoryObjects):
        missed = 0

        def list(self, prefix: str) -> list[Listed]:
            found = super().list(prefix)
            if threading.current_thread().name.startswith("kvflash-takeover") and not self.missed:
                self.missed += 1
                return []
            return found

    objects = Late()
    store = store_of(objects, wake=ended.set)
    one = Conversation(tokens=TEXT)
    store.put(one, Parked(), 0.0)
    assert store.store(one)
    for there in (True, False):
        ended.clear()
        assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=len(TEXT))
        assert ended.wait(60)
        assert store.collect()
        assert (one in store) == there
        for name in [name for name in objects.all if name.startswith("heads/")]:
            del objects.all[name]  # now it is erased
    assert objects.missed
    store.close()


def test_a_text_that_is_erased_while_it_is_fetched_does_not_come_back(tmp_path: Path) -> None:
    goes_on, fetches, ended = threading.Event(), threading.Event(), threading.Event()

    def before(what: str, name: str) -> None:
        if what == "get" and name.startswith("blocks/"):
            fetches.set()
            assert goes_on.wait(60)

    objects = MemoryObjects(before)
    store = store_of(objects, wake=ended.set)
    one = Conversation(tokens=TEXT[:300])  # this server has the text as it was before another one went on with it
    one.head = publish(SharedTexts(objects), tmp_path / "out", TEXT[:300])
    publish(SharedTexts(objects), tmp_path / "out", TEXT, base=one.head)
    assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=0)
    assert fetches.wait(60)
    store.delete_file(one)
    goes_on.set()
    assert ended.wait(60)
    assert store.collect()
    assert len(store) == 0
    assert one.head is None
    head = publish(SharedTexts(objects), tmp_path / "out", TEXT)  # by a server that had it in a slot
    head = publish(SharedTexts(objects), tmp_path / "out", TEXT, base=head)
    publish(SharedTexts(objects), tmp_path / "out", TEXT, base=head)
    ended.clear()
    assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=0)
    assert ended.wait(60)
    assert store.collect()
    assert store.counts.taken == 1, "what is newer is not fetched in vain"
    store.close()


def test_a_server_that_ends_waits_for_no_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "BLOCK", 256)
    goes_on, fetched = threading.Event(), list[str]()
    first = threading.Event()

    def before(what: str, name: str) -> None:
        if what == "get" and name.startswith("blocks/"):
            fetched.append(name)
            first.set()
            assert goes_on.wait(60)

    objects = MemoryObjects(before)
    head = publish(SharedTexts(objects), tmp_path / "out", TEXT)
    assert len(head.blocks) > 5
    store = store_of(objects)
    assert store.search(np.append(TEXT, np.int32(1)), salt="", cached=0)
    assert first.wait(60)
    monkeypatch.setattr(store._shared, "withdraw", goes_on.set)  # as late in `close` as that
    store.close()
    assert len(fetched) <= 2
