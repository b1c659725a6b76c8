"""Devices of ggml's RPC servers: connections, what is behind them, and serving one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .. import remote
from ..constants import KV_TYPES
from ..errors import KVFlashError, RemoteError
from ..remote import Endpoint
from . import library

MEASURED_BYTES = 4 << 20
TRIED_TYPES = ("f16", "q8_0")


def _lib() -> tuple[Any, Any]:
    library.load()
    from ._kvf import ffi, lib

    return ffi, lib


@contextlib.contextmanager
def connected(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Connections to these servers. RemoteError if one cannot be used, UnsupportedError in a build without RPC."""
    from .status import check

    _, lib = _lib()
    with contextlib.ExitStack() as stack:
        for endpoint in endpoints:
            name = str(endpoint).encode()
            if lib.kvf_rpc_state(name) == -1:
                remote.hello(endpoint)
            status = lib.kvf_rpc_open(name)
            if status == lib.KVF_STATUS_LOST:
                raise RemoteError(
                    f"the connection to {endpoint.text} is lost. If another model of this process uses that server, "
                    "close it first"
                )
            check(status)
            stack.callback(lib.kvf_rpc_close, name)
        yield


def device_list(endpoints: Sequence[Endpoint]) -> Any:
    """The devices of connected servers, then those of this machine: a null-terminated array, as llama.cpp wants it."""
    ffi, lib = _lib()
    names = [ffi.new("char[]", str(endpoint).encode()) for endpoint in endpoints]
    count = lib.kvf_rpc_devices(len(names), names, ffi.NULL, 0)
    found = ffi.new("void *[]", count + 1)
    lib.kvf_rpc_devices(len(names), names, found, count)
    return found


def served(endpoint: Endpoint) -> list[tuple[str, int, int]]:
    """(name, free bytes, total bytes) of the devices of a connected server."""
    ffi, lib = _lib()
    local = lib.kvf_rpc_devices(0, [], ffi.NULL, 0)
    devices = device_list([endpoint])
    found = []
    for i in range(len(devices) - 1 - local):
        out = ffi.new("kvf_device *")
        lib.kvf_rpc_device(devices[i], out)
        found.append((ffi.string(out.name).decode(), int(out.free_bytes), int(out.total_bytes)))
    return found


@dataclass(frozen=True, slots=True)
class Speed:
    """round_trip: seconds. sent, received: bytes a second. types: of keys and values that it attends to."""

    round_trip: float
    sent: float
    received: float
    types: tuple[str, ...]


def measure(endpoint: Endpoint) -> Iterator[tuple[str, Speed]]:
    """Of each device of a connected server its name, and how far it is. RemoteError if it dies of what a pool needs."""
    from .status import check

    ffi, lib = _lib()
    devices = device_list([endpoint])
    for i, (name, _, _) in enumerate(served(endpoint)):
        for kind in TRIED_TYPES:
            if lib.kvf_rpc_try(devices[i], KV_TYPES[kind]) != lib.KVF_STATUS_SUCCESS:
                raise RemoteError(f"{endpoint.text} has ended when {name} was to attend to keys of type {kind}")
        times = [ffi.new("double *") for _ in range(3)]
        check(lib.kvf_rpc_measure(devices[i], MEASURED_BYTES, *times))
        round_trip, sent, received = (time[0] for time in times)
        yield name, Speed(round_trip, MEASURED_BYTES / sent, MEASURED_BYTES / received, TRIED_TYPES)


def serve(host: str, port: int, *, devices: Sequence[str], threads: int, cache: Path | None) -> NoReturn:
    """Serve devices of this machine, one client after the other, until a signal ends the process.

    RemoteError if it cannot listen there, EngineError for a device that is not known.
    """
    from .status import check

    ffi, lib = _lib()
    names = [ffi.new("char[]", name.encode()) for name in devices]
    folder = ffi.NULL if cache is None else ffi.new("char[]", str(cache).encode())
    status = lib.kvf_rpc_serve(f"{host}:{port}".encode(), threads, folder, len(names), names)
    if status == lib.KVF_STATUS_LOST:
        raise RemoteError(f"cannot listen at {host}:{port}: is it an IPv4 address of this machine, and the port free?")
    check(status)
    raise KVFlashError(f"the server at {host}:{port} has ended")
