"""Attention masks: mask rows over the slots of a pool or of a layer buffer, and the row order of a draft tree.

One rule everywhere: a query at position `q` sees a slot that holds position `p` iff `0 <= p <= q`. The rule hides rows
of rejected drafts, of a truncated tail and of free blocks, so nobody has to clear them. Rows of an image also see each
other where a model wants that. A position is the number of a row in its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s
from ..constants import CHUNK, POOL_STEP, round_up
from .plan import Layout
from .residency import Ranking, known

FREE = -1


class MaskRows:
    """Room for the mask rows of one step. The texts of a pool use it in turn, or side by side.

    data: [max_rows, n_slots], half precision with flash attention, float32 without. owners: the mask that wrote each
    row.
    """

    def __init__(self, n_slots: int, max_rows: int, *, f32: bool) -> None:
        self.data = np.full((max_rows, n_slots), -np.inf, np.float32 if f32 else np.float16)
        self.owners: list[object] = [None] * max_rows


class SlotMask:
    """The mask of one text. `fill` writes the rows of the planned tokens, from row `first` of the step on.

    The rows are valid until the next step that uses them. A text that decodes in the same row writes one value a token.
    """

    def __init__(self, rows: MaskRows) -> None:
        dtype = rows.data.dtype
        self.slot_pos = np.full(rows.data.shape[1], FREE, np.int32)
        self._rows = rows
        self._open = dtype.type(0)
        self._closed = dtype.type(-np.inf)
        self._triangle = np.where(np.tri(CHUNK, dtype=bool), self._open, self._closed)
        self._base = -2  # last position in the newest row, if that row can be extended
        self._row = 0

    def place(self, block: int, chunk: int) -> None:
        """Note that the block holds the positions of the chunk."""
        self.slot_pos[block * CHUNK : (block + 1) * CHUNK] = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        self._base = -2

    def clear(self, block: int) -> None:
        self.slot_pos[block * CHUNK : (block + 1) * CHUNK] = FREE
        self._base = -2

    def reset(self) -> None:
        self.slot_pos[:] = FREE
        self._base = -2

    def truncate(self) -> None:
        """Build the next row from scratch, since positions were taken back."""
        self._base = -2

    def fill(self, start: int, slots: Int32s, first: int = 0) -> npt.NDArray[np.floating]:
        """Write and return the rows of the tokens at positions start, start + 1, ... that take `slots` (shape [n])."""
        n = len(slots)
        rows = self._take(n, first)
        rows[:] = np.where(self._before(start), self._open, self._closed)
        self._own_triangle(rows, start, slots)
        self._base = start if n == 1 else -2
        return rows

    def fill_token(self, start: int, slot: int, row: int = 0) -> None:
        """Write the row of one token, at position `start` in `slot`: one value, if it follows the row's last token."""
        if self._base == start - 1 and self._row == row and self._rows.owners[row] is self:
            self._rows.data[row, slot] = self._open
            self._base = start
        else:
            self.fill(start, np.array([slot], np.int32), row)

    def open_span(self, slots: Int32s, first: int = 0) -> None:
        """Let the rows that `fill` wrote last see each other. The rows take these slots."""
        self._rows.data[first : first + len(slots), slots] = self._open
        self._base = -2

    def fill_tree(self, start: int, slots: Int32s, parent: Int32s, first: int = 0) -> npt.NDArray[np.floating]:
        """Write and return the rows of a tree that follows the positions before `start`, each row in a slot of its own.

        parent: [n], the parent row of each row, a smaller number; -1 for the root, row 0, which is at `start`. A row
        sees what the root sees, and its ancestors, wherever they lie.
        """
        rows = self._take(len(slots), first)
        rows[0] = np.where(self._before(start), self._open, self._closed)
        rows[0, slots[0]] = self._open
        for i in range(1, len(slots)):
            rows[i] = rows[parent[i]]
            rows[i, slots[i]] = self._open
        self._base = -2
        return rows

    def _before(self, start: int) -> npt.NDArray[np.bool_]:
        """Return which slots hold positions before `start`."""
        return (self.slot_pos >= 0) & (self.slot_pos < start)

    def _take(self, n: int, first: int) -> npt.NDArray[np.floating]:
        """Return the rows to write. This mask owns them from now on."""
        self._rows.owners[first : first + n] = [self] * n
        self._row = first
        return self._rows.data[first : first + n]

    def _own_triangle(self, rows: npt.NDArray[np.floating], start: int, slots: Int32s) -> None:
        """Open each new slot to its own token and all later ones, a block at a time: slots of a block are
        consecutive.
        """
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

    def fill(self, start: int, slots: Int32s, first: int = 0) -> npt.NDArray[np.floating]:
        query = np.arange(start, start + len(slots), dtype=np.int32)[:, None]
        distance = query - self.slot_pos
        rows = self._take(len(slots), first)
        rows[:] = np.where((self.slot_pos >= 0) & (distance >= 0), -distance, -np.inf)
        return rows

    def fill_tree(self, start: int, slots: Int32s, parent: Int32s, first: int = 0) -> npt.NDArray[np.floating]:
        rows = self._take(len(slots), first)
        seen = self._before(start)
        paths: list[list[int]] = []
        for i in range(len(slots)):
            paths.append([*(paths[parent[i]] if i else ()), i])
            last = len(paths[i]) - 1
            rows[i] = np.where(seen, self.slot_pos - (start + last), -np.inf)
            rows[i, slots[paths[i]]] = np.arange(-last, 1)
        return rows


# --- streamed steps: chunks in order, and the mask over the rows of a layer buffer


Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class View:
    """The chunks and rows that a streamed step sees.

    chunks: sealed chunks, ascending. rows: rows of the open chunk before the step's own tokens. whole: whether these
    are the whole text before the step.
    """

    chunks: tuple[int, ...]
    rows: int
    whole: bool

    @property
    def tokens(self) -> int:
        return len(self.chunks) * CHUNK + self.rows


def everything_is_resident(layout: Layout, start: int) -> bool:
    """Return whether a step at `start` would see the whole text before it in the pool."""
    first, here = -(-start // CHUNK), layout.resident_chunks
    return first == 0 or (len(here) >= first and here[first - 1] == first - 1)  # they ascend


def lies_in_order(layout: Layout, first: int = 0) -> bool:
    """Return whether every chunk is in the block where a full cache has it. first: the block of chunk 0."""
    return all(chunk.block == c for c, chunk in enumerate(layout.chunks, first))


def choose(start: int, room: int, keep: Iterable[int], ranking: Ranking | None) -> View:
    """Return a view of the text before `start`, or of its best `room` chunks: `keep` first, then by score, then the
    newest.
    """
    sealed, rows = divmod(start, CHUNK)
    if sealed <= room:
        return View(tuple(range(sealed)), rows, True)
    first = np.zeros(sealed, bool)
    first[[c for c in keep if c < sealed]] = True
    newest = np.arange(sealed)
    order = np.lexsort((-newest, -known(ranking, sealed), ~first))
    return View(tuple(sorted(order[:room].tolist())), rows, False)


class StageMask:
    """Mask rows of a streamed step, in half precision. `fill` writes them for one step; they are valid until the next.

    max_rows: the most tokens of a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._data = np.empty((max_rows, round_up(max_rows + CHUNK, POOL_STEP) + POOL_STEP), np.float16)
        self._filled = (0, 0, False)

    def fill(self, start: int, count: int, view: View, *, mutual: bool = False) -> tuple[Halves, int]:
        """Return (rows [count, n], the row of the layer buffer at their first column).

        Every token sees the rows before that column. Of the rest a token sees the rows up to its own position, or all
        rows if the tokens are `mutual`.
        """
        if self._filled != (view.rows, count, mutual):  # steps of a prompt are alike
            seen = np.tri(count, self._data.shape[1], view.rows, dtype=bool)
            seen[:, : view.rows + count] |= mutual
            self._data[:count] = np.where(seen, np.float16(0), np.float16(-np.inf))
            self._filled = (view.rows, count, mutual)
        return self._data[:count], len(view.chunks) * CHUNK


class AlibiStageMask(StageMask):
    """The same for models whose attention adds the negative distance: the mask covers all rows."""

    def fill(self, start: int, count: int, view: View, *, mutual: bool = False) -> tuple[Halves, int]:
        assert not mutual
        chunks: npt.NDArray[np.int32] = np.array(view.chunks, np.int32)
        past = (chunks[:, None] * CHUNK + np.arange(CHUNK, dtype=np.int32)).reshape(-1)
        own = np.arange(start - view.rows, start + count, dtype=np.int32)
        distance = np.arange(start, start + count, dtype=np.int32)[:, None] - np.concatenate([past, own])
        rows = np.full((count, round_up(distance.shape[1], POOL_STEP)), -np.inf, np.float16)
        rows[:, : distance.shape[1]] = np.where(distance >= 0, -distance, -np.inf)
        return rows, 0


# --- the rows of a tree, and the places of its path, as positions counted from the root


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The rows of a draft tree, ordered by depth; row 0 is the root.

    depth: [n], distance from the root. parent: [n], the parent row of each, -1 for the root. where: [n], the position
    after the root's whose slot the row takes.
    """

    depth: Int32s
    parent: Int32s
    where: Int32s

    @property
    def room(self) -> int:
        """How many positions from the root's on the rows take slots of."""
        return int(self.where.max()) + 1


def places(depth: Int32s, main: npt.NDArray[np.bool_]) -> Int32s:
    """Return the position whose slot each row takes, [n], counted from the root.

    depth: [n], distance from the root. main: [n], whether the row is on the chain that is expected to be accepted.
    These rows take their final slots. The other rows take slots beyond the deepest row, where no path goes.
    """
    where: Int32s = depth.copy()
    where[~main] = depth.max() + 1 + np.arange(np.count_nonzero(~main))
    return where


def leaving(path: Sequence[int], where: Int32s) -> list[int]:
    """Return the places of the rows off a path, which are dropped. path: row numbers from the root on."""
    off = set(range(len(where))) - set(path)
    return [int(where[row]) for row in sorted(off)]


def moving(path: Sequence[int], where: Int32s) -> tuple[list[int], list[int]]:
    """Return the places that rows of a path leave, and their new places: the positions after the root, in order."""
    pairs = [(at, to) for to, at in enumerate(where[list(path)].tolist()) if at != to]
    return [at for at, _ in pairs], [to for _, to in pairs]
