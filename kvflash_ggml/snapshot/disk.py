"""A folder of prefixes, shared by processes: what was read once need not be read again.

Two kinds of files. A run (`PARENT-COUNT-END.run`) holds the images and statistics of consecutive chunks, and begins
where the text named PARENT ends; runs form a tree, so a shared beginning is stored once. A tip (`PARENT-COUNT-END.tip`)
holds what a session needs beside its chunks to go on COUNT tokens after PARENT: the page table, recurrent state, the
images of a chunk that is not full yet. All files are written beside their place and renamed; what has been opened stays
readable when it is deleted. Renaming and deleting happen under one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..checkpoints import Bytes
from ..config import CHUNK
from ..errors import SnapshotError
from ..files import PART, replacing
from ..pool.heap import Page, PageHeap
from ..pool.pager import ANY, PageTable
from ..saved import SavedPolicy, SavedSession
from . import chain, format
from .container import Container, StoredPage, Writer
from .fingerprint import Fingerprint
from .source import FileSource

logger = logging.getLogger("kvflash_ggml")

Int32s = npt.NDArray[np.int32]

RUN, TIP = ".run", ".tip"
MOST_CHUNKS = 256
"""Chunks of one run: what is evicted at once."""

ABANDONED = 3600
"""Seconds after which a file that was never finished belongs to a process that has died."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A file of the cache, known by its name."""

    path: Path
    parent: str
    count: int
    end: str

    @classmethod
    def of(cls, path: Path) -> Entry | None:
        parts = path.stem.split("-")
        if path.suffix not in (RUN, TIP) or len(parts) != 3 or not parts[1].isdigit():
            return None
        return cls(path, parts[0], int(parts[1]), parts[2])


@dataclass(slots=True)
class Found:
    """The longest known beginning of a text. runs: per chunk the run that holds it and the place in it."""

    length: int
    runs: list[tuple[Entry, int]]
    tip: Entry | None

    @property
    def files(self) -> set[Path]:
        return {entry.path for entry, _ in self.runs} | ({self.tip.path} if self.tip else set())


class DiskTier:
    """Prefixes of one model under one set of settings.

    folder: of the whole cache; those of other models lie beside. capacity: bytes of the whole folder. stateful: a text
    can only be continued where a tip is. blank: zeroes the rows of a page image from one on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capacity: int,
        fingerprint: Fingerprint,
        settings: dict[str, object],
        heap: PageHeap,
        blank: Callable[[memoryview, int], None],
        stateful: bool,
        n_vocab: int,
    ) -> None:
        self._root = chain.root({"fingerprint": fingerprint, "settings": settings})
        self._folder = folder / self._root
        self._all = folder
        self._capacity = capacity
        self._fingerprint = fingerprint
        self._settings = settings
        self._heap = heap
        self._blank = blank
        self._stateful = stateful
        self._n_vocab = n_vocab
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise SnapshotError(f"cannot use {folder} as a cache: {err.strerror or err}") from err
        self._sweep()

    # --- find

    def find(self, tokens: Int32s) -> Found:
        """The longest beginning of the text that can be continued from here. Opens nothing but small parts."""
        names = chain.names(self._root, tokens)
        by_parent = self._by_parent()
        runs = self._cover(names, by_parent)
        tip, length = self._best_tip(tokens, names[: len(runs) + 1], by_parent)
        if not self._stateful and len(runs) * CHUNK > length:
            return Found(len(runs) * CHUNK, runs, None)
        return Found(length, runs[: length // CHUNK], tip)

    def known(self, tokens: Int32s) -> int:
        """How long a beginning of the text has been stored, whether or not it can be continued."""
        return CHUNK * len(self._cover(chain.names(self._root, tokens), self._by_parent()))

    def load(self, found: Found, tokens: Int32s, fresh: SavedPolicy | None) -> SavedSession:
        """What was found, to be restored and released. SnapshotError if it cannot be read.

        fresh: the clock of a policy that has not looked yet.
        """
        saved = self._read(found, tokens, fresh)
        for path in found.files:
            with contextlib.suppress(OSError):
                os.utime(path)
        return saved

    def forget_damaged(self, found: Found) -> None:
        """Delete those of the files that cannot be read, so that they are written anew."""
        for path in found.files:
            self._forget_if_damaged(path)

    def _read(self, found: Found, tokens: Int32s, fresh: SavedPolicy | None) -> SavedSession:
        tokens = np.asarray(tokens[: found.length], np.int32)
        pages, rows = self._read_runs(found)
        if found.tip is None:
            saved = SavedSession(
                tokens=tokens,
                table=newest_table(len(pages)),
                heap=self._heap,
                pages=[],
                state=Bytes(b""),
                checkpoints={},
                queries=np.empty(0, np.float32),
                queries_from=found.length,
                policy=None,
            )
        else:
            container = self._open(found.tip.path, "tip")
            saved = format.read_sections(container, self._heap, n_vocab=self._n_vocab)
            if not np.array_equal(saved.tokens, tokens):
                raise SnapshotError(f"{found.tip.path} holds another text than its name says")
            pages += container.pages("pages", self._heap.page_bytes, count=int(found.length % CHUNK > 0))
        saved.pages = [Page(source=page) for page in pages]
        saved.policy = saved.policy or fresh
        if saved.policy is not None and rows is not None:
            saved.policy = replace(saved.policy, rows=_done(rows))
        return saved

    def _read_runs(self, found: Found) -> tuple[list[StoredPage], npt.NDArray[np.uint8] | None]:
        pages: list[StoredPage] = []
        rows: list[npt.NDArray[np.uint8]] = []
        at = 0
        while at < len(found.runs):
            entry, first = found.runs[at]
            size = next((i for i, (other, _) in enumerate(found.runs[at:]) if other != entry), len(found.runs) - at)
            container = self._open(entry.path, "run")
            pages += container.pages("pages", self._heap.page_bytes, count=entry.count)[first : first + size]
            if "statistics" in container:
                rows.append(format.read_rows(container, entry.count)[first : first + size])
            at += size
        whole = len(rows) > 0 and sum(map(len, rows)) == len(pages) and len({part.shape[1] for part in rows}) == 1
        return pages, np.concatenate(rows) if whole else None

    def _cover(self, names: list[str], by_parent: dict[str, list[Entry]]) -> list[tuple[Entry, int]]:
        """For each chunk from the first on, a run that holds it, as far as there are any."""
        covered: list[tuple[Entry, int]] = []
        at = 0
        while at <= len(covered):
            for entry in by_parent.get(names[at], ()) if at < len(names) else ():
                if entry.path.suffix == RUN and at + entry.count > len(covered):
                    shared = self._shared(entry, names[at + 1 :])
                    covered += [(entry, i) for i in range(len(covered) - at, shared)]
            at += 1
        return covered

    def _shared(self, entry: Entry, names: list[str]) -> int:
        """How many chunks of a run belong to the text whose next names these are."""
        if names[entry.count - 1 : entry.count] == [entry.end]:
            return entry.count
        ours = self._names_in(entry)
        count = min(len(ours), len(names))
        return next((i for i in range(count) if ours[i] != names[i]), count)

    def _names_in(self, entry: Entry) -> list[str]:
        """The names at the ends of a run's chunks; none if it is damaged or gone."""
        try:
            data = self._open(entry.path, "run").section("names").read()
        except SnapshotError:
            self._forget_if_damaged(entry.path)
            return []
        found = [data[at : at + chain.SIZE].hex() for at in range(0, len(data), chain.SIZE)]
        return found if len(found) == entry.count else []

    def _best_tip(
        self, tokens: Int32s, names: list[str], by_parent: dict[str, list[Entry]]
    ) -> tuple[Entry | None, int]:
        """The tip that lies furthest into the text, and where that is."""
        for c in range(len(names) - 1, -1, -1):
            rest = tokens[c * CHUNK : (c + 1) * CHUNK]
            fitting = [
                entry
                for entry in by_parent.get(names[c], ())
                if entry.path.suffix == TIP
                and entry.count <= min(len(rest), CHUNK - 1)
                and entry.end == chain.extend(names[c], rest[: entry.count])
            ]
            if fitting:
                best = max(fitting, key=lambda entry: entry.count)
                return best, c * CHUNK + best.count
        return None, 0

    def _by_parent(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self._entries(self._folder):
            found.setdefault(entry.parent, []).append(entry)
        return found

    @staticmethod
    def _entries(folder: Path) -> Iterator[Entry]:
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(folder.iterdir()):
                entry = Entry.of(path)
                if entry is not None:
                    yield entry

    def _open(self, path: Path, kind: str) -> Container:
        container = Container(FileSource(path))
        if container.kind != kind:
            raise SnapshotError(f"{path} is no {kind} but a {container.kind!r}")
        format.compare(container, self._fingerprint)
        return container

    # --- put

    def put(self, saved: SavedSession) -> None:
        """Store what is not there yet, and delete what is over the capacity. Raises OSError and SnapshotError."""
        names = chain.names(self._root, saved.tokens)
        # what it goes on from may be evicted by another process meanwhile, and is written again then
        while (known := len(self._cover(names, self._by_parent()))) < len(names) - 1:
            self._put_run(saved, names, known, min(known + MOST_CHUNKS, len(names) - 1))
        for pos in saved.checkpoints:
            self._put_tip(_at_checkpoint(saved, pos), names)
        self._put_tip(saved, names)
        self._evict()

    def _put_run(self, saved: SavedSession, names: list[str], first: int, last: int) -> None:
        path = self._folder / f"{names[first]}-{last - first}-{names[last]}{RUN}"
        with replacing(path, guard=self._locked) as file:
            writer = Writer(file)
            writer.section("names", bytes.fromhex("".join(names[first + 1 : last + 1])))
            writer.section("tokens", saved.tokens[first * CHUNK : last * CHUNK].astype("<i4"))
            writer.pages("pages", (self._heap.bytes_of(page) for page in saved.pages[first:last]))
            rows = None if saved.policy is None else saved.policy.rows.result()
            if rows is not None:
                writer.section("statistics", rows[first:last])
            writer.close("run", {"fingerprint": self._fingerprint, "settings": self._settings})

    def _put_tip(self, saved: SavedSession, names: list[str]) -> None:
        full, rest = divmod(saved.length, CHUNK)
        end = chain.extend(names[full], saved.tokens[full * CHUNK :])
        path = self._folder / f"{names[full]}-{rest}-{end}{TIP}"
        if path.exists():
            with contextlib.suppress(OSError):
                os.utime(path)
            return
        images = [bytearray(self._heap.bytes_of(page)) for page in saved.pages[full:]]
        for image in images:
            self._blank(memoryview(image), rest)
        with replacing(path, guard=self._locked) as file:
            writer = Writer(file)
            facts = format.write_sections(writer, replace(saved, checkpoints={}))
            writer.pages("pages", images)
            writer.close("tip", {**facts, "fingerprint": self._fingerprint, "settings": self._settings})

    # --- delete

    def _evict(self) -> None:
        """Delete what was used longest ago and nothing goes on from, until the folder fits its capacity."""
        with self._locked():
            files = {entry: stat for entry in self._everything() if (stat := _stat(entry.path)) is not None}
            total = sum(stat.st_size for stat in files.values())
            owners = self._owners(files) if total > self._capacity else {}
            children = Counter(run for entry in files for run in owners.get(entry.parent, ()))
            leaves = [(stat.st_mtime_ns, entry) for entry, stat in files.items() if not children[entry]]
            heapq.heapify(leaves)
            while leaves and total > self._capacity:
                _, entry = heapq.heappop(leaves)
                entry.path.unlink(missing_ok=True)
                total -= files[entry].st_size
                for run in owners.get(entry.parent, ()):
                    children[run] -= 1
                    if not children[run]:
                        heapq.heappush(leaves, (files[run].st_mtime_ns, run))

    def _owners(self, files: Iterable[Entry]) -> dict[str, list[Entry]]:
        """The runs in which a name is the end of a chunk."""
        owners: dict[str, list[Entry]] = {}
        for entry in files:
            if entry.path.suffix == RUN:
                for name in self._names_in(entry):
                    owners.setdefault(name, []).append(entry)
        return owners

    def _everything(self) -> Iterator[Entry]:
        """The files of all models."""
        for folder in sorted(self._all.iterdir()):
            if folder.is_dir():
                yield from self._entries(folder)

    def _forget_if_damaged(self, path: Path) -> None:
        """Delete a file unless all of it can be read; one that is gone is gone."""
        try:
            container = Container(FileSource(path))
            for section in container.sections:
                section.read()
            for page in container.pages("pages", self._heap.page_bytes):
                page.read_into(memoryview(bytearray(self._heap.page_bytes)))
        except SnapshotError as err:
            if path.exists():
                logger.warning("a file of the prefix cache is deleted: %s", err)
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Delete what processes that have died left unfinished."""
        for path in self._folder.glob(f".*{PART}"):
            stat = _stat(path)
            if stat is not None and time.time() - stat.st_mtime > ABANDONED:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._all / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def newest_table(chunks: int) -> PageTable:
    """A page table that has read its text by recency alone: any blocks, newest chunks first."""
    return PageTable(
        blocks=[ANY] * chunks,
        last_use=list(range(chunks)),
        clock=chunks,
        settled=False,
        pins=frozenset(),
        scores=None,
    )


def _at_checkpoint(saved: SavedSession, pos: int) -> SavedSession:
    """What is known of the session at a position where recurrent state was kept."""
    chunks = -(-pos // CHUNK)
    return replace(
        saved,
        tokens=saved.tokens[:pos],
        table=newest_table(chunks),
        pages=saved.pages[:chunks],
        state=saved.checkpoints[pos],
        checkpoints={},
        queries=np.empty(0, np.float32),
        queries_from=pos,
        policy=None,
        logits=None,
    )


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def _done(rows: npt.NDArray[np.uint8]) -> Future[npt.NDArray[np.uint8] | None]:
    future: Future[npt.NDArray[np.uint8] | None] = Future()
    future.set_result(rows)
    return future
