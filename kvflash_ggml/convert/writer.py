"""Writes a GGUF file from front to back. Its fields come from another file, or from values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..errors import ConversionError
from ..files import check_writable, replacing
from ..gguf import reader, target, types, verify
from ..gguf.reader import ALIGNMENT, Field
from ..gguf.types import Bytes, TensorType
from ..logs import Progress

VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A tensor to write. shape: the length of a row first. pieces: gives its bytes in order, and is called once."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Bytes]]

    @property
    def nbytes(self) -> int:
        return types.nbytes(self.kind, self.shape)


def check_output(out: Path, *read: Path | None) -> None:
    """Raise ConfigError if `out` cannot be written, ConversionError if it is one of the files to read.

    Of a folder these are all but GGUF files.
    """
    check_writable(out)
    if not out.exists():
        return
    folders = [path for path in read if path is not None and path.is_dir()]
    inside = [path for folder in folders for path in folder.rglob("*") if path.suffix != ".gguf"]
    for source in (*read, *inside):
        if source is not None and source.exists() and out.samefile(source):
            raise ConversionError(
                out.name, "the output", found="an input", wanted="another file", remedy="Name a new file to write."
            )


def write(file: BinaryIO, fields: Sequence[Field], tensors: Sequence[Planned], progress: Progress) -> None:
    """Write fields and tensors. One piece of a tensor is in memory at a time. progress: bytes written, bytes in all."""
    fields = [field for field in fields if field.name != "general.alignment"]  # ours is the usual one
    file.write(struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(fields)))
    for field in fields:
        file.write(_text(field.name) + struct.pack("<I", field.kind) + field.raw)
    offset = 0
    for tensor in tensors:
        file.write(_text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
        file.write(struct.pack("<IQ", tensor.kind.id, offset))
        offset += _padded(tensor.nbytes)
    file.write(bytes(-file.tell() % ALIGNMENT))
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    for tensor in tensors:
        size = 0
        for piece in tensor.pieces():
            file.write(piece.data)
            size += piece.nbytes
            progress(done + size, total)
        if size != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {size} bytes were made, its shape asks for {tensor.nbytes}")
        done += size
        file.write(bytes(_padded(size) - size))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def bind(
    source: Path,
    out: Path,
    *,
    model: Path,
    rope_differs: bool = False,
    called: str | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write the drafter `source` to `out` with the keys of the target `model`. Return a description for the user.

    The new keys replace old ones; tensors do not change. called: the name in errors. rope_differs: accept another RoPE
    base. Raises ConversionError if the drafter does not fit the target's shape, ConfigError if `out` cannot be written.
    """
    check_output(out, source, model)
    file, aim = reader.read(source, called=called), reader.read(model)
    file = replace(file, fields={name: field for name, field in file.fields.items() if name not in target.KEYS})
    verify.check(file, aim, rope_differs=rope_differs)
    fields = [*file.fields.values(), *target.keys_of(target.describe(aim))]
    tensors = [
        Planned(name=tensor.name, kind=tensor.kind, shape=tensor.shape, pieces=partial(file.pieces, tensor))
        for tensor in file.tensors.values()
    ]
    with replacing(out) as made:
        write(made, fields, tensors, progress)
        made.flush()
        return verify.verify(
            Path(made.name), model=model, rope_differs=rope_differs, called=called or out.name, progress=progress
        )
