"""What compute buffers take, between the points where it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..native.sizes import Measure
from .sizes import HOST


class Compute:
    """Compute buffers by device, as a function of the step and the pool.

    Linear in both and in their product (the mask), through the measures of models that are wholly on the devices: up
    to four of them are met exactly. Where part of the weights is on the host, what a measure of such a model took
    beyond that is added.
    """

    def __init__(self, measures: Sequence[Measure], extra: Mapping[str, int] | None = None) -> None:
        whole = [m for m in measures if m.offloaded] or list(measures)
        if not whole:
            raise ValueError("compute buffers are not known without one measure")
        self._measures = tuple(measures)
        self._extra = dict(extra or {})
        self._terms = _terms(whole)
        self._names = [device.device for device in whole[0].devices]
        rows = np.array([self._row(m.n_ubatch, m.pool) for m in whole])
        values = np.array([[device.compute for device in m.devices] for m in whole], np.float64)
        self._scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
        self._weights: npt.NDArray[np.float64] = np.linalg.lstsq(rows / self._scale, values, rcond=None)[0]
        self._partly = dict.fromkeys(self._names, 0)
        for measure in measures:
            if not measure.offloaded:
                whole_there = self._interpolate(measure.n_ubatch, measure.pool)
                for device in measure.devices:
                    beyond = device.compute - whole_there[device.device]
                    self._partly[device.device] = max(self._partly[device.device], beyond)

    def at(self, n_ubatch: int, pool: int, *, whole: bool = True) -> dict[str, int]:
        """Bytes by device. whole: everything but the token embedding is on the devices.

        Else the host computes too, what a device would have taken at most.
        """
        there = self._interpolate(n_ubatch, pool)
        if not whole:
            there = {name: size + self._partly[name] for name, size in there.items()}
            there[HOST] = max(there.values())
        return {name: size + self._extra.get(name, 0) for name, size in there.items()}

    def beyond(self, over: Mapping[str, int]) -> Compute:
        """The same with so many more bytes on a device, which a placement was found to take."""
        names = self._extra.keys() | over.keys()
        return Compute(self._measures, {name: self._extra.get(name, 0) + over.get(name, 0) for name in names})

    def _row(self, n_ubatch: int, pool: int) -> list[float]:
        values = {"one": 1.0, "ubatch": n_ubatch, "pool": pool, "mask": float(n_ubatch) * pool}
        return [values[term] for term in self._terms]

    def _interpolate(self, n_ubatch: int, pool: int) -> dict[str, int]:
        sizes = (np.array(self._row(n_ubatch, pool)) / self._scale) @ self._weights
        return {name: max(0, round(float(size))) for name, size in zip(self._names, sizes, strict=True)}


def _terms(measures: Sequence[Measure]) -> list[str]:
    """Of which the points can tell something."""
    several = {
        "ubatch": len({m.n_ubatch for m in measures}) > 1,
        "pool": len({m.pool for m in measures}) > 1,
        "mask": len({(m.n_ubatch, m.pool) for m in measures}) > 3,
    }
    return ["one", *(term for term, known in several.items() if known)]
