"""What the library measures and a placement counts, as values. Sizes are bytes."""

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
        """Return the bytes of one token's K, and of its V, by the names of KV types (constants.KV_TYPES)."""
        return _row(self.k_row, type_k), _row(self.v_row, type_v)

    def slot(self, type_k: str, type_v: str) -> int:
        """Return the bytes of one token's K and V together."""
        return sum(self.rows(type_k, type_v))


def _row(values: int, kind: str) -> int:
    count, size = KV_BLOCKS[kind]
    return -(-values // count) * size


PARTS = {
    "weights": "weights", "KV": "kv", "state": "state", "compute": "compute", "staging": "staging", "stages": "stages",
    "exact scores": "masses", "queries": "queries", "index": "index", "drafter, embeddings": "extra",
    "margin": "margin",
}  # fmt: skip
"""What a device is needed for: the names that users see, and fields of `Needs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is needed of one device, in bytes. A measure gives weights, kv, compute and queries; a placement gives all.

    free: what the device has before anything is loaded. layers: half-open range of layers that compute there. output:
    the output does too. experts: layers whose experts lie there, though the layer does not. kv: K and V; of a measure
    caches of all kinds. state: recurrent state and sliding windows. staging: pages on their way. stages: layer buffers
    of exact reading. masses: exact scores at its end. queries: captured queries. index: of the
    policy. extra: a drafter, embeddings.
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
    index: int = 0
    extra: int = 0
    margin: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, the margin included."""
        return sum(self.itemised.values())

    @property
    def itemised(self) -> dict[str, int]:
        """The bytes of each part, by the names that users see."""
        return {name: getattr(self, field) for name, field in PARTS.items()}

    @property
    def left(self) -> int:
        """The bytes that stay free; negative where it does not fit."""
        return self.free - self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a context takes, or would take. devices: in the model's order, the host last.

    pool: slots. layers: in the model's order. offloaded: every layer and the output was meant for the devices, without
    overrides.
    """

    n_ubatch: int
    pool: int
    devices: tuple[Needs, ...]
    layers: tuple[LayerSizes, ...] = ()
    offloaded: bool = True
