"""The newest queries of a text, captured in a ring of n rows of the engine: row `p % n` is that of position p.

The ring has more rows than are looked at, so that drafts that are rejected have overwritten none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s

if TYPE_CHECKING:
    from ..native.engine import Engine


QueryCopy = tuple[Floats, npt.NDArray[np.intp]]
"""A copy of the ring, flat, and its order."""


class QueryRing:
    """Which of the captured queries are of the text at hand, and how they lie.

    seq: each sequence has an equal part of the engine's rows. rows: how many of the newest are looked at; all that are
    its own, unless fewer are `wanted`. size: floats of these in all layers, flat: per layer [rows, n_head, head].
    valid_from: queries of earlier tokens are not of this text. order: [ring], the engine's row of the positions with
    each remainder; another array when that changes.
    """

    def __init__(self, engine: Engine, seq: int, wanted: int | None = None) -> None:
        self.ring: int = engine.info.query_rows // engine.info.n_seq
        self.rows = self.ring if wanted is None else min(wanted, self.ring)
        self.valid_from = 0
        self.order: npt.NDArray[np.intp] = np.arange(seq * self.ring, (seq + 1) * self.ring)
        self._engine = engine
        self._rings = [tuple(shape) for shape in engine.query_shapes]
        self._shapes = [(self.rows, *shape[1:]) for shape in self._rings]  # a layer may have rows beyond its ring
        self.ring_size = sum(map(math.prod, self._rings))
        self.size = sum(map(math.prod, self._shapes))
        # to touch tens of MiB for the first time takes as long as to copy them: what goes in and out has one place
        self._flat: Floats = np.zeros(self.ring_size, np.float32)

    def capture(self, start: int, count: int, place: Int32s) -> None:
        """Keep the newest queries of `count` tokens from position `start` on. There must be rows.

        place: takes the row of each token, [count].
        """
        ring = self.ring
        if count == 1:
            place[0] = self.order[start % ring]
        else:
            newest = min(count, ring)
            place[: count - newest] = -1
            place[count - newest :] = self.order[np.arange(start + count - newest, start + count) % ring]

    def rows_of(self, end: int, count: int) -> Int32s:
        """Where the queries of positions [end - count, end) are, or will be."""
        rows: Int32s = self.order[np.arange(end - count, end) % self.ring].astype(np.int32)
        return rows

    def moved(self, order: npt.NDArray[np.intp], source: Int32s, target: Int32s) -> None:
        """What was captured for positions `source` is of `target`, one for one, and the other way round.

        order: what it was before. Can be said again.
        """
        order = order.copy()
        for a, b in zip((source % self.ring).tolist(), (target % self.ring).tolist(), strict=True):
            order[a], order[b] = order[b], order[a]
        self.order = order

    def valid_after(self, cut: int, length: int) -> int:
        """What `valid_from` will be once a text of `length` tokens has been cut to `cut`."""
        if cut >= length:
            return self.valid_from
        # newer tokens have taken the place of older queries
        return min(cut, max(self.valid_from, length - self.ring))

    def saved_from(self, cut: int, length: int) -> int:
        """The same of what `read` gives: no more than are looked at."""
        return max(self.valid_after(cut, length), cut - self.rows) if self.rows else self.valid_after(cut, length)

    def newest(self, flat: Floats, order: npt.NDArray[np.intp], end: int, count: int) -> Floats:
        """The queries of positions [end - count, end) out of a copy of the ring, flat: per layer [count, ...].

        order: what it was when the copy was made.
        """
        if not self.ring:
            return np.empty(0, np.float32)
        rows = order[np.arange(end - count, end) % self.ring]
        shapes = [(count, *shape[1:]) for shape in self._rings]
        newest: Floats = np.empty(sum(map(math.prod, shapes)), np.float32)
        for to, source in zip(_layers(newest, shapes), _layers(flat, self._rings), strict=True):
            source.take(rows, axis=0, out=to, mode="clip")  # with another mode it would fill a copy
        return newest

    def newest_now(self, end: int, count: int) -> Floats:
        """The same of the ring as it is. Waits for the compute."""
        return self.newest(self._read(end, count), self.order, end, count)

    def read(self, length: int) -> Floats:
        """Those that are looked at, of a text of `length` tokens, flat: row `p % rows` of a layer is of position p.

        Empty if none are kept. Waits for the compute.
        """
        saved = np.zeros(self.size, np.float32)
        if saved.size:
            positions = np.arange(max(0, length - self.rows), length)
            flat = self._read(length, len(positions))
            for to, source in zip(_layers(saved, self._shapes), _layers(flat, self._rings), strict=True):
                to[positions % self.rows] = source[self.order[positions % self.ring]]
        return saved

    def _read(self, end: int, count: int) -> Floats:
        """The ring, flat, true for positions [end - count, end), until the next call."""
        if self._flat.size and count:
            self._engine.wait(self._engine.read_queries(self._flat, np.sort(self.rows_of(end, count))))
        return self._flat

    def load(self, saved: Floats, valid_from: int, length: int) -> None:
        """Put back what `read` has given, for a text of `length` tokens. What has another size is of no use."""
        self.valid_from = length
        if saved.size and saved.size == self.size:
            positions = np.arange(max(0, length - self.rows), length)
            if self._engine.info.n_seq > 1:  # the rows of others stay as they are
                self._engine.wait(self._engine.read_queries(self._flat))
            for to, source in zip(_layers(self._flat, self._rings), _layers(saved, self._shapes), strict=True):
                to[self.order[positions % self.ring]] = source[positions % self.rows]
            self._engine.write_queries(self._flat)  # rows before `valid_from` are of no text
            self.valid_from = valid_from


def _layers(flat: Floats, shapes: Sequence[tuple[int, ...]]) -> Iterator[Floats]:
    """The layers of a flat array, as views."""
    at = 0
    for shape in shapes:
        size = math.prod(shape)
        yield flat[at : at + size].reshape(shape)
        at += size
