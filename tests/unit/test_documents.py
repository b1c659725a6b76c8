"""`/kvflash/pdf`: the text of a PDF that may be hostile."""

from __future__ import annotations

import importlib.util
import zlib
from typing import Any

import pytest
from support.asgi import Reply
from support.documents import pdf
from support.fake_server import Server

from kvflash_ggml.media import files

pytest.importorskip("pypdf", reason="needs the extra pdf")


def send(data: bytes, kind: str = "application/pdf", **settings: Any) -> Reply:
    server = Server(**settings)
    reply = server.run(lambda client: client.call("POST", "/kvflash/pdf", raw=data, content_type=kind).done())
    assert isinstance(reply, Reply)
    return reply


def test_the_text_of_all_pages() -> None:
    reply = send(pdf("Hello there", "A second page"))
    assert reply.json == {"pages": 2, "text": "Hello there\n\nA second page"}


def expanding() -> bytes:
    """A page whose content is 200 MB of zeros, packed."""
    packed = zlib.compress(bytes(200 << 20), 1)
    page = f"<< /Length {len(packed)} /Filter /FlateDecode >>\nstream\n".encode() + packed
    return pdf("x").replace(b"<< /Length 32 >>\nstream\nBT /F1 12 Tf 72 720 Td (x) Tj ET", page)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no PDF", "a PDF of 6 bytes cannot be read: it is damaged"),
        (pdf("x")[:100], "cannot be read"),
        (pdf(" "), "a PDF of 1 pages has no text: it may be a scan"),
        (expanding(), "a PDF of "),
    ],
)
def test_what_is_no_text_costs_one_request(data: bytes, why: str) -> None:
    reply = send(data)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_value")
    assert why in reply.message


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(pdf("x"), max_body=300).status == 413
    assert send(pdf("x"), "application/json").status == 415
    monkeypatch.setattr(files, "MOST_TEXT", 5)
    assert "a PDF has more than 5 bytes of text: send a part of its pages" in send(pdf("a longer text")).message


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("kvflash_ggml.server.documents.find_spec", lambda name: None if name == "pypdf" else find(name))
    reply = send(pdf("x"))
    assert (reply.status, "pdf]" in reply.message) == (501, True), reply.message
