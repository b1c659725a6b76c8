"""A snapshot brings back what was saved, or is refused and the session that should have taken it is as it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plain_reader
from support.fake_engine import PAGE_BYTES, ROW_BYTES, FakeLayer
from support.integrity import check_table
from support.saving import N_VOCAB, Digest, decode, dump, load, make, making, save, seen, snapshot_store, text
from support.snapshot_files import EXTREMES, NONSENSE

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, ContextFull, SnapshotError, SnapshotMismatch
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.snapshot.container import BytesSource, FileSource
from kvflash_ggml.state.statistics import RowForm

LENGTH = 700


@pytest.fixture(scope="module", autouse=True)
def small_slabs() -> Iterator[None]:
    with mock.patch("kvflash_ggml.host.slabs.SLAB_BYTES", 4 * PAGE_BYTES):
        yield


@pytest.fixture
def world() -> Iterator[Any]:
    with making() as build:
        yield build


@pytest.fixture(scope="module")
def target() -> Iterator[Sequence]:
    """Holds a text that must outlive every refusal."""
    session = make()
    extend(session, text(333))
    yield session
    session.close()


@pytest.fixture(scope="module")
def data() -> bytes:
    session = make()
    extend(session, text(LENGTH))
    decode(session, 9)
    session.pin_range(130, 140)
    data = dump(session)
    session.close()
    return data


@pytest.fixture
def parts(data: bytes) -> plain_reader.Parts:
    return plain_reader.read(data)


def refused(session: Sequence, data: bytes | Path, match: str | None = None, error: Any = SnapshotError) -> None:
    before = seen(session)
    with pytest.raises(error, match=match):
        load(session, data)
    assert seen(session) == before


# --- what comes back


@pytest.mark.parametrize("info", [{}, {"recurrent": True}, {"n_swa": 80}, {"asynchronous": True}])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("scorer", [None, Digest])
def test_round_trip_of_every_memory(scorer: Any, info: dict[str, Any], length: int, world: Any) -> None:
    session, again = world(scorer=scorer, **info), world(scorer=scorer, **info)
    if length:
        extend(session, text(length))
        decode(session, 5)
    dumped = dump(session)
    extend(again, text(77))
    load(again, dumped)
    assert again.engine.get_state(seq=0) == session.engine.get_state(seq=0)
    assert again.tokens.tolist() == session.tokens.tolist()
    one, other = plain_reader.read(dumped), plain_reader.read(dump(again))
    if scorer is None:  # no queries are kept
        assert other.facts.pop("queries_from") == one.facts.pop("queries_from") + session.length
    assert other == one
    again.engine.adopt(session.engine.truth, session.engine.tokens)
    extend(again, text(100))
    check_table(again.table)


@pytest.mark.parametrize("gone_on", [False, True])
def test_a_state_that_was_just_put_back_is_not_read_again(gone_on: bool, world: Any) -> None:
    """A checkpoint is kept where a question follows: of a text that has been restored it is at hand, of another not."""
    session, again = world(recurrent=True), world(recurrent=True)
    extend(session, text(300))
    load(again, dump(session))
    again.engine.adopt(session.engine.truth, session.engine.tokens)
    if gone_on:  # another text of this length
        again.truncate(max(again.checkpoints.state()))
        extend(again, text(300, 5)[again.length :])
    with mock.patch.object(again.engine, "get_state", wraps=again.engine.get_state) as reads:
        extend(again, text(50, 2))
    assert bool(reads.call_count) is gone_on
    assert again.truncate(300) == 300
    extend(again, text(20, 3))
    assert again.length == 320


@pytest.mark.parametrize("window", [0, 128])
def test_to_change_texts_moves_a_state_once(window: int, world: Any) -> None:
    """What is not pooled is read for a text where it was not kept at its end, and put in place once."""
    session = world(recurrent=True, n_swa=window)

    def state_aside() -> bytes:
        saved = restore.state(session)
        saved.release()
        return bytes(saved.state.read())

    aside = []
    for seed, length in ((1, 300), (2, 400)):
        session.reset()
        extend(session, text(length, seed))
        session.checkpoints.before_step(length, wanted=True)
        aside.append((restore.state(session), session.engine.get_state(seq=0), session.engine.truth[:]))
    engine = session.engine
    with (
        mock.patch.object(engine, "get_state", wraps=engine.get_state) as reads,
        mock.patch.object(engine, "set_state", wraps=engine.set_state) as writes,
    ):
        for saved, state, truth in [*aside, *aside]:
            restore.load(session, saved.share())
            engine.adopt(truth, saved.tokens.tolist())
            assert state_aside() == state
        assert reads.call_count == (8 if window else 0)
        assert writes.call_count == 4
        extend(session, text(50, 3))
        assert state_aside() == engine.get_state(seq=0) != aside[1][1], "it has gone on"
    for saved, *_ in aside:
        saved.release()


@pytest.mark.parametrize("count", [1, 200])
def test_a_state_that_was_put_back_is_held_until_the_text_goes_on(count: int, world: Any) -> None:
    """By an answer or by a prompt: it may be hundreds of MiB."""
    session, again = world(recurrent=True), world(recurrent=True)
    extend(session, text(300))
    load(again, dump(session))
    again.engine.adopt(session.engine.truth, session.engine.tokens)
    held = [again.checkpoints.restored]
    extend(again, text(count, 2), after=lambda *_: held.append(again.checkpoints.restored))
    assert held[0] is not None
    assert len(held) > 1
    assert set(held[1:]) == {None}


@pytest.mark.parametrize("compress", [False, True])
def test_round_trip_through_a_file(compress: bool, world: Any, tmp_path: Path) -> None:
    if compress:
        pytest.importorskip("zstandard")
    session, again = world(), world()
    extend(session, text(LENGTH))
    path = tmp_path / "text.kvs"
    size = save(session, path, compress=compress)
    assert size == path.stat().st_size
    assert [x.name for x in tmp_path.iterdir()] == ["text.kvs"]
    load(again, path)
    path.unlink()  # what is open stays readable
    assert dump(again) == dump(session)


def test_compressed_images_that_lie_about_their_size(world: Any, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    session, again = world(), world()
    extend(session, text(LENGTH))
    save(session, tmp_path / "x", compress=True)
    parts = plain_reader.read((tmp_path / "x").read_bytes())
    assert any(codec for _, codec in parts.pages)
    pack = zstandard.ZstdCompressor().compress
    for stored in (pack(bytes(PAGE_BYTES + 1)), pack(bytes(1 << 20)), pack(bytes(1)), b"", b"(\xb5/\xfd" * 9):
        for c in range(len(parts.pages)):
            harmed = [*parts.pages[:c], (stored, 1), *parts.pages[c + 1 :]]
            load_or_refuse(again, plain_reader.write(dataclasses.replace(parts, pages=harmed)))


def load_or_refuse(session: Sequence, data: bytes) -> None:
    """Refused at once, or when the page is read."""
    with pytest.raises(SnapshotError):
        load_all(session, data)


def load_all(session: Sequence, data: bytes) -> None:
    """Load a snapshot and read every page of it."""
    load(session, data)
    for chunk in session.store:
        session.store.bytes_of(chunk)


def test_without_zstandard_it_is_said_what_to_install(world: Any, tmp_path: Path) -> None:
    from kvflash_ggml.snapshot import codec

    session = world()
    extend(session, text(LENGTH))
    codec.require.cache_clear()
    with mock.patch.dict("sys.modules", {"zstandard": None}), pytest.raises(ConfigError, match="zstd"):
        save(session, tmp_path / "x", compress=True)
    codec.require.cache_clear()
    assert not list(tmp_path.iterdir())


def test_a_state_that_was_cut_is_saved_as_a_shorter_text(world: Any) -> None:
    """Nothing of what came after it: not in the last page, not in the scores, not in the clock of the policy."""
    session, straight = world(scorer=None), world(scorer=None)
    extend(session, text(LENGTH))
    extend(straight, text(LENGTH)[:450])
    parts = plain_reader.read(dump(session, 450))
    assert parts.facts["length"] == 450
    assert parts.facts["policy"] is None
    assert len(parts.pages) == 8
    (last, _), used = parts.pages[-1], (450 - 7 * CHUNK) * ROW_BYTES
    assert not any(last[used:]), "rows of the text that was cut off"
    assert last[:used] == b"".join(session.engine.truth[448:450])
    again = world(scorer=None)
    load(again, plain_reader.write(parts))
    again.engine.adopt(session.engine.truth[:450], session.engine.tokens[:450])
    extend(again, text(100))
    assert again.tokens.tolist() == [*text(LENGTH)[:450].tolist(), *text(100).tolist()]
    check_table(again.table)


@pytest.mark.parametrize("info", [{"recurrent": True}, {"n_swa": 80}])
def test_an_impossible_length_is_an_error(info: dict[str, Any], world: Any) -> None:
    session = world(**info)
    extend(session, text(400))
    extend(session, text(100, 4))
    known = sorted(session.checkpoints.state())
    assert known
    for length in (known[0] + 1, 450, 10):
        with pytest.raises(SnapshotError, match=str(known[0])):
            restore.state(session, length)
    for length in (-1, 501, 10**9):
        with pytest.raises(SnapshotError, match="500"):
            restore.state(session, length)
    assert plain_reader.read(dump(session, known[0])).facts["length"] == known[0]


@pytest.mark.parametrize("n_slots", [384, 512, 4096])
def test_into_another_pool(n_slots: int, world: Any) -> None:
    session, other = world(), world(n_slots)
    extend(session, text(LENGTH))
    decode(session, 20)
    scores = session.relevance.ranking
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    check_table(other.table)
    inside, before = set(other.table.resident_chunks), set(session.table.resident_chunks)
    if n_slots == 384:
        assert inside < before
        kept = other.table.protected((other.length - 1) // CHUNK, (other.length - 1) // CHUNK)
        assert kept & before <= inside
        lost = [scores[c] for c in before - inside if c < len(scores)]
        stayed = [scores[c] for c in inside - kept if c < len(scores)]
        assert max(lost) <= min(stayed)
    elif n_slots == 512:
        assert inside == before
    else:
        assert inside == set(range(len(other.table.chunks)))
    extend(other, text(200, 3))
    check_table(other.table)
    assert [other.store.bytes_of(c) if c in other.store else b"" for c in range(3)] == [
        b"".join(session.engine.truth[c * CHUNK : (c + 1) * CHUNK]) if c in other.store else b"" for c in range(3)
    ]


def test_pins_that_a_smaller_pool_cannot_hold(world: Any) -> None:
    session, other = world(512), world(320)
    extend(session, text(LENGTH))
    session.pin_range(0, 2 * CHUNK)
    extend(other, text(300))
    refused(other, dump(session), "pin", ConfigError)


def test_a_whole_context_reads_every_page_before_it_changes_anything(parts: plain_reader.Parts, world: Any) -> None:
    """Also those that were not resident when it was saved."""
    other = world(4096)
    extend(other, text(300))
    blocks = [row[0] for row in ledger(parts)]
    away = blocks.index(-1)
    whole = plain_reader.write(parts)
    at = whole.index(parts.pages[away][0])
    refused(other, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "damaged")


def ledger(parts: plain_reader.Parts) -> list[tuple[int, int, float, int]]:
    return np.frombuffer(parts.sections["ledger"], "<i4, <u4, <f8, <u8").tolist()


def test_another_policy_reads_the_keys_again(data: bytes, world: Any, caplog: Any) -> None:
    class Other(Digest):
        name = "other"

    session = world(scorer=Other)
    load(session, data)
    again = world()
    load(again, data)
    np.testing.assert_array_equal(session.scoring.scorer.dump(11), again.scoring.scorer.dump(11))
    assert not session.scoring.pending


@pytest.mark.parametrize("layout", [RowForm("crc32", 8), RowForm("crc32 of something else", 4)])
def test_statistics_of_another_layout_are_made_anew(layout: RowForm, data: bytes, world: Any) -> None:
    class Other(Digest):
        loaded = False

        @property
        def layout(self) -> RowForm:
            return layout

        def load(self, rows: Any) -> None:
            self.loaded = True

    session, again = world(scorer=Other), world()
    load(session, data)
    load(again, data)
    assert not session.scoring.scorer.loaded
    np.testing.assert_array_equal(session.scoring.scorer.dump(11), again.scoring.scorer.dump(11))


@pytest.mark.parametrize("seed", [-1, 0, 1, 2**32 - 1, 2**63])
def test_any_seed(seed: int, world: Any) -> None:
    session = world()
    saved = restore.state(session)
    saved.seed = seed
    again = snapshot_store(session).load(snapshot_store(session).dump(saved))
    assert again.seed == seed
    again.release()


def test_pages_are_read_when_they_are_needed(data: bytes, world: Any) -> None:
    session = world()
    with mock.patch("kvflash_ggml.snapshot.container.StoredPage.read_into", autospec=True) as read:
        read.side_effect = lambda self, image: self.source.read_into(self.offset, image)
        load(session, data)
    assert read.call_count == session.table.resident < len(session.table.chunks)
    assert session.store.heap.host_bytes == (session.table.resident - 1) * PAGE_BYTES  # the last is not full


# --- the layout, by the document


def test_the_layout_is_what_the_document_says(data: bytes) -> None:
    parts = plain_reader.read(data)
    assert parts.kind == "snapshot"
    facts = parts.facts
    length = LENGTH + 9
    chunks = -(-length // CHUNK)
    assert facts["length"] == length == len(parts.sections["tokens"]) // 4
    assert np.frombuffer(parts.sections["tokens"], "<i4")[:LENGTH].tolist() == text(LENGTH).tolist()
    assert len(parts.sections["whole"]) == -(-length // 8)
    assert len(parts.pages) == len(ledger(parts)) == chunks
    assert all(len(stored) == PAGE_BYTES and codec == 0 for stored, codec in parts.pages)
    blocks, scored, scores, uses = zip(*ledger(parts), strict=True)
    assert sorted(set(blocks)) == list(range(-1, 7))
    assert list(scored) == sorted(scored, reverse=True)
    assert any(scores)
    assert max(uses) <= facts["clock"]
    assert facts["pins"] == [2]
    assert facts["settled"] is False
    assert facts["checkpoints"] == []
    assert parts.sections["state"] == b""
    assert len(parts.sections["queries"]) == 4 * ROW_BYTES * 4
    assert 0 <= facts["queries_from"] <= length
    policy = facts["policy"]
    assert (policy["name"], policy["tau"]) == ("digest", 64)
    assert [f"look {i}" in parts.sections for i in range(policy["looks"] + 1)] == [True] * policy["looks"] + [False]
    (found,) = policy["found"]
    assert found["start"] == LENGTH - CHUNK
    assert parts.sections["found 0 tokens"] == text(LENGTH)[-CHUNK:].astype("<i4").tobytes()
    assert len(parts.sections["found 0 ledger"]) == 24 * -(-found["start"] // CHUNK)
    assert len(parts.sections["found 0 ranking"]) == 8 * (LENGTH // CHUNK)
    assert len(parts.sections["statistics"]) == length // CHUNK * 4
    assert "logits" not in parts.sections
    assert facts["fingerprint"]["chunk"] == CHUNK
    assert set(facts["settings"]) == {"pool", "n_ctx", "policy", "tau", "sinks", "tail", "reading", "repair"}


def test_a_recurrent_layout(world: Any) -> None:
    session = world(recurrent=True)
    extend(session, text(300))
    extend(session, text(100, 2))
    saved = restore.state(session)
    saved.logits = np.arange(N_VOCAB, dtype=np.float32)
    parts = plain_reader.read(snapshot_store(session).dump(saved))
    assert parts.sections["state"] == session.engine.get_state(seq=0)
    assert parts.facts["checkpoints"] == sorted(session.checkpoints.state()) != []
    for pos, blob in session.checkpoints.state().items():
        assert parts.sections[f"checkpoint {pos}"] == blob.read()
    assert np.frombuffer(parts.sections["logits"], "<f4").tolist() == list(range(N_VOCAB))


def test_our_own_writer_is_believed(parts: plain_reader.Parts, data: bytes, world: Any) -> None:
    """What is written by the document is read as what the package writes."""
    one, other = world(), world()
    load(one, data)
    load(other, plain_reader.write(parts))
    assert dump(one) == dump(other)


# --- what is refused


def test_every_bit_of_the_prefix_and_the_directory(data: bytes, target: Sequence) -> None:
    _, _, _, total, offset, _, _, _ = plain_reader.PREFIX.unpack_from(data)
    before = seen(target)
    for at in [*range(plain_reader.PREFIX.size), *range(offset, total)]:
        for bit in range(8) if at < plain_reader.PREFIX.size else (at % 8,):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(SnapshotError):
                load(target, bytes(damaged))
    assert seen(target) == before


def test_truncations_and_extensions(data: bytes, target: Sequence) -> None:
    for size in [*range(0, 600), *range(600, len(data), 97), len(data) - 1]:
        with pytest.raises(SnapshotError):
            load(target, data[:size])
    refused(target, b"")
    refused(target, data[:-1])
    refused(target, data + b"\0", "was written with")
    refused(target, data * 2)


def test_swapped_sections_and_pages(parts: plain_reader.Parts, data: bytes, target: Sequence, world: Any) -> None:
    entries = {entry[0]: entry for entry in directory(data)["sections"]}
    names = [name for name in entries if entries[name][2]]
    for a, b in pairwise(names):
        swapped = {a: [a, *entries[b][1:]], b: [b, *entries[a][1:]]}
        refused(target, replace_sections(data, swapped), "checksum|contradicts itself")
    other = world()
    pages = parts.sections["pages"]
    for c in range(len(parts.pages) - 1):
        table = bytearray(pages)
        one, two = slice(24 * c, 24 * c + 24), slice(24 * c + 24, 24 * c + 48)
        table[one], table[two] = table[two], table[one]
        load_or_refuse(other, replace_table(data, bytes(table)))


def directory(data: bytes) -> Any:
    _, _, _, _, offset, size, _, _ = plain_reader.PREFIX.unpack_from(data)
    return json.loads(data[offset : offset + size])


def replace_sections(data: bytes, entries: dict[str, Any]) -> bytes:
    """Other places in the directory, under right checksums of the directory and the prefix."""
    _, _, _, _, offset, _, _, _ = plain_reader.PREFIX.unpack_from(data)
    whole = directory(data)
    whole["sections"] = [entries.get(entry[0], entry) for entry in whole["sections"]]
    raw = json.dumps(whole).encode()
    return plain_reader.seal(data[:offset] + raw, offset, raw)


def replace_table(data: bytes, table: bytes) -> bytes:
    (entry,) = (entry for entry in directory(data)["sections"] if entry[0] == "pages")
    at = entry[1]
    whole = data[:at] + table + data[at + len(table) :]
    return replace_sections(whole, {"pages": [*entry[:3], plain_reader.checksum(table, "pages")]})


@pytest.mark.parametrize("field", [1, 2, 3])
def test_an_impossible_place_size_or_checksum(field: int, data: bytes, target: Sequence) -> None:
    for entry in directory(data)["sections"]:
        for value in EXTREMES + NONSENSE:
            harmed = list(entry)
            harmed[field] = value
            with pytest.raises(SnapshotError):
                load(target, replace_sections(data, {entry[0]: harmed}))
    assert target.length == 333


def test_sections_that_overlap_are_refused(data: bytes, target: Sequence) -> None:
    _, _, _, _, offset, _, _, _ = plain_reader.PREFIX.unpack_from(data)
    entries = {entry[0]: [entry[0], 0, offset, 0] for entry in directory(data)["sections"]}
    refused(target, replace_sections(data, entries), "overlap")


def test_a_name_twice_is_refused(data: bytes, target: Sequence) -> None:
    entries = directory(data)["sections"]
    refused(target, replace_sections(data, {entries[0][0]: entries[1]}), "overlap")


def test_impossible_numbers_in_the_page_table(parts: plain_reader.Parts, data: bytes, target: Sequence) -> None:
    row = list(plain_reader.PAGE.unpack_from(parts.sections["pages"]))
    for field, bits in ((0, 64), (1, 64), (2, 32)):
        for value in (2**bits - 1, 2**bits - PAGE_BYTES, 2 ** (bits - 1), len(data), len(data) - 1, 7):
            harmed = list(row)
            harmed[field] = value
            table = plain_reader.PAGE.pack(*harmed) + parts.sections["pages"][24:]
            refused(target, replace_table(data, table))


def test_impossible_numbers_in_the_prefix(data: bytes, target: Sequence) -> None:
    _, _, _, _, offset, size, _, _ = plain_reader.PREFIX.unpack_from(data)
    raw = data[offset : offset + size]
    for field, bits in (("version", 32), ("total", 64), ("offset", 64), ("size", 64), ("check", 32)):
        for value in (2**bits - 1, 2 ** (bits - 1), 0, len(data) - 1, len(data) + 1):
            refused(target, plain_reader.seal(data, offset, raw, **{field: value}))
    refused(target, plain_reader.seal(data, offset, raw, version=2), "version 2")


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"3", b'"facts"', b"{}", b"\xff\xfe", b"{" * 5000, b"[" * 100_000, b"9" * 5000],
    ids=range(10),
)
def test_a_directory_that_is_none(target: Sequence, raw: bytes) -> None:
    refused(target, plain_reader.seal(bytes(48) + raw, 48, raw), "directory")


def test_a_directory_too_large(target: Sequence) -> None:
    raw = json.dumps({"kind": "snapshot", "facts": {}, "sections": []}).encode() + b" " * (1 << 20)
    refused(target, plain_reader.seal(bytes(48) + raw, 48, raw), "directory")


Harm = Callable[[plain_reader.Parts], Any]


def fact(**values: Any) -> Harm:
    return lambda parts: parts.facts.update(values)


def policy(**values: Any) -> Harm:
    return lambda parts: parts.facts["policy"].update(values)


def section(name: str, change: Callable[[bytes], bytes]) -> Harm:
    return lambda parts: parts.sections.update({name: change(parts.sections[name])})


def rows(row: int, field: str, value: Any) -> Harm:
    def harm(parts: plain_reader.Parts) -> None:
        kind = [("block", "<i4"), ("scored", "<u4"), ("score", "<f8"), ("last_use", "<u8")]
        table = np.frombuffer(parts.sections["ledger"], kind).copy()
        table[field][row] = value
        parts.sections["ledger"] = table.tobytes()

    return harm


HARM: dict[str, Harm] = {
    "another kind": lambda parts: setattr(parts, "kind", "prefix"),
    "no fingerprint": lambda parts: parts.facts.pop("fingerprint"),
    "empty fingerprint": fact(fingerprint={}),
    "listed fingerprint": fact(fingerprint=[1]),
    "length": fact(length=LENGTH),
    "half a token": section("tokens", lambda data: data[:-1]),
    "a chunk of tokens less": section("tokens", lambda data: data[: -4 * CHUNK]),
    "a foreign token": section("tokens", lambda data: data[:-4] + b"\xe8\x03\0\0"),
    "a ledger row less": section("ledger", lambda data: data[:-24]),
    "a ledger row more": section("ledger", lambda data: data + data[:24]),
    "half a ledger row": section("ledger", lambda data: data[:-1]),
    "block below": rows(0, "block", -3),
    "block twice": lambda parts: [rows(row, "block", 5)(parts) for row in (0, 1)],
    "use after the clock": rows(0, "last_use", 1 << 62),
    "scored out of order": rows(0, "scored", 0),
    "scored twice": rows(0, "scored", 2**32 - 1),
    "clock": fact(clock=-1),
    "no clock": lambda parts: parts.facts.pop("clock"),
    "settled": fact(settled=1),
    "pins a number": fact(pins=7),
    "pins below": fact(pins=[-1]),
    "pins beyond": fact(pins=[2**31]),
    "pins a bool": fact(pins=[True]),
    "checkpoint of nothing": fact(checkpoints=[100]),
    "checkpoint beyond": lambda p: (fact(checkpoints=[9999])(p), p.sections.update({"checkpoint 9999": b""})),
    "checkpoints without end": lambda p: (fact(checkpoints=[1] * 2000)(p), p.sections.update({"checkpoint 1": b""})),
    "queries from beyond": fact(queries_from=9999),
    "half a query": section("queries", lambda data: data[:-1]),
    "seed": fact(seed=2**64),
    "policy a list": fact(policy=[]),
    "policy without a name": policy(name=None),
    "due": policy(due=2**40),
    "looks without end": policy(looks=9),
    "looks that are not there": policy(looks=5),
    "findings a number": policy(found=7),
    "a finding a number": policy(found=[7]),
    "findings without end": lambda parts: policy(found=parts.facts["policy"]["found"] * 17)(parts),
    "a finding that is not there": lambda parts: policy(found=parts.facts["policy"]["found"] * 2)(parts),
    "a finding beyond": lambda parts: parts.facts["policy"]["found"][0].update(start=LENGTH + 10),
    "a finding from elsewhere": lambda parts: parts.facts["policy"]["found"][0].update(start=64),
    "a finding from a fraction": lambda parts: parts.facts["policy"]["found"][0].update(start=1.5),
    "a finding that is due a number": lambda parts: parts.facts["policy"]["found"][0].update(due=1),
    "a finding before its clock": lambda parts: parts.facts["policy"]["found"][0].update(clock=0),
    "a finding of endless tokens": section("found 0 tokens", lambda data: bytes(4 << 17)),
    "a finding's row less": section("found 0 ledger", lambda data: data[:-24]),
    "a finding's block twice": section("found 0 ledger", lambda data: data[:24] * (len(data) // 24)),
    "a finding's scores for more chunks": section("found 0 ranking", lambda data: bytes(8 * 99)),
    "statistics": section("statistics", lambda data: data[:-1]),
    "half a score": lambda parts: (policy(looks=1)(parts), parts.sections.update({"look 0": b"\0" * 7})),
    "scores for more chunks": lambda parts: (policy(looks=1)(parts), parts.sections.update({"look 0": bytes(8 * 99)})),
    "logits of another size": lambda parts: parts.sections.update({"logits": bytes(4)}),
    "a page less": lambda parts: (parts.pages.pop(), section("pages", lambda data: data[:-24])(parts)),
    "a page more": lambda parts: (parts.pages.append(parts.pages[0]), section("pages", lambda d: d + d[:24])(parts)),
    "a page short": lambda parts: parts.pages.__setitem__(4, (parts.pages[4][0][:-1], 0)),
    "a page long": lambda parts: parts.pages.__setitem__(4, (parts.pages[4][0] + b"\0", 0)),
    "a page in an unknown form": lambda parts: parts.pages.__setitem__(4, (parts.pages[4][0], 9)),
    "half a page table": section("pages", lambda data: data[:-1]),
    "a state": lambda parts: parts.sections.update(state=b"state"),
    **{f"no {name}": lambda parts, name=name: parts.sections.pop(name)
       for name in ("tokens", "ledger", "state", "queries", "pages")},
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_contradiction_under_right_checksums(parts: plain_reader.Parts, target: Sequence, name: str) -> None:
    HARM[name](parts)
    refused(target, plain_reader.write(parts))


def test_a_file_of_a_session_with_repairs_still_opens(parts: plain_reader.Parts, target: Sequence) -> None:
    fact(repaired=1000)(parts)
    parts.facts["settings"]["repair"] = 64
    load(target, plain_reader.write(parts))
    assert target.length == parts.facts["length"]


@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    session = make()
    for data in (noise, plain_reader.MAGIC + noise, plain_reader.seal(bytes(48) + noise, 48, noise)):
        refused(session, data)
    session.close()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("type_k", {"type_k": "q8_0"}),
        ("type_v", {"type_v": "q4_0"}),
        ("n_swa", {"n_swa": 100}),
        ("recurrent", {"recurrent": True}),
        ("rotated", {"rotated": 1}),
        ("n_pos", {"n_pos": 4}),
    ],
)
def test_another_model_or_setting_is_named(data: bytes, field: str, other: dict[str, Any], world: Any) -> None:
    session = world(**other)
    extend(session, text(100))
    before = seen(session)
    with pytest.raises(SnapshotMismatch, match=field) as caught:
        load(session, data)
    assert (caught.value.field, caught.value.expected) == (field, getattr(session.engine.info, field))
    assert seen(session) == before


def test_another_shape_of_layers_is_refused(data: bytes, world: Any) -> None:
    session = world()
    session.engine.layers = (FakeLayer(), FakeLayer(il=1))
    refused(session, data, "layers", SnapshotMismatch)


def test_a_layer_may_be_on_another_device(data: bytes, world: Any) -> None:
    session = world()
    session.engine.layers = (FakeLayer(device=1),)
    load(session, data)
    assert session.length


def test_a_smaller_context_refuses_a_longer_text(data: bytes, world: Any) -> None:
    session = world(n_ctx=512)
    extend(session, text(100))
    refused(session, data, "512", ContextFull)


@pytest.mark.parametrize("info", [{"recurrent": True}, {"n_swa": 80}])
def test_a_state_that_llama_cannot_read(info: dict[str, Any], world: Any) -> None:
    session, other = world(**info), world(**info)
    extend(session, text(128))
    extend(other, text(200))
    parts = plain_reader.read(dump(session))
    parts.sections["state"] = parts.sections["state"][:-4]
    refused(other, plain_reader.write(parts), "recurrent")
    extend(other, text(70))


# --- files


def test_a_file_that_is_not_there(target: Sequence, tmp_path: Path) -> None:
    refused(target, tmp_path / "absent", "absent")
    refused(target, tmp_path, "not a regular file")


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    source = FileSource(tmp_path / "x")
    (tmp_path / "x").write_bytes(bytes(50))
    with pytest.raises(SnapshotError, match="cut short: it ends before byte 100") as caught:
        source.read_into(0, memoryview(bytearray(100)))
    assert str(caught.value).count(str(tmp_path)) == 1
    with pytest.raises(SnapshotError, match="before byte 7"):
        BytesSource(b"123").read_into(2, memoryview(bytearray(5)))


def test_a_file_that_is_cut_after_a_restore_fails_the_step_only(world: Any, tmp_path: Path) -> None:
    """The chunk is wanted and cannot be had; the text goes on when it is not wanted any more."""
    session, again = world(scorer=None), world(scorer=None)
    extend(session, text(LENGTH))
    save(session, tmp_path / "x")
    load(again, tmp_path / "x")
    again.engine.adopt(session.engine.truth, session.engine.tokens)
    away = next(c for c, chunk in enumerate(again.table.chunks) if chunk.block < 0)
    (tmp_path / "x").write_bytes(b"")
    again.pin_range(away * CHUNK, away * CHUNK + 1)
    with pytest.raises(SnapshotError, match="cut short"):
        extend(again, text(70))
    assert again.length == LENGTH
    check_table(again.table)
    again.table.unpin_all()
    extend(again, text(70))
    assert again.length == LENGTH + 70


def test_the_document_names_what_the_reader_reads() -> None:
    document = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text()
    for name in (plain_reader.PREFIX.format, plain_reader.PAGE.format, "<i4, <u4, <f8, <u8", "KVFLASH\\x1a"):
        assert f"`{name}`" in document
    for name in (
        "tokens",
        "ledger",
        "pages",
        "state",
        "checkpoint <pos>",
        "queries",
        "logits",
        "look <i>",
        "statistics",
        "layout",
    ):
        assert f"| `{name}` |" in document
    session = make()
    parts = plain_reader.read(dump(session))
    session.close()
    assert all(f"`{fact}`" in document for fact in parts.facts | parts.facts["fingerprint"] | parts.facts["settings"])
