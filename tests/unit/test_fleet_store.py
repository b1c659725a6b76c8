"""A store of texts that servers share: who goes on with a conversation, and what a broken store costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_model import FakeModel
from support.fake_objects import MemoryObjects
from support.served import answer, ask

from kvflash_fleet import shared as shared_module
from kvflash_fleet.objects import (
    MAX_HANGING,
    FolderObjects,
    Objects,
    TimedObjects,
    _modified,
    open_objects,
)
from kvflash_fleet.scratch import ScratchFolder
from kvflash_fleet.shared import (
    ANNOUNCED_S,
    OLD_S,
    Draft,
    Head,
    Name,
    SharedTexts,
    alike,
    chunk_hashes,
    decode,
    encode,
    marks_of,
    parse_name,
)
from kvflash_fleet.takeover import REST_S, SharedSwapStore
from kvflash_ggml.batching.messages import Finished
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.errors import ConfigError, KVFlashError, SnapshotError
from kvflash_ggml.store.swapped import Conversation
from kvflash_ggml.store.texts import new_id

TEXT = np.arange(600, dtype=np.int32) % 90 + 33


def publish(texts: SharedTexts, path: Path, tokens: Any, base: Head | None = None, id: str | None = None) -> Head:
    tokens = np.asarray(tokens, np.int32)
    path.write_bytes(tokens.tobytes())
    id = id or (new_id() if base is None else base.id)
    return texts.publish(Draft(id=id, salt="", prompt=len(tokens), places=None, tokens=tokens, base=base), path)


@pytest.fixture(params=["folder", "memory", "fsspec"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return FolderObjects(tmp_path / "store")
    if request.param == "memory":
        return MemoryObjects()
    pytest.importorskip("fsspec", reason="kvflash-fleet's extra 's3' is not installed")
    from kvflash_fleet.objects import RemoteObjects

    return RemoteObjects(f"memory://{tmp_path}")


def test_objects(objects: Objects) -> None:
    with pytest.raises(FileNotFoundError):
        objects.get("a/b")
    assert objects.list("a") == []
    objects.delete("a/b")
    assert objects.create("a/b", b"one")
    assert not objects.create("a/b", b"two")
    objects.put("c/d", b"three")
    objects.put("c/d", b"three")
    assert (objects.get("a/b"), objects.get("c/d")) == (b"one", b"three")
    assert [(one.name, one.size) for one in objects.list("a")] == [("a/b", 3)]
    objects.delete("a/b")
    assert objects.list("a") == []


def test_stores_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep texts in"):
        open_objects(str(tmp_path / "file" / "store"), write=True)
    with pytest.raises(ConfigError, match="is no folder"):
        open_objects(str(tmp_path / "nothing"), write=False)
    assert not (tmp_path / "nothing").exists()
    monkeypatch.setattr(FolderObjects, "create", lambda self, name, data: self.put(name, data) or True)
    with pytest.raises(ConfigError, match="overwrites objects, though told not to"):
        open_objects(str(tmp_path / "store"), write=True)


def test_a_text_comes_back(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of a text have the blocks of their common beginning once."""
    monkeypatch.setattr(shared_module, "BLOCK", 256)
    texts = SharedTexts(objects)
    first = publish(texts, tmp_path / "out", TEXT)
    second = publish(texts, tmp_path / "out", [*TEXT, *TEXT[:50]], base=first)
    assert (second.id, second.number) == (first.id, 2)
    assert second.blocks[: len(first.blocks) - 1] == first.blocks[:-1]
    assert texts.latest(first.begin) == {first.id: 2}
    found = texts.read(first.begin, first.id, 2)
    texts.fetch(found, tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == (tmp_path / "out").read_bytes()
    assert len(objects.list("blocks")) == len({*first.blocks, *second.blocks})
    texts.erase(first.begin, first.id)
    assert texts.latest(first.begin) == {}


def test_two_owners_have_two_texts(objects: Objects, tmp_path: Path) -> None:
    texts = SharedTexts(objects)
    base = publish(texts, tmp_path / "out", TEXT)
    one = publish(texts, tmp_path / "out", [*TEXT, 1], base=base)
    other = publish(texts, tmp_path / "out", [*TEXT, 2], base=base)
    assert (one.id, one.number) == (base.id, 2)
    assert (other.id != base.id, other.number) == (True, 1)
    late = publish(texts, tmp_path / "out", [*TEXT, 1, 3], base=one)
    again = publish(texts, tmp_path / "out", [*TEXT, 4], base=base)  # its number is free again: 1 and 2 are deleted
    assert texts.latest(base.begin) == {base.id: late.number, other.id: 1, again.id: 1}


def test_what_is_damaged_is_refused_by_name(objects: Objects, tmp_path: Path) -> None:
    texts = SharedTexts(objects)
    head = publish(texts, tmp_path / "out", TEXT)
    (block,) = head.blocks
    objects.delete(f"blocks/{block}")
    with pytest.raises(SnapshotError, match=f"blocks/{block} has gone"):
        texts.fetch(head, tmp_path / "in")
    objects.put(f"blocks/{block}", b"half")
    with pytest.raises(SnapshotError, match=f"blocks/{block} is damaged: 4 bytes"):
        texts.fetch(head, tmp_path / "in")
    publish(texts, tmp_path / "out", TEXT)
    texts.fetch(head, tmp_path / "in")  # the damaged block was written again


@given(st.data())
def test_hostile_heads(data: st.DataObject) -> None:
    good = Head(
        id="c-0123456789abcdef", number=1, salt="", made="CPU", prompt=3, places=(1, 2), tokens=TEXT, size=64,
        first=bytes(64), blocks=(),
    )  # fmt: skip
    raw = encode(good)
    assert np.array_equal(decode(good.name, raw).tokens, TEXT)
    at = data.draw(st.integers(0, len(raw) - 1))
    broken = data.draw(st.sampled_from([raw[:at], raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]]))
    with pytest.raises(SnapshotError, match=good.name):
        decode(good.name, broken)
    with pytest.raises(SnapshotError, match="the head of another text"):
        decode(good.name.replace("c-0", "c-1"), raw)


@pytest.mark.parametrize(
    "facts", [b"[]", b"{}", b'{"count": 1e9}', b'{"count": 1, "bytes": 9}', b"[" * 100_000, b"\xff"]
)
def test_hostile_facts(facts: bytes) -> None:
    import hashlib

    with pytest.raises(SnapshotError, match="heads/x is no head"):
        decode("heads/x", hashlib.sha256(facts).hexdigest().encode() + b"\n" + facts)


# --- servers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []

    def start(objects: Objects | None = None, **settings: Any) -> Scheduler:
        settings.setdefault("clock", lambda: time.monotonic() / 60)  # a slow machine has time to fetch a text
        texts = SharedTexts(FolderObjects(tmp_path / "store") if objects is None else objects)
        made.append(Scheduler(FakeModel(), shared=partial(SharedSwapStore, texts), **settings))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.close()
        assert one.model.held == 0, "parked texts that nobody has released"  # type: ignore[attr-defined]


def until(reached: Callable[[], object]) -> None:
    """Wait up to a minute."""
    for _ in range(6000):
        if reached():
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing came of it in a minute")


def written(scheduler: Scheduler, count: int) -> None:
    """Wait until the server has written so many states."""
    until(lambda: scheduler.call(lambda: scheduler.swapped.counts.written).result(10) >= count)


def later(scheduler: Scheduler, now: list[float], count: int) -> None:
    """Let time pass until the server has written so many states: what fails late makes the store rest once more."""

    def reached() -> bool:
        now[0] += REST_S
        return scheduler.call(lambda: scheduler.swapped.counts.written).result(10) >= count

    until(reached)


def test_another_server_goes_on(server: Callable[..., Scheduler]) -> None:
    one, other = server(), server()
    tokens = TEXT.tolist()
    for turn, here in enumerate((one, other, one, other, one), 1):
        end = answer(here, tokens, 20)
        assert end.usage.cached == (0 if turn == 1 else len(tokens) - 10), turn
        written(here, -(-turn // 2))
        tokens = [*tokens, *end.tokens, *TEXT[:10].tolist()]
    assert (one.swapped.counts.taken, other.swapped.counts.taken) == (2, 2)
    assert (one.swapped.counts.copied, one.counts.lost) == (0, 0)


def test_two_servers_at_once(server: Callable[..., Scheduler]) -> None:
    """Each goes on with its own: one has the conversation, and the other a copy."""
    one, other = server(), server()
    first = answer(one, TEXT, 20)
    written(one, 1)
    text = [*TEXT.tolist(), *first.tokens]
    answer(other, [*text, *b"other"], 20)
    written(other, 1)
    end = answer(one, [*text, *b"mine"], 20)
    assert end.usage.cached >= len(text)
    written(one, 2)
    again = answer(server(), [*text, *b"mine", *end.tokens, *b"and"], 20)
    assert again.usage.cached >= len(text) + 4 + len(end.tokens)
    assert answer(server(), [*text, *b"other", *first.tokens, *b"and"], 20).usage.cached >= len(text)


def test_a_store_that_fails_costs_no_answer(server: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture) -> None:
    def away(what: str, name: str) -> None:
        raise OSError("no route to host")

    objects, now = MemoryObjects(away), [0.0]
    one = server(objects, clock=lambda: now[0])
    for turn in range(3):
        assert answer(one, [*TEXT, turn], 20).reason == "stop"
    assert [record for record in caplog.messages if "the store cannot be used" in record] == [caplog.messages[0]]
    objects.before = lambda what, name: None
    later(one, now, 1)  # without another turn
    answer(one, [*TEXT, 9], 20)
    written(one, 2)


def test_a_write_that_failed_is_repeated(server: Callable[..., Scheduler]) -> None:
    """Without another turn."""

    def away(what: str, name: str) -> None:
        if what == "create":
            raise OSError("no route to host")

    objects, now = MemoryObjects(away), [0.0]
    one = server(objects, clock=lambda: now[0])
    answer(one, TEXT, 20)
    until(lambda: one.call(lambda: one.swapped.counts.failed).result(10))
    objects.before = lambda what, name: None
    assert one.call(lambda: one.swapped.counts.written).result(10) == 0
    later(one, now, 1)


def test_a_full_store_is_searched_still(server: Callable[..., Scheduler]) -> None:
    def full(what: str, name: str) -> None:
        if what in ("put", "create"):
            raise OSError("no space left")

    objects = MemoryObjects()
    one, other = server(objects), server(objects)
    end = answer(one, TEXT, 20)
    written(one, 1)
    objects.before = full
    answer(other, TEXT[::-1], 20)
    until(lambda: other.call(lambda: other.swapped.counts.failed).result(10))
    assert answer(other, [*TEXT, *end.tokens, 65], 20).usage.cached >= len(TEXT)
    assert other.call(lambda: other.swapped.counts.written).result(10) == 0


def test_a_store_that_hangs_costs_no_answer(server: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture) -> None:
    """Neither eviction nor the end waits for it."""
    hangs, goes_on = threading.Event(), threading.Event()

    def before(what: str, name: str) -> None:
        if hangs.is_set():
            assert goes_on.wait(60)

    one = server(
        TimedObjects(MemoryObjects(before), name="/mnt/texts", limit_s=1),
        limits=Limits(park_bytes=1),
        clock=time.monotonic,
    )
    answer(one, TEXT, 20)
    written(one, 1)
    hangs.set()
    try:
        for turn in range(3):
            assert answer(one, [turn, *TEXT], 20).reason == "stop"
        one.close()
    finally:
        goes_on.set()
    assert "the store cannot be used, texts stay here until it can: /mnt/texts has not answered for 1 s" in caplog.text


def test_an_operation_that_hangs_is_given_up() -> None:
    goes_on, began = threading.Event(), threading.Semaphore(0)

    def before(what: str, name: str) -> None:
        began.release()
        assert goes_on.wait(60)

    objects = MemoryObjects(before)
    timed = TimedObjects(objects, name="/mnt/texts", limit_s=0.01, rest_s=0)
    for _ in range(MAX_HANGING + 2):
        with pytest.raises(TimeoutError, match="/mnt/texts has not answered for 0 s"):
            timed.put("a", b"1")
    for _ in range(MAX_HANGING):
        assert began.acquire(timeout=10)
    assert not began.acquire(blocking=False), "further ones do not begin"
    goes_on.set()
    timed = TimedObjects(objects, name="/mnt/texts", limit_s=10)
    assert timed.create("b", b"2")
    assert timed.get("b") == b"2"
    with pytest.raises(FileNotFoundError):
        timed.get("c")


def test_after_a_timeout_operations_fail_at_once() -> None:
    goes_on, began = threading.Event(), list[str]()

    def before(what: str, name: str) -> None:
        began.append(name)
        assert goes_on.wait(60)

    timed = TimedObjects(MemoryObjects(before), name="/mnt/texts", limit_s=0.01, rest_s=1e9)
    for name in ("a", "b", "c"):
        with pytest.raises(TimeoutError, match="/mnt/texts has not answered for 0 s"):
            timed.get(name)
    goes_on.set()
    until(lambda: began)  # its thread may come late
    assert began == ["a"]


def test_what_is_created_too_late_is_deleted() -> None:
    """Its caller was told that it failed, and erases nothing. What another server has created stays."""
    goes_on, deleted = threading.Event(), list[str]()

    def before(what: str, name: str) -> None:
        if what == "create":
            assert goes_on.wait(60)
        if what == "delete":
            deleted.append(name)

    objects = MemoryObjects(before)
    timed = TimedObjects(objects, name="/mnt/texts", limit_s=0.01, rest_s=0)
    for name in ("mine", "mine", "other"):
        with pytest.raises(TimeoutError):
            timed.create(name, b"1")
    began = [*timed._hanging]
    assert len(began) == 2, "a name whose creation has not ended is not created again"
    objects.all["other"] = b"2", 0.0
    goes_on.set()
    for thread in began:
        thread.join(60)
    assert (deleted, [*objects.all]) == (["mine"], ["other"])
    assert TimedObjects(objects, name="/mnt/texts", limit_s=60).create("mine", b"1")


def test_a_folder_knows_what_it_has_created_itself(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    assert objects.create("a/b", b"one")
    assert objects.create("a/b", b"one")
    assert not objects.create("a/b", b"two")
    assert objects.get("a/b") == b"one"


def test_a_folder_goes_with_its_last_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FolderObjects(tmp_path / "store")
    for name in ("heads/a/1", "heads/a/2", "heads/b/3"):
        assert objects.create(name, b"1")
    objects.delete("heads/a/1")
    assert [one.name for one in objects.list("")] == ["heads/a/2", "heads/b/3"]
    objects.delete("heads/a/2")
    assert [path.name for path in (tmp_path / "store" / "heads").iterdir()] == ["b"]
    objects.delete("heads/b/3")
    assert [*tmp_path.rglob("*")] == [tmp_path / "store"]
    make = Path.mkdir

    def made_and_lost(path: Path, *args: Any, **more: Any) -> None:
        make(path, *args, **more)
        monkeypatch.undo()
        path.rmdir()  # as another server that has deleted the only object in it

    for write in (objects.create, objects.put):
        monkeypatch.setattr(Path, "mkdir", made_and_lost)
        write("heads/c/4", b"4")
        assert objects.get("heads/c/4") == b"4"
        objects.delete("heads/c/4")


def test_folders_of_servers_that_died_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "other").mkdir()
    dead = ScratchFolder("texts-")
    gone = dead.path
    (gone / "text.kvs").write_bytes(b"1")
    os.close(dead._lock)  # as its process ends
    alive = ScratchFolder("texts-")
    assert gone.exists(), "one as young may belong to a process that has not locked it yet"
    for old in (gone, alive.path):
        os.utime(old / ".lock", (1, 1))
    last = ScratchFolder("texts-")
    assert not gone.exists()
    assert len(list(tmp_path.glob("texts-*"))) == 2
    alive.close()
    last.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_that_somebody_else_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kvflash_ggml.system.try_lock", lambda file: False)
    with pytest.raises(ConfigError, match=f"{tmp_path}/texts-.* was locked by another process"):
        ScratchFolder("texts-")


def test_a_damaged_store_costs_one_reading(
    server: Callable[..., Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    end = answer(one, TEXT, 20)
    written(one, 1)
    (block,) = (tmp_path / "store" / "blocks").iterdir()
    block.write_bytes(b"half")
    other = server()
    tokens = [*TEXT.tolist(), *end.tokens, 65]
    assert answer(other, tokens, 20).usage.cached == 0
    assert f"blocks/{block.name} is damaged: 4 bytes" in caplog.text
    written(other, 1)
    (head,) = [path for path in (tmp_path / "store" / "heads").rglob("*~*") if path.name.endswith("~00000001")][:1]
    for path in (tmp_path / "store" / "heads").rglob("*~*"):
        path.write_bytes(head.read_bytes()[:99])
    assert answer(server(), tokens, 20).usage.cached == 0


def test_memory_that_is_full(server: Callable[..., Scheduler]) -> None:
    """What leaves memory is fetched again; the store keeps what is dropped."""
    one = server(limits=Limits(park_bytes=1))
    texts = [[*b"%d" % n, *TEXT.tolist()] for n in range(3)]
    ends = [answer(one, tokens, 20) for tokens in texts]
    for tokens, end in zip(texts, ends, strict=True):
        again = answer(one, [*tokens, *end.tokens, 65], 20)
        assert again.usage.cached == len(tokens) + len(end.tokens)
    assert one.swapped.counts.taken == 3


def test_erased_everywhere(server: Callable[..., Scheduler]) -> None:
    one, other = server(), server()
    end = answer(one, TEXT, 20)
    written(one, 1)
    tokens = [*TEXT.tolist(), *end.tokens]
    answer(other, [*tokens, 65], 20)
    written(other, 1)
    assert other.slot.conversation is not None
    other.call(lambda: other.slot.swap_out()).result(10)
    (id,) = [one.id for one in other.swapped]
    from kvflash_ggml.batching.messages import Access

    one.call(lambda: one.slot.swap_out()).result(10)
    assert other.call(lambda: other.conversations.erase(id, Access())).result(10)
    assert answer(server(), [*tokens, 65], 20).usage.cached == 0
    assert answer(one, [*tokens, 65], 20).usage.cached == 0


def test_the_faster_of_both(server: Callable[..., Scheduler]) -> None:
    one, other = server(), server()
    end = answer(one, TEXT, 20)
    written(one, 1)
    shared = other.shared
    assert shared is not None
    shared._shared.rate, shared.read_rate = 1.0, 1e9  # fetching takes minutes, reading nothing
    assert answer(other, [*TEXT.tolist(), *end.tokens, 65], 20).usage.cached == 0
    shared._shared.rate = 1e12
    assert answer(other, [*TEXT.tolist(), *end.tokens, 66], 20).usage.cached >= len(TEXT)


def test_bandwidth() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    texts = SharedTexts(MemoryObjects(), bandwidth=1000, clock=lambda: now, sleep=sleep)
    for _ in range(5):
        texts._wait(500)
    assert now == 2.5


def test_names() -> None:
    begin, id = "a" * 32, "c-0123456789abcdef"
    name = parse_name(f"heads/{begin}/{id}~00000012")
    assert name is not None
    assert (name.begin, name.id, name.number, name.marks) == (begin, id, 12, None)
    marked = parse_name(f"heads/{begin}/{id}~00000012~{marks_of(TEXT)}")
    assert marked is not None
    assert marked.marks is not None
    assert marked.marks[0] == len(TEXT) // 64
    for other in ("/../x", f"/{id}~1", f"/{id}~00000012~", f"/{id}~00000012~0-", f"/{id}~00000012~9-012345678"):
        assert parse_name(f"heads/{begin}{other}") is None


@pytest.mark.parametrize("shared", [64, 100, 128, 200, 500, 576, 599, 600])
@pytest.mark.parametrize("more", [0, 1, 64, 700])
def test_marks_tell_how_much_is_shared(shared: int, more: int) -> None:
    name = parse_name(f"heads/{'a' * 32}/c-0123456789abcdef~00000001~{marks_of(TEXT)}")
    assert name is not None
    other = np.concatenate([TEXT[:shared], np.full(more, 7, np.int32)])
    least, below = alike(name.marks, chunk_hashes(other))
    assert least <= shared // 64 < below
    if shared == len(TEXT):
        assert least == shared // 64


def test_a_long_prompt_is_written_before_its_answer_ends(server: Callable[..., Scheduler], tmp_path: Path) -> None:
    one, other = server(), server()
    held, at = threading.Event(), threading.Event()
    tokens = [*TEXT.tolist(), *TEXT[::-1].tolist()]

    def wait() -> None:
        if len(one.model.tokens) > len(tokens) + 3:
            at.set()
            assert held.wait(60)

    one.model.on_step = wait  # type: ignore[attr-defined]
    asked = ask(one, tokens, 20)
    assert at.wait(60)
    try:
        until(lambda: list((tmp_path / "store").rglob("c-*~*~*")))
        assert answer(other, tokens, 20).usage.cached == len(tokens) - 1
    finally:
        held.set()
    assert isinstance(asked.wait(), Finished)


def test_a_text_that_is_being_written_is_waited_for(server: Callable[..., Scheduler]) -> None:
    """The next turn comes to another server before the first one has written its text."""
    waits, writes = threading.Event(), threading.Event()
    lists = 0

    def before(what: str, name: str) -> None:
        nonlocal lists
        if what == "put" and name.startswith("blocks/") and not waits.is_set():
            writes.set()
            assert waits.wait(60)
        lists += what == "list" and writes.is_set()
        if lists == 2:
            waits.set()

    objects = MemoryObjects(before)
    one, other = server(objects), server(objects)
    text = np.tile(TEXT, 2)[:1100]
    end = answer(one, text, 20)
    assert writes.wait(60)
    assert answer(other, [*text, *end.tokens, 65], 20).usage.cached >= len(text)
    written(other, 1)
    assert not [name for name in objects.all if name.endswith("~soon")]


def test_an_announcement_of_a_server_that_died(server: Callable[..., Scheduler]) -> None:
    """It is waited for once, and pruned later."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    objects = MemoryObjects(clock=lambda: 1000.0)
    texts = SharedTexts(objects, clock=lambda: now[0], sleep=sleep, wall=lambda: 1000.0)
    text = np.tile(TEXT, 2)
    draft = Draft(id="c-0123456789abcdef", salt="", prompt=1, places=None, tokens=text, base=None)
    with texts.announced(draft):
        (name,) = objects.all
    assert objects.all == {}
    objects.put(name, b"")
    refused = set[str]()
    for waited in (ANNOUNCED_S, ANNOUNCED_S):
        assert texts.search(text, salt="", cached=0, numbers={}, refused=refused) == (None, set())
        assert now[0] == pytest.approx(waited, abs=1)
    assert refused == {name}
    later = SharedTexts(objects, clock=lambda: now[0], sleep=sleep, wall=lambda: 1000.0 + OLD_S)
    before = now[0]
    assert later.search(text, salt="", cached=0, numbers={}, refused=set()) == (None, set())
    assert now[0] == before, "an old one is not waited for"


def test_an_announcement_of_a_write_that_failed() -> None:
    """It goes when the store works again."""

    def away(what: str, name: str) -> None:
        raise OSError("no route to host")

    objects = MemoryObjects()
    texts = SharedTexts(objects)
    draft = Draft(id="c-0123456789abcdef", salt="", prompt=1, places=None, tokens=np.tile(TEXT, 2), base=None)
    with texts.announced(draft):
        objects.before = away
    assert len(objects.all) == 1
    objects.before = lambda what, name: None
    with texts.announced(draft):
        assert len(objects.all) == 1
    assert objects.all == {}


def test_what_could_not_be_announced_is_not_withdrawn() -> None:
    """A store that hangs is waited for once."""
    asked = list[str]()

    def away(what: str, name: str) -> None:
        asked.append(what)
        raise OSError("no route to host")

    texts = SharedTexts(MemoryObjects(away))
    draft = Draft(id="c-0123456789abcdef", salt="", prompt=1, places=None, tokens=np.tile(TEXT, 2), base=None)
    with pytest.raises(OSError, match="no route"), texts.announced(draft):
        pass
    assert asked == ["put"]


class Parked:
    """A swapped-out text of so many tokens."""

    places = None

    def __init__(self, count: int) -> None:
        self.tokens = np.resize(TEXT, count)

    def parts(self) -> Iterator[tuple[int, int]]:
        yield id(self), 1000

    def release(self) -> None:
        pass


@pytest.fixture
def parking() -> Iterator[Callable[..., SharedSwapStore]]:
    made: list[SharedSwapStore] = []

    def make(objects: Objects, **settings: Any) -> SharedSwapStore:
        def write(swapped: Any, path: Path, *, sync: bool) -> None:
            path.write_bytes(swapped.tokens.tobytes())

        settings = {"capacity": 1 << 30, "read": None, "at_hand": list, "wake": lambda: None, **settings}
        made.append(SharedSwapStore(SharedTexts(objects), write=write, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def announcements(objects: MemoryObjects) -> list[Name]:
    return [name for name in map(parse_name, list(objects.all)) if name is not None and name.soon]


def test_eviction_waits_once_for_a_store_that_hangs(parking: Callable[..., SharedSwapStore]) -> None:
    """However many writes are queued."""
    goes_on, began = threading.Event(), list[str]()

    def before(what: str, name: str) -> None:
        began.append(what)
        assert goes_on.wait(60)

    store = parking(TimedObjects(MemoryObjects(before), name="/mnt/texts", limit_s=0.05, rest_s=1e9), capacity=1)
    several = [Conversation(tokens=Parked(2048).tokens) for _ in range(4)]
    for one in several:
        store.offer(one, Parked(2048))
    try:
        store.put(several[-1], Parked(2048), 0.0)
        until(lambda: began)  # its thread may come late
        assert began == ["put"]
    finally:
        goes_on.set()


@pytest.mark.parametrize("end", ["failed", "copied"])
def test_a_state_that_never_comes_is_not_waited_for(end: str, parking: Callable[..., SharedSwapStore]) -> None:
    """The next state was announced while one was written, which failed, or became a copy."""
    goes_on, creates, now = threading.Event(), list[str](), [0.0]

    def before(what: str, name: str) -> None:
        if what == "create":
            creates.append(name)
        if what == "create" and len(creates) == 1:
            assert goes_on.wait(60)
            if end == "failed":
                raise OSError("no route to host")
            objects.create_now(name, b"of another server")

    objects = MemoryObjects(before)
    store = parking(objects, clock=lambda: now[0])
    one = Conversation(tokens=Parked(2048).tokens)
    store.offer(one, Parked(2048))
    store.offer(one, Parked(3072))
    until(lambda: len(announcements(objects)) == 2)
    goes_on.set()
    until(lambda: store.collect() or store.counts.failed + store.counts.written)
    until(lambda: (one.id, 2) not in {(name.id, name.number) for name in announcements(objects)})
    now[0] += REST_S
    until(lambda: store.collect() or (one.head is not None and len(one.head.tokens) == 3072))
    until(lambda: not announcements(objects))


def test_a_stale_text_is_announced_as_it_is_written(parking: Callable[..., SharedSwapStore]) -> None:
    goes_on = threading.Event()

    def before(what: str, name: str) -> None:
        if what == "create":
            assert goes_on.wait(60)

    objects = MemoryObjects(before)
    store = parking(objects)
    one = Conversation(tokens=Parked(2048).tokens, stale=True)
    store.offer(one, Parked(2048))
    store.offer(one, Parked(3072))
    until(lambda: len(announcements(objects)) == 2)
    ids = {name.id for name in announcements(objects)}
    goes_on.set()
    until(lambda: store.collect() or (one.head is not None and one.head.number == 2))
    assert one.head is not None
    assert ids == {one.head.id}


def test_the_answer_of_a_long_prompt_is_waited_for_too(server: Callable[..., Scheduler]) -> None:
    """Its prompt is still being written when it ends. Another server goes on from its end, and nobody has a copy."""
    waits, writes, sees = threading.Event(), threading.Event(), threading.Event()
    searching = False

    def before(what: str, name: str) -> None:
        first = any(name.endswith("~00000001") for name in list(objects.all))
        if what == "put" and name.startswith("blocks/"):
            writes.set()
            assert (sees if first else waits).wait(60)
        if what == "list" and searching and threading.current_thread().name.startswith("kvflash-takeover"):
            (sees if any(name.endswith(f"~00000001~{marks_of(text)}") for name in list(objects.all)) else waits).set()

    objects = MemoryObjects(before)
    one, other = server(objects), server(objects)
    text = np.tile(TEXT, 2)[:1100]
    end = answer(one, text, 20)
    assert writes.wait(60)
    until(lambda: any(name.endswith("~soon") and "~00000002~" in name for name in list(objects.all)))
    searching = True
    again = answer(other, [*text, *end.tokens, *TEXT[:70]], 20)
    assert again.usage.cached == len(text) + len(end.tokens)
    written(one, 2)
    written(other, 1)
    assert (one.swapped.counts.copied, other.swapped.counts.copied) == (0, 0)


def test_nobody_waits_for_a_second_write(server: Callable[..., Scheduler]) -> None:
    """A long prompt is still being written when its answer ends: then that is written, and the server goes on."""
    first, second, writes = threading.Event(), threading.Event(), list[str]()

    def before(what: str, name: str) -> None:
        if what == "put" and name.startswith("blocks/"):
            writes.append(name)
            assert (first if len(writes) == 1 else second).wait(60)

    one = server(MemoryObjects(before))
    answer(one, np.tile(TEXT, 2)[:1100], 20)
    first.set()
    until(lambda: len(writes) == 2)
    assert one.call(lambda: len(writes)).result(10) == 2
    second.set()
    written(one, 2)


def test_an_erase_that_fails_is_told(server: Callable[..., Scheduler]) -> None:
    from kvflash_ggml.batching.messages import Access

    objects = MemoryObjects()
    one = server(objects)
    answer(one, TEXT, 20)
    written(one, 1)
    assert one.slot.conversation is not None
    id = one.slot.conversation.id

    def away(what: str, name: str) -> None:
        raise OSError("no route to host")

    objects.before = away
    with pytest.raises(KVFlashError, match="could not be erased from the store: no route to host"):
        one.call(lambda: one.conversations.erase(id, Access())).result(10)
    objects.before = lambda what, name: None


def test_a_store_without_times_is_refused() -> None:
    assert _modified({"creation_time": 12.0, "mtime": None}) == 12
    with pytest.raises(OSError, match="does not say when"):
        _modified({"name": "a", "size": 1})


def test_a_block_that_was_damaged_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server has met it, and the one that has the text writes all of it with its next turn."""
    monkeypatch.setattr(shared_module, "BLOCK", 256)
    objects = MemoryObjects()
    texts = SharedTexts(objects)
    base = publish(texts, tmp_path / "out", TEXT)
    objects.put(f"blocks/{base.blocks[0]}", b"half")
    with pytest.raises(SnapshotError, match="is damaged: 4 bytes"):
        texts.fetch(base, tmp_path / "in")
    texts.forget(base)
    texts.fetch(publish(texts, tmp_path / "out", [*TEXT, 1], base=base), tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == (tmp_path / "out").read_bytes()


def test_what_is_damaged_is_no_state_any_more(tmp_path: Path, server: Callable[..., Scheduler]) -> None:
    one = server()
    end = answer(one, TEXT, 20)
    written(one, 1)
    (head,) = (tmp_path / "store" / "heads").rglob("*~00000001")
    for block in (tmp_path / "store" / "blocks").iterdir():
        block.write_bytes(b"half")
    assert answer(server(), [*TEXT.tolist(), *end.tokens, 65], 20).usage.cached == 0
    assert not head.exists()
