"""The prefix cache: a prefix that this process or another one has read is not read again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import RLock

import numpy as np

from ..arrays import Int32s, common_prefix
from ..config import PrefixCache
from ..constants import CHUNK
from ..errors import KVFlashError, SnapshotError
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..sequence import restore
from ..sequence.sequence import Sequence
from ..snapshot.container import StoredPage
from ..snapshot.store import SnapshotStore
from ..state.session import SessionState
from ..threads import held_back
from .disk import DiskTier
from .texts import Texts

logger = logging.getLogger("kvflash_ggml")

MAX_TEXTS = 128
"""In memory. Each may keep files open from which its pages have not been read yet."""

MAX_TRIES = 8
"""Prefixes that may fail to load before the prompt is read as a whole."""

MAX_WAITING = 8
"""Texts that wait to be written to the folder. Further ones are not stored there."""

UNWRITTEN = "the prefix cache could not be written"


class MemoryTier:
    """Saved sessions by their text, least recently used first. Any thread uses it: the heap evicts where it is full.

    capacity: in bytes. in_use: the pages of the text in the pool.
    """

    def __init__(self, heap: PageHeap, capacity: int, in_use: Callable[[], Iterable[PageImage]]) -> None:
        self._heap = heap
        self._capacity = capacity
        self._in_use = in_use
        self._texts = Texts[SessionState]()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def size(self) -> int:
        """Bytes that only this tier holds. Shared parts count once, and pages in use not at all."""
        with self._lock:
            in_use = sum(self._texts.holds(id(page)) for page in self._in_use())
            return self._texts.size - in_use * self._heap.page_bytes

    def put(self, saved: SessionState) -> None:
        """Keep a session, and release it when it is evicted. Pages that other texts share stay."""
        with self._lock:
            self._texts.add(saved)
            self._texts.add_parts(saved, saved.parts())
            while (self.size > self._capacity or len(self) > MAX_TEXTS) and self.evict():
                pass

    def find(self, tokens: Int32s, *, stateful: bool) -> tuple[SessionState | None, int]:
        """Return the session that has the longest usable beginning of a text, and its length; None and 0 without.

        stateful: a session can be continued only from its end and from its checkpoints.
        """
        best, longest = None, (0, False)
        with self._lock:
            for entry in self._texts if len(tokens) < CHUNK else self._texts.alike(tokens):
                length = common_prefix(entry.tokens, tokens)
                # a whole prompt is of use with the logits of its end: without them its last token is evaluated again
                whole = length == entry.length and (length < len(tokens) or entry.logits is not None)
                if stateful and not whole:
                    last = min(length, len(tokens) - 1)
                    length = max((pos for pos in entry.checkpoints if pos <= last), default=0)
                if (length, whole) > longest:
                    best, longest = entry, (length, whole)
        return best, longest[0]

    def known(self, tokens: Int32s) -> int:
        """Return how long a beginning of a text is known, whether or not it can be continued from there."""
        with self._lock:
            return self._texts.nearest(tokens)[0]

    def take(self, saved: SessionState) -> SessionState:
        """Return a copy of a kept session, to be restored and released. SnapshotError if it has been evicted."""
        with self._lock:
            if saved not in self._texts:
                raise SnapshotError("it was evicted because memory was full")
            self._texts.touch(saved)
            return saved.share()

    def evict(self) -> bool:
        """Drop the least recently used session; False if there is none."""
        with self._lock:
            oldest = next(iter(self._texts), None)
            if oldest is not None:
                self.drop(oldest)
            return oldest is not None

    def drop(self, saved: SessionState) -> None:
        """Drop a session, if it is still there."""
        with self._lock:
            if saved in self._texts:
                self._texts.remove(saved)
                saved.release()

    def drop_holders(self, pages: Set[PageImage]) -> None:
        """Drop all sessions that have one of these pages."""
        for entry in self._texts:
            if not pages.isdisjoint(entry.pages):
                self.drop(entry)

    def clear(self) -> None:
        while self.evict():
            pass


class Prefixes:
    """The prefix cache of one model. Only the writing of files happens on another thread than the caller's."""

    def __init__(self, cache: PrefixCache, session: Sequence, store: SnapshotStore, *, n_vocab: int) -> None:
        info, heap = session.engine.info, session.paging.heap
        self.cache = cache
        self._session = session
        self._snapshot_store = store
        self._stateful = info.recurrent or info.n_swa > 0
        self._memory = MemoryTier(heap, cache.memory_bytes, session.store.pages)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-cache")
        self._writing: list[Future[None]] = []
        self._newest = np.empty(0, np.int32)  # the text that was kept last
        self._disk: DiskTier | None = None
        if cache.folder is not None:
            self._disk = DiskTier(
                cache.folder, capacity=cache.disk_bytes, fingerprint=store.fingerprint,
                settings={**store.settings, "pins": session.config.pins}, heap=heap, blank=session.engine.blank,
                stateful=self._stateful, limits=session.limits(n_vocab),
            )  # fmt: skip
        session.paging.keep_images_for(self)
        heap.add_reclaimer(self._memory.evict)

    def load(self, tokens: Int32s, mine: int, then: Callable[[SessionState], None]) -> None:
        """Restore the longest known beginning of a text, if it has more than `mine` tokens that can be continued.

        then: called with what is restored, which may be longer than the shared beginning: the caller cuts it.
        """
        if self._session.paging.heap.limit is not None:
            self.flush()  # texts that wait to be written hold pages, and the next text may need their room
        for _ in range(MAX_TRIES):
            cached, length = self._memory.find(tokens, stateful=self._stateful)
            found = None if self._disk is None else self._disk.find(tokens)
            best = length if found is None else max(length, found.length)
            # reading less than a chunk is faster than restoring it, except that a whole text comes with its logits
            worth = best >= max(mine + CHUNK, self.cache.least) or best == len(tokens)
            if best <= mine or not worth:
                return
            discard: Callable[[], None]
            if self._disk is not None and found is not None and found.length > length:
                fresh = None if self._session.scoring is None else self._session.scoring.blank_state()
                take, discard = partial(self._disk.load, found, tokens, fresh), partial(self._disk.discard, found)
            else:
                assert cached is not None
                take, discard = partial(self._memory.take, cached), partial(self._memory.drop, cached)
            try:
                saved = take()
                try:
                    restore.load(self._session, saved, then)
                finally:
                    saved.release()
                return
            except SnapshotError as err:
                # a file is damaged, or another process has just deleted it: something shorter may be left
                logger.warning("a prefix of %d tokens cannot be used: %s", best, err)
                discard()
            except KVFlashError as err:
                logger.warning("a prefix of %d tokens is read again: %s", best, err)
                return

    def discard_lost(self) -> None:
        """After a page of the text could not be read: forget all texts that need it, and the damaged file."""
        lost = {page for page in self._session.store.pages() if not self._session.paging.heap.readable(page)}
        self._newest = self._newest[:0]
        self._memory.drop_holders(lost)
        if self._disk is not None:
            stored = [page.source for page in lost if isinstance(page.source, StoredPage)]
            self._disk.discard_damaged({Path(page.source.name) for page in stored})

    def branch(self, tokens: Int32s, cached: int) -> int | None:
        """Return where a text leaves the known ones, if it cannot be continued there: a checkpoint pays there.

        cached: tokens of it that the session has. None if there is no such place.
        """
        if not self._stateful:
            return None
        length = self._memory.known(tokens)
        if self._disk is not None:
            length = max(length, self._disk.known(tokens))
        length = min(length, len(tokens) - 1)
        return length if length - cached >= self.cache.least else None

    def usable(self, tokens: Int32s) -> int:
        """Return how many tokens of a text need not be read, as a kept text has them. Restores nothing."""
        _, length = self._memory.find(tokens, stateful=self._stateful)
        length = length if self._disk is None else max(length, self._disk.find(tokens).length)
        return length if length >= self.cache.least else 0

    def has(self, tokens: Int32s) -> bool:
        """Return whether exactly this text is kept, or is too short to be."""
        if len(tokens) < self.cache.least or np.array_equal(tokens, self._newest):
            return True
        return self._memory.known(tokens) == len(tokens)

    def put(self, saved: SessionState) -> None:
        """Keep a session in memory and in the folder. Takes over `saved`.

        A drafter's part is left out: a loaded drafter knows how much of a text it has read. Pins are of a request.
        """
        whole, saved = saved, saved.share()
        whole.release()
        saved.table.pins = frozenset()
        self._newest = saved.tokens
        if self._disk is not None and not self._snapshot_store.forked:
            self._writing = [future for future in self._writing if not future.done()]
            if len(self._writing) < MAX_WAITING:
                self._writing.append(self._writer.submit(self._write, saved.share()))
            else:
                self._disk.folder.failed("the prefix cache is behind", f"{MAX_WAITING} texts wait to be written")
        self._memory.put(saved)

    def flush(self) -> None:
        """Wait until everything is written. A forked process has nothing to write."""
        if not self._snapshot_store.forked:
            wait(self._writing)

    def close(self) -> None:
        with held_back():
            self.flush()
            self._writer.shutdown()
        self._memory.clear()
        self._session.paging.no_images_for(self)
        self._session.paging.heap.remove_reclaimer(self._memory.evict)

    def _write(self, saved: SessionState) -> None:
        assert self._disk is not None
        try:
            self._disk.put(saved)
            self._disk.folder.wrote(UNWRITTEN)
        except OSError as err:
            why = (
                f"{self.cache.folder}: {err.strerror or err}: name a folder that can be written and has room for "
                f"{self.cache.disk_bytes >> 20} MiB, or fewer disk_bytes"
            )
            self._disk.folder.failed(UNWRITTEN, why)
        except Exception as err:  # nobody reads the result of this thread
            self._disk.folder.failed(UNWRITTEN, err)
        finally:
            saved.release()
