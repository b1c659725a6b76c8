"""Parses forms with files, as `multipart/form-data`, from a body that is in memory already."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser

MEDIA_TYPE = "multipart/form-data"

MAX_FIELDS = 64

MAX_HEAD = 4 << 10
"""Bytes before the content of a field."""

MAX_BOUNDARY = 70
"""Characters, by RFC 2046."""

MAX_TEXT = 64 << 10
"""Bytes of a field that is no file."""


def parsed(data: bytes | bytearray, content_type: str) -> dict[str, str | bytes]:
    """Return the fields by name: a file as bytes, any other as text. ValueError for what is no form, or too much."""
    boundary = _header("content-type", content_type).get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise ValueError(f"the content type of a form has a boundary of 1 to {MAX_BOUNDARY} ASCII characters")
    mark, found = b"\r\n--" + boundary.encode(), dict[str, str | bytes]()
    if not data.startswith(mark[2:]):
        raise ValueError("the form does not begin with its boundary")
    at = len(mark) - 2
    while data[at : at + 2] == b"\r\n":
        if len(found) == MAX_FIELDS:
            raise ValueError(f"the form has more than {MAX_FIELDS} fields: send fewer")
        begin = data.find(b"\r\n\r\n", at, at + MAX_HEAD)
        if begin < 0:
            raise ValueError(f"the head of a field has no end within {MAX_HEAD} bytes: shorten it")
        end = data.find(mark, begin + 2)
        if end < 0:
            break
        name, is_file = _named(bytes(data[at + 2 : begin]))
        content = bytes(data[begin + 4 : end])
        found[name] = content if is_file else _text(name, content)
        at = end + len(mark)
    if data[at : at + 2] != b"--":
        raise ValueError("the form is cut off: it does not end with its boundary")
    return found


def _header(name: str, value: str) -> Message:
    made = Message()
    made[name] = value
    return made


def _named(head: bytes) -> tuple[str, bool]:
    """Return the name of a field, and whether it is a file."""
    said = BytesHeaderParser().parsebytes(head)
    name = said.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise ValueError("a field of the form has no name")
    return name, said.get_param("filename", header="content-disposition") is not None


def _text(name: str, content: bytes) -> str:
    if len(content) > MAX_TEXT:
        raise ValueError(f"{name[:40]} has {len(content)} bytes, and {MAX_TEXT} is the most of a text: send a file")
    return content.decode("utf-8", "replace")
