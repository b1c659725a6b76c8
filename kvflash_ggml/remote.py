"""Servers of devices on other machines: how they are named, who is trusted, and whether one answers.

Everything that can be wrong with an endpoint shows here, over a connection of our own, before ggml makes its.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import ConfigError, RemoteError

PORT = 50052
PROTOCOL = (7, 0)
"""Version of ggml's RPC protocol that this build speaks: servers with the same major number and no newer minor one."""

SECONDS = 3.0
"""How long a server may take to accept a connection, and to say which protocol it speaks."""

RISK = (
    "RPC has neither a password nor encryption: anybody who reaches the port controls the server's machine, and "
    "anybody on the wire reads prompts and weights"
)
TUNNEL = "ssh -N -L {port}:127.0.0.1:{port} HOST"

_HELLO = 14
_CAPS = 24
_REPLY = struct.Struct(f"<Q3B{1 + _CAPS}x")
_DEVICE_COUNT = 15
_COUNT = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An IPv4 address in numbers, and a port. text: as it was given."""

    text: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def find(text: str, *, trust: bool = False) -> Endpoint:
    """Read "host:port" or "host", and look the host up.

    trust: any address will do, not only those of this machine and of private networks. ConfigError for what is no
    endpoint, RemoteError for a host that is not known or not trusted.
    """
    host, colon, number = text.strip().rpartition(":")
    if not colon:
        host, number = number, str(PORT)
    if not host or ":" in host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise ConfigError(f"{text!r} is no server: write host:port, as 192.168.1.7:{PORT} (IPv4)")
    try:
        address = socket.getaddrinfo(host, int(number), socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as err:
        raise RemoteError(f"{text}: the host {host} is not known ({err})") from err
    if not trust and not ipaddress.ip_address(address).is_private:
        raise RemoteError(
            f"{text} is {address}, an address of the open internet. {RISK}. Use a tunnel "
            f"({TUNNEL.format(port=number)}, then 127.0.0.1:{number}), or rpc_trust=True (--rpc-trust)"
        )
    return Endpoint(text, str(address), int(number))


def find_all(texts: Sequence[str], *, trust: bool = False) -> list[Endpoint]:
    """Find several servers, as `find` does one. ConfigError if one of them is named twice."""
    found = [find(text, trust=trust) for text in texts]
    seen: dict[str, Endpoint] = {}
    for endpoint in found:
        if (other := seen.setdefault(str(endpoint), endpoint)) is not endpoint:
            raise ConfigError(f"rpc names one server twice: {other.text} and {endpoint.text}")
    return found


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can reach an address. ValueError if it is no IPv4 address."""
    return ipaddress.IPv4Address(address).is_loopback


def hello(endpoint: Endpoint) -> tuple[int, int, int]:
    """Ask for the version of the protocol that a server speaks. RemoteError if it cannot be used."""
    with _connected(endpoint) as connection:
        return _greet(connection, endpoint)


def device_count(endpoint: Endpoint) -> int:
    """Ask how many devices a server has. RemoteError if it cannot be used."""
    with _connected(endpoint) as connection:
        _greet(connection, endpoint)
        connection.sendall(struct.pack("<BQ", _DEVICE_COUNT, 0))
        reply = _receive(connection, _COUNT.size)
        return int(_COUNT.unpack(reply)[1]) if len(reply) == _COUNT.size else 0


@contextlib.contextmanager
def _connected(endpoint: Endpoint) -> Iterator[socket.socket]:
    try:
        with socket.create_connection((endpoint.address, endpoint.port), timeout=SECONDS) as connection:
            yield connection
    except RemoteError:
        raise
    except OSError as err:
        raise RemoteError(
            f"nobody answers at {endpoint.text} ({err}). Start a server there: kvflash-run rpc serve"
        ) from err


def _greet(connection: socket.socket, endpoint: Endpoint) -> tuple[int, int, int]:
    try:
        connection.sendall(struct.pack(f"<BQ{_CAPS}x", _HELLO, _CAPS))
        reply = _receive(connection, _REPLY.size)
    except TimeoutError as err:
        raise RemoteError(
            f"{endpoint.text} takes connections, but has not answered for {SECONDS:g} seconds: it serves another "
            "client (one at a time), or it is no RPC server"
        ) from err
    size, major, minor, patch = _REPLY.unpack(reply) if len(reply) == _REPLY.size else (0, 0, 0, 0)
    if size != _REPLY.size - 8:
        raise RemoteError(f"{endpoint.text} is no RPC server, or one of another protocol: it answered {reply[:16]!r}")
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise RemoteError(
            f"{endpoint.text} speaks protocol {major}.{minor}, this build {PROTOCOL[0]}.{PROTOCOL[1]}: install the "
            "same version of kvflash-ggml on both machines"
        )
    return major, minor, patch


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive up to `size` bytes; fewer if the other side closes, or answers with something that has no such size."""
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
        if len(data) >= 8 and data[:8] != struct.pack("<Q", size - 8):
            break
    return data


def free_port(host: str) -> int:
    """Find a port of this machine that nobody listens at."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
