"""Finds the best layout that there is room for.

In this order: layers on devices, experts on devices, slots, a large step, KV types that are not quantised. An expert
layer on the host costs every token; beyond a few thousand slots a pool gains slowly; a large step is for prompts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..constants import POOL_STEP, SPEED_CAP, round_up
from .layout import Compute, DeviceLayout, Experts, Layouts
from .needs import LayerBytes, Shape, parts
from .sizes import Device, ModelSizes, PlacementRequest

POOL_FLOOR = 4096
"""Slots that are reserved before any expert is placed."""

POOL_GOOD = 8192
"""Slots below which a pool is worth the quantisation of K and V."""

UBATCHES = (2048, 1024, 512)

PLAIN, SMALL = ("f16", "f16"), ("q8_0", "q8_0")

Level = Literal[1, 2, 3, 4]
"""1 everything on the devices, 2 some experts on the host, 3 some layers, 4 all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    level: Level
    layout: DeviceLayout


class Search:
    """One search. It never changes what the request gives."""

    def __init__(
        self, sizes: ModelSizes, devices: tuple[Device, ...], request: PlacementRequest, compute: Compute
    ) -> None:
        self.layouts = Layouts(sizes, devices, request, compute)
        self.sizes = sizes
        self.request = request
        self.floor, self.cap = pool_range(request)
        self.types = _types(sizes, request)
        self.ubatches = _ubatches(request, self.floor)

    def run(self) -> SearchResult | None:
        """Return the best layout of the first level that is feasible with the fewest slots. None if no level is."""
        for level in self.levels():
            for n_ubatch in self._first_steps(level):
                places = [self._place(level, self._shape(self.floor, n_ubatch, kv)) for kv in self.types]
                found = [place for place in places if place is not None]
                if found:
                    least = min(found, key=lambda layout: layout.on_host)  # of equals the first, which is plain
                    return SearchResult(level=level, layout=self._grow(level, least))
        return None

    def nearest(self) -> DeviceLayout:
        """Return the layout of the last level that can be tried, with the least of everything."""
        *_, level = self.levels()
        first = {3: self._requested_first() or 1, 4: self.layouts.n_layers + 1}.get(level, 0)
        shape = self._shape(self.floor, self.ubatches[-1], self.types[-1])
        return self.layouts.nearest(shape, first, _experts(level))

    def levels(self) -> Iterator[Level]:
        """Yield the levels that the request leaves open, the best first."""
        requested = self.request.n_gpu_layers
        if requested == 0 or not self.layouts.taking_part:
            yield 4
            return
        first = self._requested_first()
        if not first:
            movable = any(layer.experts for layer in self.sizes.layers)
            if not (movable and self.request.n_cpu_moe):
                yield 1
            if movable and self.request.n_cpu_moe != 0:
                yield 2
        if first != 0:
            yield 3
        if requested is None:
            yield 4

    def _requested_first(self) -> int | None:
        """Return the first layer that the user puts on a device, None if that is open."""
        requested = self.request.n_gpu_layers
        if requested is None:
            return None
        return max(0, self.layouts.n_layers + 1 - requested) if requested >= 0 else 0

    def _first_steps(self, level: Level) -> tuple[int, ...]:
        """Return the step sizes to place experts with: usually the smallest one.

        With experts on the host a step copies those that it uses to the device, so that the largest is worth one layer,
        and no more. What it takes must not depend on free memory, or a larger device could get fewer experts.
        """
        largest, least = self.ubatches[0], self.ubatches[-1]
        if level != 2 or largest == least:
            return (least,)
        taken = [self.layouts.compute.at(u, self.floor, whole=False) for u in (largest, least)]
        windows = [sum(part.window for part in self._parts(u)) for u in (largest, least)]
        more = max(taken[0][name] - taken[1][name] for name in taken[0]) + windows[0] - windows[1]
        return (largest, least) if more <= min(x.experts for x in self.sizes.layers if x.experts) else (least,)

    def _parts(self, n_ubatch: int) -> tuple[LayerBytes, ...]:
        return parts(self.sizes, self.request, self._shape(self.floor, n_ubatch, self.types[0]))

    def _grow(self, level: Level, least: DeviceLayout) -> DeviceLayout:
        """Add slots while there is room, quantise K and V if they are few, and enlarge the step. No layer moves."""
        best = self._tallest(level, least)
        kv = least.shape.type_k, least.shape.type_v
        if kv != self.types[-1] and best.shape.pool < min(POOL_GOOD, self.cap):
            small = self._place(level, self._shape(self.floor, least.shape.n_ubatch, self.types[-1]))
            if small is not None:
                best = max(best, self._tallest(level, small), key=lambda layout: layout.shape.pool)
        kv = best.shape.type_k, best.shape.type_v
        for n_ubatch in self.ubatches if level != 4 else ():  # a CPU is no faster with large steps
            if n_ubatch <= best.shape.n_ubatch:
                break
            place = self._place(level, self._shape(self.floor, n_ubatch, kv))
            if place is not None and place.on_host <= best.on_host:
                large = self._tallest(level, place)
                if large.shape.pool >= min(best.shape.pool, POOL_GOOD):
                    return large
        return best

    def _tallest(self, level: Level, least: DeviceLayout) -> DeviceLayout:
        """Return the layout with the most slots that has no more on the host."""
        low, high = self.floor // POOL_STEP, self.cap // POOL_STEP
        while low < high:
            middle = (low + high + 1) // 2
            place = self._place(level, replace(least.shape, pool=middle * POOL_STEP), first=least.bounds[0])
            if place is not None and place.on_host <= least.on_host:
                low, least = middle, place
            else:
                high = middle - 1
        return least

    def _place(self, level: Level, shape: Shape, first: int | None = None) -> DeviceLayout | None:
        """Return the best layout of a level. first: the first layer on a device; found if it is open."""
        if level != 3:
            return self.layouts.find(shape, self.layouts.n_layers + 1 if level == 4 else 0, _experts(level))
        if (requested := self._requested_first()) is not None:
            return self.layouts.find(shape, requested, "fill")
        first = first or self._bisect(shape)
        return self.layouts.find(shape, first, "host") if first < self.layouts.n_layers else None

    def _bisect(self, shape: Shape) -> int:
        """Return the first layer on a device, where as many layers as fit are there without their experts."""
        low, high = 1, self.layouts.n_layers
        while low < high:
            middle = (low + high) // 2
            *needs, _ = self.layouts.nearest(shape, middle, "host").needs
            if all(need.left >= 0 for need in needs):
                high = middle
            else:
                low = middle + 1
        return low

    def _shape(self, pool: int, n_ubatch: int, kv: tuple[str, str]) -> Shape:
        return Shape(pool=pool, n_ubatch=n_ubatch, type_k=kv[0], type_v=kv[1])


def _experts(level: Level) -> Experts:
    return "device" if level == 1 else "fill" if level == 2 else "host"


def pool_range(request: PlacementRequest) -> tuple[int, int]:
    """Return the fewest slots, which are reserved first, and the most."""
    full = round_up(request.n_ctx, POOL_STEP)
    minimum = round_up(request.minimum_pool, POOL_STEP)
    if request.pool is None:
        return full, full
    if request.pool == "auto":
        floor = min(full, max(minimum, POOL_FLOOR))
        return floor, min(full, max(floor, SPEED_CAP))
    requested = min(full, max(minimum, round_up(request.pool, POOL_STEP)))
    return requested, requested


def _types(sizes: ModelSizes, request: PlacementRequest) -> tuple[tuple[str, str], ...]:
    if request.type_k is None and request.type_v is None:
        return (PLAIN, SMALL) if sizes.quantizable else (PLAIN,)
    return ((request.type_k or PLAIN[0], request.type_v or PLAIN[1]),)


def _ubatches(request: PlacementRequest, floor: int) -> tuple[int, ...]:
    """Return step sizes, the largest first. A step must have room in half of the pool."""
    if request.n_ubatch is not None:
        return (request.n_ubatch,)
    *larger, least = UBATCHES
    return (*(u for u in larger if u <= request.n_ctx and (u <= floor // 2 or floor >= request.n_ctx)), least)
