"""What a step attends to that does not read the pool: chunks in order, and the mask over the rows of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..constants import CHUNK, POOL_STEP, round_up
from .plan import ABSENT, Layout
from .residency import Ranking, known

Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class View:
    """chunks: sealed ones, ascending. rows: of the open chunk that come before the step's own tokens.

    whole: are these all there are?
    """

    chunks: tuple[int, ...]
    rows: int
    whole: bool

    @property
    def tokens(self) -> int:
        return len(self.chunks) * CHUNK + self.rows


def everything_is_resident(layout: Layout, start: int) -> bool:
    """Would a step at `start` see the whole text before it in the pool?"""
    return all(chunk.block != ABSENT for chunk in layout.chunks[: -(-start // CHUNK)])


def lies_in_order(layout: Layout) -> bool:
    """Is every chunk in the block where a cache that holds the whole text has it?"""
    return all(chunk.block == c for c, chunk in enumerate(layout.chunks))


def choose(start: int, room: int, keep: Iterable[int], ranking: Ranking | None) -> View:
    """The text before `start`, or those `room` chunks of it that matter: `keep`, then by rank, then the newest."""
    sealed, rows = divmod(start, CHUNK)
    if sealed <= room:
        return View(tuple(range(sealed)), rows, True)
    first = np.zeros(sealed, bool)
    first[[c for c in keep if c < sealed]] = True
    newest = np.arange(sealed)
    order = np.lexsort((-newest, -known(ranking, sealed), ~first))
    return View(tuple(sorted(order[:room].tolist())), rows, False)


class StageMask:
    """Rows of a streamed step, in half precision. `fill` writes them for one step, valid until the next.

    max_rows: tokens of a step at most.
    """

    def __init__(self, max_rows: int) -> None:
        self._data = np.empty((max_rows, round_up(max_rows + CHUNK, POOL_STEP) + POOL_STEP), np.float16)
        self._filled = (0, 0)

    def fill(self, start: int, count: int, view: View) -> tuple[Halves, int]:
        """(rows [count, n], the row of the stage that their first column is).

        What comes before that is visible to every token. Of the rest a token sees what is at or before its position.
        """
        if self._filled != (view.rows, count):  # a prompt is read in steps that are alike
            seen = np.tri(count, self._data.shape[1], view.rows, dtype=bool)
            self._data[:count] = np.where(seen, np.float16(0), np.float16(-np.inf))
            self._filled = (view.rows, count)
        return self._data[:count], len(view.chunks) * CHUNK


class AlibiStageMask(StageMask):
    """For models whose attention adds the negative distance: it is given for all rows."""

    def fill(self, start: int, count: int, view: View) -> tuple[Halves, int]:
        chunks: npt.NDArray[np.int32] = np.array(view.chunks, np.int32)
        past = (chunks[:, None] * CHUNK + np.arange(CHUNK, dtype=np.int32)).reshape(-1)
        own = np.arange(start - view.rows, start + count, dtype=np.int32)
        distance = np.arange(start, start + count, dtype=np.int32)[:, None] - np.concatenate([past, own])
        rows = np.full((count, round_up(distance.shape[1], POOL_STEP)), -np.inf, np.float16)
        rows[:, : distance.shape[1]] = np.where(distance >= 0, -distance, -np.inf)
        return rows, 0
