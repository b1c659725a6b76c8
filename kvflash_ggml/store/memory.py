"""Texts that were read lately, in memory. Their page images are those of the host store, retained and not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from threading import RLock

from ..arrays import Int32s, common_prefix
from ..constants import CHUNK
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..state.session import SessionState
from .texts import Texts

MAX_TEXTS = 128
"""Each may keep files open from which its pages have not been read yet."""


class MemoryTier:
    """Saved sessions by their text, least recently used first.

    capacity: in bytes. in_use: the pages of the text at hand. A lock guards everything, since the heap lets go of texts
    from whichever thread finds it full.
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
        """Bytes that are held for later alone: what several texts share counts once, a page in use not at all."""
        with self._lock:
            in_use = sum(self._texts.holds(id(page)) for page in self._in_use())
            return self._texts.size - in_use * self._heap.page_bytes

    def put(self, saved: SessionState) -> None:
        """Keep a session, and release it when it has to go.

        Letting go of a text frees only the pages that no other text has, so a shared beginning stays to the last.
        """
        with self._lock:
            self._texts.add(saved)
            self._texts.add_parts(saved, saved.parts())
            while (self.size > self._capacity or len(self) > MAX_TEXTS) and self.evict():
                pass

    def find(self, tokens: Int32s, *, stateful: bool) -> tuple[SessionState | None, int]:
        """The session from which most of a text can be continued, and how much that is.

        stateful: it can be continued only from its end and from its checkpoints.
        """
        best, most = None, (0, False)
        with self._lock:
            for entry in self._texts if len(tokens) < CHUNK else self._texts.alike(tokens):
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
            return self._texts.known(tokens)

    def take(self, saved: SessionState) -> SessionState | None:
        """A session to be restored and released, whatever happens to the one that is kept; None if it is gone."""
        with self._lock:
            if saved not in self._texts:
                return None
            self._texts.touch(saved)
            return saved.share()

    def evict(self) -> bool:
        """Let go of the session used longest ago; False if there is none."""
        with self._lock:
            for oldest in self._texts:
                self.drop(oldest)
                return True
            return False

    def drop(self, saved: SessionState) -> None:
        """Let go of a session, if it is still there."""
        with self._lock:
            if saved in self._texts:
                self._texts.remove(saved)
                saved.release()

    def drop_holders(self, pages: Set[PageImage]) -> None:
        """Let go of all sessions that have one of these pages."""
        for entry in self._texts:
            if not pages.isdisjoint(entry.pages):
                self.drop(entry)

    def clear(self) -> None:
        while self.evict():
            pass
