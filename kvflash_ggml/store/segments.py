"""The files of a prefix cache, and which of them go when they are too many.

    ROOT/PARENT-COUNT-END.segment   images and statistics of COUNT chunks that go on from the text named PARENT
    ROOT/PARENT-COUNT-END.tail   what a session needs beside its chunks to go on COUNT tokens after PARENT

ROOT is the name of the empty text, of one model under one set of settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Int32s
from ..constants import CHUNK
from ..errors import SnapshotError
from ..snapshot.container import Container, FileSource
from .folder import Folder, file_stat

# --- names of the beginnings of texts: each chunk depends on all tokens up to its end


NAME_BYTES = 16


def root_name(facts: dict[str, Any]) -> str:
    """Return the name of the empty text under these facts. Texts under other facts share nothing with it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[: 2 * NAME_BYTES]


def chunk_names(start: str, tokens: Int32s) -> list[str]:
    """Return the names of the text's beginnings at chunk boundaries, the empty one first."""
    result = [start]
    for at in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        result.append(extend_name(result[-1], tokens[at : at + CHUNK]))
    return result


def extend_name(name: str, tokens: Int32s | Sequence[int]) -> str:
    """Return the name of a text that continues a named one with these tokens."""
    data = np.asarray(tokens, "<i4").tobytes()
    return hashlib.blake2b(bytes.fromhex(name) + data, digest_size=NAME_BYTES).hexdigest()


# --- the files


logger = logging.getLogger("kvflash_ggml")

SEGMENT, TAIL = "segment", "tail"

CLOCK_SKEW_SECONDS = 60
"""Seconds that the clocks of two machines may differ."""

_NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,5})-([0-9a-f]{32})\.(segment|tail)")
_ROOT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A file of the cache, as its name describes it. The name is checked when the file is read."""

    path: Path
    parent: str
    count: int
    end: str
    kind: str

    @classmethod
    def of(cls, path: Path) -> Entry | None:
        match = _NAME.fullmatch(path.name)
        return None if match is None else cls(path, match[1], int(match[2]), match[3], match[4])

    @classmethod
    def named(cls, folder: Path, parent: str, count: int, end: str, kind: str) -> Entry:
        return cls(folder / f"{parent}-{count}-{end}.{kind}", parent, count, end, kind)


class Segments:
    """The files of a prefix cache, of all models together. capacity: maximum bytes of all."""

    def __init__(self, path: Path, *, capacity: int) -> None:
        self.folder = Folder(path, _NAME, what="prefixes", inside="*")
        self.capacity = capacity
        self._names: dict[Path, bytes] = {}  # of segments that have been opened: they never change
        self.unusable: set[Path] = set()
        """Sound files that cannot be used here."""

    def entries(self, folder: Path) -> list[Entry]:
        """Return the files of one model, sorted by name."""
        with contextlib.suppress(OSError):
            return [entry for path, _ in self.folder.files(folder) if (entry := Entry.of(path)) is not None]
        return []

    def has(self, path: Path) -> bool:
        """Return whether a file is there and can be used."""
        return path not in self.unusable and path.is_file()

    def names(self, entry: Entry) -> list[str]:
        """Return the names at the ends of a segment's chunks. SnapshotError if it cannot be read."""
        data = self._names.get(entry.path)
        if data is None:
            data = bytes(Container(FileSource(entry.path)).section("names").read())
            if len(data) != entry.count * NAME_BYTES or data[-NAME_BYTES:].hex() != entry.end:
                raise SnapshotError(f"{entry.path} holds another text than its name says")
            self._names[entry.path] = data
        return [data[at : at + NAME_BYTES].hex() for at in range(0, len(data), NAME_BYTES)]

    # --- changes

    def reject(self, path: Path, why: SnapshotError) -> None:
        """Delete a damaged file, so that it is written again.

        A file that could not be read for lack of rights or of open files may be sound: it stays, unused.
        """
        if isinstance(why.__cause__, OSError):
            if path.exists():
                self.unusable.add(path)
            return
        self.delete(path)
        logger.warning("a file of the prefix cache is deleted: %s", why)

    def delete(self, path: Path) -> None:
        """Delete a file, if it is there."""
        self._names.pop(path, None)
        self.folder.delete(path)

    def written(self, path: Path) -> None:
        """Use a file that has just been written."""
        self._names.pop(path, None)
        self.unusable.discard(path)

    def evict(self) -> None:
        """Delete files that no other file continues, least recently used first, until the folder fits its capacity.

        Unfinished files count.
        """
        with self.folder.locked():
            files = {entry: stat for entry in self._everything() if (stat := file_stat(entry.path)) is not None}
            unfinished = [stat for path in self.folder.unfinished() if (stat := file_stat(path)) is not None]
            total = sum(stat.st_size for stat in [*files.values(), *unfinished])
            if total <= self.capacity:
                return
            owners = self._owners(files)
            children = Counter(segment for entry in files for segment in owners.get(entry.parent, ()))
            leaves = [(_last_use(stat), entry) for entry, stat in files.items() if not children[entry]]
            heapq.heapify(leaves)
            while leaves and total > self.capacity:
                _, entry = heapq.heappop(leaves)
                self.delete(entry.path)
                total -= files[entry].st_size
                for segment in owners.get(entry.parent, ()):
                    children[segment] -= 1
                    if not children[segment]:
                        heapq.heappush(leaves, (_last_use(files[segment]), segment))

    def _owners(self, files: Iterable[Entry]) -> dict[str, list[Entry]]:
        """Return the segments that hold the chunk before a file, by that chunk's name."""
        owners: dict[str, list[Entry]] = {entry.parent: [] for entry in files}
        for entry in files:
            if entry.kind == SEGMENT:
                with contextlib.suppress(SnapshotError):  # nothing can continue it
                    for name in owners.keys() & set(self.names(entry)):
                        owners[name].append(entry)
        return owners

    def _everything(self) -> Iterator[Entry]:
        """Yield the files of all models."""
        for folder in sorted(self.folder.path.iterdir()):
            if _ROOT.fullmatch(folder.name):
                yield from self.entries(folder)


def _last_use(stat: os.stat_result) -> int:
    """Return when a file was used last, in ns. A time in the future is wrong, and counts as the oldest."""
    return 0 if stat.st_mtime > time.time() + CLOCK_SKEW_SECONDS else stat.st_mtime_ns
