"""How much of a device can be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .sizes import Device, Fit

MIB = 1 << 20
GIB = 1 << 30


def counted(devices: tuple[Device, ...], fit: Fit) -> tuple[Device, ...]:
    """The devices, with as much free memory as is to be counted on."""
    return tuple(replace(device, free=fit.free.get(device.name, device.free)) for device in devices)


def margin(device: Device, fit: Fit) -> int:
    """Bytes that stay free: what a backend takes by itself, and what others may ask for meanwhile.

    One number of a user's is for every device but the host, as upstream's --fit-target is.
    """
    asked = fit.margin
    if isinstance(asked, Mapping):
        asked = asked.get(device.name)
    elif device.kind == "host":
        asked = None
    if asked is not None:
        return asked
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
    """Layers can go there. Some devices tell nothing of their memory: nothing is put there unasked."""
    return device.kind != "host" and device.total > 0
