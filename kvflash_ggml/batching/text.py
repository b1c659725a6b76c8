"""From tokens to text that is final: characters that are whole, and no beginning of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from .messages import Logprob


class TextStream:
    """Bytes go in, text comes out; what may yet become a stop string is held back.

    `stopped` is the stop string that ended the text, once one has.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(word for word in stop if word)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._start = 0  # where the held text begins, in characters
        self._waiting: deque[tuple[int, Logprob]] = deque()
        self.stopped: str | None = None

    def push(self, piece: bytes, logprob: Logprob | None = None) -> tuple[str, tuple[Logprob, ...]]:
        """More bytes of the text. Returns what is final now, and what is told of its tokens."""
        if logprob is not None:
            self._waiting.append((self._start + len(self._held), logprob))
        self._held += self._decoder.decode(piece)
        if not self._stop:
            return self._release(len(self._held))
        at, word = min(((at, word) for word in self._stop if (at := self._held.find(word)) >= 0), default=(-1, ""))
        if at >= 0:
            self.stopped = word
            out = self._release(at)
            self._held = ""
            self._waiting.clear()
            return out
        return self._release(len(self._held) - self._beginning())

    def finish(self) -> tuple[str, tuple[Logprob, ...]]:
        """The text has ended: what was held back is final, and half a character is a replacement mark."""
        if self.stopped is None:
            self._held += self._decoder.decode(b"", True)
        return self._release(len(self._held), everything=True)

    def _release(self, count: int, *, everything: bool = False) -> tuple[str, tuple[Logprob, ...]]:
        text, self._held = self._held[:count], self._held[count:]
        self._start += count
        told = []
        # a token without text of its own, as half a character, goes with the text before it
        while self._waiting and (everything or not self._held or self._waiting[0][0] < self._start):
            told.append(self._waiting.popleft()[1])
        return text, tuple(told)

    def _beginning(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = max(len(word) for word in self._stop) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(word.startswith(tail) for word in self._stop):
                return count
        return 0
