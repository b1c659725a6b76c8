"""What the library measures of a model and a context, and what a placement counts, as values. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..constants import KV_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """One layer. dense: its weights without the experts. experts: its routed experts, 0 if it has none. A
    measure of a context has neither.

    k_row, v_row: values that one token's key and value have over all heads, 0 without a cache of its own. window: the
    tokens of a sliding window, whose cache is no part of the pool; 0 where all of the text counts. state: recurrent
    state, rollback planes included. query: one captured query row, heads: of it, heads_kv: that they read; 0 if the
    layer is not pooled.
    """

    dense: int = 0
    experts: int = 0
    k_row: int = 0
    v_row: int = 0
    window: int = 0
    state: int = 0
    query: int = 0
    heads: int = 0
    heads_kv: int = 0

    def rows(self, type_k: str, type_v: str) -> tuple[int, int]:
        """One token's K, and its V, by the names of KV types (constants.KV_TYPES)."""
        return _row(self.k_row, type_k), _row(self.v_row, type_v)

    def slot(self, type_k: str, type_v: str) -> int:
        """Both."""
        return sum(self.rows(type_k, type_v))


def _row(values: int, kind: str) -> int:
    count, size = KV_BLOCKS[kind]
    return -(-values // count) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is needed of one device, in bytes: by a measure, which does not tell parts apart, or by a placement.

    A measure gives weights, kv (caches of all kinds, and recurrent state), compute and queries. A placement gives all.
    free: what the device has, before anything of ours. layers: half-open range of layers that compute there. output: so
    does the output. experts: layers whose experts lie there, where that is not their own device. state: recurrent, and
    windows. staging: for pages on their way. stages: for exact reading. masses: for exact scores at its end. queries:
    captured. extra: something else's.
    """

    device: str
    free: int = 0
    layers: tuple[int, int] = (0, 0)
    output: bool = False
    experts: tuple[int, ...] = ()
    weights: int = 0
    kv: int = 0
    state: int = 0
    compute: int = 0
    staging: int = 0
    stages: int = 0
    masses: int = 0
    queries: int = 0
    extra: int = 0
    margin: int = 0

    @property
    def total(self) -> int:
        """All of it, the margin included."""
        ours = self.weights + self.kv + self.state + self.compute + self.staging + self.queries
        return ours + self.stages + self.masses + self.extra + self.margin

    @property
    def left(self) -> int:
        """Free beyond all that. Negative where it does not fit."""
        return self.free - self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a context of these parameters would take, or takes. devices: in the model's order, the host last.

    pool: slots. layers: in the model's order. offloaded: every layer and the output was meant for the devices, without
    overrides.
    """

    n_ubatch: int
    pool: int
    devices: tuple[Needs, ...]
    layers: tuple[LayerSizes, ...] = ()
    offloaded: bool = True
