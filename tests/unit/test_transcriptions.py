"""`/v1/audio/transcriptions`: a form with a file becomes a chat, and its answer the text that was heard."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server
from support.posted import BOUNDARY, form

from kvflash_ggml.server import forms

PATH = "/v1/audio/transcriptions"
KIND = f"multipart/form-data; boundary={BOUNDARY}"


class Hearing(FakeModel):
    images = True


def ask(*, prompts: FakePrompts | None = None, path: str = PATH, model: Any = None, **sent: Any) -> Reply:
    server = Server(model or FakeModel(reply=lambda prompt: b" so it is"), prompts or FakePrompts(hears=True))
    reply = server.run(lambda client: client.call("POST", path, **{**form(b"\1\2"), **sent}).done())
    assert isinstance(reply, Reply)
    return reply


@pytest.mark.parametrize("path", [PATH, "/audio/transcriptions"])
def test_a_file_is_heard(path: str) -> None:
    prompts = FakePrompts(hears=True)
    reply = ask(prompts=prompts, path=path)
    assert reply.json["text"] == "so it is"
    assert reply.json["usage"]["type"] == "tokens"
    assert reply.json["usage"]["output_tokens"] == 9
    assert prompts.seen == [b"\1\2"]
    ((message,),) = prompts.rendered
    assert message["content"].startswith("Transcribe audio to text<image-")


def test_the_question_may_be_another() -> None:
    prompts = FakePrompts(hears=True)
    reply = ask(prompts=prompts, **form(b"\1", prompt="Translate", language="de", temperature="0.5", model="any"))
    assert reply.status == 200
    ((message,),) = prompts.rendered
    assert message["content"].startswith("Translate (language: de)<image-")


def test_an_answer_as_plain_text() -> None:
    reply = ask(**form(b"\1", response_format="text"))
    assert (bytes(reply.body), reply.headers["content-type"]) == (b"so it is\n", "text/plain; charset=utf-8")


def test_a_stream() -> None:
    frames = ask(**form(b"\1", stream="true")).frames
    assert {one["type"] for one in frames[:-1]} == {"transcript.text.delta"}
    assert "".join(one["delta"] for one in frames[:-1]) == " so it is"
    assert (frames[-1]["type"], frames[-1]["text"]) == ("transcript.text.done", "so it is")


def test_fields_that_are_not_known_are_named() -> None:
    reply = ask(**form(b"\1", **{"timestamp_granularities[]": "word"}))
    assert reply.headers["x-kvflash-ignored"] == "timestamp_granularities[]"


@pytest.mark.parametrize(
    ("sent", "status", "code", "why"),
    [
        (form(None), 400, "invalid_value", "file: it is missing"),
        (form(b"bad"), 400, "invalid_audio", "file: an image of 3 bytes cannot be decoded"),
        (form(b"\1", response_format="srt"), 400, "invalid_value", "response_format: it is the text \"srt\", and must"),
        (form(b"\1", temperature="warm"), 400, "invalid_value", "temperature: it is the text \"warm\""),
        ({"raw": b"{}", "content_type": "application/json"}, 415, "content_type", "must be multipart/form-data"),
        ({"raw": b"x", "content_type": "multipart/form-data"}, 400, "invalid_form", "a boundary of 1 to 70"),
        ({"raw": b"x", "content_type": KIND}, 400, "invalid_form", "does not begin with its boundary"),
        ({**form(b"\1"), "raw": form(b"\1")["raw"][:-4]}, 400, "invalid_form", "is cut off"),
    ],
)  # fmt: skip
def test_what_is_refused(sent: dict[str, Any], status: int, code: str, why: str) -> None:
    reply = ask(**sent)
    assert (reply.status, reply.json["error"]["code"]) == (status, code)
    assert why in reply.message


def test_a_model_that_hears_nothing() -> None:
    reply = ask(prompts=FakePrompts())
    assert (reply.status, "file: the model 'fake' hears no sound" in reply.message) == (400, True)


# --- the form


def test_fields_of_a_form() -> None:
    """A file's bytes come as they are, whatever they look like."""
    file = b"\r\n--\r\n--between\r\n\r\n" + bytes(range(256))
    sent = form(file, language="dé")
    assert forms.parsed(sent["raw"], sent["content_type"]) == {"language": "dé", "file": file}
    assert forms.parsed(bytearray(form(b"")["raw"]), KIND) == {"file": b""}
    assert forms.parsed(b"--a--", "multipart/form-data; boundary=a") == {}


def part(head: str, content: bytes = b"") -> bytes:
    return b"--a\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"".join(part(f'Content-Disposition: form-data; name="{i}"') for i in range(65)), "more than 64 fields"),
        (part("X: " + "x" * 5000), "no end within 4096 bytes"),
        (part("Content-Type: text/plain"), "has no name"),
        (part('Content-Disposition: form-data; name="n"', b"x" * 70_000), "n has 70000 bytes, and 65536 is the most"),
        (b"--ax" * 1_000_000, "is cut off"),
    ],
)
def test_a_form_that_is_too_much(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forms.parsed(data + b"--a--", "multipart/form-data; boundary=a")
