"""A change of the page table, kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One or more changes of the page table in a row, as the last of them left it.

    length: tokens read. bits: packed residency by chunk. recalled: chunks paged in, one entry each time. scores: of the
    last look among them, one per chunk. evicted_mass: at that look. generating: an answer was being written. changes:
    how many changes this stands for.
    """

    length: int
    bits: npt.NDArray[np.uint8]
    recalled: tuple[int, ...]
    scores: Floats | None
    evicted_mass: float | None
    generating: bool
    changes: int = 1

    @property
    def resident(self) -> tuple[int, ...]:
        """The chunks that were on the device, ascending."""
        return tuple(np.flatnonzero(np.unpackbits(self.bits)).tolist())

    @property
    def nbytes(self) -> int:
        scores = 0 if self.scores is None else self.scores.nbytes
        return self.bits.nbytes + 8 * len(self.recalled) + scores

    def then(self, later: Moment) -> Moment:
        """This moment and the next as one."""
        looked = self if later.scores is None else later
        return Moment(
            length=later.length,
            bits=later.bits,
            recalled=self.recalled + later.recalled,
            scores=looked.scores,
            evicted_mass=looked.evicted_mass,
            generating=later.generating,
            changes=self.changes + later.changes,
        )
