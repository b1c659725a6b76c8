"""RPC servers of this machine's CPU, one thread each, in processes of their own; and wires to them."""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator

import pytest

from kvflash_ggml.native import library

SERVE = [sys.executable, "-m", "kvflash_ggml", "rpc", "serve", "--port", "0", "-t", "1", "--device", "CPU"]

REPLIES = {0, 1, 2, 3, 7, 8, 9, 11, 13, 15}
"""Commands that are answered, of protocol 7."""

COMPUTE = ("graph", "again")

NAMES = {6: "set", 8: "get", 9: "copy", 10: "graph", 11: "memory", 16: "again"}


class Server:
    """endpoint: "127.0.0.1:port"."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if found := re.search(r"serving at (\S+:\d+),", line):
                self.endpoint = found[1]
                return
        raise AssertionError(f"the server has ended: {said}")

    def wait_until_it_listens(self) -> None:
        host, port = self.endpoint.split(":")
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"nobody listens at {self.endpoint}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> int:
        """Its exit code."""
        self._process.kill()
        return self._process.wait()

    def end(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Wire:
    """Between a client and a server: counts the messages by what they are, and can cut the connection at one.

    sent: by name. cut: which of them, and how many more come through; or None. at_least: the bytes that a "get"
    asks for when it counts.
    """

    def __init__(self, server: Server) -> None:
        self.sent: Counter[str] = Counter()
        self.cut: tuple[Collection[str], int] | None = None
        self.at_least = 0
        self.server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, port = self.server.endpoint.split(":")
                with client, socket.create_connection((host, int(port))) as server, contextlib.suppress(EOFError):
                    for one in (client, server):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        hello = True
        while True:
            head = _take(client, 9)
            command, size = struct.unpack("<BQ", head)
            body = _take(client, size)
            name = NAMES.get(command, "other")
            counts = name != "get" or struct.unpack("<Q", body[-8:])[0] >= self.at_least
            if self.cut is not None and name in self.cut[0] and counts:
                which, left = self.cut
                if left == 0:
                    return
                self.cut = which, left - 1
            self.sent[name] += 1
            server.sendall(head + body)
            if hello or command in REPLIES:
                reply = _take(server, 8)
                client.sendall(reply + _take(server, struct.unpack("<Q", reply)[0]))
            hello = False


def _take(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def has_rpc() -> bool:
    """Asked of ggml: what a build was made with may have been left out where it is installed."""
    library.load()
    find = ctypes.CDLL(None).ggml_backend_reg_by_name
    find.restype = ctypes.c_void_p
    return find(b"RPC") is not None


@contextlib.contextmanager
def running(count: int) -> Iterator[list[Server]]:
    """So many servers, which are started at the same time. Skips the test in a build that cannot have them."""
    if not has_rpc():
        pytest.skip("this build has no RPC backend")
    servers: list[Server] = []
    try:
        servers += [Server() for _ in range(count)]
        for server in servers:
            server.wait_until_it_listens()
        yield servers
    finally:
        for server in servers:
            server.end()


def device_names(endpoints: list[str]) -> list[str]:
    """Of their devices: numbers depend on how many servers this process has met before."""
    from kvflash_ggml import remote
    from kvflash_ggml.native import remote as connections

    found = remote.find_all(endpoints)
    with connections.connected(found):
        return [device.name for endpoint in found for device in connections.served(endpoint)]
