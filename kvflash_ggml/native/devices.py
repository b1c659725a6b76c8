"""The devices that ggml knows, and what a model is told of them when it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, EngineError
from ._kvf import ffi, lib
from .info import DeviceInfo, read_device
from .status import check, value


def devices() -> tuple[DeviceInfo, ...]:
    """Return all devices in ggml's order, with their free memory as it is now."""
    n = lib.kvf_device_count()
    raw: Any = ffi.new("kvf_device[]", n)
    check(lib.kvf_list_devices(raw, n))
    return tuple(map(read_device, raw))


def model_devices(model: int) -> tuple[DeviceInfo, ...]:
    """Return the devices that hold layers of the llama_model at this address, in its order; those of servers too."""
    address = ffi.cast("void *", model)
    n = lib.kvf_model_n_devices(address) - 1
    raw: Any = ffi.new("kvf_device[]", n)
    check(lib.kvf_model_devices(address, raw, n))
    return tuple(map(read_device, raw))


@functools.cache
def largest_tensor(device: str) -> int | None:
    """Return the bytes of the largest tensor that a device here computes on, None where nothing bounds it."""
    return int(lib.kvf_largest_tensor(device.encode())) or None


class ModelArrays:
    """Arrays for a llama_model_params, as addresses: 0 leaves a choice to llama.cpp. They live as long as this does.

    use: the devices that hold layers, in their order, None for llama.cpp's choice. overrides: (pattern, device), of
    which the first that is found in a tensor's name says where it goes. Those of connected servers can be named too.
    ConfigError for a device that there is not, or a pattern that is no regular expression.
    """

    def __init__(self, use: Sequence[str] | None, overrides: Sequence[tuple[str, str]]) -> None:
        self._use = None if use is None else _owned("device", lib.kvf_device_list, len(use), _texts(use))
        self._overrides = None
        if overrides:
            patterns, places = map(_texts, zip(*overrides, strict=True))
            self._overrides = _owned("override_tensor", lib.kvf_overrides, len(overrides), patterns, places)

    @property
    def devices(self) -> int:
        """llama_model_params.devices."""
        return _address(self._use)

    @property
    def overrides(self) -> int:
        """llama_model_params.tensor_buft_overrides."""
        return _address(self._overrides)


def finds(pattern: str, name: str) -> bool:
    """Report whether llama.cpp finds this regular expression in a tensor's name."""
    return bool(lib.kvf_finds(pattern.encode(), name.encode()))


def _owned(option: str, make: Any, n: int, *texts: Any) -> Any:
    made = ffi.new("void **")
    try:
        # the call reads the texts through these arrays, which point into what is kept beside them
        return ffi.gc(value(make(n, *(array for array, _ in texts), made), made), lib.kvf_list_free)
    except EngineError as err:
        raise ConfigError(f"{option}: {err}") from err


def _texts(words: Sequence[str]) -> tuple[Any, list[Any]]:
    kept = [ffi.new("char[]", word.encode()) for word in words]
    return ffi.new("char *[]", kept), kept


def _address(array: Any) -> int:
    return 0 if array is None else int(ffi.cast("uintptr_t", array))
