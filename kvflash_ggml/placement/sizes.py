"""What there is to place, what there is room for, and where it goes, as values. All sizes are bytes, unless said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..constants import KV_BLOCKS
from ..errors import ConfigError

HOST = "CPU"
"""ggml's name of the device whose memory is the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """One layer. dense: its weights without the experts. experts: those of its routed experts, 0 if it has none.

    k_row, v_row: values that one token's key and value have over all heads, 0 without a cache of its own. window: the
    tokens of a sliding window, whose cache is no part of the pool; 0 where all of the text counts. state: recurrent
    state, rollback planes included. query: one captured query row, heads: of it, heads_kv: that they read; 0 if the
    layer is not pooled.
    """

    dense: int
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
class ModelSizes:
    """A model. layers: in their order, all that llama.cpp counts, also those that it does not load.

    output: the last norm and the output matrix, a tied one's copy included. embedding: the token embedding, which stays
    in host memory. fixed: weights that the user's own overrides put on a device, by its name; they are no part of the
    others. quantizable: K and V can be of quantised types, whose blocks divide a head. n_ctx_train: tokens. n_expert,
    n_expert_used: of each layer that has experts.
    """

    layers: tuple[LayerSizes, ...]
    output: int
    embedding: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    quantizable: bool = True
    name: str = ""
    n_ctx_train: int = 0
    n_expert: int = 0
    n_expert_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, in llama.cpp's order; the host comes last, as HOST with what is available of its memory.

    kind: integrated devices share the host's memory, remote ones are reached over the network. free, total: bytes; a
    device that tells 0 of both is never chosen. overlaps: it has asynchronous transfers and events.
    """

    name: str
    kind: Literal["gpu", "integrated", "remote", "host"]
    free: int
    total: int
    description: str = ""
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """What llama.cpp has on one device: weights, caches (K, V and recurrent state), compute buffers."""

    device: str
    model: int
    context: int
    compute: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a load without its data has told, for these parameters. devices: in the order of the Device list.

    pool: slots. offloaded: every layer and the output was meant for the devices, without overrides.
    """

    n_ubatch: int
    pool: int
    devices: tuple[DeviceBytes, ...]
    offloaded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a user can ask of fitting. None and an empty mapping: as usual.

    margin: bytes left free, of every device or by name. free: bytes that a device counts as free, by name, instead of
    what it tells. prefer: "pool" keeps a pool where a full cache fits too, since it is faster at long contexts;
    "exact" takes the full cache then. ConfigError for anything else.
    """

    margin: int | Mapping[str, int] | None = None
    free: Mapping[str, int] = field(default_factory=dict)
    prefer: Literal["pool", "exact"] = "pool"

    def __post_init__(self) -> None:
        margins = self.margin if isinstance(self.margin, Mapping) else {"": 0 if self.margin is None else self.margin}
        for what, sizes in (("margin", margins), ("free", self.free)):
            for name, size in sizes.items():
                if not isinstance(size, int) or size < 0:
                    of = f" of {name}" if name else ""
                    raise ConfigError(f"fit: {what}{of} is a number of bytes, 0 or more, not {size!r}")
        if self.prefer not in ("pool", "exact"):
            raise ConfigError(f"fit: prefer is 'pool' or 'exact', not {self.prefer!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a placement. None (or "auto") is left to the planner; what is given is never changed.

    n_ctx: tokens. pool: slots, or None for a full cache. minimum_pool: slots that the protections need. type_k, type_v:
    names of KV types. n_gpu_layers: the output counts as one, negative for all. tensor_split: layers or shares by
    device. overrides: the user's own (pattern, device), which come first. n_cpu_moe: layers whose experts stay on the
    host: those that are there as a whole, then the first of each device, in turn. use_mmap: as upstream's.
    offload_kqv: K and V are where their layer is, else all on the host. query_rows: captured queries a pooled layer
    keeps. stage: tokens of stages for exact reading, which have to have room beside a pool. masses: values of attention
    masses that a policy asks of the last step of a prompt at most, heads x rows x chunks. extra: what something else
    takes, by device, such as a drafter.
    """

    n_ctx: int
    pool: int | Literal["auto"] | None = "auto"
    minimum_pool: int = 512
    n_ubatch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    n_cpu_moe: int | None = None
    use_mmap: bool | None = None
    offload_kqv: bool = True
    query_rows: int = 0
    stage: int = 0
    masses: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a placement takes of one device. free: what the device has, before anything of ours.

    layers: half-open range of those that compute there. output: so does the output. experts: layers whose experts lie
    there, where that is not their own device. state: recurrent, and windows. staging: for pages on their way. stages:
    for exact reading. masses: for exact scores at its end. queries: captured. extra: something else's.
    """

    device: str
    free: int
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
class Placement:
    """Where everything goes. needs: one for each Device, in their order.

    n_gpu_layers, tensor_split, overrides: as llama.cpp takes them; tensor_split in whole layers by device without the
    host, unless the user has given another; None with one device. pool: slots, n_ctx of them for a full cache.
    use_mmap: weights stay in the file's pages; else they are read to memory of their own. pipeline: steps on several
    devices overlap. level: 1 everything on the devices, 2 some experts on the host, 3 some layers, 4 all. redundant: a
    full cache would have fitted, with every expert where it is. why: what decided.
    """

    n_ctx: int
    n_gpu_layers: int
    tensor_split: tuple[float, ...] | None
    overrides: tuple[tuple[str, str], ...]
    pool: int
    n_ubatch: int
    type_k: str
    type_v: str
    use_mmap: bool
    pipeline: bool
    level: Literal[1, 2, 3, 4]
    needs: tuple[Needs, ...]
    redundant: bool = False
    why: str = ""

    @property
    def host_experts(self) -> tuple[int, ...]:
        """Layers whose experts lie in host memory though the layer computes on a device."""
        return self.needs[-1].experts
