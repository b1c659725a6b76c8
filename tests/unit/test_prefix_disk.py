"""Prefixes in a folder: what is found, what is never accepted, and what goes when there is too much."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prefix_texts import (
    PAGE,
    check_session,
    load,
    make_heap,
    make_tier,
    policy,
    put,
    ready,
    released,
    session,
    text,
)

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, SnapshotError
from kvflash_ggml.files import ABANDONED_AFTER_SECONDS
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.state.statistics import Statistics
from kvflash_ggml.store import disk, segments
from kvflash_ggml.store.disk import DiskTier
from kvflash_ggml.store.segments import Entry

SYSTEM, A, B, C = (1, 640), (2, 200), (3, 300), (4, 150)


@pytest.fixture
def heap() -> PageHeap:
    return make_heap()


@pytest.fixture
def tier(tmp_path: Path, heap: PageHeap) -> DiskTier:
    return make_tier(tmp_path, heap)


def files(path: Path, kind: str = "*") -> list[Path]:
    return sorted(path.glob(f"*/*.{kind}"))


def entry_of(path: Path) -> Entry:
    entry = Entry.of(path)
    assert entry is not None
    return entry


def chunks_in(path: Path) -> int:
    return sum(entry_of(file).count for file in files(path, "segment"))


def only(path: Path, kind: str) -> Path:
    (file,) = files(path, kind)
    return file


# --- found


def test_a_text_is_found_again_by_another_process(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    other = make_heap()
    again = make_tier(tmp_path, other)
    assert load(again, tokens) == 840
    with released(again.load(again.find(tokens), tokens, None)) as saved:
        assert saved.logits is not None
        assert saved.table.blocks[:5] == [0, 1, 2, 3, -1]
        assert other.host_bytes == 0, "pages are read when they are needed"


def test_a_shared_beginning_is_stored_once(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    for part in (A, B, C):
        put(tier, heap, text(SYSTEM, part))
    assert chunks_in(tmp_path) == sum(n // CHUNK for n in (640, 200, 300, 150))
    for part in (A, B, C):
        assert load(tier, text(SYSTEM, part)) == 640 + part[1]


def test_texts_can_leave_a_run_in_its_middle(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    put(tier, heap, text(SYSTEM, A))
    put(tier, heap, text(SYSTEM)[:200])
    branch = np.concatenate([text(SYSTEM)[:200], text(B)])
    assert tier.known(branch) == 192
    assert load(tier, branch) == 200  # the tail of the second text
    put(tier, heap, branch)
    assert load(tier, branch) == 500
    assert load(tier, text(SYSTEM, A)) == 840
    assert load(tier, text(SYSTEM, B)) == 640


def test_the_longest_beginning_wins(tier: DiskTier, heap: PageHeap) -> None:
    whole = text((1, 1000))
    for length in (300, 600, 450):
        put(tier, heap, whole[:length])
    lengths = [load(tier, whole[:n]) for n in (1000, 599, 580, 460, 449, 300, 100, 64, 63, 0)]
    assert lengths == [600, 576, 576, 450, 448, 300, 64, 64, 0, 0]


def test_a_state_is_continued_at_tails_only(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap, stateful=True)
    whole = text((1, 1000))
    put(tier, heap, whole[:600], stateful=True, checkpoints=[130, 512])
    lengths = [load(tier, whole[:n], stateful=True) for n in (1000, 600, 599, 513, 512, 200, 130, 129)]
    # a checkpoint has no logits, so that it is of no use to a prompt that ends there
    assert lengths == [600, 600, 512, 512, 130, 130, 0, 0]
    assert tier.known(whole[:599]) == 576


def test_logits_of_a_checkpoint_are_added_when_a_prompt_ends_there(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap, stateful=True)
    whole = text((1, 600))
    put(tier, heap, whole, stateful=True, checkpoints=[512])
    assert load(tier, whole[:512], stateful=True) == 0
    put(tier, heap, whole[:512], stateful=True)
    assert load(tier, whole[:512], stateful=True) == 512


@pytest.mark.parametrize("length", [640, 641, 703, 65])
def test_a_chunk_that_is_not_full_is_stored_with_the_tail(tmp_path: Path, heap: PageHeap, length: int) -> None:
    tier = make_tier(tmp_path, heap, stateful=True)
    put(tier, heap, text((1, length)), stateful=True)
    assert load(tier, text((1, length), (2, 100)), stateful=True) == length


def test_runs_that_overlap_cover_a_text_together(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    """Two processes that store a text at the same time do not see each other's runs."""
    whole = text((1, 1024))
    parts = {}
    for length in (320, 704, 1024):
        other = tmp_path / str(length)
        put(make_tier(other, heap), heap, whole[:length])
        parts[length] = only(other, "segment")
    for path in parts.values():
        shutil.copy(path, tier._folder / path.name)
    found = tier.find(whole)
    assert found.length == 1024
    assert load(tier, whole) == 1024
    (tier._folder / parts[1024].name).unlink()
    assert load(tier, whole) == 704


def test_other_models_and_settings_share_nothing(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    put(tier, heap, text(SYSTEM))
    assert make_tier(tmp_path, heap, model="b").find(text(SYSTEM)).length == 0


def test_files_of_another_format_are_neither_found_nor_judged(
    tier: DiskTier, tmp_path: Path, heap: PageHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, heap, text(SYSTEM))
    before = files(tmp_path)
    monkeypatch.setattr(disk, "VERSION", 2)
    newer = make_tier(tmp_path, heap)
    assert newer.find(text(SYSTEM)).length == 0
    put(newer, heap, text(A))
    assert set(before) < set(files(tmp_path))


def test_statistics_are_left_out_where_runs_have_others(tier: DiskTier, heap: PageHeap) -> None:
    whole = text((1, 640), (2, 128))
    with released(session(heap, whole[:640])) as saved:
        assert saved.policy is not None
        saved.policy.statistics = ready(Statistics("of other heads", saved.rows))
        tier.put(saved)
    put(tier, heap, whole)
    with released(tier.load(tier.find(whole), whole, policy())) as saved:
        assert saved.policy is not None
        assert saved.policy.statistics.result() is None


def test_statistics_are_left_out_where_a_run_has_none(tier: DiskTier, heap: PageHeap) -> None:
    whole = text((1, 640), (2, 128))
    with released(session(heap, whole[:640])) as saved:
        saved.policy = None
        tier.put(saved)
    put(tier, heap, whole)
    with released(tier.load(tier.find(whole), whole, policy())) as saved:
        assert saved.policy is not None
        assert saved.policy.statistics.result() is None
    assert load(tier, whole) == 768


# --- many turns


def test_a_text_that_grows_stays_in_few_files(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    whole = text((1, 100 * CHUNK))
    before = None
    for length in range(2 * CHUNK, len(whole) + 1, 3 * CHUNK // 2):
        saved = session(heap, whole[:length], after=before)
        tier.put(saved)
        if before is not None:
            before.release()
        before = saved
    runs = files(tmp_path, "segment")
    assert len(runs) <= 8
    assert chunks_in(tmp_path) == length // CHUNK, "something is stored twice"
    assert load(tier, whole) == length


def test_runs_of_a_text_that_others_go_on_from_are_not_written_again(
    tier: DiskTier, tmp_path: Path, heap: PageHeap
) -> None:
    put(tier, heap, text(SYSTEM))
    put(tier, heap, text(SYSTEM, A))
    put(tier, heap, text(SYSTEM, B))
    shared = {path for path in files(tmp_path, "segment") if entry_of(path).parent == tier._root}
    put(tier, heap, text(SYSTEM, (7, 1200)))
    assert shared <= set(files(tmp_path, "segment"))


def test_looking_a_text_up_opens_nothing_anew(tier: DiskTier, heap: PageHeap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is listed, once; only a run that a text leaves has to be opened, once."""
    for seed in range(2, 12):
        put(tier, heap, text(SYSTEM, (seed, 200)))
    opened: list[Path] = []
    listed: list[Path] = []
    source, entries = segments.FileSource, segments.Segments.entries
    for module in (disk, segments):
        monkeypatch.setattr(module, "FileSource", lambda path: (opened.append(path), source(path))[1])
    monkeypatch.setattr(segments.Segments, "entries", lambda self, path: (listed.append(path), entries(self, path))[1])
    assert tier.find(text(SYSTEM, (5, 200), (20, 400))).length == 840
    assert len(listed) == 1
    first = len(opened)
    assert first <= 10
    for _ in range(5):
        tier.find(text(SYSTEM, (5, 200), (20, 400)))
    assert len(opened) == first
    put(tier, heap, text(SYSTEM, (5, 200)))
    assert len(opened) == first + 1, "of a text that is there, only whether its tail has logits is looked up"


# --- never accepted


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def attempt(tier: DiskTier, tokens: Any) -> int:
    """As the cache does it: until something is read as a whole, or nothing is left."""
    for _ in range(8):
        found = tier.find(tokens)
        if not found.length:
            return 0
        try:
            return load(tier, tokens)
        except SnapshotError:
            tier.discard(found)
    raise AssertionError("the same files are found again and again")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "prefix": lambda path: flip(path, 20),
    "directory": lambda path: flip(path, path.stat().st_size - 30),
    "data": lambda path: flip(path, 70),
    "image": lambda path: flip(path, path.stat().st_size // 2),
    "cut": lambda path: cut(path, path.stat().st_size - 1),
    "short": lambda path: cut(path, 30),
    "empty": lambda path: cut(path, 0),
    "foreign": lambda path: path.write_bytes(b"GGUF" * 100),
}


@pytest.mark.parametrize("kind", ["segment", "tail"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_deleted_and_written_anew(
    tier: DiskTier, tmp_path: Path, heap: PageHeap, how: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    path = only(tmp_path, kind)
    DAMAGE[how](path)
    again = make_tier(tmp_path, heap)
    assert attempt(again, tokens) == (0 if kind == "segment" else 832)
    assert not path.exists()
    assert "deleted" in caplog.text
    put(again, heap, tokens)
    assert attempt(again, tokens) == 840


def test_what_is_left_of_a_damaged_text_is_still_found(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    put(tier, heap, text(SYSTEM))
    put(tier, heap, text(SYSTEM, A))
    last = next(path for path in files(tmp_path, "segment") if entry_of(path).parent != tier._root)
    DAMAGE["directory"](last)
    assert attempt(make_tier(tmp_path, heap), text(SYSTEM, A)) == 640


@pytest.mark.parametrize("kind", ["segment", "tail"])
def test_a_file_under_the_name_of_another_is_not_believed(tmp_path: Path, heap: PageHeap, kind: str) -> None:
    ours, theirs = make_tier(tmp_path / "a", heap), make_tier(tmp_path / "b", heap)
    put(ours, heap, text((1, 700)))
    put(theirs, heap, text((2, 700)))
    path = only(tmp_path / "a", kind)
    shutil.copy(only(tmp_path / "b", kind), path)
    again = make_tier(tmp_path / "a", heap)
    assert attempt(again, text((1, 700))) == (0 if kind == "segment" else 640)
    assert not path.exists()


def test_a_file_of_another_model_is_not_believed(tmp_path: Path, heap: PageHeap) -> None:
    ours, theirs = make_tier(tmp_path, heap), make_tier(tmp_path, heap, model="b")
    put(theirs, heap, text((1, 640)))
    path = only(tmp_path, "segment")
    forged = path.read_bytes()
    put(ours, heap, text((1, 640)))
    mine = next(file for file in files(tmp_path, "segment") if file != path)
    mine.write_bytes(forged)
    assert attempt(make_tier(tmp_path, heap), text((1, 640))) == 0


HOSTILE = (
    "x.segment",
    "--.segment",
    "a-1-b.segment",
    f"{'0' * 32}-²-{'0' * 32}.segment",
    f"{'0' * 32}-0-{'0' * 32}.segment",
    f"{'0' * 32}--1-{'0' * 32}.segment",
    f"{'0' * 32}-99999-{'0' * 32}.segment",
    f"{'0' * 32}-70-{'0' * 32}.tail",
    f"{'g' * 32}-1-{'0' * 32}.segment",
    f"{'0' * 32}-1-{'0' * 32}.segment\n",
    "\udcff.segment",
    "-" * 200,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_not_believed(tier: DiskTier, tmp_path: Path, heap: PageHeap, name: str) -> None:
    tokens = text(SYSTEM)
    put(tier, heap, tokens)
    for other in (name, name.replace("0" * 32, tier._root)):
        (tier._folder / other).write_bytes(b"nothing")
    again = make_tier(tmp_path, heap, capacity=10_000)
    assert load(again, tokens) == 640
    put(again, heap, text(A))  # and evicts
    assert load(again, text(A)) == 200


def test_links_pipes_and_folders_are_left_alone(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    tokens = text(SYSTEM)
    put(tier, heap, tokens)
    run = only(tmp_path, "segment")
    kept = run.rename(tmp_path / "kept")
    for make in (lambda: run.mkdir(), lambda: os.mkfifo(run), lambda: run.symlink_to(kept)):
        make()
        assert attempt(make_tier(tmp_path, heap), tokens) == 0
        run.rmdir() if run.is_dir() else run.unlink()
    assert kept.exists()


def test_a_file_that_vanishes_after_the_folder_was_read(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    found = tier.find(tokens)
    run = only(tmp_path, "segment")
    moved = run.rename(tmp_path / "moved")
    with pytest.raises(SnapshotError, match="cannot open"):
        tier.load(found, tokens, None)
    tier.discard(found)
    moved.rename(run)
    assert load(tier, tokens) == 840, "run and tail are sound, and are used again"


def test_what_was_opened_stays_readable(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    with released(tier.load(tier.find(tokens), tokens, policy())) as saved:
        shutil.rmtree(tmp_path)
        check_session(saved, tokens, stateful=False)
    put(tier, heap, tokens)
    assert load(tier, tokens) == 840, "a folder that was removed is made again"


def test_a_file_that_may_not_be_read_is_not_deleted(
    tier: DiskTier, tmp_path: Path, heap: PageHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, or no right to read: that says nothing about what is in it."""
    tokens = text(SYSTEM)
    put(tier, heap, tokens)
    again = make_tier(tmp_path, heap)

    def refuse(path: Path) -> Any:
        raise SnapshotError(f"cannot open {path}") from OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "FileSource", refuse)
        assert attempt(again, tokens) == 0
    assert len(files(tmp_path)) == 2
    assert load(make_tier(tmp_path, heap), tokens) == 640
    put(again, heap, tokens)
    assert load(again, tokens) == 640, "what could not be read is written anew"


def test_what_cannot_be_restored_is_not_found_again(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    """All checksums are right, and yet the session refuses it."""
    tokens = text(SYSTEM, A)
    put(tier, heap, tokens)
    lengths = []
    while (found := tier.find(tokens)).length:
        lengths.append(found.length)
        tier.discard(found)
    assert lengths == [840, 832]
    assert len(files(tmp_path)) == 2


# --- what goes


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in files(path))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap)
    texts = [text((seed, 640)) for seed in range(4)]
    for i, tokens in enumerate(texts):
        put(tier, heap, tokens)
        for path in files(tmp_path):
            if path.stat().st_mtime > time.time() - 50:
                age(path, 1000 - i)
    assert load(tier, texts[0]) == 640  # used now
    tight = make_tier(tmp_path, heap, capacity=size_of(tmp_path))
    put(tight, heap, text((9, 640)))
    assert [load(tight, tokens) for tokens in texts] == [640, 0, 640, 640]
    assert load(tight, text((9, 640))) == 640


def test_a_run_that_something_goes_on_from_stays(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap)
    put(tier, heap, text(SYSTEM, A))
    put(tier, heap, text(SYSTEM, B))
    ancestor = next(path for path in files(tmp_path, "segment") if entry_of(path).parent == tier._root)
    age(ancestor, 5000)
    for i, path in enumerate(sorted(set(files(tmp_path)) - {ancestor})):
        age(path, 100 - i)
    total = size_of(tmp_path)
    while len(files(tmp_path)) > 1:
        total -= 1
        segments.Segments(tmp_path, capacity=total).evict()
        total = size_of(tmp_path)
        assert ancestor.exists()
    segments.Segments(tmp_path, capacity=0).evict()
    assert not files(tmp_path)


def test_nothing_goes_while_there_is_room(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap)
    for seed in range(6):
        put(tier, heap, text((seed, 300)))
    names = files(tmp_path)
    segments.Segments(tmp_path, capacity=size_of(tmp_path)).evict()
    assert files(tmp_path) == names


def test_all_models_share_the_room_and_keep_their_ancestors(tmp_path: Path) -> None:
    """Another model has pages of another size, and its runs are not ours to judge."""
    ours, theirs = make_heap(page_bytes=3 * PAGE), make_heap()
    mine, other = make_tier(tmp_path, ours), make_tier(tmp_path, theirs, model="b")
    put(other, theirs, text(SYSTEM, A))
    put(other, theirs, text(SYSTEM, B))
    for path in files(tmp_path):
        age(path, 5000 if entry_of(path).parent == other._root else 1000)
    before = set(files(tmp_path))
    mine._all.capacity = size_of(tmp_path) + 10_000
    put(mine, ours, text((8, 640)))
    gone = before - set(files(tmp_path))
    assert gone, "the folder is over its capacity"
    left = {entry_of(path) for path in before - gone}
    assert any(entry.parent == other._root for entry in left), "a run went before what goes on from it"
    assert size_of(tmp_path) <= mine._all.capacity


def test_a_text_larger_than_the_folder_is_not_stored(tmp_path: Path, heap: PageHeap) -> None:
    tier = make_tier(tmp_path, heap, capacity=20_000)
    put(tier, heap, text((1, 300)))
    with pytest.raises(SnapshotError, match="larger than"):
        put(tier, heap, text((2, 6400)))
    assert load(tier, text((1, 300))) == 300


def test_unfinished_files_of_the_dead_are_swept(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    old, new = tier._folder / ".x.segment.1234.part", tier._folder / ".y.segment.1234.part"
    elsewhere = tmp_path / ".mine.part"
    for path in (old, new, elsewhere):
        path.write_bytes(b"unfinished")
    age(old, ABANDONED_AFTER_SECONDS + 60)
    age(elsewhere, ABANDONED_AFTER_SECONDS + 60)
    make_tier(tmp_path, heap, model="b")
    assert [path.exists() for path in (old, new, elsewhere)] == [False, True, True]


def test_unfinished_files_take_room(tier: DiskTier, tmp_path: Path, heap: PageHeap) -> None:
    put(tier, heap, text((1, 300)))
    full = size_of(tmp_path)
    (tier._folder / ".x.segment.1234.part").write_bytes(bytes(full // 2))
    tight = make_tier(tmp_path, heap, capacity=full)
    put(tight, heap, text((1, 64)))
    assert size_of(tmp_path) <= full
    assert 0 < load(tight, text((1, 300))) < 300


def test_a_write_that_fails_leaves_nothing(
    tier: DiskTier, tmp_path: Path, heap: PageHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, heap, text((1, 300)))
    before = files(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvflash_ggml.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        put(tier, heap, text((2, 300)))
    assert files(tmp_path) == before
    assert not list(tmp_path.glob("*/.*"))


def test_a_folder_that_cannot_be_made(tmp_path: Path, heap: PageHeap) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        make_tier(tmp_path / "file", heap)
