"""Devices of ggml's RPC servers: connects, lists and measures them, and serves one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import remote
from ..constants import KV_TYPES
from ..errors import DeviceLost, KVFlashError, RemoteError
from ..remote import Endpoint
from . import library

if TYPE_CHECKING:
    from .info import DeviceInfo

MEASURED_BYTES = 4 << 20
TRIED_TYPES = ("f16", "q8_0")

_met: dict[str, int] = {}
"""Endpoints that this process has connected to, and how many devices they had."""


def _lib() -> tuple[Any, Any]:
    library.load()
    from ._kvf import ffi, lib

    return ffi, lib


@contextlib.contextmanager
def connected(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Connect to these servers. RemoteError if one cannot be used, UnsupportedError in a build without RPC.

    An error within becomes RemoteError if a server was lost: ggml reports nothing, and answers with zeros.
    """
    from .status import check

    ffi, lib = _lib()
    with contextlib.ExitStack() as stack:
        for endpoint in endpoints:
            name = str(endpoint).encode()
            if lib.kvf_rpc_state(name) == -1:
                _check_server(endpoint)
            status = lib.kvf_rpc_open(name)
            if status == lib.KVF_STATUS_LOST:
                raise RemoteError(
                    f"the connection to {endpoint.text} is lost. If another model of this process uses that server, "
                    "close it first"
                )
            check(status)
            stack.callback(lib.kvf_rpc_close, name)
            _met[str(endpoint)] = lib.kvf_rpc_devices(name, ffi.NULL, 0)
        try:
            yield
        except Exception as err:
            lost = [endpoint.text for endpoint in endpoints if lib.kvf_rpc_state(str(endpoint).encode()) == 1]
            if not lost or isinstance(err, (RemoteError, DeviceLost)):
                raise
            raise RemoteError(f"the connection to {lost[0]} was lost meanwhile") from err


def _check_server(endpoint: Endpoint) -> None:
    """Check that a server can be used. ggml keeps the devices of an endpoint as they were when this process met it."""
    known = _met.get(str(endpoint))
    if known is None:
        remote.hello(endpoint)
    elif (count := remote.device_count(endpoint)) != known:
        raise RemoteError(
            f"{endpoint.text} has {count} devices, and had {known} when this process connected to it first: it was "
            "started again with others. Use it in a new process, or let it listen at another port"
        )


def served(endpoint: Endpoint) -> tuple[DeviceInfo, ...]:
    """Return the devices of a connected server."""
    from .info import read_device

    ffi, lib = _lib()
    name = str(endpoint).encode()
    count = lib.kvf_rpc_devices(name, ffi.NULL, 0)
    raw = ffi.new("kvf_device[]", count)
    lib.kvf_rpc_devices(name, raw, count)
    return tuple(map(read_device, raw))


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """round_trip: seconds. sent, received: bytes a second. types: of keys and values that it attends to."""

    round_trip: float
    sent: float
    received: float
    types: tuple[str, ...]


def measure(endpoint: Endpoint) -> Iterator[tuple[str, LinkSpeed]]:
    """Yield the name and the distance of each device of a server. RemoteError if it dies of what a pool needs."""
    from .status import check

    ffi, lib = _lib()
    for device in served(endpoint):
        name = device.name.encode()
        for kind in TRIED_TYPES:
            status = lib.kvf_rpc_try(name, KV_TYPES[kind])
            if status == lib.KVF_STATUS_LOST:
                raise RemoteError(f"{endpoint.text} has ended when {device.name} was to attend to keys of type {kind}")
            check(status)
        times = [ffi.new("double *") for _ in range(3)]
        check(lib.kvf_rpc_measure(name, MEASURED_BYTES, *times))
        round_trip, sent, received = (time[0] for time in times)
        yield device.name, LinkSpeed(round_trip, MEASURED_BYTES / sent, MEASURED_BYTES / received, TRIED_TYPES)


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
