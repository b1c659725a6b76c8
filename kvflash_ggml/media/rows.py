"""Embeddings of media, by the numbers that stand for their rows in a text.

A row of an image has no token. A negative number stands for it in the text, made of the image's key and the row. So
texts, page tables, snapshots and prefix caches know images by what they are, as they know tokens by theirs. The number
says, too, where the position of the next row is: a text that was restored knows its positions by its numbers alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import KVFlashError

LIMIT = 512 << 20
"""Bytes of embeddings that are kept for texts that are read again. Those of the newest request stay beyond it."""


MOST = 0xFFFF
"""How far the position can go on behind a row."""

_KIND = _MUTUAL = np.int32(3 << 29)
_ONE, _STAYS, _JUMPS = (np.int32(kind << 29) for kind in (2, 1, 0))
"""Two bits of a number, behind the sign: the position goes on by one, it stays, or it goes on by the lowest 16 bits.
MUTUAL: it goes on by one, and the rows of the medium see each other."""


def numbers_of(key: bytes, count: int, advances: Int32s | None = None, *, mutual: bool = False) -> Int32s:
    """The numbers of a medium of `count` rows, [count], each negative.

    key: names the medium and its encoder. advances: how far the position goes on behind each row, [count], 0 to MOST;
    None: by one. mutual: the rows see each other, and the position goes on by one.
    """
    digest = hashlib.shake_256(key + count.to_bytes(8, "little")).digest(4 * count)
    numbers: Int32s = (np.frombuffer(digest, "<i4") & ~_KIND) | np.int32(-1 << 31) | (_MUTUAL if mutual else _ONE)
    if advances is not None:
        numbers = np.where(advances == 1, numbers, numbers ^ _ONE ^ np.where(advances == 0, _STAYS, _JUMPS))
        numbers = np.where(advances > 1, (numbers & ~np.int32(MOST)) | advances.astype(np.int32), numbers)
    return numbers


def advances_of(text: Int32s) -> Int32s:
    """How far the position goes on behind each row of a text, [n]: by one behind a token."""
    kinds = np.where(text < 0, text & _KIND, _ONE)
    advances: Int32s = np.where(kinds == _JUMPS, text & np.int32(MOST), kinds != _STAYS).astype(np.int32)
    return advances


def are_mutual(rows: Int32s) -> bool:
    """Do these rows, of tokens or of one medium, see each other?"""
    first = rows.item(0)
    return first < 0 and first & int(_KIND) == int(_MUTUAL)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one medium. rows: their embeddings, [count, width].

    axes: their positions on each axis of M-RoPE, [4, count], in llama.cpp's order (time, y, x, z). Time, y and x count
    from the position of the medium's first row, z does not. None where the rows have the positions of tokens.
    """

    rows: Floats
    axes: Int32s | None = None

    def __getitem__(self, at: slice) -> Part:
        return Part(self.rows[at], None if self.axes is None else self.axes[:, at])


class MediaRows:
    """The embeddings of media by their numbers, the least recently used ones dropped beyond `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: OrderedDict[bytes, tuple[Int32s, Part]] = OrderedDict()
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

    def add(
        self, key: bytes, rows: Floats, axes: Int32s | None = None, size: int = 0, *, mutual: bool = False
    ) -> Int32s:
        """Keep the embeddings of a medium, [count, width], and return its numbers, [count].

        axes: see `Part`. size: what follows the medium is so many positions behind its first row, if there are axes.
        mutual: do its rows see each other? Then there are no axes.
        """
        advances = None if axes is None else np.diff(axes[0], append=np.int32(size))
        numbers = numbers_of(key, len(rows), advances, mutual=mutual)
        self._spans[key] = numbers, Part(rows, axes)
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
        numbers, part = self._spans.pop(key)
        self._size -= part.rows.nbytes
        for row, number in enumerate(numbers.tolist()):
            places = self._places[number]
            places.remove((key, row))
            if not places:
                del self._places[number]

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def rows(self, before: Int32s, numbers: Int32s) -> Part:
        """Consecutive rows of one medium.

        before: the text's last number before them, if there is one: two media may share a number, but not two in
        succession. KVFlashError for a medium that is not kept.
        """
        for key, row in self._places.get(int(numbers[0]), ()):
            known, part = self._spans[key]
            follows = row == 0 or (len(before) and known[row - 1] == before[-1])
            if follows and np.array_equal(known[row : row + len(numbers)], numbers):
                return part[row : row + len(numbers)]
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
