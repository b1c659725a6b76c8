"""The devices that there are, and how much of their memory is free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ..native import devices as native
from ..native.info import DeviceInfo
from .sizes import HOST, Device

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_REMOTE = "RPC"


def devices() -> tuple[Device, ...]:
    """All that can hold layers, in ggml's order, and the host."""
    return (*(_device(x) for x in native.devices() if x.kind in ("gpu", "integrated")), host())


def of_model(address: int) -> tuple[Device, ...]:
    """Those of the llama_model at this address, in its order, and the host."""
    return (*map(_device, native.model_devices(address)), host())


def host() -> Device:
    """The host's memory. total: all of it, or as much as a container may have. free: what can be had of it without
    swapping."""
    total = _meminfo("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = _meminfo("MemAvailable") or total
    if (container := _limit()) is not None:
        total, left = min(total, container[0]), min(left, container[1])
    return Device(name=HOST, kind="host", free=min(total, left), total=total)


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


def _meminfo(field: str) -> int | None:
    """Bytes, None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None


def _limit() -> tuple[int, int] | None:
    """What a control group allows, and still allows: pages of files that nobody has used lately are given back."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    files = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return (int(limit), max(0, int(limit) - used + files)) if limit.isdigit() else None
