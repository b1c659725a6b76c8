"""The history of a page table: which chunks were resident when, what came back, and what the policy thought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..arrays import Floats
from ..files import write_atomically
from .html import Summary, page
from .moment import Moment

MAX_MOMENTS = 2000
MAX_BYTES = 64 << 20
"""Beyond either, every two moments become one."""


class Trace:
    """Collects moments while a model runs; it is a `trace.Observer`. Memory stays bounded: old and new thin out alike.

    summary: what stands beside the map in a report, asked for when one is written.
    """

    def __init__(self, summary: Callable[[], Summary] = Summary) -> None:
        self.moments: list[Moment] = []
        self._summary = summary
        self._stride = 1  # changes per moment
        self._bytes = 0

    @property
    def page_ins(self) -> int:
        """Chunks paged in since the recording began."""
        return sum(len(moment.recalled) for moment in self.moments)

    def changed(
        self,
        *,
        length: int,
        resident: Sequence[int],
        recalled: Sequence[int],
        scores: Floats | None,
        evicted_mass: float | None,
        generating: bool,
    ) -> None:
        if scores is None and not recalled and self.moments and self.moments[-1].resident == tuple(resident):
            return  # a cut within a chunk, as of drafts that were rejected
        bits = np.zeros(max(resident, default=-1) + 1, np.bool_)
        bits[list(resident)] = True
        moment = Moment(
            length=length,
            bits=np.packbits(bits),
            recalled=tuple(recalled),
            scores=None if scores is None else scores.astype(np.float32),
            evicted_mass=evicted_mass,
            generating=generating,
        )
        if self.moments and self.moments[-1].changes < self._stride:
            last = self.moments.pop()
            self._bytes -= last.nbytes
            moment = last.then(moment)
        self.moments.append(moment)
        self._bytes += moment.nbytes
        if len(self.moments) > MAX_MOMENTS or self._bytes > MAX_BYTES:
            self._stride *= 2
            self.moments = thinned(self.moments)
            self._bytes = sum(moment.nbytes for moment in self.moments)

    def write_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the residency map: one HTML file that needs nothing else. Before the model is closed.

        title: what ran, such as the model's name. Raises OSError; the file is there as a whole or not at all.
        """
        write_atomically(Path(path), page(self.moments, self._summary(), title=title))


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Every two moments as one."""
    pairs = [a.then(b) for a, b in zip(moments[::2], moments[1::2], strict=False)]
    return pairs + list(moments[len(pairs) * 2 :])
