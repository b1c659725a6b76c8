"""A snapshot read by the rules of docs/snapshot-format.md, with nothing of the package; and written, sound or not."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"KVFLASH\x1a"
PREFIX = struct.Struct("<8sIIQQQII")
PAGE = struct.Struct("<QQII")
ALIGNMENT = 64


def checksum(data: bytes, salt: str) -> int:
    return zlib.crc32(data, zlib.crc32(salt.encode()))


@dataclass
class Parts:
    """pages: per table the stored bytes and the codec of each image."""

    kind: str
    facts: dict[str, Any]
    sections: dict[str, bytes]
    pages: list[tuple[bytes, int]] = field(default_factory=list)


def read(data: bytes) -> Parts:
    """All of a sound file. AssertionError if it is not one."""
    magic, version, zero, total, offset, size, check, own = PREFIX.unpack_from(data)
    assert (magic, version, zero, total) == (MAGIC, 1, 0, len(data))
    assert own == zlib.crc32(data[: PREFIX.size - 4])
    assert offset % ALIGNMENT == 0
    assert offset + size == total
    raw = data[offset : offset + size]
    assert zlib.crc32(raw) == check
    directory = json.loads(raw)
    assert set(directory) == {"kind", "facts", "sections"}
    covered = [(0, PREFIX.size), (offset, size)]

    def cut(at: int, length: int) -> bytes:
        assert at % ALIGNMENT == 0
        covered.append((at, length))
        return data[at : at + length]

    sections = {}
    for name, at, length, check in directory["sections"]:
        sections[name] = cut(at, length)
        assert checksum(sections[name], name) == check, name
    parts = Parts(directory["kind"], directory["facts"], sections)
    for number, (at, length, codec, check) in enumerate(PAGE.iter_unpack(sections["pages"])):
        stored = cut(at, length)
        parts.pages.append((stored, codec))
        if codec == 0:
            assert checksum(stored, f"pages {number}") == check, number
    end = 0
    for at, length in sorted(covered):
        assert not any(data[end:at]), "padding is zero"
        assert end <= at < end + ALIGNMENT or length == 0, "sections neither overlap nor leave holes"
        end = max(end, at + length)
    return parts


def write(parts: Parts, *, sections: dict[str, Any] | None = None, directory: bytes | None = None) -> bytes:
    """A file with right checksums. sections: entries of the directory to replace. directory: all of it."""
    out = bytearray(PREFIX.size)

    def put(data: bytes) -> int:
        out.extend(bytes(-len(out) % ALIGNMENT))
        at = len(out)
        out.extend(data)
        return at

    table = b""
    for number, (stored, codec) in enumerate(parts.pages):
        table += PAGE.pack(put(stored), len(stored), codec, checksum(stored, f"pages {number}"))
    entries = []
    for name, data in parts.sections.items():
        if name == "pages" and len(data) == len(table):
            data = table
        entries.append([name, put(data), len(data), checksum(data, name)])
    entries = [(sections or {}).get(entry[0], entry) for entry in entries]
    if directory is None:
        directory = json.dumps({"kind": parts.kind, "facts": parts.facts, "sections": entries}).encode()
    offset = put(directory)
    return seal(bytes(out), offset, directory)


def seal(data: bytes, at: int, directory: bytes, /, **fields: int) -> bytes:
    """The prefix of a file, with right checksums but for the fields that are given."""
    values = {"version": 1, "zero": 0, "total": len(data), "offset": at, "size": len(directory)}
    values = values | {"check": zlib.crc32(directory)} | fields
    head = PREFIX.pack(MAGIC, *values.values(), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + data[PREFIX.size :]
