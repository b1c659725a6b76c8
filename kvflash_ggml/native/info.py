"""What an engine says of itself, and ggml of devices, as values. Fields are called as in `kvf.h`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from ..constants import CHUNK
from ._kvf import ffi, lib
from .status import check

T = TypeVar("T")

Mode = Literal["stream", "remote", "sync", "host"]
"""How pages move between a device and the host: on a stream of their own; in one queue with the compute, over a
network; by plain copies when the compute is done; or by plain copies in host memory, for which nothing need wait."""

Kind = Literal["cpu", "gpu", "integrated", "other"]

_MODES: tuple[Mode, ...] = ("stream", "remote", "sync", "host")
_KINDS: tuple[Kind, ...] = ("cpu", "gpu", "integrated", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device, and what of a pool it holds. Sizes are bytes; `free_bytes` as it was when somebody asked.

    id: of the hardware, empty if it is not known. pinned: can it copy from and to page-locked memory? asynchronous:
    does it compute beside the host? layers: how many of the pooled layers, from `first_layer` on; 0 without a pool, as
    all that follows. share_offset, share_bytes: what they are of a page image. staging_bytes: where pages arrive on it.
    largest_bytes: of the largest tensor that it computes on, 0 where nothing bounds it.
    """

    name: str
    description: str
    backend: str
    id: str
    kind: Kind
    pinned: bool
    asynchronous: bool
    free_bytes: int
    total_bytes: int
    mode: Mode
    first_layer: int
    layers: int
    share_offset: int
    share_bytes: int
    staging_bytes: int
    query_bytes: int
    largest_bytes: int

    @property
    def overlaps(self) -> bool:
        """Do its transfers run beside the host?"""
        return self.mode in ("stream", "remote")

    @property
    def slot_bytes(self) -> int:
        """What one token takes on it."""
        return self.share_bytes // CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pooled layer. Offsets and rows are bytes in a page image of CHUNK rows; `has_v` is false if V is a view of K.

    device: index in `EngineInfo.devices`. scale: what attention multiplies q*k with; 0 unless queries are captured.
    """

    il: int
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    has_v: bool
    k_offset: int
    k_row: int
    v_offset: int
    v_row: int
    device: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the pooled cache looks like; `n_swa` and `recurrent` tell what else the memory holds. Sizes are bytes.

    n_embd: values of a media row. n_seq: sequences that can be named. query_rows: rows for captured queries, per layer.
    branches: can tokens of a step be siblings, of one position? windows_mutual: do rows of media that see each other do
    so in sliding windows only?
    rs_planes: tokens that recurrent state can go back within a step, 0 if it cannot.
    rotated: bit 0 if keys are stored rotated, bit 1 if values are.
    host_compute: has the CPU a part in every step, with `n_threads` threads? step_work: multiplications with weights
    that a step of one token makes. devices: in the order of the layers.
    """

    n_slots: int
    n_layers: int
    n_seq: int
    n_pos: int
    n_embd: int
    n_swa: int
    recurrent: bool
    rs_planes: int
    alibi: bool
    mask_f32: bool
    v_trans: bool
    query_rows: int
    branches: bool
    windows_mutual: bool
    page_bytes: int
    device_bytes: int
    step_work: int
    rotated: int
    host_compute: bool
    n_threads: int
    type_k: str
    type_v: str
    devices: tuple[DeviceInfo, ...]

    @property
    def device(self) -> str:
        """The names of all devices."""
        return ", ".join(device.name for device in self.devices)

    @property
    def pinned(self) -> bool:
        """Are page images in page-locked memory? They are if any device can use that."""
        return any(device.pinned for device in self.devices)

    @property
    def asynchronous(self) -> bool:
        """Does any device compute beside the host?"""
        return any(device.asynchronous for device in self.devices)


def _read(cls: type[T], raw: Any, **others: Any) -> T:
    """Return a dataclass with the values of a C struct. others: fields whose values differ from those in the struct."""
    converters: dict[str, Callable[[Any], Any]] = {"bool": bool, "str": _text}
    values = dict(others)
    for one in fields(cls):  # type: ignore[arg-type]
        if one.name not in others:
            convert = converters.get(str(one.type))
            value = getattr(raw, one.name)
            values[one.name] = value if convert is None else convert(value)
    return cls(**values)


def _text(raw: Any) -> str:
    return str(ffi.string(raw).decode("utf-8", "replace"))


def read_info(engine: object) -> EngineInfo:
    """Read what an engine says of its pool. engine: a kvf_engine pointer."""
    raw: Any = ffi.new("kvf_info *")
    lib.kvf_get_info(engine, raw)
    devices: Any = ffi.new("kvf_device[]", raw.n_devices)
    check(lib.kvf_get_devices(engine, devices, raw.n_devices))
    return _read(EngineInfo, raw, devices=tuple(map(read_device, devices)))


def read_device(raw: Any) -> DeviceInfo:
    """Read a kvf_device."""
    return _read(DeviceInfo, raw, kind=_KINDS[raw.kind], mode=_MODES[raw.mode], layers=raw.n_layers)


def read_layers(engine: object, n: int) -> tuple[Layer, ...]:
    """Read the pooled layers of an engine, of which there are `n`. engine: a kvf_engine pointer."""
    raw: Any = ffi.new("kvf_layer[]", n)
    check(lib.kvf_get_layers(engine, raw, n))
    return tuple(_read(Layer, one) for one in raw)
