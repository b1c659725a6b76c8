"""Where layers and experts go for one size of pool and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..constants import POOL_STEP, round_up
from ..native.sizes import Measure, Needs
from . import memory
from .devices import bounds_of
from .needs import Bill, Shape
from .sizes import HOST, Device, ModelSizes, PlacementRequest


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
        """Return the bytes by device. whole: everything but the token embedding is on the devices.

        Otherwise the host computes too, and takes what the largest device would have taken.
        """
        there = self._interpolate(n_ubatch, pool)
        if not whole:
            there = {name: size + self._partly[name] for name, size in there.items()}
            there[HOST] = max(there.values())
        return {name: size + self._extra.get(name, 0) for name, size in there.items()}

    def beyond(self, over: Mapping[str, int]) -> Compute:
        """Return the same function with more bytes on some devices, which a placement was found to take."""
        names = self._extra.keys() | over.keys()
        return Compute(self._measures, {name: self._extra.get(name, 0) + over.get(name, 0) for name in names})

    def _row(self, n_ubatch: int, pool: int) -> list[float]:
        values = {"one": 1.0, "ubatch": n_ubatch, "pool": pool, "mask": float(n_ubatch) * pool}
        return [values[term] for term in self._terms]

    def _interpolate(self, n_ubatch: int, pool: int) -> dict[str, int]:
        sizes = (np.array(self._row(n_ubatch, pool)) / self._scale) @ self._weights
        return {name: max(0, round(float(size))) for name, size in zip(self._names, sizes, strict=True)}


def _terms(measures: Sequence[Measure]) -> list[str]:
    """Return the terms that the measures can determine."""
    several = {
        "ubatch": len({m.n_ubatch for m in measures}) > 1,
        "pool": len({m.pool for m in measures}) > 1,
        "mask": len({(m.n_ubatch, m.pool) for m in measures}) > 3,
    }
    return ["one", *(term for term, known in several.items() if known)]


Int64s = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]
"""[a, b]: of the range a..b-1, infinite where it does not fit. (n + 1, n + 1); a device may get nothing, [a, a]."""

Experts = Literal["device", "fill", "host"]
"""Where those of offloaded layers go: to the device, or what it has room for, or to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """bounds: of the devices' ranges of layers, the output being the last one. needs: by device, the host's last."""

    shape: Shape
    bounds: tuple[int, ...]
    needs: tuple[Needs, ...]

    @property
    def on_host(self) -> tuple[int, int]:
        """Layers on the host, and layers that have only their experts there."""
        return self.bounds[0], len(self.needs[-1].experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranges:
    """Of one device, [a, b] for the layers a..b-1: layers with experts on the host, the part of its memory that is
    taken, and the first layer whose experts it has."""

    cost: Costs
    load: Costs
    kept: Int64s


class Layouts:
    """Finds layouts of a model on devices, the host last."""

    def __init__(
        self, sizes: ModelSizes, devices: tuple[Device, ...], request: PlacementRequest, compute: Compute
    ) -> None:
        if not devices or devices[-1].kind != "host":
            raise ValueError("the host is the last of the devices")
        self.sizes = sizes
        self.request = request
        self.n_layers = len(sizes.layers)
        self.full = round_up(request.n_ctx, POOL_STEP)
        *self.devices, self.host = memory.counted(devices, request.fit)
        self.taking_part = [i for i, device in enumerate(self.devices) if memory.usable(device)]
        self.compute = compute
        self._has_experts = _running([int(layer.experts > 0) for layer in sizes.layers] + [0])

    def find(self, shape: Shape, first: int, experts: Experts) -> DeviceLayout | None:
        """Return the layout with the fewest layers' experts on the host; of equals the one that fills devices evenly.

        first: the first layer on a device, n_layers + 1 for none. None if nothing fits.
        """
        layout = self._layout(shape, first, experts, bounded=True)
        return layout if layout is not None and self._fits(layout) else None

    def nearest(self, shape: Shape, first: int, experts: Experts) -> DeviceLayout:
        """Return the layout whose fullest device is the least full, whether it fits or not."""
        layout = self._layout(shape, first, "host" if experts == "fill" else experts, bounded=False)
        assert layout is not None, "without bounds everything fits"
        return layout

    def _layout(self, shape: Shape, first: int, experts: Experts, *, bounded: bool) -> DeviceLayout | None:
        apart = experts != "device" or self.request.n_cpu_moe or self.sizes.fixed.get(self.host.name)
        taken = self.compute.at(shape.n_ubatch, shape.pool, whole=first == 0 and not apart)
        bill = Bill(self.sizes, self.request, shape, taken)
        if first > self.n_layers:
            none = tuple(bill.device(device, first, first, first) for device in self.devices)
            host = bill.host(self.host, first, ())
            return DeviceLayout(shape=shape, bounds=(first,) * (len(self.devices) + 1), needs=(*none, host))
        ranges = [self._ranges(bill, i, first, experts, bounded=bounded) for i in range(len(self.devices))]
        places = partition([r.cost for r in ranges], [r.load for r in ranges])
        if places is None:
            return None
        spans = list(pairwise(places))
        kept = [int(r.kept[span]) + first for r, span in zip(ranges, spans, strict=True)]
        bounds = tuple(place + first for place in places)
        needs = [bill.device(*of) for of in zip(self.devices, bounds, bounds[1:], kept, strict=False)]
        moved = tuple(
            i for begin, end in zip(bounds, kept, strict=False) for i in range(begin, end) if bill.parts[i].experts
        )
        return DeviceLayout(shape=shape, bounds=bounds, needs=(*needs, bill.host(self.host, first, moved)))

    def _fits(self, layout: DeviceLayout) -> bool:
        """Report whether every device has room. Integrated devices and the host share one memory."""
        *needs, host = layout.needs
        shared = sum(
            need.total - need.margin
            for need, device in zip(needs, self.devices, strict=True)
            if device.kind == "integrated"
        )
        return all(need.left >= 0 for need in needs) and host.left >= shared

    def _ranges(self, bill: Bill, number: int, first: int, experts: Experts, *, bounded: bool) -> _Ranges:
        device = self.devices[number]
        base = _running([bill.base(part) for part in bill.parts[first:]])
        weights = _running([part.experts for part in bill.parts[first:]])
        count = self._has_experts[first:]
        alone = base[None, :] - base[:, None] + bill.constant(device)
        kept = self._first_kept(number, first, weights, device.free - alone, experts)
        need = alone + weights[None, :] - weights[kept]
        empty = np.eye(len(base), dtype=np.bool_)  # one without layers takes nothing
        fits = empty | (need <= device.free) | (not bounded)
        cost = np.where(self._allowed(number, len(base) - 1) & fits, count[kept] - count[:, None], np.inf)
        return _Ranges(cost=cost, load=np.where(empty, 0.0, need / max(device.free, 1)), kept=kept)

    def _allowed(self, number: int, n: int) -> npt.NDArray[np.bool_]:
        """Return which ranges of n layers a device may get, by the user's split and by its own memory."""
        if self.request.tensor_split is not None:
            shares = (*self.request.tensor_split, *(0.0 for _ in self.devices))[: len(self.devices)]
            bounds = bounds_of(shares, n)
            requested = np.zeros((n + 1, n + 1), np.bool_)
            requested[bounds[number], bounds[number + 1]] = True
            return requested
        if number in self.taking_part:
            return np.triu(np.ones((n + 1, n + 1), np.bool_))
        return np.eye(n + 1, dtype=np.bool_)

    def _first_kept(self, number: int, first: int, weights: Int64s, room: Int64s, experts: Experts) -> Int64s:
        """Find [a, b]: the first layer of a range whose experts are on the device, which has `room` [a, b] for them."""
        n = len(weights)
        begins, ends = np.indices((n, n))
        if self.request.n_cpu_moe is not None:
            kept = begins + self._quota(number, first)
        elif experts == "fill":
            kept = np.searchsorted(weights, weights[None, :] - room, side="left")
        else:
            kept = begins if experts == "device" else ends
        res: Int64s = np.clip(kept, begins, np.maximum(begins, ends))
        return res

    def _quota(self, number: int, first: int) -> int:
        """Return how many layers of a device have their experts on the host, as the user asks for it.

        Each device that takes part gives one in turn. Layers before `first`, which are on the host, count too.
        """
        if number not in self.taking_part:
            return 0
        each, rest = divmod(max(0, (self.request.n_cpu_moe or 0) - first), len(self.taking_part))
        return each + (self.taking_part.index(number) < rest)


def _running(values: list[int]) -> Int64s:
    """Return the sum of the values before each place, and of all."""
    return np.concatenate([[0], np.cumsum(np.array(values, np.int64))]).astype(np.int64)


# --- contiguous ranges, in the devices' order


def partition(costs: Sequence[Costs], loads: Sequence[Costs]) -> tuple[int, ...] | None:
    """Return the bounds of ranges that cover all layers, one range a device, or None where no split fits.

    Of all splits it takes one with the least sum of costs, and of these the one whose highest load is the least.
    """
    n = len(costs[0]) - 1
    cost = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    load = np.zeros(n + 1)
    begins = []
    for more, heavy in zip(costs, loads, strict=True):
        sums = cost[:, None] + more
        highest = np.where(sums == sums.min(axis=0), np.maximum(load[:, None], heavy), np.inf)
        begin = highest.argmin(axis=0)
        ends = np.arange(n + 1)
        cost, load = sums[begin, ends], highest[begin, ends]
        begins.append(begin)
    if not np.isfinite(cost[n]):
        return None
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(int(begin[bounds[-1]]))
    return tuple(reversed(bounds))
