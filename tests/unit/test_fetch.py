"""Files that requests name by URLs: from public addresses alone, with limits."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.server import fetch

PRIVATE = (
    "127.0.0.1", "10.1.1.1", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "::1", "::",
    "fe80::1", "fc00::1", "fec0::1", "ff02::1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1",
    "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:a00:1::", "2001:db8::1",
    "192.0.0.9", "192.88.99.1", "168.63.129.16", "::ffff:168.63.129.16", "3fff::1",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever name leads there, and though another address of the name is public."""
    assert not fetch.is_public(address)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 80)) for at in ("8.8.8.8", address)]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **more: found)
    monkeypatch.setattr(fetch.socket, "socket", None)
    with pytest.raises(ConfigError, match=r"http://photos.example/a is not fetched: its address is not a public one"):
        fetch.fetch("http://photos.example/a", 99)


def test_addresses_of_the_open_network_are_public() -> None:
    assert all(map(fetch.is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")))


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://a/b", "http://", "http://a:b@c/", "http://a:99999/", "http://[::1", "http://a/\r\nb",
     "http://\u0430/", "http://a:22/", "https://a:8443/"],
)  # fmt: skip
def test_other_urls_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.socket, "getaddrinfo", None)
    with pytest.raises(ConfigError, match=r"is not fetched|is no URL"):
        fetch.fetch(url, 99)


class Web:
    """A server that answers every request with the same bytes, and a name that leads to it."""

    def __init__(self) -> None:
        self.answer: bytes = b""
        self.asked: list[bytes] = []
        self.ended = False
        self.stays = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://photos.example/a.png?b=c"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                self.asked.append(client.recv(4096))
                client.sendall(self.answer)
                if self.answer.endswith(b"..."):
                    self.stays.wait(60)
                for _ in range(100 * self.answer.endswith(b"~")):
                    self.stays.wait(0.05)
                    client.sendall(b"~")
                self.ended = True


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    one, stock = Web(), socket.getaddrinfo

    def found(host: str, *args: Any, **more: Any) -> Any:
        return stock("127.0.0.1" if host == "photos.example" else host, *args, **more)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", found)
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    monkeypatch.setattr(fetch, "PORTS", dict.fromkeys(("http", "https"), one.socket.getsockname()[1]))
    yield one
    one.stays.set()
    one.socket.close()


def test_a_file_is_fetched(web: Web) -> None:
    for head in (b"Content-Length: 5\r\n", b""):
        web.answer = b"HTTP/1.1 200 OK\r\n" + head + b"\r\nhello"
        assert fetch.fetch(web.url, 5) == b"hello"
        assert web.asked[-1].startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: photos.example")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n",
            r"leads elsewhere \(302\), which is not followed",
        ),
        (b"HTTP/1.1 404 No\r\n\r\n", "its server answers 404"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello!", "has more than 5 bytes, which is the most"),
        (CHUNKED + b"6\r\nhello!\r\n0\r\n\r\n", "has more than 5 bytes"),
        (CHUNKED + b"-1\r\n" + bytes(200_000) + b"...", "cannot be fetched: (?!it takes longer)"),
        (CHUNKED + b"-5\r\nhello", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", "cannot be fetched"),
        (b"SSH-2.0-x\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
    ],
)
def test_what_cannot_be_had_is_an_error(answer: bytes, why: str, web: Web) -> None:
    web.answer = answer
    with pytest.raises(ConfigError, match=why):
        fetch.fetch(web.url, 5, 60.0)
    assert len(web.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [b"...", b"HTTP/1.1 200 OK\r\nA: ...", b"HTTP/1.1 200 OK\r\n\r\n...", b"HTTP/1.1 200 OK\r\nA: ~",
     b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n~"],
)  # fmt: skip
def test_a_server_that_does_not_end_is_left(answer: bytes, web: Web) -> None:
    web.answer = answer
    with pytest.raises(ConfigError, match=r"longer than 0.3 seconds"):
        fetch.fetch(web.url, 99, 0.3)
    assert not web.ended, "it is left, and not waited for"


def test_a_look_up_that_does_not_end_is_left(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **more: web.stays.wait(60))
    with pytest.raises(ConfigError, match=r"longer than 0.1 seconds"):
        fetch.fetch(web.url, 99, 0.1)
    assert not web.stays.is_set(), "it is left, and not waited for"


def test_time_that_ends_between_a_socket_and_its_tls_is_seen(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would end the handshake then."""
    stock, made = ssl.SSLContext.wrap_socket, threading.Timer

    def timer(seconds: float, end: Any) -> threading.Timer:
        monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda *a, **more: (stock(*a, **more), end())[0])
        return made(60, lambda: None)

    monkeypatch.setattr(fetch.threading, "Timer", timer)
    web.answer = b"..."
    with pytest.raises(ConfigError, match=r"longer than 5 seconds"):
        fetch.fetch(web.url.replace("http:", "https:"), 99, 5.0)
    assert web.asked in ([], [b""])


def test_the_look_up_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 11.0))
    monkeypatch.setattr(fetch.time, "monotonic", clock.__next__)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80))]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **more: found)
    monkeypatch.setattr(fetch.socket, "socket", None)
    with pytest.raises(ConfigError, match=r"longer than 10 seconds"):
        fetch.fetch("http://photos.example/a", 99)


def test_a_server_without_a_certificate_is_refused(web: Web) -> None:
    web.answer = b"HTTP/1.1 200 OK\r\n\r\n"
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetch.fetch(web.url.replace("http:", "https:"), 99, 5.0)
