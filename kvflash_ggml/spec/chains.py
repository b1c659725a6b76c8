"""Where in a text the same run of tokens has been: chains of positions that share a hash."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s

Hashes = npt.NDArray[np.uint32]
NONE = -1

_Element = TypeVar("_Element", bound=np.generic)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FEWEST_BITS = 10
_FEW = 8
"""So many windows are linked faster one by one."""


class Chains:
    """For windows that are added one after the other: those before each that share its bucket, newest first.

    A table of bucket -> newest window, and of window -> the one before it in its bucket. Windows of different text may
    share a bucket: who asks compares.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hashes: Hashes = np.empty(0, np.uint32)
        self._before: Int32s = np.empty(0, np.int32)
        self._linked = True  # else an interrupt has left the tables half done
        self._table(_FEWEST_BITS)

    def add(self, hashes: Hashes) -> None:
        """These windows come next; [n]."""
        if not len(hashes):
            return
        end = self.count + len(hashes)
        self._hashes = grown(self._hashes, end)
        self._before = grown(self._before, end)
        self._hashes[self.count : end] = hashes
        first = self.count if self._linked else 0
        self._linked = False
        self.count = end
        if first == 0 or 2 * end > len(self._newest):
            first = 0
            self._table(max(_FEWEST_BITS, (4 * end - 1).bit_length()))
        self._link(first)
        self._linked = True

    def truncate(self, count: int) -> None:
        """Forget the windows from `count` on, as if they had never been added."""
        if not self._linked:
            self.count = min(self.count, count)
            self._table(max(_FEWEST_BITS, (4 * self.count).bit_length()))
            self._link(0)
        elif count < self.count:
            self._linked = False
            late = slice(count, self.count)
            # Of several windows of a bucket the oldest is assigned last, and stays.
            self._newest[self._buckets(self._hashes[late])[::-1]] = self._before[late][::-1]
            self.count = count
        self._linked = True

    def newest(self, hashed: np.uint32, most: int) -> list[int]:
        """At most so many windows of the bucket of this hash, newest first."""
        found: list[int] = []
        window = self._newest.item(int(hashed) >> self._shift)
        while window != NONE and len(found) < most:
            found.append(window)
            window = self._before.item(window)
        return found

    def _table(self, bits: int) -> None:
        self._shift = 32 - bits
        self._newest: Int32s = np.full(1 << bits, NONE, np.int32)

    def _buckets(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        buckets: npt.NDArray[np.intp] = (hashes >> np.uint32(self._shift)).astype(np.intp)
        return buckets

    def _link(self, first: int) -> None:
        """Put the windows from `first` on into the tables."""
        if self.count - first <= _FEW:
            for window, hashed in enumerate(self._hashes[first : self.count].tolist(), first):
                bucket = hashed >> self._shift
                self._before[window] = self._newest[bucket]
                self._newest[bucket] = window
            return
        buckets = self._buckets(self._hashes[first : self.count])
        order = np.argsort(buckets, kind="stable")
        before = self._newest[buckets]
        again = np.flatnonzero(buckets[order[1:]] == buckets[order[:-1]])
        before[order[again + 1]] = order[again] + first
        self._before[first : self.count] = before
        # Of several windows of a bucket the newest is assigned last, and stays.
        self._newest[buckets] = np.arange(first, self.count, dtype=np.int32)


def hashes_of(tokens: Int32s, lengths: tuple[int, ...]) -> list[Hashes]:
    """A hash of every window of each length, [len(tokens) - length + 1]; each length is twice the one before it."""
    ids = tokens.astype(np.uint64)
    count = max(0, len(ids) - lengths[0] + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(lengths[0]):
        mixed = (mixed ^ ids[offset : offset + count]) * _MIX
        mixed ^= mixed >> np.uint64(29)
    hashes = [mixed]
    for half in lengths[:-1]:
        shorter = hashes[-1]
        longer = (shorter[:-half] * _MIX) ^ shorter[half:]
        longer ^= longer >> np.uint64(29)
        hashes.append(longer * _MIX)
    return [(mixed >> np.uint64(32)).astype(np.uint32) for mixed in hashes]


def grown(values: npt.NDArray[_Element], size: int) -> npt.NDArray[_Element]:
    """The same values with room for at least `size`, and for more to come."""
    if size <= len(values):
        return values
    roomy: npt.NDArray[Any] = np.empty(max(size, 2 * len(values), 1024), values.dtype)
    roomy[: len(values)] = values
    return roomy
