"""Endpoints: how they are written, who is trusted, and what may answer there."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from kvflash_ggml import remote
from kvflash_ggml.cli.main import main
from kvflash_ggml.errors import ConfigError, DeviceLost, KVFlashError, RemoteError

HELLO = struct.pack("<BQ24x", 14, 24)


@contextlib.contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """The endpoint of somebody who answers with this, or takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                heard = b""
                while len(heard) < len(HELLO):
                    heard += client.recv(64)
                assert heard == HELLO
                if reply is None:
                    done.wait(5)
                else:
                    client.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        thread.join()


def version(major: int, minor: int) -> bytes:
    return struct.pack("<Q4B24x", 28, major, minor, 0, 0)


def test_a_server_of_this_protocol_says_its_version() -> None:
    with answering(version(*remote.PROTOCOL)) as text:
        assert remote.hello(remote.find(text)) == (*remote.PROTOCOL, 0)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (version(6, 1), "speaks protocol 6.1, this build 7.0"),
        (version(7, 1), "speaks protocol 7.1, this build 7.0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no RPC server, or one of another protocol: it answered b'HTTP"),
        (b"", "is no RPC server"),
        (b"\x1c\0\0", "is no RPC server"),
        (None, "it serves another client"),
    ],
)
def test_who_cannot_be_used_is_told_apart(reply: bytes | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SECONDS", 0.3)
    with answering(reply) as text, pytest.raises(RemoteError, match=told):
        remote.hello(remote.find(text))


def test_nobody_there() -> None:
    endpoint = remote.find(f"127.0.0.1:{remote.free_port('127.0.0.1')}")
    with pytest.raises(ConnectionError, match=r"nobody answers at 127\.0\.0\.1:.*kvflash-run rpc serve") as caught:
        remote.hello(endpoint)
    assert isinstance(caught.value, KVFlashError)


@pytest.mark.parametrize("text", ["", ":50052", "localhost:", "localhost:0", "localhost:70000", "a:b", "[::1]:50052"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ConfigError, match="is no server: write host:port"):
        remote.find(text)


def test_the_port_can_be_left_out() -> None:
    assert str(remote.find("localhost")) == f"127.0.0.1:{remote.PORT}"


def test_a_server_is_named_once() -> None:
    assert [str(x) for x in remote.find_all(["localhost:1", "127.0.0.1:2"])] == ["127.0.0.1:1", "127.0.0.1:2"]
    with pytest.raises(ConfigError, match=r"one server twice: localhost:1 and 127\.0\.0\.1:1"):
        remote.find_all(["localhost:1", "127.0.0.1:1"])


def test_an_unknown_host() -> None:
    with pytest.raises(RemoteError, match="is not known"):
        remote.find("no-such-host.invalid:1")


def test_only_private_addresses_are_trusted() -> None:
    for address in ("127.0.0.1", "10.1.2.3", "192.168.1.7", "172.16.0.9"):
        remote.find(f"{address}:1")
    with pytest.raises(RemoteError, match=r"8.8.8.8, an address of the open internet.*rpc_trust=True"):
        remote.find("8.8.8.8:1")
    assert remote.find("8.8.8.8:1", trust=True).address == "8.8.8.8"


def test_a_refusal_is_short_sentences() -> None:
    with pytest.raises(RemoteError) as refused:
        remote.find("8.8.8.8:1")
    for told in (str(refused.value), CliRunner().invoke(main, ["rpc", "serve", "--host", "0.0.0.0"]).stderr):
        sentences = re.split(r"[.?!:;]\s", told)
        assert max(len(sentence.split()) for sentence in sentences) <= 25, sentences


def test_check_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(text: str) -> str:
        result = CliRunner().invoke(main, ["rpc", "check", text])
        assert result.exit_code == 2
        return result.stderr

    assert "nobody answers" in run(f"127.0.0.1:{remote.free_port('127.0.0.1')}")
    assert "open internet" in run("8.8.8.8")
    monkeypatch.setattr(remote, "SECONDS", 0.3)
    replies = [(version(6, 0), "protocol 6.0"), (b"HTTP/1.0 400\r\n", "no RPC server"), (None, "another client")]
    for reply, told in replies:
        with answering(reply) as text:
            assert told in run(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7"])
def test_serving_a_network_takes_a_word(host: str) -> None:
    result = CliRunner().invoke(main, ["rpc", "serve", "--host", host])
    assert result.exit_code == 2
    for told in ("--trust-network", "controls the server's machine", "ssh -N -L 50052:127.0.0.1:50052"):
        assert told in result.stderr


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_serving_what_is_no_ipv4_address_is_refused(host: str) -> None:
    result = CliRunner().invoke(main, ["rpc", "serve", "--host", host, "--port", "0"])
    assert result.exit_code == 2
    assert "is no IPv4 address" in result.stderr


def test_a_loss_says_what_is_left() -> None:
    assert "nothing of the text" in str(DeviceLost("10.0.0.2:50052"))
    lost = DeviceLost("10.0.0.2:50052", 640)
    assert (lost.device, lost.kept) == ("10.0.0.2:50052", 640)
    assert "10.0.0.2:50052 does not answer any more; the first 640 tokens" in str(lost)
    assert "salvage=True" in str(lost)
