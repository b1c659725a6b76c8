"""Embeddings of media, by the numbers that stand for their rows in a text.

A row of an image has no token. A negative number stands for it in the text, made of the image's key and the row. So
texts, page tables, snapshots and prefix caches know images by what they are, as they know tokens by theirs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import KVFlashError

LIMIT = 512 << 20
"""Bytes of embeddings that are kept for texts that are read again. Those of the newest request stay beyond it."""


def numbers_of(key: bytes, count: int) -> Int32s:
    """The numbers of a medium of `count` rows, [count], each negative. key: names the medium and its encoder."""
    digest = hashlib.shake_256(key + count.to_bytes(8, "little")).digest(4 * count)
    numbers: Int32s = np.frombuffer(digest, "<i4") | np.int32(-1 << 31)
    return numbers


class MediaRows:
    """The embeddings of media by their numbers, the least recently used ones dropped beyond `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: OrderedDict[bytes, tuple[Int32s, Floats]] = OrderedDict()
        self._places: dict[int, list[tuple[bytes, int]]] = {}
        self._size = 0
        self._fresh: set[bytes] = set()

    def begin(self) -> None:
        """A request begins: the media that are added or found from here on stay until the next one begins."""
        self._fresh.clear()

    def find(self, key: bytes) -> Int32s | None:
        """The numbers of a medium whose embeddings are kept; None for another one."""
        span = self._spans.get(key)
        if span is None:
            return None
        self._spans.move_to_end(key)
        self._fresh.add(key)
        return span[0]

    def add(self, key: bytes, rows: Floats) -> Int32s:
        """Keep the embeddings of a medium, [count, width], and return its numbers, [count]."""
        numbers = numbers_of(key, len(rows))
        self._spans[key] = numbers, rows
        self._size += rows.nbytes
        self._fresh.add(key)
        for row, number in enumerate(numbers.tolist()):
            self._places.setdefault(number, []).append((key, row))
        for old in [key for key in self._spans if key not in self._fresh]:
            if self._size <= self._limit:
                break
            self._drop(old)
        return numbers

    def _drop(self, key: bytes) -> None:
        numbers, rows = self._spans.pop(key)
        self._size -= rows.nbytes
        for row, number in enumerate(numbers.tolist()):
            places = self._places[number]
            places.remove((key, row))
            if not places:
                del self._places[number]

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def rows(self, before: Int32s, numbers: Int32s) -> Floats:
        """The embeddings of consecutive rows of one medium, [count, width].

        before: the text's last number before them, if there is one: two media may share a number, but not two in
        succession. KVFlashError for a medium that is not kept.
        """
        for key, row in self._places.get(int(numbers[0]), ()):
            known, rows = self._spans[key]
            follows = row == 0 or (len(before) and known[row - 1] == before[-1])
            if follows and np.array_equal(known[row : row + len(numbers)], numbers):
                return rows[row : row + len(numbers)]
        raise KVFlashError(
            "an image of this text has to be read again, and its embeddings are not kept any more: send the chat with "
            "its images again"
        )

    def stretches(self, text: Int32s) -> Iterator[int]:
        """Where runs of tokens, and media, end in a text: positions in ascending order, the last one its length."""
        at, total = 0, len(text)
        borders = np.flatnonzero(np.diff(text < 0)) + 1
        for end in (*borders.tolist(), total):
            while text[at] < 0 and (count := self._rest(text[at:end])) < end - at:
                at += count
                yield at
            yield end
            at = end

    def _rest(self, numbers: Int32s) -> int:
        """How many of these rows are of the first one's medium; all where it is not known."""
        for key, row in self._places.get(int(numbers[0]), ()):
            known = self._spans[key][0][row : row + len(numbers)]
            if np.array_equal(known, numbers[: len(known)]):
                return len(known)
        return len(numbers)
