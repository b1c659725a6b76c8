"""What a policy has found out of a text: statistics of its chunks, and how ends of prompts were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..arrays import Floats, Int32s
    from ..pool.page_table import PageTableState

Row = npt.NDArray[np.uint8]


class RowForm(NamedTuple):
    """The form of a row of statistics. A policy computes rows of another form again, from the keys."""

    name: str
    row_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """A row of bytes for each sealed chunk, as a policy keeps it. Texts share rows, so nothing may write to them."""

    name: str
    rows: Sequence[Row]

    @property
    def layout(self) -> RowForm:
        return RowForm(self.name, len(self.rows[0]) if self.rows else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """How the last step of a prompt was computed, so that the same prompt can be computed alike.

    The step read `tokens` from `start` on. table: before that step, with its scores. rebuild: whether the step brought
    the resident set to these scores. ranking, due: the same for the first step of the answer.
    """

    start: int
    tokens: Int32s
    table: PageTableState
    rebuild: bool
    ranking: Floats | None
    due: bool

    @property
    def size(self) -> int:
        """Bytes in memory, roughly."""
        arrays = self.tokens, self.table.scores, self.ranking
        return 16 * len(self.table.blocks) + sum(array.nbytes for array in arrays if array is not None)
