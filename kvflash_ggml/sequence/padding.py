"""Rows of no text, which give the steps of few texts as many rows as the steps of all."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..errors import ConfigError
from ..pool.masks import MaskRows

if TYPE_CHECKING:
    from ..native.engine import Engine


class Padding:
    """Fills a step up to a row for each sequence of the context: then a row alone has the bits that it has among
    others.

    Each padding row belongs to a sequence without a token in the step. It is at that sequence's next position, in a
    slot that no text can have. It sees only itself, no other row sees it, and its slot is empty again after the step.
    ends: returns how many tokens a sequence has in memory.

    ConfigError for recurrent state and sliding windows, where a row cannot be taken back without a trace.
    """

    def __init__(self, engine: Engine, rows: MaskRows, ends: Callable[[int], int]) -> None:
        info = engine.info
        if info.recurrent or info.n_swa:
            what = "recurrent state" if info.recurrent else "a sliding window"
            raise ConfigError(
                f"deterministic_batch: steps of a fixed number of rows need memory that is pooled, and this model has"
                f" {what}: leave it out"
            )
        self.width = info.n_seq
        self._engine = engine
        self._rows = rows
        self._ends = ends
        engine.fix_view()  # bits can depend on the number of slots that a kernel reads
        self._slot = info.n_slots - self.blocks(info.n_seq) * CHUNK

    @staticmethod
    def blocks(n_seq: int) -> int:
        """Return how many blocks at the end of the pool no text can have."""
        return -(-n_seq // CHUNK)

    def fill(self, first: int, taken: Container[int]) -> int:
        """Write rows from `first` on, and return the rows of the step. taken: the sequences with tokens in it."""
        engine, rows = self._engine, self._rows
        idle = (seq for seq in range(self.width) if seq not in taken)
        for row, seq in zip(range(first, self.width), idle, strict=False):
            slot = self._slot + row
            engine.seq[row], engine.pos[row], engine.slot[row] = seq, self._ends(seq), slot
            engine.token[row], engine.query_row[row] = 0, -1
            engine.output[row] = 1  # the model's last layers compute only rows with an output
            if rows.owners[row] is not self:
                rows.owners[row] = self
                rows.data[row] = -float("inf")
                rows.data[row, slot] = 0
        return max(first, self.width)

    def clear(self, first: int) -> None:
        """Empty the slots of the rows from `first` on, after the step."""
        if first < self.width:
            self._engine.clear_cells(self._slot + first, self.width - first)
