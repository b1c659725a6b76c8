"""What a snapshot file says about itself, whether it is sound, and which files of a folder may go."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prefix_texts import make_heap, make_tier, put, text
from support.snapshot_files import PAGE, damage, write

from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.files import replacing
from kvflash_ggml.snapshot.container import PREFIX, Container, FileSource, Writer
from kvflash_ggml.snapshot.inspect import describe, removable, verify

DAY = 86_400


def test_describe(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvs")
    it = describe(path)
    assert (it.path, it.kind, it.version, it.bytes) == (path, "snapshot", 1, path.stat().st_size)
    assert (it.architecture, it.model, it.build) == ("qwen3", "abc123", "0c1e")
    assert (it.tokens, it.chunks, it.resident, it.checkpoints) == (150, 3, 2, 1)
    assert (it.pool, it.n_ctx, it.policy) == (1024, 4096, "qk")
    assert (it.pages, it.raw_bytes, it.compressed) == (3, 3 * PAGE, 0)
    assert it.sections["tokens"] == 600
    assert 3 * PAGE < it.sections["pages"] < 4 * PAGE


def test_a_compressed_file(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    path = write(tmp_path / "a.kvs", compress=True)
    it = describe(path)
    assert (it.pages, it.raw_bytes, it.compressed) == (3, 3 * PAGE, 3)
    assert it.sections["pages"] < 3 * PAGE
    assert verify(path) == it.bytes


def test_a_container_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.section("notes", b"text")
        writer.close("something else", {})
    it = describe(path)
    assert (it.kind, it.tokens, it.chunks, it.policy, it.pages) == ("something else", None, None, None, 0)
    assert verify(path) == it.bytes


def test_the_files_of_a_prefix_cache_are_sound(tmp_path: Path) -> None:
    """A tail has a ledger of all chunks, and an image of the last alone, or of none."""
    heap = make_heap()
    tier = make_tier(tmp_path, heap)
    for length in (640, 800):
        put(tier, heap, text((length, length)))
    kinds = set()
    for path in [*tmp_path.glob("*/*.tail"), *tmp_path.glob("*/*.segment")]:
        assert verify(path) == path.stat().st_size
        it = describe(path)
        kinds.add((it.kind, it.pages == it.chunks))
        damage(path, describe(path).bytes // 2)
        with pytest.raises(SnapshotError):
            verify(path)
    assert ("tail", False) in kinds
    assert len(kinds) == 2


@pytest.mark.parametrize(
    "facts",
    [
        {"fingerprint": 5, "settings": [], "policy": "x", "length": "many", "checkpoints": 7},
        {"fingerprint": {"architecture": 5, "model": "a\x1b[2Jb\n" * 40}, "settings": {"pool": 1e300, "policy": {}}},
        {"policy": {"name": ["x"]}, "length": True},
    ],
)
def test_facts_that_are_nonsense_are_left_out(tmp_path: Path, facts: dict[str, Any]) -> None:
    it = describe(write(tmp_path / "a.kvs", facts=facts))
    assert it.tokens is None
    assert it.pool is None
    assert it.policy is None
    assert it.architecture is None
    assert it.model is None or (it.model.isprintable() and len(it.model) < 100)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvs")
    seen: list[tuple[int, int]] = []
    assert verify(path, lambda done, total: seen.append((done, total))) == path.stat().st_size
    dones = [done for done, _ in seen]
    assert dones == sorted(dones)
    assert {total for _, total in seen} == {path.stat().st_size}
    assert 0 < dones[-1] <= path.stat().st_size


def test_every_byte_that_means_something_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvs")
    sound = path.read_bytes()
    container = Container(FileSource(path))
    spans = [(0, PREFIX.size), *((x.offset, x.size) for x in container.sections)]
    spans += [(page.offset, page.size) for page in container.pages("pages", PAGE, count=3)]
    for offset, size in spans:
        for at in {offset, offset + size // 2, offset + size - 1}:
            path.write_bytes(sound)
            damage(path, at)
            with pytest.raises(SnapshotError):
                verify(path)


@pytest.mark.parametrize("content", [b"", b"short", bytes(4096), b"GGUF" + bytes(4096)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    for look in (describe, verify):
        with pytest.raises(SnapshotError, match="is no snapshot"):
            look(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(SnapshotError):
            describe(tmp_path / name)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvs")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match="was written with"):
        verify(path)


def rewrite(path: Path, change: Any) -> None:
    """Change the directory of a file, with checksums that fit."""
    data = path.read_bytes()
    magic, version, zero, _, offset, size, _, _ = PREFIX.unpack(data[: PREFIX.size])
    directory = json.loads(data[offset : offset + size])
    change(directory)
    text = json.dumps(directory).encode()
    head = (magic, version, zero, offset + len(text), offset, len(text), zlib.crc32(text))
    prefix = PREFIX.pack(*head, zlib.crc32(PREFIX.pack(*head, 0)[:-4]))
    path.write_bytes(prefix + data[PREFIX.size : offset] + text)


def test_parts_that_overlap_are_not_read_again_and_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvs")

    def repeat(directory: dict[str, Any]) -> None:
        name, offset, size, check = next(x for x in directory["sections"] if x[0] == "tokens")
        directory["sections"] += [[f"{name} {i}", offset, size, check] for i in range(1000)]

    rewrite(path, repeat)
    with pytest.raises(SnapshotError, match="overlap"):
        verify(path)


def test_pages_that_are_not_one_for_each_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.section("ledger", bytes(24 * 5))
        writer.pages("pages", [bytes(PAGE)] * 4)
        writer.close("snapshot", {})
    with pytest.raises(SnapshotError, match="4 page images are not one for each chunk"):
        verify(path)


def test_page_images_of_no_size(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.pages("pages", [b""])
        writer.close("snapshot", {})
    with pytest.raises(SnapshotError, match="page images of 0 bytes"):
        describe(path)


# --- folders


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * DAY
    os.utime(path, (then, then))
    return path


def names(found: Any) -> list[tuple[str, str]]:
    return [(file.path.name, file.why) for file in found]


def test_only_remains_of_killed_saves_go_by_themselves(tmp_path: Path) -> None:
    aged(write(tmp_path / "old.kvs"), 400)
    with (tmp_path / ".a.kvs.x1.part").open("wb") as file:
        Writer(file).section("tokens", bytes(100))  # never closed
    with (tmp_path / ".young.part").open("wb") as file:
        Writer(file)
    (tmp_path / ".other.part").write_bytes(b"half a download")
    for name in (".a.kvs.x1.part", ".other.part"):
        aged(tmp_path / name, 1)
    assert names(removable(tmp_path)) == [(".a.kvs.x1.part", "abandoned")]


def test_a_save_that_is_under_way_stays(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.kvs") as file:
        Writer(file)  # type: ignore[arg-type]
        file.flush()
        (part,) = tmp_path.iterdir()
        aged(part, 1)
        assert removable(tmp_path, older_than=0, larger_than=0) == []
    assert names(removable(tmp_path, larger_than=0)) == [("a.kvs", "oldest")]


def test_an_unfinished_file_is_no_snapshot(tmp_path: Path) -> None:
    with (tmp_path / "a.kvs").open("wb") as file:
        Writer(file).section("tokens", bytes(100))
    with pytest.raises(SnapshotError, match="damaged"):
        describe(tmp_path / "a.kvs")


def test_by_age_and_by_size(tmp_path: Path) -> None:
    for days, name in enumerate("abcd"):
        aged(write(tmp_path / f"{name}.kvs"), days + 0.5)
    (tmp_path / "book.txt").write_text("text")
    aged(tmp_path / "book.txt", 100)
    (tmp_path / "link.kvs").symlink_to(tmp_path / "d.kvs")
    (tmp_path / "sub").mkdir()
    aged(write(tmp_path / "sub" / "e.kvs"), 100)
    size = (tmp_path / "a.kvs").stat().st_size
    assert names(removable(tmp_path, older_than=2)) == [("c.kvs", "old"), ("d.kvs", "old")]
    assert names(removable(tmp_path, larger_than=2 * size)) == [("d.kvs", "oldest"), ("c.kvs", "oldest")]
    assert names(removable(tmp_path, larger_than=4 * size)) == []
    both = removable(tmp_path, older_than=3, larger_than=size)
    assert names(both) == [("d.kvs", "old"), ("c.kvs", "oldest"), ("b.kvs", "oldest")]
    assert all(file.bytes == size for file in both)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot read the folder"):
        removable(tmp_path / "missing")


def test_a_large_section_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflash_ggml.snapshot.container.PIECE", 64)
    path = tmp_path / "a"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.section("numbers", np.arange(1000))
        writer.close("snapshot", {})
    verify(path)
    damage(path, 5000)
    with pytest.raises(SnapshotError, match="section 'numbers' does not match"):
        verify(path)
