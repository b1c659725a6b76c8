"""Describes and verifies snapshot files, and finds those of a folder that may be deleted. Needs no model.

Files are not trusted: a reported value has been checked, or has a known type and is on one line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SnapshotError
from ..files import PART, is_abandoned
from ..logs import Progress
from . import codec
from .container import MAGIC, TABLE, VERSION, Container, FileSource
from .format import KIND, LEDGER

PAGES = "pages"
MAX_PAGE = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDescription:
    """The content of a file. A fact that this kind of file does not have is None.

    kind: "snapshot", or another use of the container. model: a hash of the GGUF file. resident: chunks that are loaded
    into the pool. sections: stored bytes by name, page images under "pages". raw_bytes: of the page images in memory;
    None for compressed ones without Zstandard. compressed: page images that are stored compressed.
    """

    path: Path
    kind: str
    version: int
    bytes: int
    saved_at: float
    architecture: str | None
    model: str | None
    build: str | None
    tokens: int | None
    chunks: int | None
    resident: int | None
    pool: int | None
    n_ctx: int | None
    policy: str | None
    checkpoints: int | None
    sections: dict[str, int]
    pages: int
    raw_bytes: int | None
    compressed: int


def describe(path: Path) -> SnapshotDescription:
    """Read the directory and the tables of a file. SnapshotError if it is no snapshot, or damaged."""
    container = Container(FileSource(path))
    facts = container.facts
    fingerprint, settings = _table_of(facts, "fingerprint"), _table_of(facts, "settings")
    policy = settings.get("policy")
    if isinstance(facts.get("policy"), dict):
        policy = facts["policy"].get("name")
    chunks = resident = None
    if "ledger" in container:
        blocks = container.section("ledger").array(LEDGER)["block"]
        chunks, resident = len(blocks), int((blocks >= 0).sum())
    sections = {_line(section.name): section.size for section in container.sections if section.name != PAGES}
    count = compressed = 0
    raw_bytes: int | None = 0
    if PAGES in container:
        table = container.section(PAGES).array(TABLE)
        count, compressed = len(table), int((table["codec"] != codec.RAW).sum())
        sections[PAGES] = table.nbytes + sum(table["size"].tolist())
        try:
            raw_bytes = count * _page_bytes(container)
        except ConfigError:
            raw_bytes = None
    checkpoints = facts.get("checkpoints")
    return SnapshotDescription(
        path=path, kind=_line(container.kind), version=VERSION, bytes=container.source.size,
        saved_at=path.stat().st_mtime, architecture=_text(fingerprint, "architecture"),
        model=_text(fingerprint, "model"), build=_text(fingerprint, "llama.cpp"), tokens=_number(facts, "length"),
        chunks=chunks, resident=resident, pool=_number(settings, "pool"), n_ctx=_number(settings, "n_ctx"),
        policy=_line(policy) if isinstance(policy, str) else None,
        checkpoints=len(checkpoints) if isinstance(checkpoints, list) else None, sections=sections, pages=count,
        raw_bytes=raw_bytes, compressed=compressed,
    )  # fmt: skip


def verify(path: Path, progress: Progress = lambda done, total: None) -> int:
    """Read a file, check every checksum, and return its bytes. SnapshotError at the first one that is wrong.

    progress(done, total): in bytes. Compressed pages need the package zstandard.
    """
    container = Container(FileSource(path))
    total, pages = container.source.size, []
    page_bytes = 0
    if PAGES in container:
        page_bytes = _page_bytes(container)
        pages = container.pages(PAGES, page_bytes, count=container.section(PAGES).size // TABLE.itemsize)
        # other kinds have a page image of some chunks only
        if container.kind == KIND and container.section("ledger").size != len(pages) * LEDGER.itemsize:
            raise SnapshotError(f"{path} contradicts itself: {len(pages)} page images are not one for each chunk")
    if sum(section.size for section in container.sections) + sum(page.size for page in pages) > total:
        raise SnapshotError(f"{path} is damaged: its parts overlap")
    done = 0
    for section in container.sections:
        for size in section.check():
            done += size
            progress(done, total)
    image = memoryview(bytearray(page_bytes))
    for page in pages:
        page.read_into(image)
        done += page.size
        progress(done, total)
    return total


# --- folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """A file that may be deleted. why: "abandoned", "old" or "oldest"."""

    path: Path
    bytes: int
    why: str


def removable(folder: Path, *, older_than: float | None = None, larger_than: int | None = None) -> list[Removable]:
    """Return files of a folder that may be deleted: unfinished ones of killed processes, old ones, and the oldest.

    older_than: days since they were saved. larger_than: bytes that the snapshots of the folder may take together.
    Other files, links and subfolders do not count. SnapshotError if the folder cannot be read.
    """
    now = time.time()
    found: list[Removable] = []
    retained: list[tuple[float, Path, int]] = []
    for path, status in _files(folder):
        if path.name.startswith(".") and path.name.endswith(PART):
            if _is_ours(path) and is_abandoned(path):
                found.append(Removable(path=path, bytes=status.st_size, why="abandoned"))
        elif _is_ours(path):
            if older_than is not None and now - status.st_mtime > older_than * 86_400:
                found.append(Removable(path=path, bytes=status.st_size, why="old"))
            else:
                retained.append((status.st_mtime, path, status.st_size))
    if larger_than is not None:
        total = sum(size for _, _, size in retained)
        for _, path, size in sorted(retained):
            if total <= larger_than:
                break
            found.append(Removable(path=path, bytes=size, why="oldest"))
            total -= size
    return found


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as err:
        raise SnapshotError(f"cannot read the folder {folder}: {err.strerror or err}") from err
    for entry in entries:
        with suppress(OSError):  # another process may delete it
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _is_ours(path: Path) -> bool:
    """Return whether it begins as a snapshot, finished or not."""
    head = bytearray(len(MAGIC))
    try:
        FileSource(path).read_into(0, memoryview(head))
    except SnapshotError:
        return False
    return head == MAGIC


# --- what a file says


def _page_bytes(container: Container) -> int:
    """Return the bytes of a page image in memory; 0 without any."""
    table = container.section(PAGES).array(TABLE)
    if not len(table):
        return 0
    raw = table[table["codec"] == codec.RAW]
    if len(raw):
        size = int(raw["size"][0])
    else:
        codec.check(set(table["codec"].tolist()), container.source.name)
        head = bytearray(min(codec.HEAD, int(table["size"][0])))
        container.source.read_into(min(int(table["offset"][0]), container.source.size), memoryview(head))
        size = codec.image_size(bytes(head))
    if not 0 < size <= MAX_PAGE:
        raise SnapshotError(f"{container.source.name} is damaged: it has page images of {size} bytes")
    return size


def _table_of(facts: dict[str, Any], name: str) -> dict[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _text(facts: dict[str, Any], name: str) -> str | None:
    value = facts.get(name)
    return _line(value) if isinstance(value, str) else None


def _number(facts: dict[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and abs(value) < 2**63 else None


def _line(text: str) -> str:
    """Return at most 80 characters, without those that control a terminal."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:80])
    return shown if len(text) <= 80 else shown + "..."
