"""Counts what layers take of a device, for one size of pool and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..constants import CHUNK, POOL_STEP, round_up
from ..native.sizes import LayerSizes, Needs
from . import memory
from .buffers import F32, STAGED_PAGES, buffer_row
from .sizes import Device, ModelSizes, PlacementRequest

MASSES_AT_ONCE = 2**20
"""Scores that are computed at once, and the unit in which their results grow, as in `kvf_masses.cpp`."""

MASSES_LIVE = 3
"""Arrays of that size that are alive at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides the sizes of caches and compute buffers: slots, tokens of a step, and names of KV types."""

    pool: int
    n_ubatch: int
    type_k: str
    type_v: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """A layer, or the output, in bytes. window: its cache if that is no part of the pool. staging: on a device.

    rows: a pooled layer's K and V of one token. heads: of its queries. group: those of one captured query that read the
    same keys, and how many they are.
    """

    dense: int
    experts: int = 0
    kv: int = 0
    window: int = 0
    state: int = 0
    staging: int = 0
    queries: int = 0
    rows: tuple[int, int] = (0, 0)
    heads: int = 0
    group: tuple[int, int] = (0, 0)


def parts(sizes: ModelSizes, request: PlacementRequest, shape: Shape) -> tuple[LayerBytes, ...]:
    """Return the bytes of every layer, and then of the output."""
    full = round_up(request.n_ctx, POOL_STEP)
    return (*(_part(layer, request, shape, full) for layer in sizes.layers), LayerBytes(dense=sizes.output))


def _part(layer: LayerSizes, request: PlacementRequest, shape: Shape, full: int) -> LayerBytes:
    slot = layer.slot(shape.type_k, shape.type_v)
    pooled = not layer.window
    cells = round_up(min(full, layer.window + shape.n_ubatch), POOL_STEP)
    return LayerBytes(
        dense=layer.dense,
        experts=layer.experts,
        kv=slot * shape.pool if pooled else 0,
        window=0 if pooled else slot * cells,
        state=layer.state,
        staging=slot * CHUNK * STAGED_PAGES if pooled and shape.pool < full else 0,
        queries=layer.query * (request.query_rows + 1 if request.query_rows else 0),  # one for what is not kept
        rows=layer.rows(shape.type_k, shape.type_v) if pooled else (0, 0),
        heads=layer.heads,
        group=(layer.query // layer.heads_kv, layer.heads // layer.heads_kv) if layer.heads_kv else (0, 0),
    )


class Bill:
    """Adds up what devices need for one shape. compute: bytes of compute buffers by device."""

    def __init__(self, sizes: ModelSizes, request: PlacementRequest, shape: Shape, compute: Mapping[str, int]) -> None:
        self.parts = parts(sizes, request, shape)
        self._sizes = sizes
        self._request = request
        self._paged = shape.pool < round_up(request.n_ctx, POOL_STEP)
        self._compute = compute
        self._stage = request.stage if self._paged else 0
        self._n_ubatch = shape.n_ubatch

    def stages(self, device: Device, here: Sequence[LayerBytes]) -> int:
        """Return the bytes of layer buffers for these layers: one or two for each shape, and columns of the mask."""
        shapes = {part.rows for part in here if any(part.rows)}
        return self._stage * buffer_row(shapes, self._n_ubatch, overlaps=device.overlaps) if shapes else 0

    def masses(self, device: Device, here: Sequence[LayerBytes]) -> int:
        """Return the bytes that attention scores of these layers' heads take: places of queries, results and scratch.

        A device behind a network computes no scores, and needs nothing.
        """
        if not self._stage or not self._request.masses or device.kind == "remote":
            return 0
        rows, chunks = self._request.query_rows, self._request.n_ctx // CHUNK
        columns = sum(part.heads for part in here) * rows
        results = round_up(min(self._request.masses, columns * chunks), MASSES_AT_ONCE)
        pieces = (
            query * rows + F32 * MASSES_LIVE * min(MASSES_AT_ONCE, heads * rows * chunks * CHUNK)
            for query, heads in (part.group for part in here)
        )
        return F32 * (columns + results) + max(pieces) if columns else 0

    def base(self, part: LayerBytes) -> int:
        """Return the bytes that a layer takes of its device, without its experts."""
        cached = part.kv + part.window + part.staging if self._request.offload_kqv else 0
        return part.dense + part.state + part.queries + cached

    def constant(self, device: Device) -> int:
        """Return the bytes that a device takes as soon as it has any layer, at most."""
        return (
            self._compute.get(device.name, 0)
            + self._sizes.fixed.get(device.name, 0)
            + self._request.extra.get(device.name, 0)
            + memory.margin(device, self._request.fit)
            + self.stages(device, self.parts)
            + self.masses(device, self.parts)
        )

    def device(self, device: Device, begin: int, end: int, kept: int) -> Needs:
        """Return the needs of a device with these layers, and the experts of layers from `kept` on.

        A device that holds nothing needs no margin. An index takes what is left, and only beside all layers.
        """
        here = self.parts[begin:end]
        cached = here if self._request.offload_kqv else ()
        need = self._needs(device, begin, end, cached, experts=sum(part.experts for part in self.parts[kept:end]))
        if not here:
            holds = self._sizes.fixed.get(device.name) or need.extra
            return replace(need, compute=0, margin=need.margin if holds else 0)
        if self._paged and cached and begin == 0 and end >= len(self._sizes.layers):
            return replace(need, index=max(0, min(need.left, self._request.index.get(device.name, 0))))
        return need

    def host(self, device: Device, first: int, moved: tuple[int, ...]) -> Needs:
        """Return the needs of the host: layers before `first`, experts of the layers `moved`, and the token embedding.

        staging: the host keeps as many page images as its layers have pages, for what leaves their part of the pool.
        """
        cached = self.parts[:first] if self._request.offload_kqv else self.parts
        experts = sum(part.experts for part in (*self.parts[:first], *(self.parts[i] for i in moved)))
        need = self._needs(device, 0, first, cached, experts=experts + self._sizes.embedding)
        return replace(need, experts=moved, staging=need.kv if self._paged else 0)

    def _needs(self, device: Device, begin: int, end: int, cached: Sequence[LayerBytes], *, experts: int) -> Needs:
        """Compute a device's needs. cached: the layers whose caches are there. experts: bytes beside dense weights."""
        here, n = self.parts[begin:end], len(self._sizes.layers)
        fixed = self._sizes.fixed.get(device.name, 0)
        return Needs(
            device=device.name,
            free=device.free,
            layers=(min(begin, n), min(end, n)),
            output=begin < end == len(self.parts),
            weights=sum(part.dense for part in here) + experts + fixed,
            kv=sum(part.kv for part in cached),
            state=sum(part.state for part in here) + sum(part.window for part in cached),
            compute=self._compute.get(device.name, 0),
            staging=sum(part.staging for part in cached),
            stages=self.stages(device, cached),
            masses=self.masses(device, cached),
            queries=sum(part.queries for part in here),
            extra=self._request.extra.get(device.name, 0),
            margin=memory.margin(device, self._request.fit),
        )
