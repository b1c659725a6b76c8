"""Texts that were read lately, in memory. Their page images are those of the host store, held and not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ..pool.heap import Page
from ..saved import SavedSession

Int32s = npt.NDArray[np.int32]


class MemoryTier:
    """Saved sessions by their text, the one used longest ago first.

    capacity: in bytes. in_use: the pages of the text at hand.
    """

    def __init__(self, capacity: int, in_use: Callable[[], Iterable[Page]]) -> None:
        self._capacity = capacity
        self._in_use = in_use
        self._entries: list[SavedSession] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that are held for later alone: a page that several texts share counts once, one in use not at all."""
        pages = {page for entry in self._entries for page in entry.pages} - set(self._in_use())
        page_bytes = self._entries[0].heap.page_bytes if self._entries else 0
        return len(pages) * page_bytes + sum(entry.own_size for entry in self._entries)

    def put(self, saved: SavedSession) -> None:
        """Keep a session, and release it when it has to go.

        Letting go of a text frees only the pages that no other text has, so a shared beginning stays to the last.
        """
        self._entries.append(saved)
        while self.size > self._capacity and self.evict():
            pass

    def find(self, tokens: Int32s, *, stateful: bool) -> tuple[SavedSession | None, int]:
        """The session from which most of a text can be continued, and how much that is.

        stateful: it can be continued only from its end and from its checkpoints.
        """
        best, most = None, 0
        for entry in self._entries:
            length = shared(entry.tokens, tokens)
            if stateful and length < entry.length:
                length = max((pos for pos in entry.checkpoints if pos <= length), default=0)
            if length > most:
                best, most = entry, length
        return best, most

    def known(self, tokens: Int32s) -> int:
        """How long a beginning of a text is known, whether or not it can be continued from there."""
        return max((shared(entry.tokens, tokens) for entry in self._entries), default=0)

    def touch(self, saved: SavedSession) -> None:
        """It has been used."""
        self._entries.remove(saved)
        self._entries.append(saved)

    def evict(self) -> bool:
        """Let go of the session used longest ago; False if there is none."""
        if not self._entries:
            return False
        self._drop(self._entries[0])
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def _drop(self, saved: SavedSession) -> None:
        self._entries.remove(saved)
        saved.release()


def shared(a: Int32s, b: Int32s) -> int:
    """How many leading tokens two texts have in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
