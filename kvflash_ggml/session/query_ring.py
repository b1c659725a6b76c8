"""The newest queries of the compute, captured in a ring: row `p % n` is that of position p.

The ring has more rows than are looked at, so that drafts that are rejected have overwritten none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats

if TYPE_CHECKING:
    from ..native.engine import Engine


class QueryRing:
    """Which of the captured queries are of the text at hand, and how they lie.

    rows: how many of the newest are looked at; all that the engine keeps, unless fewer are `wanted`. size: floats of
    these in all layers, flat: per layer [rows, n_head, head]. valid_from: queries of earlier tokens are not of this
    text.
    """

    def __init__(self, engine: Engine, wanted: int | None = None) -> None:
        self.ring: int = engine.info.query_rows
        self.rows = self.ring if wanted is None else min(wanted, self.ring)
        self.valid_from = 0
        self._engine = engine
        self._rings = [tuple(shape) for shape in engine.query_shapes]
        self._shapes = [(self.rows, *shape[1:]) for shape in self._rings]
        self.ring_size = sum(map(math.prod, self._rings))
        self.size = sum(map(math.prod, self._shapes))

    def capture(self, start: int, count: int) -> None:
        """Let the next step keep the newest queries of `count` tokens from position `start` on. There must be rows."""
        ring, place = self.ring, self._engine.query_row
        if count == 1:
            place[0] = start % ring
        else:
            newest = min(count, ring)
            place[: count - newest] = -1
            place[count - newest : count] = np.arange(start + count - newest, start + count) % ring

    def valid_after(self, cut: int, length: int) -> int:
        """What `valid_from` will be once a text of `length` tokens has been cut to `cut`."""
        if cut >= length:
            return self.valid_from
        # newer tokens have taken the place of older queries
        return min(cut, max(self.valid_from, length - self.ring))

    def newest(self, flat: Floats, end: int, count: int) -> Floats:
        """The queries of positions [end - count, end) out of a copy of the ring, flat: per layer [count, ...]."""
        positions: npt.NDArray[np.intp] = np.arange(end - count, end)
        layers = _layers(flat, self._rings)
        parts = [layer[positions % max(1, self.ring)].reshape(-1) for layer in layers]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def read(self, length: int) -> Floats:
        """Those that are looked at, of a text of `length` tokens, flat: row `p % rows` of a layer is of position p.

        Empty if none are kept. Waits for the compute.
        """
        flat, saved = np.zeros(self.ring_size, np.float32), np.zeros(self.size, np.float32)
        if saved.size:
            self._engine.wait(self._engine.read_queries(flat))
            positions = np.arange(max(0, length - self.rows), length)
            for to, source in zip(_layers(saved, self._shapes), _layers(flat, self._rings), strict=True):
                to[positions % self.rows] = source[positions % self.ring]
        return saved

    def load(self, saved: Floats, valid_from: int, length: int) -> None:
        """Put back what `read` has given, for a text of `length` tokens. What has another size is of no use."""
        self.valid_from = length
        if saved.size and saved.size == self.size:
            flat = np.zeros(self.ring_size, np.float32)
            positions = np.arange(max(0, length - self.rows), length)
            for to, source in zip(_layers(flat, self._rings), _layers(saved, self._shapes), strict=True):
                to[positions % self.ring] = source[positions % self.rows]
            self._engine.write_queries(flat)
            self.valid_from = max(valid_from, length - self.rows)


def _layers(flat: Floats, shapes: Sequence[tuple[int, ...]]) -> Iterator[Floats]:
    """The layers of a flat array, as views."""
    at = 0
    for shape in shapes:
        size = math.prod(shape)
        yield flat[at : at + size].reshape(shape)
        at += size
