"""Embeddings of media, by the numbers that stand for their rows in a text.

A row of an image or of sound has no token. A negative number stands for it in the text, made of the medium's key and
the row. So texts, page tables, snapshots and prefix caches know media by what they are, as they know tokens by theirs.
The number says, too, where the position of the next row is: a text that was restored knows its positions by its
numbers alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import KVFlashError, NotFinite

LIMIT = 512 << 20
"""Bytes of embeddings that are kept for texts that are read again. Those of the newest request stay beyond it."""


MOST = 0xFFFF
"""How far the position can go on behind a row."""

_KIND = _MUTUAL = np.int32(3 << 29)
_ONE, _STAYS, _JUMPS = (np.int32(kind << 29) for kind in (2, 1, 0))
"""Two bits of a number, behind the sign: the position goes on by one, it stays, or it goes on by the lowest 16 bits.
MUTUAL: it goes on by one, and the rows of the medium see each other."""


def numbers_of(key: bytes, count: int, advances: Int32s | None = None, *, mutual: bool = False) -> Int32s:
    """Return the numbers of a medium of `count` rows, [count], each negative.

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
    """Return how far the position goes on behind each row of a text, [n]: by one behind a token."""
    kinds = np.where(text < 0, text & _KIND, _ONE)
    advances: Int32s = np.where(kinds == _JUMPS, text & np.int32(MOST), kinds != _STAYS).astype(np.int32)
    return advances


def are_mutual(rows: Int32s) -> bool:
    """Do these rows, of tokens or of one medium, see each other?"""
    first = rows.item(0)
    return first < 0 and first & int(_KIND) == int(_MUTUAL)


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a sound, or a part of one that is encoded by itself.

    key: names it beside others. numbers: stand for its rows in a text, [count], see `numbers_of`. axes: their positions
    on each axis of M-RoPE, [4, count], in llama.cpp's order (time, y, x, z). Time, y and x count from the position of
    the medium's first row, z does not. None where the rows have the positions of tokens.
    """

    key: bytes
    numbers: Int32s
    axes: Int32s | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one medium. rows: their embeddings, [count, width]. axes: see `Medium`, [4, count]."""

    rows: Floats
    axes: Int32s | None = None

    def __getitem__(self, at: slice) -> Part:
        return Part(self.rows[at], None if self.axes is None else self.axes[:, at])


@dataclass(slots=True)
class _Span:
    """encoders: of the texts that have the medium; one makes the embeddings, if there are none yet."""

    medium: Medium
    encoders: list[Callable[[], Floats | None]]
    part: Part | None = None


class MediaRows:
    """The embeddings of media by their numbers, the least recently used ones dropped beyond `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: OrderedDict[bytes, _Span] = OrderedDict()
        self._places: dict[int, list[tuple[bytes, int]]] = {}
        self._size = 0
        self._fresh: set[bytes] = set()

    def begin(self) -> None:
        """Begin a request: the media that are expected from here on stay until the next one begins."""
        self._fresh.clear()
        for key in [key for key, span in self._spans.items() if span.part is None]:
            self._drop(key)

    def expect(self, medium: Medium, encode: Callable[[], Floats | None] | None) -> None:
        """Expect these rows in a text. encode: called when the first of them is read, unless their embeddings are kept.
        It makes them, [count, width], or returns None if it no longer can. None for what cannot.
        """
        self._fresh.add(medium.key)
        if (span := self._spans.get(medium.key)) is not None:
            self._spans.move_to_end(medium.key)
            if encode is not None and span.part is None:  # the text that came first may have ended
                span.encoders.append(encode)
            return
        self._spans[medium.key] = _Span(medium, [] if encode is None else [encode])
        for row, number in enumerate(medium.numbers.tolist()):
            self._places.setdefault(number, []).append((medium.key, row))

    def kept(self, key: bytes) -> Floats | None:
        """Return the embeddings of a medium if they are at hand, [count, width]. From any thread."""
        span = self._spans.get(key)
        part = None if span is None else span.part
        return None if part is None else part.rows

    def _filled(self, span: _Span) -> Part | None:
        """Return a medium with its embeddings."""
        if span.part is None:
            rows = next((made for encode in span.encoders if (made := encode()) is not None), None)
            if rows is None:
                return None
            if not np.isfinite(rows).all():
                raise NotFinite(
                    f"the encoder made {len(rows)} rows of an image or a sound, and not all of its values are finite: "
                    f"send it smaller, or in another format"
                )
            span.part = Part(rows, span.medium.axes)
            span.encoders.clear()
            self._size += rows.nbytes
            for old in [key for key in self._spans if key not in self._fresh]:
                if self._size <= self._limit:
                    break
                self._drop(old)
        return span.part

    def _drop(self, key: bytes) -> None:
        span = self._spans.pop(key)
        self._size -= 0 if span.part is None else span.part.rows.nbytes
        for row, number in enumerate(span.medium.numbers.tolist()):
            places = self._places[number]
            places.remove((key, row))
            if not places:
                del self._places[number]

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def rows(self, before: Int32s, numbers: Int32s) -> Part:
        """Return consecutive rows of one medium, which is encoded if need be.

        before: the text's last number before them, if there is one: two media may share a number, but not two in
        succession. KVFlashError for a medium that is not kept, DecodeError if its encoder fails, NotFinite if it makes
        values that are not finite.
        """
        for key, row in self._places.get(int(numbers[0]), ()):
            span = self._spans[key]
            known = span.medium.numbers
            follows = row == 0 or (len(before) and known[row - 1] == before[-1])
            if follows and np.array_equal(known[row : row + len(numbers)], numbers):
                part = self._filled(span)
                if part is not None:
                    return part[row : row + len(numbers)]
                break
        raise KVFlashError(
            "an image or a sound of this text has to be read again, and its embeddings are not kept any more: send the "
            "chat with it again"
        )

    def stretches(self, text: Int32s) -> Iterator[int]:
        """Yield where runs of tokens, and media, end in a text: ascending positions, the last one its length."""
        at, total = 0, len(text)
        borders = np.flatnonzero(np.diff(text < 0)) + 1
        for end in (*borders.tolist(), total):
            while text[at] < 0 and (count := self._rest(text[at:end])) < end - at:
                at += count
                yield at
            yield end
            at = end

    def _rest(self, numbers: Int32s) -> int:
        """Count how many of these rows are of the first one's medium; all where it is not known."""
        for key, row in self._places.get(int(numbers[0]), ()):
            known = self._spans[key].medium.numbers[row : row + len(numbers)]
            if np.array_equal(known, numbers[: len(known)]):
                return len(known)
        return len(numbers)
