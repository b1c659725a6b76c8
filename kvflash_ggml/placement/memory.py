"""Lists the devices, their free memory, and how much of it can be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from .. import system
from ..config import Fit
from .sizes import HOST, Device

if TYPE_CHECKING:
    from ..native.info import DeviceInfo

MIB = 1 << 20
GIB = 1 << 30

_REMOTE = "RPC"


def devices() -> tuple[Device, ...]:
    """Return all devices that can hold layers, in ggml's order, and the host."""
    from ..native import devices as native  # here, as below: the arithmetic needs no library

    return (*(_device(x) for x in native.devices() if x.kind in ("gpu", "integrated")), host())


def of_model(address: int) -> tuple[Device, ...]:
    """Return the devices of the llama_model at this address, in its order, and the host."""
    from ..native import devices as native

    return (*map(_device, native.model_devices(address)), host())


def host() -> Device:
    """Return the host's memory. total: all of it, or what a container may have. free: what is available unswapped."""
    total, free = system.host_memory()
    return Device(name=HOST, kind="host", free=free, total=total)


def imagined(free: Mapping[str, int]) -> tuple[Device, ...]:
    """Return devices with this much free memory, in their order, and then the host of this machine."""
    kinds: dict[bool, Literal["gpu", "remote"]] = {False: "gpu", True: "remote"}
    found = [
        Device(name=name, kind=kinds[name.startswith(_REMOTE)], free=size, total=size, description="imagined")
        for name, size in free.items()
        if name != HOST
    ]
    return (*found, host())


def _device(found: DeviceInfo) -> Device:
    kind: Literal["gpu", "integrated", "remote"] = "integrated" if found.kind == "integrated" else "gpu"
    return Device(
        name=found.name,
        kind="remote" if found.backend == _REMOTE else kind,
        free=found.free_bytes,
        total=found.total_bytes,
        description=found.description,
        overlaps=found.overlaps,
    )


# --- how much of it can be used


def counted(devices: tuple[Device, ...], fit: Fit) -> tuple[Device, ...]:
    """Return the devices with the free memory that the user lets a placement count on."""
    return tuple(replace(device, free=fit.free.get(device.name, device.free)) for device in devices)


def margin(device: Device, fit: Fit) -> int:
    """Return the bytes to leave free: for a backend's own buffers, and for other programs.

    One number of a user's is for every device but the host, as upstream's --fit-target is.
    """
    given = fit.margin
    if isinstance(given, Mapping):
        given = given.get(device.name)
    elif device.kind == "host":
        given = None
    if given is not None:
        return given
    match device.kind:
        case "gpu":
            return max(512 * MIB, device.total // 50)
        case "integrated":
            return 2 * GIB
        case "remote":
            return 512 * MIB
        case "host":
            return max(2 * GIB, device.free // 10)


def usable(device: Device) -> bool:
    """Report whether layers may go to a device that the user has not named. One of unknown memory gets none."""
    return device.kind != "host" and device.total > 0
