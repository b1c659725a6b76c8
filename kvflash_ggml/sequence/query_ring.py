"""The newest queries of a text, captured in a ring of n rows of the engine: row `p % n` has position p.

The ring has more rows than a score uses, so rejected draft rows have overwritten no row that a score uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s

if TYPE_CHECKING:
    from ..native.engine import PagedEngine
    from ..policy.base import Pairs


QueryCopy = tuple[Floats, npt.NDArray[np.intp]]
"""A copy of the ring, flat, and its order."""


class QueryRing:
    """Knows which captured queries belong to the text, and where they lie.

    seq: each sequence has an equal part of the engine's rows. rows: how many of the newest a score uses: all rows of
    the ring, or the `wanted` ones if they are fewer. size: floats of these in all layers, flat: per layer [rows,
    n_head, head]. valid_from: queries of earlier tokens are not of this text. order: [ring], the engine's row for each
    remainder of a position; replaced by another array when it changes.
    """

    def __init__(self, engine: PagedEngine, seq: int, wanted: int | None = None) -> None:
        self.ring: int = engine.info.query_rows // engine.info.n_seq
        self.rows = self.ring if wanted is None else min(wanted, self.ring)
        self.valid_from = 0
        self.order: npt.NDArray[np.intp] = np.arange(seq * self.ring, (seq + 1) * self.ring)
        self._engine = engine
        self._rings = [tuple(shape) for shape in engine.query_shapes]
        self._shapes = [(self.rows, *shape[1:]) for shape in self._rings]  # a layer may have rows beyond the ring
        # consecutive layers of one shape, [layers, rows, values]: one call gathers their queries, for every token
        self._alike = [(len([*same]), shape[0], math.prod(shape[1:])) for shape, same in groupby(self._rings)]
        self.ring_size = sum(map(math.prod, self._rings))
        self.size = sum(map(math.prod, self._shapes))
        # reused: touching tens of MiB for the first time takes as long as copying them
        self._flat: Floats = np.zeros(self.ring_size, np.float32)
        # what was asked for and room for it: one tuple, so that an interrupt cannot separate them
        self._some: tuple[tuple[int, bytes] | None, Floats] = None, np.empty(0, np.float32)

    def capture(self, start: int, count: int, place: Int32s) -> None:
        """Fill `place` [count] with the rows for the queries of `count` tokens from position `start` on; -1 for none.
        There must be rows.
        """
        ring = self.ring
        newest = min(count, ring)
        place[: count - newest] = -1
        place[count - newest :] = self.order[np.arange(start + count - newest, start + count) % ring]

    def rows_of(self, end: int, count: int) -> Int32s:
        """Return the rows of the queries of positions [end - count, end)."""
        rows: Int32s = self.order[np.arange(end - count, end) % self.ring].astype(np.int32)
        return rows

    def moved(self, order: npt.NDArray[np.intp], source: Int32s, target: Int32s) -> None:
        """Exchange the queries of positions `source` and `target`, one for one.

        order: the order before. It can be repeated.
        """
        order = order.copy()
        for a, b in zip((source % self.ring).tolist(), (target % self.ring).tolist(), strict=True):
            order[a], order[b] = order[b], order[a]
        self.order = order

    def valid_after(self, cut: int, length: int) -> int:
        """Return `valid_from` after a text of `length` tokens has been cut to `cut`."""
        if cut >= length:
            return self.valid_from
        # newer queries have overwritten older ones
        return min(cut, max(self.valid_from, length - self.ring))

    def saved_from(self, cut: int, length: int) -> int:
        """Return `valid_from` of the result of `read`, which has no more rows than a score uses."""
        return max(self.valid_after(cut, length), cut - self.rows) if self.rows else self.valid_after(cut, length)

    def newest(self, flat: Floats, order: npt.NDArray[np.intp], end: int, count: int) -> Floats:
        """Return the queries of positions [end - count, end) from a flat copy of the ring: per layer [count, ...].

        order: the order when the copy was made.
        """
        if not self.ring:
            return np.empty(0, np.float32)
        rows = order[np.arange(end - count, end) % self.ring]
        shapes = [(n, count, row) for n, _, row in self._alike]
        newest: Floats = np.empty(sum(map(math.prod, shapes)), np.float32)
        for to, source in zip(_layers(newest, shapes), _layers(flat, self._alike), strict=True):
            source.take(rows, axis=1, out=to, mode="clip")  # another mode would fill a copy
        return newest

    def newest_of(self, flat: Floats, order: npt.NDArray[np.intp], end: int, count: int, heads: Pairs) -> Floats:
        """Return what `newest` does, valid until the next call, with 0 for the queries of other heads.

        heads: (layer, head) [n, 2].
        """
        rows = order[np.arange(end - count, end) % self.ring]
        some = self._room_for(count, heads)
        into = list(_layers(some, [(count, *shape[1:]) for shape in self._rings]))
        of = list(_layers(flat, self._rings))
        for layer, head in heads.tolist():
            into[layer][:, head] = of[layer][rows, head]
        lent: Floats = some.view()
        lent.flags.writeable = False  # what somebody wrote there would stay for the next score
        return lent

    def _room_for(self, count: int, heads: Pairs) -> Floats:
        """Return room for `count` queries of each head, with 0 for all but these heads. It is that of the call before
        if that asked for the same ones: fresh room of 12 MiB takes a millisecond.
        """
        asked = count, heads.tobytes()
        if asked != self._some[0]:
            size = sum(count * math.prod(shape[1:]) for shape in self._rings)
            self._some = asked, np.zeros(size, np.float32)
        return self._some[1]

    def newest_now(self, end: int, count: int) -> Floats:
        """Return the queries of positions [end - count, end). Waits for the compute."""
        return self.newest(self._read(end, count), self.order, end, count)

    def read(self, length: int) -> Floats:
        """Return the queries that a score uses, of a text of `length` tokens, flat: row `p % rows` of a layer has
        position p.

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
        """Return the ring, flat, valid for positions [end - count, end), until the next call."""
        if self._flat.size and count:
            self._engine.wait(self._engine.read_queries(self._flat, np.sort(self.rows_of(end, count))))
        return self._flat

    def load(self, saved: Floats, valid_from: int, length: int) -> None:
        """Put back the result of `read`, for a text of `length` tokens. Queries of another size are ignored."""
        self.valid_from = length
        if saved.size and saved.size == self.size:
            positions = np.arange(max(0, length - self.rows), length)
            if self._engine.info.n_seq > 1:  # the rows of other texts stay as they are
                self._engine.wait(self._engine.read_queries(self._flat))
            for to, source in zip(_layers(self._flat, self._rings), _layers(saved, self._shapes), strict=True):
                to[self.order[positions % self.ring]] = source[positions % self.rows]
            self._engine.write_queries(self._flat)  # rows before `valid_from` belong to no text
            self.valid_from = valid_from


def _layers(flat: Floats, shapes: Sequence[tuple[int, ...]]) -> Iterator[Floats]:
    """Yield the layers of a flat array, as views."""
    at = 0
    for shape in shapes:
        size = math.prod(shape)
        yield flat[at : at + size].reshape(shape)
        at += size
