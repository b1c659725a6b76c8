"""A file of named sections and page images, each with its size and checksum.

    prefix     48 bytes: magic, version, file size, place, size and checksum of the directory, checksum of all that
    data       sections and page images, in any order
    directory  JSON: what kind of file it is, its facts, and where the sections are

Everything is checked before it is used, and nothing larger than the file is allocated. docs/snapshot-format.md gives
the format byte by byte.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from .. import system
from ..arrays import Buffer, room_for
from ..errors import SnapshotError
from ..host.image import READERS
from . import codec

MAX_AT_ONCE = 1 << 30
"""Linux reads at most 2 GiB in one call."""


class ContainerSource(Protocol):
    """The bytes of a container. name: for messages. size: in bytes."""

    name: str
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`. SnapshotError if these bytes cannot be read."""
        ...


class FileSource:
    """An open file, which stays readable if it is deleted or replaced meanwhile.

    The garbage collector closes it with the last page or section that is read from it.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._handle = system.open_file(path)  # a pipe would wait for a writer
            weakref.finalize(self, os.close, self._handle)
            status = os.fstat(self._handle)
        except (OSError, ValueError) as err:
            raise SnapshotError(f"cannot open {path}: {getattr(err, 'strerror', None) or err}") from err
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(f"{path} is no snapshot: it is not a regular file")
        self.size = status.st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        while out:
            try:
                read = system.read_at(self._handle, out[:MAX_AT_ONCE], offset)
            except OSError as err:
                raise SnapshotError(f"cannot read {self.name}: {err.strerror or err}") from err
            if not read:
                raise SnapshotError(f"{self.name} has been cut short: it ends before byte {offset + len(out)}")
            offset += read
            out = out[read:]


class BytesSource:
    """A container in memory."""

    def __init__(self, data: bytes) -> None:
        self.name = "the state"
        self.size = len(data)
        self._data = memoryview(data)

    def read_into(self, offset: int, out: memoryview) -> None:
        part = self._data[offset : offset + len(out)]
        if len(part) != len(out):
            raise SnapshotError(f"{self.name} ends before byte {offset + len(out)}")
        out[:] = part


MAGIC = b"KVFLASH\x1a"
VERSION = 1
PREFIX = struct.Struct("<8sIIQQQII")
"""magic, version, zero, file size, directory offset, directory size, directory checksum, checksum of what is before."""

MAX_DIRECTORY = 1 << 20
ALIGNMENT = 64
PIECE = 4 << 20
"""Of a section that is read by several threads: checksums take longer than reading."""

TABLE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("codec", "<u4"), ("checksum", "<u4")])
"""One page image: its place and stored bytes, its codec, and the checksum of the image itself."""

Table = npt.NDArray[np.void]


def checksum(data: Buffer, salt: str) -> int:
    """Return a CRC-32 that also depends on the name of the data, so that sections cannot change places."""
    return zlib.crc32(data, zlib.crc32(salt.encode()))


class Writer:
    """Writes a container to a stream at its beginning. Sections first, `close` last."""

    def __init__(self, stream: BinaryIO, *, compress: bool = False) -> None:
        self._stream = stream
        self._compress = compress
        self._sections: list[tuple[str, int, int, int]] = []
        self._prefix = ""
        self._at = 0
        # an unfinished file is recognizable, and not valid
        self._put(MAGIC.ljust(PREFIX.size, b"\0"))

    def section(self, name: str, data: Buffer | npt.NDArray[Any]) -> None:
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        name = self._prefix + name
        self._sections.append((name, self._align(), len(data), checksum(data, name)))
        self._put(data)

    def pages(self, name: str, images: Iterable[Buffer]) -> None:
        """Page images, and the table that says where they are."""
        rows = []
        for number, image in enumerate(images):
            stored, how = codec.encode(image) if self._compress else (image, codec.RAW)
            rows.append((self._align(), len(stored), how, checksum(image, f"{self._prefix}{name} {number}")))
            self._put(stored)
        self.section(name, np.array(rows, TABLE))

    @contextmanager
    def part(self, prefix: str) -> Iterator[None]:
        """Sections that are written inside get names with this prefix."""
        before = self._prefix
        self._prefix += prefix
        try:
            yield
        finally:
            self._prefix = before

    def close(self, kind: str, facts: dict[str, Any]) -> None:
        """Write the directory, and the prefix that makes all of it valid."""
        directory = json.dumps({"kind": kind, "facts": facts, "sections": self._sections}).encode()
        if len(directory) > MAX_DIRECTORY:
            raise SnapshotError(f"a directory of {len(directory)} bytes is more than the format's {MAX_DIRECTORY}")
        offset = self._align()
        self._put(directory)
        head = (MAGIC, VERSION, 0, self._at, offset, len(directory), zlib.crc32(directory))
        self._stream.seek(0)
        self._stream.write(PREFIX.pack(*head, zlib.crc32(PREFIX.pack(*head, 0)[:-4])))
        self._stream.seek(self._at)

    def _align(self) -> int:
        self._put(bytes(-self._at % ALIGNMENT))
        return self._at

    def _put(self, data: Buffer) -> None:
        self._stream.write(data)
        self._at += len(data)


@dataclass(frozen=True, slots=True)
class Section:
    """A section that has not been read."""

    source: ContainerSource
    name: str
    offset: int
    size: int
    checksum: int

    def read(self) -> memoryview:
        """Return its bytes. SnapshotError if they are damaged."""
        data = room_for(self.size)
        if self.size <= PIECE:
            self.source.read_into(self.offset, data)
            self._compare(checksum(data, self.name))
        else:
            self._read_pieces(data)
        return data

    def _read_pieces(self, data: memoryview) -> None:
        def read(at: int) -> int:
            piece = data[at : at + PIECE]
            self.source.read_into(self.offset + at, piece)
            return zlib.crc32(piece)

        places = range(0, self.size, PIECE)
        value = checksum(b"", self.name)
        with ThreadPoolExecutor(READERS, thread_name_prefix="kvflash-load") as readers:
            for at, each in zip(places, readers.map(read, places), strict=True):
                value = joined(value, each, min(PIECE, self.size - at))
        self._compare(value)

    def check(self) -> Iterator[int]:
        """Read it and keep nothing. Yields the size of each piece, and raises SnapshotError at the end if damaged."""
        value = checksum(b"", self.name)
        buffer = memoryview(bytearray(min(self.size, PIECE)))
        for at in range(0, self.size, PIECE):
            piece = buffer[: self.size - at]
            self.source.read_into(self.offset + at, piece)
            value = zlib.crc32(piece, value)
            yield len(piece)
        self._compare(value)

    def _compare(self, value: int) -> None:
        if value != self.checksum:
            raise SnapshotError(f"{self.source.name} is damaged: section '{self.name}' does not match its checksum")

    def array(self, kind: npt.DTypeLike, *, most: int | None = None) -> npt.NDArray[Any]:
        """Return its bytes as a flat array. SnapshotError if it is damaged or has more than `most` items."""
        if most is not None and self.size > most * np.dtype(kind).itemsize:
            raise SnapshotError(
                f"{self.source.name} contradicts itself: section '{self.name}' has {self.size} bytes, and can have "
                f"{most * np.dtype(kind).itemsize}"
            )
        data = self.read()
        if len(data) % np.dtype(kind).itemsize:
            raise SnapshotError(f"{self.source.name} is damaged: section '{self.name}' has {len(data)} bytes")
        return np.frombuffer(data, kind)


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page image that has not been read (host.image.PageSource)."""

    source: ContainerSource
    salt: str
    offset: int
    size: int
    codec: int
    checksum: int

    def read_into(self, image: memoryview) -> None:
        if self.codec == codec.RAW:
            self.source.read_into(self.offset, image)
        else:
            stored = bytearray(self.size)
            self.source.read_into(self.offset, memoryview(stored))
            codec.decode(bytes(stored), self.codec, image)
        if checksum(image, self.salt) != self.checksum:
            raise SnapshotError(f"{self.source.name} is damaged: page image '{self.salt}' does not match its checksum")


class Container:
    """An open container: its directory is read and sound, its sections are not read yet.

    kind: what the file is. facts: as given to the writer, and as untrustworthy as the file.
    """

    def __init__(self, source: ContainerSource) -> None:
        self.source = source
        directory = self._read_directory()
        kind, facts, entries = (directory.get(key) for key in ("kind", "facts", "sections"))
        if not isinstance(kind, str) or not isinstance(facts, dict) or not isinstance(entries, list):
            raise SnapshotError(f"the directory of {source.name} is not one")
        sections = [self._check_section(entry) for entry in entries]
        self.kind = kind
        self.facts: dict[str, Any] = facts
        self._prefix = ""
        self._sections = {section.name: section for section in sections}
        # otherwise a small file could make its reader allocate much memory
        if len(self._sections) != len(sections) or sum(section.size for section in sections) > source.size:
            raise SnapshotError(f"{source.name} is damaged: its sections overlap")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._sections

    @property
    def sections(self) -> list[Section]:
        return list(self._sections.values())

    def section(self, name: str) -> Section:
        name = self._prefix + name
        if name not in self._sections:
            raise SnapshotError(f"{self.source.name} has no section '{name}'")
        return self._sections[name]

    def contradiction(self, name: str) -> SnapshotError:
        """Return the error for a fact or section that is impossible."""
        return SnapshotError(f"{self.source.name} contradicts itself: '{self._prefix}{name}' cannot be as it says")

    def part(self, prefix: str, facts: dict[str, Any]) -> Container:
        """Return the sections whose names begin with a prefix, as a container with these facts."""
        part = copy(self)
        part.facts = facts
        part._prefix = self._prefix + prefix
        return part

    def pages(self, name: str, page_bytes: int, *, count: int | None = None) -> list[StoredPage]:
        """Return the page images of a table. SnapshotError unless there are `count`, all within the file.

        count: bounds the memory that a hostile file can ask for; None takes all of the table.
        """
        table: Table = self.section(name).array(TABLE)
        offset, size, total = table["offset"], table["size"], np.uint64(self.source.size)
        inside = (offset <= total) & (size <= total - np.minimum(offset, total))
        fits = (size == page_bytes) | ((table["codec"] != codec.RAW) & (size < page_bytes))
        if len(table) != (len(table) if count is None else count) or not (inside & fits).all():
            raise SnapshotError(f"{self.source.name} is damaged: table '{name}' has other page images than it should")
        codec.check(set(table["codec"].tolist()), self.source.name)
        return [
            StoredPage(self.source, f"{self._prefix}{name} {number}", *row) for number, row in enumerate(table.tolist())
        ]

    def _read_directory(self) -> dict[str, Any]:
        source = self.source
        if source.size < PREFIX.size:
            raise SnapshotError(f"{source.name} is no snapshot: it has only {source.size} bytes")
        prefix = bytearray(PREFIX.size)
        source.read_into(0, memoryview(prefix))
        magic, version, _, total, offset, size, check, own = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise SnapshotError(f"{source.name} is no snapshot: it begins with {bytes(magic)!r}")
        if zlib.crc32(prefix[:-4]) != own:
            raise SnapshotError(f"{source.name} is damaged: its first {PREFIX.size} bytes do not match their checksum")
        if version != VERSION:
            raise SnapshotError(f"{source.name} has format version {version}; this build reads {VERSION}")
        if total != source.size:
            raise SnapshotError(f"{source.name} has {source.size} bytes and was written with {total}")
        if size > min(MAX_DIRECTORY, total) or offset > total - size:
            raise SnapshotError(f"{source.name} is damaged: its directory lies outside the file")
        data = bytearray(size)
        source.read_into(offset, memoryview(data))
        if zlib.crc32(data) != check:
            raise SnapshotError(f"{source.name} is damaged: its directory does not match its checksum")
        try:
            directory = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise SnapshotError(f"the directory of {source.name} cannot be read: {err}") from err
        if not isinstance(directory, dict):
            raise SnapshotError(f"the directory of {source.name} is not one")
        return directory

    def _check_section(self, entry: object) -> Section:
        name, *numbers = entry if isinstance(entry, list) and entry else [None]
        whole = [x for x in numbers if type(x) is int and x >= 0]
        if not isinstance(name, str) or not name.isascii() or not len(whole) == len(numbers) == 3:
            raise SnapshotError(f"{self.source.name} is damaged: a section has no name, place, size and checksum")
        offset, size, check = whole
        if size > self.source.size or offset > self.source.size - size:
            raise SnapshotError(f"{self.source.name} is damaged: section '{name}' lies outside the file")
        return Section(self.source, name, offset, size, check)


# --- checksums of pieces


POLYNOMIAL = 0xEDB88320
"""Of zlib's CRC-32: the highest power is the lowest bit."""

ONE = 1 << 31


def joined(first: int, second: int, size: int) -> int:
    """Return the checksum of two consecutive pieces, from that of each. size: bytes of the second."""
    return _product(first, _shift(size)) ^ second


@lru_cache(maxsize=16)
def _shift(size: int) -> int:
    """Return the factor that moves a checksum past so many bytes: x^(8*size) modulo the polynomial."""
    power, square, left = ONE, ONE >> 8, size
    while left:
        if left & 1:
            power = _product(power, square)
        square = _product(square, square)
        left >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo `POLYNOMIAL`."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return total
