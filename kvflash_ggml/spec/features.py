"""What drafters are given of the target's compute: kept once for all of them, and handed to each as it wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from .base import Drafter, Features

if TYPE_CHECKING:
    from ..native.engine import Engine


class FeatureRows:
    """Lets an engine keep what drafters want of each token. Made before its first step, and once.

    n_embd: values of a layer's input. newest: of so many tokens, the newest ones, it is looked at; None for all. Raises
    UnsupportedError for an architecture that does not give them.
    """

    def __init__(self, engine: Engine, drafters: Sequence[Drafter], n_embd: int) -> None:
        self._layers = sorted({layer for drafter in drafters for layer in drafter.wants.layers})
        self._n_embd = n_embd
        self._engine = engine
        spans = [drafter.wants.newest for drafter in drafters]
        self.newest = None if None in spans else max(span for span in spans if span is not None)
        self._columns: dict[Features, slice | npt.NDArray[np.intp]] = {}
        self._width = engine.open_features(self._layers, nextn=any(drafter.wants.nextn for drafter in drafters))

    def read(self, count: int) -> Floats:
        """What is kept of the first `count` tokens of the newest step, [count, width]. Waits for the compute."""
        rows = np.empty((count, self._width), np.float32)
        self._engine.read_features(0, rows)
        return rows

    def of(self, wants: Features, rows: Floats) -> Floats:
        """The columns that one drafter wants, in its order."""
        columns = self._columns.get(wants)
        if columns is None:
            columns = self._columns[wants] = self._find(wants)
        return rows[:, columns]

    def _find(self, wants: Features) -> slice | npt.NDArray[np.intp]:
        n = self._n_embd
        parts = [np.arange(n) + n * self._layers.index(layer) for layer in wants.layers]
        if wants.nextn:
            parts.append(np.arange(n * len(self._layers), self._width))
        columns = np.concatenate(parts)
        adjacent = bool(np.all(np.diff(columns) == 1))  # a view is enough
        return slice(int(columns[0]), int(columns[-1]) + 1) if adjacent else columns
