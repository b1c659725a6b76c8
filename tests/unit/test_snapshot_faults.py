"""Kills, full disks and ten thousand hostile files: the old file stays whole, and the session lives."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import plain_reader
from support.fake_engine import PAGE_BYTES, ROW_BYTES
from support.integrity import check_table
from support.saving import decode, dump, load, make, save, seen, snapshot_store, text
from support.snapshot_files import EXTREMES, NONSENSE

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, ContextFull, KVFlashError, SnapshotError
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence

TESTS = Path(__file__).parents[1]
LENGTH = 460
KINDS: tuple[dict[str, Any], ...] = ({}, {"n_swa": 80})
REFUSALS = (SnapshotError, ConfigError, ContextFull)


@pytest.fixture(autouse=True)
def small_slabs() -> Iterator[None]:
    with mock.patch("kvflash_ggml.host.slabs.SLAB_BYTES", 4 * PAGE_BYTES):
        yield


@pytest.fixture
def session() -> Iterator[Sequence]:
    session = make()
    extend(session, text(LENGTH))
    yield session
    assert all(page.holders == 1 for page in session.store.heap._pages)
    session.close()


# --- processes that die, disks that fail


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_save_leaves_the_old_file_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.save_forever", tmp_path, "200"]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout)
    assert result["cut_off"] >= 20, "few kills came while a file was being written"
    assert result["seen"] >= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_says_that_it_cannot_save(tmp_path: Path) -> None:
    """The thread that writes is in the parent: the child would wait for ever."""
    code = f"""
import os, signal, sys, warnings
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
warnings.simplefilter("ignore")
from support.saving import dump, snapshot_store, make, text
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.config import PrefixCache
from kvflash_ggml.store.prefixes import Prefixes
session = make()
extend(session, text(700))
each = snapshot_store(session)
cached = Prefixes(PrefixCache(folder=Path({str(tmp_path)!r})), session, each, n_vocab=1000)
each.save(restore.state(session), Path({str(tmp_path / "a")!r}), compress=False).result()
cached.put(restore.state(session))
cached.flush()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
extend(session, text(100))
assert len(dump(session)) > 1000
try:
    each.save(restore.state(session), Path({str(tmp_path / "b")!r}), compress=False)
except SnapshotError as err:
    assert "forked" in str(err)
    cached.put(restore.state(session))
    cached.close()
    each.close()
    os._exit(7)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 7, run.stderr[-2000:]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("room", [0, 47, 1000, 5000])
def test_a_full_disk(room: int, compress: bool, session: Sequence, tmp_path: Path) -> None:
    """The old file stays, nothing else is left, and the session goes on."""
    if compress:
        pytest.importorskip("zstandard")
    path = tmp_path / "x"
    size = save(session, path)
    old = path.read_bytes()
    extend(session, text(100, 3))
    with room_for(room), pytest.raises(SnapshotError, match="room"):
        save(session, path, compress=compress)
    assert path.read_bytes() == old
    assert [other.name for other in tmp_path.iterdir()] == ["x"]
    extend(session, text(100, 4))
    assert save(session, path) > size
    load(session, path)
    assert session.length == LENGTH + 200


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end(where: str, session: Sequence, tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(session, path)
    old = path.read_bytes()
    extend(session, text(100, 3))
    trouble = OSError(errno.ENOSPC, "No space left on device")
    target = "kvflash_ggml.files.os.fsync" if where == "fsync" else "kvflash_ggml.files.Path.replace"
    with mock.patch(target, side_effect=trouble), pytest.raises(SnapshotError, match="No space"):
        save(session, path)
    assert path.read_bytes() == old
    assert [other.name for other in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_written(session: Sequence, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "absent" / "x", tmp_path / "file" / "x", Path("/proc/x"), tmp_path / ("x" * 300)):
        with pytest.raises(SnapshotError, match="folder"):
            save(session, path)
    assert [other.name for other in tmp_path.iterdir()] == ["file"]
    done = snapshot_store(session).save(restore.state(session), tmp_path / "absent" / "x", compress=False)
    assert isinstance(done.exception(), SnapshotError)
    decode(session, 3)


def test_a_file_has_the_permissions_of_others(session: Sequence, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    save(session, tmp_path / "x")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "other").stat().st_mode


# --- hostile files


class Victim:
    """A session with a text, a sound snapshot of another, and what that one holds."""

    def __init__(self, **info: Any) -> None:
        source = make(384, 2048, **info)
        extend(source, text(LENGTH))
        decode(source, 9)
        self.data = dump(source)
        self.parts = plain_reader.read(self.data)
        self.truth = [b"".join(source.engine.truth[c * CHUNK : (c + 1) * CHUNK]) for c in range(len(self.parts.pages))]
        self.tokens = source.tokens.tolist()
        self.state = source.engine.get_state(seq=0)
        source.close()
        self.plain = not info
        self.session = make(384, 2048, **info)
        extend(self.session, text(333))
        self.before = seen(self.session)

    def take(self, data: bytes, *, forged: bool) -> bool:
        """Was it accepted? Then it is either what was saved, or, under right checksums, at least a sound session."""
        session = self.session
        try:
            load(session, data)
        except REFUSALS:
            assert seen(session) == self.before
            return False
        check_table(session.table)
        cells, slots = session.engine.cell_pos, session.mask.slot_pos
        assert np.array_equal(cells.reshape(-1, CHUNK).max(1) >= 0, slots.reshape(-1, CHUNK).max(1) >= 0)
        if not forged:
            self.compare()
        elif self.plain:
            self.use()
        session.reset()
        extend(session, text(333))
        self.before = seen(session)
        return True

    def compare(self) -> None:
        session = self.session
        assert session.tokens.tolist() == self.tokens
        assert session.engine.get_state(seq=0) == self.state
        pool, _ = session.engine.settled()
        for c, chunk in enumerate(session.table.chunks):
            rows = self.truth[c]
            if chunk.block >= 0:
                at = chunk.block * CHUNK
                assert pool[at : at + len(rows) // ROW_BYTES].tobytes() == rows
            if c in session.store:
                with contextlib.suppress(SnapshotError):
                    assert session.store.bytes_of(c)[: len(rows)] == rows

    def use(self) -> None:
        """It may hold any text, but it works."""
        session = self.session
        session.engine.adopt([b""] * session.length, session.tokens.tolist())
        with contextlib.suppress(KVFlashError):
            extend(session, text(70, 8))
            decode(session, 20)
        check_table(session.table)

    def close(self) -> None:
        self.session.close()


@pytest.fixture(params=KINDS, ids=["plain", "window"])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    victim = Victim(**request.param)
    yield victim
    victim.close()


def flip(victim: Victim, rng: random.Random) -> bytes:
    data = bytearray(victim.data)
    for _ in range(rng.choice([1, 1, 2, 30])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(victim: Victim, rng: random.Random) -> bytes:
    """The beginning, a hole, or something after the end."""
    data, at, size = victim.data, rng.randrange(len(victim.data)), rng.randrange(1, 700)
    return rng.choice(
        [data[:at], data[:at] + data[at + size :], data[:at] + bytes(size) + data[at + size :], data + data[:at]]
    )


def shuffle(victim: Victim, rng: random.Random) -> bytes:
    """Two stretches of the file change places."""
    data, size = bytearray(victim.data), rng.choice([4, 8, 24, 64, PAGE_BYTES])
    a, b = (rng.randrange(0, len(data) - size, rng.choice([1, 4, 64])) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return bytes(data)


def forge_prefix(victim: Victim, rng: random.Random) -> bytes:
    _, _, _, _, offset, size, _, _ = plain_reader.PREFIX.unpack_from(victim.data)
    raw = victim.data[offset : offset + size]
    field = rng.choice(["total", "offset", "size"])
    value = rng.choice([0, 1, 47, 48, len(victim.data), offset, 2**31, 2**32, 2**63, 2**64 - 1, rng.randrange(2**64)])
    data = victim.data if rng.random() < 0.5 else victim.data[: rng.randrange(48, len(victim.data))]
    return plain_reader.seal(data, offset, raw, **{field: value})


def forge_directory(victim: Victim, rng: random.Random) -> bytes:
    """Any value of the directory becomes another, under right checksums."""
    _, _, _, _, offset, size, _, _ = plain_reader.PREFIX.unpack_from(victim.data)
    directory = json.loads(victim.data[offset : offset + size])
    for _ in range(rng.choice([1, 1, 3])):
        places = [place for place in walk_json(directory) if place[1] != "fingerprint" or rng.random() < 0.1]
        where, key = rng.choice(places)
        value = where[key]
        choices = [*EXTREMES, *NONSENSE, rng.randrange(600), "x" * 99, copy.deepcopy(victim.parts.facts)]
        if type(value) is int:
            choices += [value + 1, value - 1, -value, value * 2, 0] * 4
        if isinstance(where, dict) and rng.random() < 0.1:
            del where[key]
        else:
            where[key] = rng.choice(choices)
    raw = json.dumps(directory).encode()
    return plain_reader.seal(victim.data[:offset] + raw, offset, raw)


def walk_json(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from walk_json(inner)


def forge_section(victim: Victim, rng: random.Random) -> bytes:
    """Other bytes in a section, or another size, under right checksums."""
    parts = copy.deepcopy(victim.parts)
    name = rng.choice([name for name in parts.sections if parts.sections[name]])
    data = bytearray(parts.sections[name])
    for _ in range(rng.choice([1, 2, 40])):
        at = rng.randrange(0, len(data), 4)
        data[at : at + 4] = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)]).to_bytes(4, "little")
    if rng.random() < 0.3:
        data = data * 2 if rng.random() < 0.5 else data[: rng.randrange(len(data))]
    parts.sections[name] = bytes(data)
    if name != "pages":
        return plain_reader.write(parts)
    parts.sections["pages "] = parts.sections.pop("pages")  # not the true one
    whole = plain_reader.write(parts)
    _, _, _, _, offset, size, _, _ = plain_reader.PREFIX.unpack_from(whole)
    directory = json.loads(whole[offset : offset + size])
    for entry in directory["sections"]:
        if entry[0] == "pages ":
            entry[0], entry[3] = "pages", plain_reader.checksum(bytes(data), "pages")
    raw = json.dumps(directory).encode()
    return plain_reader.seal(whole[:offset] + raw, offset, raw)


def swap_sections(victim: Victim, rng: random.Random) -> bytes:
    """Sections under each other's names, with checksums that fit the names."""
    parts = copy.deepcopy(victim.parts)
    names = [name for name in parts.sections if name != "pages"]
    a, b = rng.choice(names), rng.choice(names)
    parts.sections[a], parts.sections[b] = parts.sections[b], parts.sections[a]
    if rng.random() < 0.5:
        rng.shuffle(parts.pages)
    return plain_reader.write(parts)


Mutation = Callable[[Victim, random.Random], bytes]
RAW: list[Mutation] = [flip, cut, shuffle]
FORGED: list[Mutation] = [forge_prefix, forge_directory, forge_section, swap_sections]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", RAW + FORGED)
def test_hostile_files(mutation: Mutation, victim: Victim) -> None:
    """Ten thousand in all: refused with a typed error, or harmless."""
    rng = random.Random(11)
    taken = 0
    for _ in range(720):
        data = mutation(victim, rng)
        taken += victim.take(data, forged=mutation in FORGED)
    if mutation in RAW:
        assert taken < 300, "damage lies in pages that are not read yet, or in no bytes that count"
    assert victim.take(victim.data, forged=False), "it still takes what is sound"


@pytest.mark.slow
@pytest.mark.parametrize("mutation", RAW + FORGED)
def test_hostile_files_cost_no_memory(mutation: Mutation, victim: Victim) -> None:
    """Nothing beyond the size of the file and a constant, whatever its numbers say."""
    rng = random.Random(12)
    victim.take(victim.data, forged=False)
    tracemalloc.start()
    try:
        for _ in range(60):
            data = mutation(victim, rng)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(*REFUSALS):
                snapshot_store(victim.session).load(data).release()
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 6 << 20, 2**31 - 1])
def test_large_sections_are_not_read(length: int | None, victim: Victim) -> None:
    """A file that is nearly all of one section, such as one of holes, is refused before that is read."""
    for name in ("tokens", "ledger", "queries", "statistics", "logits", "state", "look 0"):
        parts = copy.deepcopy(victim.parts)
        parts.facts["policy"]["looks"] = 1
        parts.facts["length"] = parts.facts["length"] if length is None else length
        parts.sections[name] = bytes(24 << 20)
        data = plain_reader.write(parts)
        tracemalloc.start()
        try:
            with contextlib.suppress(*REFUSALS):
                load(victim.session, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20, name
