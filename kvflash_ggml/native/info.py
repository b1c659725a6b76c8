"""What an engine tells of itself, and ggml of devices, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..constants import CHUNK
from ._kvf import ffi, lib
from .status import check

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
    host_compute: has the CPU a part in every step, with `n_threads` threads? devices: in the order of the layers.
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


def read_info(engine: object) -> EngineInfo:
    """engine: a kvf_engine pointer."""
    raw: Any = ffi.new("kvf_info *")
    lib.kvf_get_info(engine, raw)
    return EngineInfo(
        n_slots=raw.n_slots,
        n_layers=raw.n_layers,
        n_seq=raw.n_seq,
        n_pos=raw.n_pos,
        n_embd=raw.n_embd,
        n_swa=raw.n_swa,
        recurrent=bool(raw.recurrent),
        rs_planes=raw.rs_planes,
        alibi=bool(raw.alibi),
        mask_f32=bool(raw.mask_f32),
        v_trans=bool(raw.v_trans),
        query_rows=raw.query_rows,
        branches=bool(raw.branches),
        windows_mutual=bool(raw.windows_mutual),
        page_bytes=raw.page_bytes,
        device_bytes=raw.device_bytes,
        rotated=raw.rotated,
        host_compute=bool(raw.host_compute),
        n_threads=raw.n_threads,
        type_k=ffi.string(raw.type_k).decode(),
        type_v=ffi.string(raw.type_v).decode(),
        devices=_read_devices(engine, raw.n_devices),
    )


def _read_devices(engine: object, n: int) -> tuple[DeviceInfo, ...]:
    raw: Any = ffi.new("kvf_device[]", n)
    check(lib.kvf_get_devices(engine, raw, n))
    return tuple(map(read_device, raw))


def read_device(raw: Any) -> DeviceInfo:
    """raw: a kvf_device."""
    return DeviceInfo(
        name=_text(raw.name),
        description=_text(raw.description),
        backend=_text(raw.backend),
        id=_text(raw.id),
        kind=_KINDS[raw.kind],
        pinned=bool(raw.pinned),
        asynchronous=bool(raw.asynchronous),
        free_bytes=raw.free_bytes,
        total_bytes=raw.total_bytes,
        mode=_MODES[raw.mode],
        first_layer=raw.first_layer,
        layers=raw.n_layers,
        share_offset=raw.share_offset,
        share_bytes=raw.share_bytes,
        staging_bytes=raw.staging_bytes,
        query_bytes=raw.query_bytes,
    )


def _text(raw: Any) -> str:
    return str(ffi.string(raw).decode("utf-8", "replace"))


def read_layers(engine: object, n: int) -> tuple[Layer, ...]:
    """engine: a kvf_engine pointer."""
    raw: Any = ffi.new("kvf_layer[]", n)
    check(lib.kvf_get_layers(engine, raw, n))
    return tuple(
        Layer(
            il=x.il,
            n_head=x.n_head,
            n_head_kv=x.n_head_kv,
            head_k=x.head_k,
            head_v=x.head_v,
            has_v=bool(x.has_v),
            k_offset=x.k_offset,
            k_row=x.k_row,
            v_offset=x.v_offset,
            v_row=x.v_row,
            device=x.device,
            scale=x.scale,
        )
        for x in raw
    )
