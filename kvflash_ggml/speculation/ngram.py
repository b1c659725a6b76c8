"""Drafts from the text itself: the tokens that followed an earlier occurrence of its last tokens.

The index covers the whole text, evicted chunks included.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s, Int64s
from .base import Features
from .draft import Draft, chain

Hashes = npt.NDArray[np.uint32]
NONE = -1

_Element = TypeVar("_Element", bound=np.generic)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FEWEST_BITS = 10
_FEW = 8
"""This few windows are linked faster one by one."""


class Chains:
    """Finds, for windows that are added in order, the earlier windows of the same bucket, newest first.

    One table maps a bucket to its newest window, another maps a window to the one before it in its bucket. Windows of
    different text may share a bucket: callers compare the tokens.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hashes: Hashes = np.empty(0, np.uint32)
        self._before: Int32s = np.empty(0, np.int32)
        self._linked = True  # else an interrupt has left the tables half done
        self._table(_FEWEST_BITS)

    def add(self, hashes: Hashes) -> None:
        """Append these windows; [n]."""
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

    def newest(self, hashed: np.uint32, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` windows of the bucket of this hash, newest first."""
        found: list[int] = []
        window = self._newest.item(int(hashed) >> self._shift)
        while window != NONE and len(found) < max_tokens:
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
    """Return a hash of every window of each length, [len(tokens) - length + 1]; each length is twice the one before
    it.
    """
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
    """Return the same values with room for at least `size`, and for more to come."""
    if size <= len(values):
        return values
    roomy: npt.NDArray[Any] = np.empty(max(size, 2 * len(values), 1024), values.dtype)
    roomy[: len(values)] = values
    return roomy


ORDERS = (3, 6, 12, 24)
"""Lengths of the runs that are looked up; the longest earlier occurrence decides."""

CANDIDATES = 8
"""Earlier occurrences that are compared, the newest first."""

REACH = 64
"""A match is not followed further back: every draft has its full length by then."""

EAGER = 32
"""This many new tokens are indexed when they are observed; fewer wait for the next lookup."""

_BACK = np.arange(REACH)


class NGram:
    """Proposes the tokens that followed the longest earlier occurrence of the end of the text; the newest of several.

    The longer the match, the longer the proposal: 4 tokens, and two for each matching token. A match that runs into the
    end of the text is a repetition, and the draft continues it.
    """

    name = "ngram"
    wants = Features()

    def __init__(self) -> None:
        self._base = 0  # position of the first known token
        self._length = 0  # known tokens
        self._indexed = 0  # of these, indexed tokens
        self._text: Int32s = np.empty(1, np.int32)
        self._chains = tuple(Chains() for _ in ORDERS)

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """Tokens before a gap are forgotten."""
        if start > self._base + self._length:
            self.close()
            self._base = start
        self.truncate(start)
        if start < self._base:
            self._base = start
        end = self._length + len(tokens)
        self._text = grown(self._text, end + 1)
        self._text[self._length : end] = tokens
        self._length = end
        if end - self._indexed >= EAGER:
            self._index()

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """Log-probabilities grow with the match, and are only a guess."""
        self._text[self._length] = root
        found = self._longest(self._index(beyond=1))
        if found is None or max_tokens < 1:
            return None
        position, match = found
        count = min(4 + 2 * match, max_tokens)
        after = self._text[position + 1 : self._length + 1]
        tokens = np.resize(after[:count], count)  # resize repeats the tokens
        count = int(np.append(tokens < 0, True).argmax())  # a row of an image cannot be drafted
        if not count:
            return None
        return chain(tokens[:count], self.name, np.full(count, np.log(match / (match + 1)), np.float32))

    def truncate(self, length: int) -> None:
        left = max(0, length - self._base)
        self._length = min(self._length, left)
        self._indexed = min(self._indexed, left)
        for order, chains in zip(ORDERS, self._chains, strict=True):
            chains.truncate(_windows(left, order))

    def close(self) -> None:
        self.truncate(0)
        self._text = np.empty(1, np.int32)
        self._chains = tuple(Chains() for _ in ORDERS)

    def _index(self, beyond: int = 0) -> list[Hashes]:
        """Index all tokens. Returns the hashes of new runs, and of the runs that end `beyond` tokens later."""
        self.truncate(self._base + self._length)  # an interrupt may have left some of them ahead
        first = max(0, self._indexed - ORDERS[-1] + 1)
        hashes = hashes_of(self._text[first : self._length + beyond], ORDERS)
        for chains, order, values in zip(self._chains, ORDERS, hashes, strict=True):
            end = max(0, len(values) - beyond)
            chains.add(values[end - _windows(self._length, order) + chains.count : end])
        self._indexed = self._length
        return hashes

    def _longest(self, last: list[Hashes]) -> tuple[int, int] | None:
        """Return where the text, root included, matches itself best: the position like the root's, and the matching
        tokens.

        last: the hashes of the runs at its end, for each order.
        """
        for chains, order, hashes in zip(reversed(self._chains), reversed(ORDERS), reversed(last), strict=True):
            windows = chains.newest(hashes[-1], CANDIDATES) if hashes.size else None
            if not windows:
                continue
            positions = np.array(windows, np.int64) + order - 1
            matches = self._matches(positions)
            best = int(matches.argmax())  # the first of several, which is the newest
            if matches[best] >= order:
                return int(positions[best]), int(matches[best])
        return None

    def _matches(self, positions: Int64s) -> Int64s:
        """Return how many tokens up to each position equal the end of the text, [n]; at most REACH."""
        reach = min(REACH, self._length)
        back = _BACK[:reach]
        # Positions before the text wrap around; `within` cuts them off.
        differs = self._text[positions[:, None] - back] != self._text[self._length - back]
        matches = np.where(differs.any(axis=1), differs.argmax(axis=1), reach)
        within: Int64s = np.minimum(matches, positions + 1)
        return within


def _windows(length: int, order: int) -> int:
    """Return how many runs of `order` tokens a text has."""
    return max(0, length - order + 1)
