"""Who may see whom, in slot space.

One rule everywhere: a slot that holds position `p` is visible to a query at position `q` iff `0 <= p <= q`. Rows of
rejected drafts, of a truncated tail and of free blocks are hidden by it without being cleared.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..constants import CHUNK

FREE = -1


class MaskRows:
    """Room for the rows of one step, which all texts of a pool use in turn.

    data: [max_rows, n_slots], half precision with flash attention, float32 without. owner: whose rows they are.
    """

    def __init__(self, n_slots: int, max_rows: int, *, f32: bool) -> None:
        self.data = np.full((max_rows, n_slots), -np.inf, np.float32 if f32 else np.float16)
        self.owner: SlotMask | None = None


class SlotMask:
    """What one text sees. `fill` writes rows for the planned tokens, valid until the next step of any text."""

    def __init__(self, rows: MaskRows) -> None:
        dtype = rows.data.dtype
        self.slot_pos = np.full(rows.data.shape[1], FREE, np.int32)
        self._rows = rows
        self._open = dtype.type(0)
        self._closed = dtype.type(-np.inf)
        self._triangle = np.where(np.tri(CHUNK, dtype=bool), self._open, self._closed)
        self._base = -2  # the last position that row 0 shows, when nothing has moved since

    def place(self, block: int, chunk: int) -> None:
        """The block holds the positions of the chunk."""
        self.slot_pos[block * CHUNK : (block + 1) * CHUNK] = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        self._base = -2

    def clear(self, block: int) -> None:
        self.slot_pos[block * CHUNK : (block + 1) * CHUNK] = FREE
        self._base = -2

    def reset(self) -> None:
        self.slot_pos[:] = FREE
        self._base = -2

    def truncate(self) -> None:
        """Positions have been taken back: the next row is built from scratch."""
        self._base = -2

    def fill(self, start: int, slots: Int32s) -> npt.NDArray[np.floating]:
        """Rows for the tokens at positions start, start + 1, ... that take `slots` (shape [n])."""
        n = len(slots)
        rows = self._take(n)
        if self._base == start - 1 and n == 1:
            rows[0, slots[0]] = self._open
        else:
            rows[:] = np.where(self._before(start), self._open, self._closed)
            self._own_triangle(rows, start, slots)
        self._base = start if n == 1 else -2
        return rows

    def fill_tree(self, start: int, slots: Int32s, parent: Int32s) -> npt.NDArray[np.floating]:
        """Rows for the nodes of a tree that follows the positions before `start`, each in a slot of its own.

        parent: [n], the row before each, of a smaller number; -1 for the root, row 0, which is at `start`. A node sees
        what the root sees, and its ancestors, wherever they lie.
        """
        rows = self._take(len(slots))
        rows[0] = np.where(self._before(start), self._open, self._closed)
        rows[0, slots[0]] = self._open
        for i in range(1, len(slots)):
            rows[i] = rows[parent[i]]
            rows[i, slots[i]] = self._open
        self._base = -2
        return rows

    def _before(self, start: int) -> npt.NDArray[np.bool_]:
        """Which slots hold positions before this one?"""
        return (self.slot_pos >= 0) & (self.slot_pos < start)

    def _take(self, n: int) -> npt.NDArray[np.floating]:
        if self._rows.owner is not self:  # they show what another text sees
            self._rows.owner = self
            self._base = -2
        return self._rows.data[:n]

    def _own_triangle(self, rows: npt.NDArray[np.floating], start: int, slots: Int32s) -> None:
        """Open each of the new slots to its own token and those after it; a block at a time, since runs are whole."""
        n = len(slots)
        a = 0
        while a < n:
            size = min(CHUNK - (start + a) % CHUNK, n - a)
            run = slice(slots[a], slots[a] + size)
            rows[a : a + size, run] = self._triangle[:size, :size]
            rows[a + size :, run] = self._open
            a += size


class AlibiMask(SlotMask):
    """The same rule for models whose attention adds the negative distance instead of rotating keys."""

    def fill(self, start: int, slots: Int32s) -> npt.NDArray[np.floating]:
        query = np.arange(start, start + len(slots), dtype=np.int32)[:, None]
        distance = query - self.slot_pos
        rows = self._take(len(slots))
        rows[:] = np.where((self.slot_pos >= 0) & (distance >= 0), -distance, -np.inf)
        return rows

    def fill_tree(self, start: int, slots: Int32s, parent: Int32s) -> npt.NDArray[np.floating]:
        rows = self._take(len(slots))
        seen = self._before(start)
        paths: list[list[int]] = []
        for i in range(len(slots)):
            paths.append([*(paths[parent[i]] if i else ()), i])
            last = len(paths[i]) - 1
            rows[i] = np.where(seen, self.slot_pos - (start + last), -np.inf)
            rows[i, slots[paths[i]]] = np.arange(-last, 1)
        return rows
