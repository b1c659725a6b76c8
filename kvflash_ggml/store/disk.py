"""Prefixes of one model in a folder that processes share: a prefix that one of them has read need not be read again.

Segments of chunks form a tree, so a shared beginning is stored once. A text can branch off at any chunk.
Names are not trusted: a file with other content is deleted, and its text is read again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..constants import CHUNK
from ..errors import KVFlashError, SnapshotError
from ..files import replacing
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..pool.page_table import ANY, PageTableState
from ..snapshot import format, inspect
from ..snapshot.container import VERSION, Container, FileSource, StoredPage, Writer
from ..snapshot.fingerprint import Fingerprint
from ..state.blob import Bytes
from ..state.session import PolicyState, SessionLimits, SessionState
from ..state.statistics import Statistics
from ..threads import done
from .segments import NAME_BYTES, SEGMENT, TAIL, Entry, Segments, chunk_names, extend_name, root_name

MAX_CHUNKS = 256
"""Maximum chunks of a segment, which is evicted as a whole."""


@dataclass(slots=True)
class PrefixMatch:
    """The longest known beginning of a text. segments: for each chunk its segment, and the place in that."""

    length: int
    segments: list[tuple[Entry, int]]
    tail: Entry | None

    @property
    def files(self) -> list[Path]:
        """The file that was written last comes last."""
        segments = dict.fromkeys(entry.path for entry, _ in self.segments)
        return [*segments, *([self.tail.path] if self.tail else [])]


class DiskTier:
    """Prefixes of one model under one set of settings.

    folder: of the cache, for all models. capacity: bytes of the whole folder. stateful: a text can only be continued
    from a tail. blank: zeroes the rows of a page image from one on.
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
        limits: SessionLimits,
    ) -> None:
        self._root = root_name({"fingerprint": fingerprint, "settings": settings, "version": VERSION})
        self._all = Segments(folder, capacity=capacity)
        self.folder = self._all.folder
        self._folder = folder / self._root
        self.folder.make(self._folder)
        self._fingerprint = fingerprint
        self._settings = settings
        self._heap = heap
        self._blank = blank
        self._stateful = stateful
        self._limits = limits

    # --- find

    def find(self, tokens: Int32s) -> PrefixMatch:
        """Return the longest beginning of the text that can be continued from here. Reads only small parts of files."""
        names = chunk_names(self._root, tokens)
        by_parent = self._by_parent()
        segments = self._cover(names, by_parent)
        tail, length = self._best_tail(tokens, names[: len(segments) + 1], by_parent)
        if tail is not None and self._stateful and length == len(tokens) and not self._has_logits(tail):
            # logits are missing, and recurrent state cannot go back by one token to compute them
            tail, length = self._best_tail(tokens[:-1], names[: len(segments) + 1], by_parent)
        if not self._stateful and len(segments) * CHUNK > length:
            return PrefixMatch(len(segments) * CHUNK, segments, None)
        return PrefixMatch(length, segments[: length // CHUNK], tail)

    def known(self, tokens: Int32s) -> int:
        """Return how many tokens of the text's beginning are stored, whether or not they can be continued."""
        return CHUNK * len(self._cover(chunk_names(self._root, tokens), self._by_parent()))

    def load(self, found: PrefixMatch, tokens: Int32s, fresh: PolicyState | None) -> SessionState:
        """Return what was found, to be restored and released. SnapshotError if it cannot be read.

        fresh: the state of a policy that has not scored yet.
        """
        saved = self._read(found, np.asarray(tokens[: found.length], np.int32), fresh)
        for path in found.files:
            with contextlib.suppress(OSError):
                os.utime(path)
        return saved

    def discard(self, found: PrefixMatch) -> None:
        """Do not find this prefix again: it could not be restored."""
        if all(map(self._all.has, found.files)):
            self.discard_damaged(found.files)
        if all(map(self._all.has, found.files)):
            self._all.unusable.add(found.files[-1])

    def discard_damaged(self, paths: Iterable[Path]) -> None:
        """Read each file of this folder to its end, and delete it if it is damaged, so that it is written again."""
        for path in paths:
            if path.parent == self._folder:
                with contextlib.suppress(KVFlashError), self._blaming(path):
                    inspect.verify(path)

    def _read(self, found: PrefixMatch, tokens: Int32s, fresh: PolicyState | None) -> SessionState:
        pages, statistics, whole = self._read_segments(found, chunk_names(self._root, tokens))
        if found.tail is None:
            saved = SessionState(
                tokens=tokens, whole=whole, table=newest_table(len(pages)), heap=self._heap, pages=[],
                state=Bytes(b""), checkpoints={}, queries=np.empty(0, np.float32), queries_valid_from=found.length,
                policy=None,
            )  # fmt: skip
        else:
            with self._blaming(found.tail.path):
                container = self._open(found.tail)
                saved = format.read_sections(container, self._heap, replace(self._limits, n_ctx=len(tokens)))
                if not np.array_equal(saved.tokens, tokens):
                    raise SnapshotError(f"{found.tail.path} holds another text than its name says")
                pages += container.pages("pages", self._heap.page_bytes, count=int(found.length % CHUNK > 0))
        saved.pages = [PageImage(source=page) for page in pages]
        saved.policy = saved.policy or fresh
        if saved.policy is not None:
            saved.policy = replace(saved.policy, statistics=done(statistics))
        return saved

    def _read_segments(
        self, found: PrefixMatch, names: list[str]
    ) -> tuple[list[StoredPage], Statistics | None, npt.NDArray[np.bool_]]:
        """Return the chunks' images, their statistics if all have them, and which tokens have seen the whole text."""
        pages: list[StoredPage] = []
        parts: list[Statistics] = []
        whole: list[npt.NDArray[np.bool_]] = []
        for entry, group in groupby(found.segments, key=itemgetter(0)):
            at, places = len(pages), [place for _, place in group]
            first, last = places[0], places[-1] + 1
            with self._blaming(entry.path):
                container = self._open(entry)
                held = container.section("names").read()[first * NAME_BYTES : last * NAME_BYTES]
                if held.hex() != "".join(names[at + 1 : at + 1 + last - first]):
                    raise SnapshotError(f"{entry.path} holds another text than its name says")
                pages += container.pages("pages", self._heap.page_bytes, count=entry.count)[first:last]
                whole.append(format.read_whole(container, entry.count * CHUNK)[first * CHUNK : last * CHUNK])
                if "statistics" in container:
                    part = format.read_statistics(container, entry.count, self._heap.page_bytes)
                    parts.append(Statistics(part.name, part.rows[first:last]))
        rows = [row for part in parts for row in part.rows]
        complete = len(rows) == len(pages) and len({part.layout for part in parts}) == 1
        statistics = Statistics(parts[0].name, rows) if complete else None
        return pages, statistics, np.concatenate(whole) if whole else np.zeros(0, np.bool_)

    def _cover(self, names: list[str], by_parent: dict[str, list[Entry]]) -> list[tuple[Entry, int]]:
        """Return a segment for each chunk, from the first one to the first that none holds."""
        covered: list[tuple[Entry, int]] = []
        at = 0
        while at <= len(covered) and at < len(names):
            for entry in by_parent.get(names[at], ()):
                if entry.kind == SEGMENT and at + entry.count > len(covered):
                    shared = self._shared(entry, names, at)
                    covered += [(entry, i) for i in range(len(covered) - at, shared)]
            at += 1
        return covered

    def _shared(self, entry: Entry, names: list[str], at: int) -> int:
        """Return how many chunks of a segment that continues names[at] belong to the text of these names."""
        if names[at + entry.count : at + entry.count + 1] == [entry.end]:
            return entry.count
        try:
            with self._blaming(entry.path):
                ours = self._all.names(entry)
        except SnapshotError:
            return 0
        pairs = zip(ours, names[at + 1 : at + 1 + entry.count], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(entry.count, len(names) - at - 1))

    def _best_tail(
        self, tokens: Int32s, names: list[str], by_parent: dict[str, list[Entry]]
    ) -> tuple[Entry | None, int]:
        """Return the tail that lies furthest into the text, and its position."""
        for c in range(len(names) - 1, -1, -1):
            rest = tokens[c * CHUNK : (c + 1) * CHUNK]
            fitting = [
                entry
                for entry in by_parent.get(names[c], ())
                if entry.kind == TAIL
                and c * CHUNK + entry.count <= len(tokens)
                and entry.count < CHUNK
                and entry.end == extend_name(names[c], rest[: entry.count])
            ]
            if fitting:
                best = max(fitting, key=lambda entry: entry.count)
                return best, c * CHUNK + best.count
        return None, 0

    def _has_logits(self, tail: Entry) -> bool:
        with contextlib.suppress(SnapshotError), self._blaming(tail.path):
            return "logits" in self._open(tail)
        return False

    def _by_parent(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self._all.entries(self._folder):
            if entry.path not in self._all.unusable:
                found.setdefault(entry.parent, []).append(entry)
        return found

    def _open(self, entry: Entry) -> Container:
        container = Container(FileSource(entry.path))
        if container.kind != entry.kind:
            raise SnapshotError(f"{entry.path} is no {entry.kind} but a {container.kind!r}")
        format.compare(container, self._fingerprint)
        return container

    @contextlib.contextmanager
    def _blaming(self, path: Path) -> Iterator[None]:
        """Reject this file if SnapshotError is raised inside."""
        try:
            yield
        except SnapshotError as err:
            self._all.reject(path, err)
            raise

    # --- put

    def put(self, saved: SessionState) -> None:
        """Store what is not there yet, and evict what exceeds the capacity. OSError, SnapshotError."""
        if saved.size > self._all.capacity:
            raise SnapshotError(
                f"a text of {saved.size >> 20} MiB is larger than the {self._all.capacity >> 20} MiB of the folder: "
                f"allow more disk_bytes"
            )
        self.folder.make(self._folder)
        names = chunk_names(self._root, saved.tokens)
        if self._put_segments(saved, names):
            self._put_tail(saved, names)
            for pos in saved.checkpoints:
                self._put_tail(_at_checkpoint(saved, pos), names)
        self._all.evict()

    def _put_segments(self, saved: SessionState, names: list[str]) -> bool:
        """Store the missing chunks. Return False if other processes delete them as fast."""
        full = len(names) - 1
        for _ in range(2 * (full // MAX_CHUNKS + 2)):
            by_parent = self._by_parent()
            covered = self._cover(names, by_parent)
            first, short = len(covered), list[Entry]()
            if first == full:
                return True
            last = min(first + MAX_CHUNKS, full)
            # rewrite segments that are no larger than what follows, together with it: else a text that grows by a few
            # chunks at a time ends in thousands of files. A segment that other texts continue stays
            while first and covered[first - 1][1] + 1 == covered[first - 1][0].count <= min(
                last - first, MAX_CHUNKS - (last - first)
            ):
                if any(entry.kind == SEGMENT for entry in by_parent.get(names[first], ()) if entry not in short):
                    break
                short.append(covered[first - 1][0])
                first -= short[-1].count
            self._put_segment(saved, names, first, last)
            with self.folder.locked():
                for entry in short:
                    self._all.delete(entry.path)
        return False

    def _put_segment(self, saved: SessionState, names: list[str], first: int, last: int) -> None:
        path = Entry.named(self._folder, names[first], last - first, names[last], SEGMENT).path
        with replacing(path, guard=self.folder.locked) as file:
            writer = Writer(file)
            writer.section("names", bytes.fromhex("".join(names[first + 1 : last + 1])))
            format.write_whole(writer, saved.whole[first * CHUNK : last * CHUNK])
            writer.pages("pages", (self._heap.bytes_of(page) for page in saved.pages[first:last]))
            format.write_statistics(writer, saved, slice(first, last))
            writer.close(SEGMENT, {"fingerprint": self._fingerprint, "settings": self._settings})
        self._all.written(path)

    def _put_tail(self, saved: SessionState, names: list[str]) -> None:
        full, rest = divmod(saved.length, CHUNK)
        end = extend_name(names[full], saved.tokens[full * CHUNK :])
        tail = Entry.named(self._folder, names[full], rest, end, TAIL)
        if self._all.has(tail.path) and (saved.logits is None or self._has_logits(tail)):
            with contextlib.suppress(OSError):
                os.utime(tail.path)
            return
        images = [bytearray(self._heap.bytes_of(page)) for page in saved.pages[full:]]
        for image in images:
            self._blank(memoryview(image), rest)
        with replacing(tail.path, guard=self.folder.locked) as file:
            writer = Writer(file)
            facts = format.write_sections(writer, replace(saved, checkpoints={}))
            writer.pages("pages", images)
            writer.close(TAIL, {**facts, "fingerprint": self._fingerprint, "settings": self._settings})
        self._all.written(tail.path)


def newest_table(chunks: int) -> PageTableState:
    """Return a page table for any blocks, in which the newest chunks were used last."""
    return PageTableState(
        blocks=[ANY] * chunks, last_use=list(range(chunks)), clock=chunks, settled=False, pins=frozenset(), scores=None
    )


def _at_checkpoint(saved: SessionState, pos: int) -> SessionState:
    """Return the session cut to the position of a checkpoint."""
    chunks = -(-pos // CHUNK)
    return replace(
        saved, tokens=saved.tokens[:pos], whole=saved.whole[:pos], table=newest_table(chunks),
        pages=saved.pages[:chunks], state=saved.checkpoints[pos], checkpoints={}, queries=np.empty(0, np.float32),
        queries_valid_from=pos, policy=saved.policy and saved.policy.before(pos), logits=None, rebuild=False,
    )  # fmt: skip
