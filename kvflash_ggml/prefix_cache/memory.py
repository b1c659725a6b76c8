"""Texts that were read lately, in memory. Their page images are those of the host store, retained and not copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from threading import RLock

from ..arrays import Int32s, common_prefix
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..state.session import SessionState

MAX_TEXTS = 128
"""Each may keep files open from which its pages have not been read yet."""


class MemoryTier:
    """Saved sessions by their text, the one used longest ago first.

    capacity: in bytes. in_use: the pages of the text at hand. A lock guards everything, since the heap lets go of texts
    from whichever thread finds it full.
    """

    def __init__(self, heap: PageHeap, capacity: int, in_use: Callable[[], Iterable[PageImage]]) -> None:
        self._heap = heap
        self._capacity = capacity
        self._in_use = in_use
        self._entries: list[SessionState] = []
        self._holders: Counter[int] = Counter()  # texts that have a page or a copy of state, by its id
        self._shared_bytes = 0
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that are held for later alone: what several texts share counts once, a page in use not at all."""
        with self._lock:
            in_use = sum(id(page) in self._holders for page in self._in_use())
            own = sum(entry.own_size for entry in self._entries)
            return self._shared_bytes - in_use * self._heap.page_bytes + own

    def put(self, saved: SessionState) -> None:
        """Keep a session, and release it when it has to go.

        Letting go of a text frees only the pages that no other text has, so a shared beginning stays to the last.
        """
        with self._lock:
            self._entries.append(saved)
            for key, size in self._parts(saved):
                self._holders[key] += 1
                if self._holders[key] == 1:
                    self._shared_bytes += size
            while (self.size > self._capacity or len(self) > MAX_TEXTS) and self.evict():
                pass

    def find(self, tokens: Int32s, *, stateful: bool) -> tuple[SessionState | None, int]:
        """The session from which most of a text can be continued, and how much that is.

        stateful: it can be continued only from its end and from its checkpoints.
        """
        best, most = None, (0, False)
        with self._lock:
            for entry in self._entries:
                length = common_prefix(entry.tokens, tokens)
                # at the end of what is asked for, logits are needed: without them a token is evaluated again
                whole = length == entry.length and (length < len(tokens) or entry.logits is not None)
                if stateful and not whole:
                    last = min(length, len(tokens) - 1)
                    length = max((pos for pos in entry.checkpoints if pos <= last), default=0)
                if (length, whole) > most:
                    best, most = entry, (length, whole)
        return best, most[0]

    def known(self, tokens: Int32s) -> int:
        """How long a beginning of a text is known, whether or not it can be continued from there."""
        with self._lock:
            return max((common_prefix(entry.tokens, tokens) for entry in self._entries), default=0)

    def take(self, saved: SessionState) -> SessionState | None:
        """A session to be restored and released, whatever happens to the one that is kept; None if it is gone."""
        with self._lock:
            if saved not in self._entries:
                return None
            self._entries.remove(saved)
            self._entries.append(saved)
            return saved.share()

    def evict(self) -> bool:
        """Let go of the session used longest ago; False if there is none."""
        with self._lock:
            if not self._entries:
                return False
            self.drop(self._entries[0])
            return True

    def drop(self, saved: SessionState) -> None:
        """Let go of a session, if it is still there."""
        with self._lock:
            if saved not in self._entries:
                return
            self._entries.remove(saved)
            for key, size in self._parts(saved):
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    self._shared_bytes -= size
            saved.release()

    def drop_holders(self, pages: Set[PageImage]) -> None:
        """Let go of all sessions that have one of these pages."""
        for entry in list(self._entries):
            if not pages.isdisjoint(entry.pages):
                self.drop(entry)

    def clear(self) -> None:
        while self.evict():
            pass

    def _parts(self, saved: SessionState) -> Iterator[tuple[int, int]]:
        """What other texts may have too: its id, which is its own while a text has it, and its size."""
        for page in saved.pages:
            yield id(page), self._heap.page_bytes
        for blob in saved.blobs:
            yield id(blob), blob.size
        for row in saved.rows:
            yield id(row), row.nbytes
