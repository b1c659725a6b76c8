"""What there is to place, what there is room for, and where it goes, as values. All sizes are bytes, unless said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..config import Fit

if TYPE_CHECKING:
    from ..native.sizes import LayerSizes, Needs

HOST = "CPU"
"""ggml's name of the device whose memory is the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model. layers: in their order, all that llama.cpp counts, also those that it does not load.

    output: the last norm and the output matrix, a tied one's copy included. embedding: the token embedding, which stays
    in host memory. fixed: weights that the user's own overrides put on a device, by its name; they are no part of the
    others. work: multiplications with weights of a token. quantizable: K and V can be of quantised types, whose blocks
    divide a head. n_ctx_train: tokens.
    """

    layers: tuple[LayerSizes, ...]
    output: int
    embedding: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    work: int = 0
    quantizable: bool = True
    n_ctx_train: int = 0


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
class PlacementRequest:
    """What is asked of a placement. None (or "auto") is left to the planner; what is given is never changed.

    n_ctx: tokens. pool: slots, or None for a full cache. minimum_pool: slots that the protections need. type_k, type_v:
    names of KV types. n_gpu_layers: the output counts as one, negative for all. tensor_split: layers or shares by
    device. overrides: the user's own (pattern, device), which come first. n_cpu_moe: layers whose experts stay on the
    host: those that are there as a whole, then the first of each device, in turn. use_mmap: as upstream's.
    offload_kqv: K and V are where their layer is, else all on the host. query_rows: captured queries a pooled layer
    keeps. stage: tokens of stages for exact reading, which have to have room beside a pool. masses: values of attention
    masses that a policy asks of the last step of a prompt at most, heads x rows x chunks. index: what that of a policy
    takes at most, by device. extra: what something else takes, such as a drafter.
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
    index: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)


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
