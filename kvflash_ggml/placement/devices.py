"""Puts a model on the devices that a user has chosen, and shares its layers out as llama.cpp does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from ..gguf import reader
from .sizes import HOST
from .wanted import EXPERTS, LAYER, MAX_DEVICES, NONE, DeviceChoice, Override

if TYPE_CHECKING:
    from ..native.devices import ModelArrays
    from ..native.info import DeviceInfo
    from ..remote import Endpoint

MAX_LAYERS = 512
"""That a model of llama.cpp has at most."""


def place(path: str, choice: DeviceChoice, settings: dict[str, Any], endpoints: Sequence[Endpoint] = ()) -> ModelArrays:
    """Make the arrays that say so to llama.cpp. ConfigError for a device that is not there.

    endpoints: of servers that are connected; their devices come before this machine's, unless `device` says otherwise.

    settings: upstream's keywords. Where experts are put aside of several devices, it gets the split of the layers that
    this went by, since llama.cpp's own follows the memory that is free at the moment.
    """
    from ..native.devices import ModelArrays

    known, use = _known(endpoints), holders(choice, endpoints)
    overrides = list(choice.override_tensor)
    if choice.n_cpu_moe:
        layers: Sequence[int] = range(min(choice.n_cpu_moe, MAX_LAYERS))
        if settings.get("split_mode", LAYER) != NONE:
            by_name = {device.name: device for device in known}
            chosen = default_devices(known) if use is None else [by_name[name] for name in use]
            if len(chosen) > 1:
                use = tuple(device.name for device in chosen)
                layers = _share_experts(path, choice.n_cpu_moe, chosen, settings)
        overrides += experts(layers, HOST)
    return ModelArrays(use, overrides)


def holders(choice: DeviceChoice, endpoints: Sequence[Endpoint]) -> tuple[str, ...] | None:
    """Return the names of the devices that hold layers, None for llama.cpp's choice, which knows of no server.

    ConfigError if anything is to go where it cannot.
    """
    if choice == DeviceChoice() and not endpoints:
        return None
    known, use = _known(endpoints), choice.device
    if use is None and endpoints:
        use = tuple(device.name for device in default_devices(known))
    if use is not None:
        check_devices(use, known)
    check_overrides(choice.override_tensor, known)
    return use


def _known(endpoints: Sequence[Endpoint]) -> tuple[DeviceInfo, ...]:
    """Return the devices of connected servers, and of this machine."""
    from ..native.devices import devices
    from ..native.remote import served

    return (*(device for endpoint in endpoints for device in served(endpoint)), *devices())


def check_devices(use: Sequence[str], known: Sequence[DeviceInfo]) -> None:
    """Raise ConfigError unless these can hold layers."""
    names = [device.name for device in known if device.kind in ("gpu", "integrated")]
    for name in use:
        if name not in names:
            raise ConfigError(f"device={name!r} cannot hold layers: {_there_are(names)}")
    if len(set(use)) < len(use):
        raise ConfigError(f"device={','.join(use)!r} names one of them twice")
    if len(use) > MAX_DEVICES:
        raise ConfigError(f"{len(use)} devices: llama.cpp takes {MAX_DEVICES} at most")


def check_overrides(overrides: Sequence[Override], known: Sequence[DeviceInfo]) -> None:
    """Raise ConfigError unless these can hold tensors."""
    names = [device.name for device in known if device.kind != "other"]
    for pattern, where in overrides:
        if where not in names:
            raise ConfigError(f"override_tensor={pattern}={where}: {where!r} cannot hold tensors: {_there_are(names)}")


def _there_are(names: Sequence[str]) -> str:
    return f"there are {', '.join(names)}" if names else "there is no device but the CPU"


def default_devices(known: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices that llama.cpp takes by itself, in its order: remote ones, then GPUs, else integrated ones."""
    remote = [device for device in known if device.kind == "gpu" and device.backend == "RPC"]
    gpus, seen = [], set()
    for device in known:
        if device.kind == "gpu" and device.backend != "RPC" and not (device.id and device.id in seen):
            gpus.append(device)
            seen.add(device.id)
    return [*remote, *(gpus or [device for device in known if device.kind == "integrated"])]


def slices(n_layers: int, n_gpu_layers: int, splits: Sequence[float]) -> list[range]:
    """Divide the layers among devices as llama.cpp does; the output layer counts as number `n_layers`.

    n_gpu_layers: -1 is all. splits: the share of each device, in any unit.
    """
    every = n_layers + 1
    count = every if n_gpu_layers < 0 else min(n_gpu_layers, every)
    first = every - count
    return [range(first + a, first + b) for a, b in pairwise(bounds_of(splits, count))]


def bounds_of(shares: Sequence[float], n: int) -> tuple[int, ...]:
    """Return the bounds that llama.cpp makes of a `tensor_split` for n layers, the output counted as one.

    Whole numbers of layers come out as they are.
    """
    given = np.asarray(shares, np.float32)
    given = given if given.any() else np.ones_like(given)
    edges = np.cumsum(given, dtype=np.float32)
    edges /= edges[-1]
    where = np.searchsorted(edges, np.arange(n, dtype=np.float32) / np.float32(n), side="right")
    return (*(int(np.searchsorted(where, device)) for device in range(len(given))), n)


def in_turn(parts: Sequence[range], count: int) -> list[int]:
    """Take the first layers of all parts, then the second ones, and so on: `count` of them, ascending."""
    rounds = chain.from_iterable(zip_longest(*parts))
    return sorted([layer for layer in rounds if layer is not None][:count])


def _share_experts(
    path: str, count: int, chosen: Sequence[DeviceInfo], settings: dict[str, Any],
    read: Callable[[Path], reader.GGUF] = reader.read,
) -> list[int]:  # fmt: skip
    n_layers = int(read(Path(path)).own("block_count"))
    split = settings.get("tensor_split")
    splits = list(split)[: len(chosen)] if split and any(split) else [max(1, device.free_bytes) for device in chosen]
    splits += [0.0] * (len(chosen) - len(splits))
    parts = slices(n_layers, settings.get("n_gpu_layers", 0), splits)
    settings["tensor_split"] = [float(len(part)) for part in parts]
    on_host = range(min(count, parts[0].start))  # as a whole
    offloaded = [range(part.start, min(part.stop, n_layers)) for part in parts]
    return [*on_host, *in_turn(offloaded, count - len(on_host))]


# --- patterns of tensors' names that keep experts on another device than their layer


def experts(layers: Iterable[int], device: str) -> tuple[Override, ...]:
    """Make the override that puts the experts of these layers on a device; none for no layers."""
    numbers = "|".join(_ranges(sorted(set(layers))))
    return ((rf"^blk\.({numbers}){EXPERTS}", device),) if numbers else ()


def _ranges(layers: list[int]) -> Iterator[str]:
    """Yield alternatives that match these numbers. Whole tens are one each: 8, 9, 1[0-9], 2[0-3]."""
    tens: dict[int, list[int]] = {}
    for layer in layers:
        tens.setdefault(layer // 10, []).append(layer % 10)
    for ten, digits in tens.items():
        prefix = str(ten) if ten else ""
        if digits == list(range(digits[0], digits[-1] + 1)) and len(digits) > 1:
            yield f"{prefix}[{digits[0]}-{digits[-1]}]"
        else:
            yield from (f"{prefix}{digit}" for digit in digits)
