"""Files from public addresses of http and https, for requests that name them: with limits, and without redirects."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from concurrent import futures
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..errors import ConfigError, brief

SECONDS = 10.0
"""For all files of a request, to the last byte."""

_PIECE = 64 << 10
_HEADERS = {"User-Agent": "kvflash", "Accept": "image/*", "Connection": "close"}
PORTS = {"http": 80, "https": 443}
"""The only ports that are asked, by scheme."""

_IPV6 = ipaddress.ip_network("2000::/3")
"""What is routed. The rest has addresses of this network, some of IPv4."""

_CLOSED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")))
"""Not public either, though some versions of Python say so. One serves the hosts of a cloud."""


def fetch(url: str, limit: int, seconds: float = SECONDS) -> bytes:
    """Fetch the file at a URL, of `limit` bytes at most.

    Only a public address is asked, and no other one than was looked at: names may lead to another one the next time.
    seconds: from the look-up of the name to the last byte. ConfigError for a URL that is refused, and for what cannot
    be fetched.
    """
    parts, port = _parts(url)
    until = time.monotonic() + seconds
    slow = f"{brief(url)} cannot be fetched: it takes longer than {seconds:.2g} seconds"
    assert parts.hostname is not None
    try:
        found = _look_up(parts.hostname, port).result(seconds)
    except futures.TimeoutError as err:
        raise ConfigError(slow) from err
    except (OSError, UnicodeError) as err:
        raise ConfigError(f"{brief(url)} cannot be fetched: the name is not known ({err})") from err
    if not all(is_public(str(at[0])) for *_, at in found):
        raise ConfigError(f"{brief(url)} is not fetched: its address is not a public one")
    left = until - time.monotonic()
    if left <= 0:
        raise ConfigError(slow)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with contextlib.closing(_Connection(parts.hostname, port, found[0], parts.scheme == "https", left)) as connection:
        late = threading.Timer(left, connection.end)
        late.start()
        try:
            connection.request("GET", path, headers=_HEADERS)
            with connection.getresponse() as reply:
                made = _body(reply, url, limit)
        except ConfigError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as err:
            connection.ended |= isinstance(err, TimeoutError)
            if not connection.ended:
                raise ConfigError(f"{brief(url)} cannot be fetched: {brief(err)}") from err
        finally:
            late.cancel()
        if connection.ended:
            raise ConfigError(slow)
        return made


def _look_up(host: str, port: int) -> futures.Future[list[Any]]:
    """Look up the addresses of a host. Nothing cuts a look-up short: its thread ends when the resolver gives up."""
    found: futures.Future[list[Any]] = futures.Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as err:
            found.set_exception(err)

    threading.Thread(target=look_up, name="kvflash-look-up", daemon=True).start()
    return found


def is_public(text: str) -> bool:
    """Tell whether an address is one of the open network, and no host's or local network's."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in _IPV6 or address.sixtofour is not None or address.teredo is not None:
            return False
    if any(address in network for network in _CLOSED):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _parts(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError as err:
        raise ConfigError(f"{brief(url)} is no URL: {err}") from err
    if port is None or not parts.hostname or parts.username is not None or not url.isascii() or not url.isprintable():
        raise ConfigError(f"{brief(url)} is not fetched: give a URL of http or https, without a name and a password")
    if port not in PORTS.values():
        ports = " and ".join(map(str, PORTS.values()))
        raise ConfigError(f"{brief(url)} is not fetched: its port is {port}, and {ports} are all that are asked")
    return parts, port


def _body(reply: http.client.HTTPResponse, url: str, limit: int) -> bytes:
    if 300 <= reply.status < 400:
        raise ConfigError(f"{brief(url)} leads elsewhere ({reply.status}), which is not followed: give that URL")
    if reply.status != 200:
        raise ConfigError(f"{brief(url)} cannot be fetched: its server answers {reply.status}")
    made, piece = bytearray(), memoryview(bytearray(_PIECE))
    while count := reply.readinto(piece):  # read() returns all that comes where a chunk's size is negative
        made += piece[:count]
        if len(made) > limit:
            raise ConfigError(f"{brief(url)} has more than {limit} bytes, which is the most: give a smaller file")
    if reply.length:
        raise http.client.IncompleteRead(b"", reply.length)
    return bytes(made)


class _Connection(http.client.HTTPConnection):
    """To an address that was looked at, wherever the host's name leads by now. ended: was it too slow?"""

    def __init__(self, host: str, port: int, found: tuple[object, ...], secure: bool, seconds: float) -> None:
        super().__init__(host, port, timeout=seconds)
        self._found, self._secure = found, secure
        self._reached: socket.socket | None = None  # http.client forgets it when the body begins
        self.ended = False

    def connect(self) -> None:
        family, kind, protocol, _, address = self._found
        self.sock = self._reached = socket.socket(family, kind, protocol)  # type: ignore[arg-type]
        self.sock.settimeout(self.timeout)
        self.sock.connect(address)  # type: ignore[arg-type]
        if self._secure:
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._reached = wrapped
            self._check()  # `end` may have found the socket that was wrapped, which has no descriptor any more
            wrapped.do_handshake()
        self._check()

    def _check(self) -> None:
        if self.ended:
            raise TimeoutError

    def end(self) -> None:
        """End the connection from another thread: whoever reads or writes gets an error, or the end."""
        self.ended = True
        if self._reached is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._reached, socket.SHUT_RDWR)  # that of TLS would go on in plain text
