"""Large sections are read in pieces, several at a time, and are checked as a whole."""

from __future__ import annotations

import io
import zlib

import pytest

from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.snapshot import container
from kvflash_ggml.snapshot.container import BytesSource, Container, Writer

DATA = bytes(range(251)) * 40


@pytest.mark.parametrize("size", [0, 1, 33, 4096])
def test_the_checksum_of_two_pieces(size: int) -> None:
    one, other = DATA[:777], DATA[777 : 777 + size]
    assert container.joined(zlib.crc32(one), zlib.crc32(other), size) == zlib.crc32(one + other)


@pytest.mark.parametrize("piece", [1000, 1004, 5020, len(DATA) - 1])
def test_a_section_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "PIECE", piece)
    stream = io.BytesIO()
    writer = Writer(stream)
    writer.section("first", b"something else")
    writer.section("large", DATA)
    writer.close("test", {})
    whole = stream.getvalue()
    assert Container(BytesSource(whole)).section("large").read() == DATA
    for at in (0, piece, len(DATA) - 1):
        damaged = bytearray(whole)
        damaged[whole.index(DATA) + at] ^= 4
        with pytest.raises(SnapshotError, match="'large' does not match"):
            Container(BytesSource(bytes(damaged))).section("large").read()
