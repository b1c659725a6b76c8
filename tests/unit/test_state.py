"""A damaged state is refused, and the session that should have taken it is as it was."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fake_engine import PAGE_BYTES, FakeEngine, FakeLayer
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.config import CHUNK, KVFlashConfig
from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.pool.pager import ABSENT
from kvflash_ggml.session import Session
from kvflash_ggml.snapshot import state

PREFIX = struct.Struct("<8sII")


def make(n_slots: int = 448, n_ctx: int = 4096, **info: Any) -> Session:
    engine = FakeEngine(n_slots, 64, **info)
    return Session(engine, KVFlashConfig(tail=2), n_ctx=n_ctx, n_batch=64, n_ubatch=64)


def text(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).integers(0, 1000, count, dtype=np.int32)


@pytest.fixture(scope="module", autouse=True)
def small_slabs() -> Iterator[None]:
    with mock.patch("kvflash_ggml.pool.store.SLAB_BYTES", 4 * PAGE_BYTES):
        yield


@pytest.fixture(scope="module")
def target() -> Iterator[Session]:
    """Holds a text that must outlive every refusal."""
    session = make()
    session.extend(text(333))
    yield session
    session.close()


@pytest.fixture(scope="module")
def data() -> bytes:
    session = make()
    session.extend(text(700))
    dumped = state.dump(session)
    session.close()
    return dumped


def split(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    _, size, _ = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + size])
    at, sections = PREFIX.size + size, []
    for length, _ in header["sections"]:
        sections.append(data[at : at + length])
        at += length
    assert at == len(data)
    return header, sections


def join(header: Any, sections: list[bytes], *, sums: bool = True) -> bytes:
    """A state whose checksums are right again, so that what is inside has to be looked at."""
    if sums:
        header = header | {"sections": [[len(data), zlib.crc32(data)] for data in sections]}
    written = json.dumps(header).encode()
    prefix = PREFIX.pack(state.MAGIC, len(written), zlib.crc32(written))
    return b"".join([prefix, written, *sections])


def refused(session: Session, data: bytes, match: str | None = None) -> None:
    engine = session.engine
    assert isinstance(engine, FakeEngine)

    def everything() -> tuple[Any, ...]:
        return (
            session.tokens.tolist(),
            [(chunk.block, chunk.on_host) for chunk in session.pager.chunks],
            session.pager.epoch,
            sorted(session.store),
            engine.cell_pos.tolist(),
            engine.settled()[0].tobytes(),
            engine.get_state(),
        )

    before = everything()
    with pytest.raises(SnapshotError, match=match):
        state.load(session, data)
    assert everything() == before


def test_round_trip(data: bytes) -> None:
    session, again = make(), make()
    session.extend(text(700))
    assert state.dump(session) == data
    state.load(again, data)
    assert again.tokens.tolist() == text(700).tolist()
    assert state.dump(again) == data
    session.close()
    again.close()


@pytest.mark.parametrize("info", [{}, {"recurrent": True}, {"n_swa": 80}])
@pytest.mark.parametrize("length", [0, 1, 64, 1000])
def test_round_trip_of_every_memory(info: dict[str, Any], length: int) -> None:
    session, again = make(**info), make(**info)
    if length:
        session.extend(text(length))
    dumped = state.dump(session)
    again.extend(text(77))
    state.load(again, dumped)
    assert again.engine.get_state() == session.engine.get_state()
    assert state.dump(again) == dumped
    again.engine.adopt(session.engine.truth, session.engine.tokens)
    again.extend(text(100))
    session.close()
    again.close()


def test_the_layout_is_what_it_says(data: bytes) -> None:
    header, sections = split(data)
    assert join(header, sections) == data
    assert np.frombuffer(sections[0], "<i4").tolist() == text(700).tolist()
    assert len(header["blocks"]) == len(sections) - 2 == 11
    assert ABSENT in header["blocks"]


def test_every_single_bit(data: bytes, target: Session) -> None:
    """Every bit of the prefix and the header, and some of every KiB of the body."""
    rng = random.Random(5)
    head = len(data) - sum(len(section) for section in split(data)[1])
    body = [rng.randrange(at, at + 256) for at in range(head, len(data) - 256, 256)]
    bits = [8 * at + bit for at in range(head) for bit in range(8)]
    bits += [8 * at + rng.randrange(8) for at in [*body, len(data) - 1]]
    before = target.tokens.tolist()
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SnapshotError):
            state.load(target, bytes(damaged))
    assert target.tokens.tolist() == before
    refused(target, b"")


def test_every_bit_of_an_empty_state(target: Session) -> None:
    session = make()
    data = state.dump(session)
    session.close()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SnapshotError):
            state.load(target, bytes(damaged))
    refused(target, data[:-1])


def test_every_truncation_and_extension(data: bytes, target: Session) -> None:
    for size in [*range(0, 600), *range(600, len(data), 97), len(data) - 1]:
        with pytest.raises(SnapshotError):
            state.load(target, data[:size])
    refused(target, data[:-1])
    refused(target, data + b"\0", "belong to nothing")
    refused(target, data * 2)


def test_swapped_sections(data: bytes, target: Session) -> None:
    header, sections = split(data)
    for a, b in ((2, 3), (0, 2), (1, 4)):
        swapped = list(sections)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        refused(target, join(header, swapped, sums=False))


@pytest.mark.parametrize("size", [2**31, 2**63, 10**30, -1, 1.5, "7", None, True, [], float("nan")])
def test_an_impossible_section_size(data: bytes, target: Session, size: Any) -> None:
    header, sections = split(data)
    for n in (0, 1, 5, len(sections) - 1):
        header["sections"][n][0] = size
        refused(target, join(header, sections, sums=False), "section")


def test_a_huge_header(data: bytes, target: Session) -> None:
    for size in (2**32 - 1, len(data), 0):
        refused(target, PREFIX.pack(state.MAGIC, size, 0) + data[PREFIX.size :])


def change(**fields: Any) -> Callable[[dict[str, Any], list[bytes]], None]:
    return lambda header, sections: header.update(fields)


HARM: dict[str, Callable[[dict[str, Any], list[bytes]], Any]] = {
    "no blocks": lambda h, s: h.pop("blocks"),
    "no fingerprint": lambda h, s: h.pop("fingerprint"),
    "empty fingerprint": change(fingerprint={}),
    "listed fingerprint": change(fingerprint=[1]),
    "blocks a number": change(blocks=7),
    "too few blocks": lambda h, s: h["blocks"].pop(),
    "too many blocks": lambda h, s: h["blocks"].append(ABSENT),
    "block out of range": lambda h, s: h["blocks"].__setitem__(0, 7),
    "block below": lambda h, s: h["blocks"].__setitem__(0, -2),
    "block twice": lambda h, s: h["blocks"].__setitem__(slice(0, 2), [5, 5]),
    "block a float": lambda h, s: h["blocks"].__setitem__(0, 0.0),
    "block a bool": lambda h, s: h["blocks"].__setitem__(0, True),
    "block a list": lambda h, s: h["blocks"].__setitem__(0, [0]),
    "a page missing": lambda h, s: s.pop(),
    "a page more": lambda h, s: s.append(s[-1]),
    "a page short": lambda h, s: s.__setitem__(4, s[4][:-1]),
    "a page long": lambda h, s: s.__setitem__(4, s[4] + b"\0"),
    "half a token": lambda h, s: s.__setitem__(0, s[0][:-1]),
    "a chunk of tokens less": lambda h, s: s.__setitem__(0, s[0][: -4 * CHUNK]),
    "more tokens than the context": lambda h, s: s.__setitem__(0, s[0] * 10),
    "only tokens": lambda h, s: s.__delitem__(slice(1, None)),
    "nothing": lambda h, s: s.clear(),
    "foreign state": lambda h, s: s.__setitem__(1, b"state"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_contradiction_under_right_checksums(data: bytes, target: Session, name: str) -> None:
    header, sections = split(data)
    HARM[name](header, sections)
    refused(target, join(header, sections))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"3",
        b'"blocks"',
        b"{}",
        b"\xff\xfe",
        b"{" * 5000,
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_a_header_that_is_no_header(target: Session, header: bytes) -> None:
    refused(target, PREFIX.pack(state.MAGIC, len(header), zlib.crc32(header)) + header, "header")


@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    session = make()
    for data in (
        noise,
        state.MAGIC + noise,
        PREFIX.pack(state.MAGIC, len(noise), zlib.crc32(noise)) + noise,
    ):
        refused(session, data)
    session.close()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pool", {"n_slots": 512}),
        ("type_k", {"type_k": "q8_0"}),
        ("type_v", {"type_v": "q4_0"}),
        ("n_swa", {"n_swa": 100}),
        ("recurrent", {"recurrent": True}),
    ],
)
def test_another_model_or_setting_is_named(data: bytes, name: str, other: dict[str, Any]) -> None:
    session = make(**other)
    session.extend(text(100))
    refused(session, data, name)
    session.close()


def test_another_shape_of_layers_is_refused(data: bytes) -> None:
    session = make()
    session.engine.layers = (FakeLayer(), FakeLayer(il=1))
    refused(session, data, "layers")
    session.close()


def test_a_smaller_context_refuses_a_longer_text(data: bytes) -> None:
    session = make(n_ctx=512)
    refused(session, data)
    session.close()


@pytest.mark.parametrize("length", [100, 128])
def test_a_recurrent_state_that_llama_cannot_read(length: int) -> None:
    session, other = make(recurrent=True), make(recurrent=True)
    session.extend(text(length))
    other.extend(text(200))
    header, sections = split(state.dump(session))
    sections[1] = sections[1][:-4]
    refused(other, join(header, sections), "recurrent")
    other.extend(text(70))
    session.close()
    other.close()
