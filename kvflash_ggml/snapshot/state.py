"""A session as bytes: enough to continue in this or another process, with the same blocks in the same places.

Layout: magic, length and checksum of the header, header (JSON), then the sections it lists, each with its size and
checksum: token ids, what is not pooled (recurrent state, sliding windows), and one page image per chunk. Everything is
checked before the session is touched.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import CHUNK
from ..errors import HostMemoryError, SnapshotError
from ..pool.pager import ABSENT
from ..session import Session

if TYPE_CHECKING:
    from ..native.engine import Layer

MAGIC = b"KVFSTAT1"
_PREFIX = struct.Struct("<8sII")


def dump(session: Session) -> bytes:
    """The whole session. Pages that are only on the device are copied out first."""
    sections = [session.tokens.astype("<i4").tobytes(), session.engine.get_state(), *pages(session)]
    header = {
        "fingerprint": _fingerprint(session),
        "blocks": [chunk.block for chunk in session.pager.chunks],
        "sections": [[len(data), zlib.crc32(data)] for data in sections],
    }
    text = json.dumps(header).encode()
    return b"".join([_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)), text, *sections])


def pages(session: Session) -> list[bytes]:
    """One image per chunk, in the order of the text; the last may be partly filled."""
    return [
        session.store.bytes_of(c) if chunk.on_host else read_block(session, chunk.block)
        for c, chunk in enumerate(session.pager.chunks)
    ]


def read_block(session: Session, block: int) -> bytes:
    """The bytes of one block of the pool."""
    engine = session.engine
    size = engine.info.page_bytes
    image = engine.alloc(size)
    if not image:
        raise HostMemoryError(f"could not get {size} bytes of host memory to copy a chunk: free memory")
    try:
        engine.wait(engine.page_out([block], [image]))
        return bytes(engine.view(image, size))
    finally:
        engine.free(image)


def load(session: Session, data: bytes) -> None:
    """Put a dumped session in place of what this one holds. SnapshotError, and nothing changed, if it does not fit."""
    header, body = _read_header(data)
    ours = _fingerprint(session)
    for name, value in ours.items():
        theirs = header["fingerprint"].get(name)
        if theirs != value:
            raise SnapshotError(f"the state was saved with {name} = {theirs}, this session has {value}")
    sections = _read_sections(header["sections"], body)
    if len(sections) < 2 or len(sections[0]) % 4:
        raise SnapshotError("the state has no tokens")
    tokens = np.frombuffer(sections[0], "<i4")
    images, blocks = sections[2:], header["blocks"]
    chunks = -(-len(tokens) // CHUNK)
    resident = [block for block in blocks if block != ABSENT]
    sound = (
        len(tokens) <= session.n_ctx
        and len(images) == len(blocks) == chunks
        and all(len(image) == session.engine.info.page_bytes for image in images)
        and all(type(block) is int and ABSENT <= block < session.pager.blocks.count for block in blocks)
        and len(set(resident)) == len(resident)
    )
    if not sound:
        raise SnapshotError("the state contradicts itself: tokens, pages and blocks do not match")
    session.restore(tokens, images, blocks, sections[1])


def _fingerprint(session: Session) -> dict[str, Any]:
    """What must be equal for the bytes to mean the same."""
    info = session.engine.info
    return {
        "chunk": CHUNK,
        "pool": info.n_slots,
        "type_k": info.type_k,
        "type_v": info.type_v,
        "n_swa": info.n_swa,
        "recurrent": info.recurrent,
        "layers": [_shape(layer) for layer in session.engine.layers],
    }


def _shape(layer: Layer) -> list[int]:
    values = asdict(layer)
    values.pop("scale", None)  # known only where queries are captured
    return list(values.values())


def _read_header(data: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(data) < _PREFIX.size:
        raise SnapshotError(f"a state of {len(data)} bytes is too short")
    magic, size, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotError(f"this is not a state of a paged session (it begins with {magic!r})")
    view = memoryview(data)[_PREFIX.size :]
    if size > len(view) or zlib.crc32(view[:size]) != checksum:
        raise SnapshotError("the header of the state is damaged")
    try:
        header = json.loads(bytes(view[:size]))
        if not all(isinstance(header[key], kind) for key, kind in _HEADER.items()):
            raise TypeError("a field has the wrong type")
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise SnapshotError(f"the header of the state cannot be read: {err}") from err
    return header, view[size:]


_HEADER = {"fingerprint": dict, "blocks": list, "sections": list}


def _read_sections(sizes: list[Any], body: memoryview) -> list[bytes]:
    at = 0
    sections: list[bytes] = []
    for entry in sizes:
        try:
            size, checksum = entry
        except (TypeError, ValueError) as err:
            raise SnapshotError(f"section {len(sections)} of the state has no size and checksum") from err
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise SnapshotError(f"section {len(sections)} of the state does not fit in its {len(body)} bytes")
        end = at + size
        section = bytes(body[at:end])
        if zlib.crc32(section) != checksum:
            raise SnapshotError(f"section {len(sections)} of the state is damaged")
        sections.append(section)
        at = end
    if at != len(body):
        raise SnapshotError(f"the state has {len(body) - at} bytes that belong to nothing")
    return sections
