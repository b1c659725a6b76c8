"""The newest queries of the compute, captured in a ring: row `p % rows` is that of position p."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats

if TYPE_CHECKING:
    from ..native.engine import Engine


class QueryRing:
    """Which of the captured queries are of the text at hand, and how they lie.

    size: floats of all layers, flat: per layer [rows, n_head, head]. valid_from: queries of earlier tokens are not of
    this text.
    """

    def __init__(self, engine: Engine) -> None:
        self.rows: int = engine.info.query_rows
        self.shapes = [tuple(shape) for shape in engine.query_shapes]
        self.size = sum(math.prod(shape) for shape in self.shapes)
        self.valid_from = 0
        self._engine = engine

    def capture(self, start: int, count: int) -> None:
        """Let the next step keep the newest queries of `count` tokens from position `start` on. There must be rows."""
        rows, place = self.rows, self._engine.query_row
        if count == 1:
            place[0] = start % rows
        else:
            newest = min(count, rows)
            place[: count - newest] = -1
            place[count - newest : count] = np.arange(start + count - newest, start + count) % rows

    def valid_after(self, cut: int, length: int) -> int:
        """What `valid_from` will be once a text of `length` tokens has been cut to `cut`."""
        if cut >= length:
            return self.valid_from
        # newer tokens have taken the place of older queries
        return min(cut, max(self.valid_from, length - self.rows))

    def newest(self, flat: Floats, end: int, count: int) -> Floats:
        """The queries of positions [end - count, end) out of a copy of the ring, flat: per layer [count, ...]."""
        positions: npt.NDArray[np.intp] = np.arange(end - count, end)
        parts, at = [], 0
        for shape in self.shapes:
            layer = flat[at : at + math.prod(shape)].reshape(shape)
            parts.append(layer[positions % max(1, len(layer))].reshape(-1))
            at += layer.size
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def read(self) -> Floats:
        """A copy of the ring, flat; empty if none is kept. Waits for the compute."""
        flat = np.zeros(self.size, np.float32)
        if flat.size:
            self._engine.wait(self._engine.read_queries(flat))
        return flat

    def load(self, flat: Floats, valid_from: int, length: int) -> None:
        """Put a copy back, for a text of `length` tokens. One of another size is of no use."""
        self.valid_from = length
        if flat.size and flat.size == self.size:
            self._engine.write_queries(flat)
            self.valid_from = valid_from
