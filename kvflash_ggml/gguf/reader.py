"""Reads the head of a GGUF file, and checks every number before using it.

Each length is compared with the rest of the file before anything is read or allocated. So a damaged or hostile file
costs no memory, and ends with a ConversionError.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, ConversionError
from . import types
from .types import Bytes, TensorType

_MAGIC = b"GGUF"
_OLD = (b"lmgg", b"tjgg", b"fmgg", b"algg")  # the magic numbers of ggml, ggjt, ggmf and ggla, as they lie in a file
_SHOWN = 3

# magic, version, numbers of tensors and fields; length and text of the first key; type and length of its value
_FIELD = struct.Struct("<4s4x16x8x20sIQ")
FLOAT, TEXT = 6, 8
"""Numbers of types in a file: a number of 32 bits with a point, a text."""

_LONGEST = 64


def check(path: Path) -> None:
    """Raise ConfigError if `path` exists and is no GGUF file. llama.cpp reports a path that does not exist."""
    try:
        str(path).encode()
        start = _start(path)
    except UnicodeEncodeError as error:  # upstream hands the path over in UTF-8
        raise _refusal(Path(ascii(str(path))), "has a name that is not UTF-8: rename it, or link to it") from error
    except OSError as error:
        reason = error.strerror or error
        raise _refusal(path, f"cannot be read ({reason}): check its name, and who may read it") from error
    if start is None:
        return
    if start == _MAGIC:
        return
    if not start:
        raise _refusal(path, "is empty: fetch it again")
    if start in _OLD:
        raise _refusal(path, "is of a format older than GGUF: fetch or convert the model again")
    raise _refusal(path, f"is not a GGUF file, it begins with {start!r}: convert the model, or give its .gguf file")


def _start(path: Path) -> bytes | None:
    """Return the first four bytes of a file, None if the path does not exist. ConfigError if it is no file."""
    if path.is_dir():
        raise _refusal(path, f"is a folder: give {_files(path)}")
    if not path.exists():
        return None
    if not path.is_file():  # to open a pipe would wait for whoever writes into it
        raise _refusal(path, "is a pipe or a device: give the path of a .gguf file")
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def architecture(path: Path) -> str | None:
    """Return the architecture if it is the file's first field, as all writers put it; None otherwise."""
    with path.open("rb") as file:
        start = file.read(_FIELD.size + _LONGEST)
    if len(start) < _FIELD.size:
        return None
    magic, key, kind, length = _FIELD.unpack_from(start)
    if (magic, key, kind) != (_MAGIC, b"general.architecture", TEXT) or length > _LONGEST:
        return None
    return start[_FIELD.size : _FIELD.size + length].decode("utf-8", "replace")


def _files(folder: Path) -> str:
    names = sorted(file.name for file in folder.glob("*.gguf"))
    if not names:
        return "the path of a .gguf file"
    return "one of its files, " + ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"Failed to load model from file: {path} {why}")


ALIGNMENT = 32

PIECE = 16 << 20
"""Maximum bytes of a tensor in memory at a time."""

_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _ARRAY = 4, 9
_MAX_ITEMS = 1 << 20
_MAX_NAME = 1 << 16
_MAX_TENSOR_NAME = 64
_MAX_DIMS = 4
_MAX_COUNT = 1 << 48
_REMEDY = "Fetch the file again, or convert it anew."
_OTHER_TYPE = "Fetch another quantisation of the model, or convert it anew."
_SHARD = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Field:
    """A key and its value. kind: GGUF's number of the value's type. raw: the value's bytes in the file."""

    name: str
    kind: int
    raw: bytes

    @classmethod
    def of(cls, name: str, value: bool | int | float | str | Sequence[int] | Sequence[bool]) -> Field:
        """Make a field. An int becomes u32, a float f32, a list an array of i32 or of bool."""
        if isinstance(value, bool):
            return cls(name, 7, struct.pack("<?", value))
        if isinstance(value, int):
            return cls(name, 4, struct.pack("<I", value))
        if isinstance(value, float):
            return cls(name, 6, struct.pack("<f", value))
        if isinstance(value, str):
            data = value.encode("utf-8", "surrogateescape")
            return cls(name, TEXT, struct.pack("<Q", len(data)) + data)
        kind, code = (7, "?") if isinstance(value[0], bool) else (5, "i")
        return cls(name, _ARRAY, struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value))

    def renamed(self, name: str) -> Field:
        return Field(name, self.kind, self.raw)

    @property
    def is_array(self) -> bool:
        return self.kind == _ARRAY

    @property
    def count(self) -> int:
        """Number of items of an array; 1 otherwise."""
        return int(struct.unpack_from("<Q", self.raw, 4)[0]) if self.is_array else 1

    @property
    def value(self) -> Any:
        """A bool, int, float or str, or a list of them."""
        if self.kind == TEXT:  # llama.cpp reads it up to a zero byte
            return self.raw[8:].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        if not self.is_array:
            return struct.unpack("<" + _SCALARS[self.kind], self.raw)[0]
        kind, count = struct.unpack_from("<IQ", self.raw)
        if kind != TEXT:
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.raw, 12))
        texts, at, length, raw = [], 12, _LENGTH.unpack_from, self.raw
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + length(raw, at)[0]
            texts.append(raw[start:at].decode("utf-8", "surrogateescape"))
        return texts


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. shape: the length of a row first, as in ggml. offset: bytes from the file's beginning."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return types.nbytes(self.kind, self.shape)

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return types.nbytes(self.kind, self.shape[:1])


@dataclass(frozen=True, kw_only=True)
class GGUF:
    """A file's fields and tensors by name, in the file's order. name: the name in errors."""

    path: Path
    name: str
    fields: dict[str, Field]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        value = self.get("general.architecture")
        if not isinstance(value, str):
            raise ConversionError(self.name, "general.architecture", found=value, wanted="a name", remedy=_REMEDY)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field's value by its whole name."""
        field = self.fields.get(key)
        return default if field is None else field.value

    def own(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture: `context_length` for `qwen3.context_length`."""
        return self.get(f"{self.architecture}.{key}", default)

    def pieces(self, tensor: Tensor) -> Iterator[Bytes]:
        """Yield a tensor's rows, [n, bytes of a row], at most PIECE bytes at a time."""
        return file_pieces(self.path, tensor.offset, tensor.nbytes, row=tensor.row)


def file_pieces(path: Path, offset: int, nbytes: int, *, row: int) -> Iterator[Bytes]:
    """Yield rows of `row` bytes from a part of a file, [n, row], at most PIECE bytes at a time.

    The rows are read and not mapped: if another process truncates a mapped file, the system ends this one.
    """
    step = max(1, PIECE // row) * row
    for start in range(0, nbytes, step):
        size = min(step, nbytes - start)
        data = np.fromfile(path, np.uint8, size, offset=offset + start)
        if data.size != size:
            raise ConversionError(
                path.name, "the file", found="shorter than it was", wanted="left alone meanwhile", remedy=_REMEDY
            )
        yield data.reshape(-1, row)


def read(path: Path, *, called: str | None = None) -> GGUF:
    """Read the head of a GGUF file.

    called: the name in errors, for a file with a temporary name. Raises ConversionError for a file that is not sound,
    OSError if it cannot be read.
    """
    if not path.exists():
        raise ConversionError(path.name, "the file", found="not there", wanted="a GGUF file", remedy="Check its path.")
    try:
        check(path)
    except ConfigError as error:
        raise ConversionError(path.name, "the file", found="no GGUF file", wanted="one", remedy=f"{error}.") from error
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, called or path.name, data).read()


def parts(file: GGUF) -> Iterator[GGUF]:
    """Yield the file, and the other parts if it is the first of several. Each part is read when its turn comes."""
    yield file
    split = _SHARD.fullmatch(file.path.name)
    for part in range(2, int(split[2]) + 1) if split else ():
        yield read(file.path.with_name(f"{split[1]}-{part:05}-of-{split[2]}.gguf") if split else file.path)


def all_tensors(file: GGUF) -> list[Tensor]:
    """Return the tensors of the file, and of the other parts if it is the first of several."""
    return [tensor for part in parts(file) for tensor in part.tensors.values()]


class _Reader:
    """A position in the file, which never moves beyond the end."""

    def __init__(self, path: Path, name: str, data: mmap.mmap) -> None:
        self._path = path
        self._name = name
        self._data = data
        self._size = len(data)
        self._at = 4

    def read(self) -> GGUF:
        version = self._number("I")
        if version not in (2, 3):
            other = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            wanted = "2 or 3, little-endian" if other else "2 or 3"
            raise self._refusal("its version", version, wanted)
        n_tensors, n_fields = self._count("tensors", self._number("Q")), self._count("fields", self._number("Q"))
        fields: dict[str, Field] = {}
        for _ in range(n_fields):
            field = self._field()
            if field.name in fields:
                raise self._refusal(f"the key {field.name!r}", "there twice", "one of each")
            fields[field.name] = field
        infos = [self._tensor() for _ in range(n_tensors)]
        tensors = self._placed(infos, self._alignment(fields))
        return GGUF(path=self._path, name=self._name, fields=fields, tensors=tensors)

    def _field(self) -> Field:
        name = self._text("a key", _MAX_NAME)
        kind = self._number("I")
        start = self._at
        if kind == TEXT:
            self._skip(name, self._number("Q"))
        elif kind == _ARRAY:
            self._skip_array(name)
        elif kind in _SCALARS:
            self._skip(name, struct.calcsize(_SCALARS[kind]))
        else:
            raise self._refusal(f"the type of {name!r}", kind, "a type of GGUF")
        return Field(name, kind, self._data[start : self._at])

    def _skip_array(self, name: str) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind == TEXT:
            if count > (self._size - self._at) // 8:
                raise self._refusal(f"the length of {name!r}", count, "no more than the file has room for")
            self._skip_strings(name, count)
        elif kind in _SCALARS:
            self._skip(name, count * struct.calcsize(_SCALARS[kind]))
        else:
            raise self._refusal(f"the type in {name!r}", kind, "numbers, truth values or strings")

    def _skip_strings(self, name: str, count: int) -> None:
        """Skip strings without a call for each: vocabularies have hundreds of thousands, and a user waits."""
        at, last, length = self._at, self._size - _LENGTH.size, _LENGTH.unpack_from
        for _ in range(count):
            if at > last:
                break
            at += _LENGTH.size + length(self._data, at)[0]
        else:
            if at <= self._size:
                self._at = at
                return
        raise self._refusal(name, f"strings up to {at}", f"within the file's {self._size}")

    def _tensor(self) -> Tensor:
        name = self._text("a tensor's name", _MAX_TENSOR_NAME)
        n_dims = self._number("I")
        if n_dims > _MAX_DIMS:
            raise self._refusal(f"the dimensions of {name!r}", n_dims, f"at most {_MAX_DIMS}")
        shape = tuple(self._number("Q") for _ in range(n_dims)) or (1,)  # without dimensions it is one number
        number, offset = self._number("I"), self._number("Q")
        kind = types.BY_ID.get(number)
        if kind is None:
            found = f"{number} ({types.REMOVED[number]})" if number in types.REMOVED else number
            raise self._refusal(f"the type of {name!r}", found, "a type that this version of ggml has", _OTHER_TYPE)
        if not 0 < math.prod(shape) < _MAX_COUNT or shape[0] % kind.block:
            raise self._refusal(f"the shape of {name!r}", shape, f"rows of whole blocks of {kind.block}")
        return Tensor(name, kind, shape, offset)

    def _placed(self, infos: list[Tensor], alignment: int) -> dict[str, Tensor]:
        """Return tensors by name, with offsets from the file's beginning. Refuse overlaps, and ends beyond the file."""
        start = -(-self._at // alignment) * alignment
        placed: dict[str, Tensor] = {}
        end = 0
        for info in sorted(infos, key=lambda tensor: tensor.offset):
            if info.name in placed:
                raise self._refusal(f"the tensor {info.name!r}", "there twice", "one of each")
            if info.offset % alignment or info.offset < end:
                raise self._refusal(
                    f"the place of {info.name!r}", info.offset, f"one of its own, in steps of {alignment}"
                )
            end = info.offset + info.nbytes
            if start + end > self._size:
                missing = start + end - self._size
                raise self._refusal(
                    f"the end of {info.name!r}", f"{missing} bytes behind the file's end", "in the file"
                )
            placed[info.name] = Tensor(info.name, info.kind, info.shape, start + info.offset)
        return {info.name: placed[info.name] for info in infos}

    def _alignment(self, fields: dict[str, Field]) -> int:
        field = fields.get("general.alignment", Field.of("general.alignment", ALIGNMENT))
        if field.kind != _U32 or field.value.bit_count() != 1:
            raise self._refusal("general.alignment", field.value, "a power of two, of 32 bits")
        return int(field.value)

    def _count(self, what: str, value: int) -> int:
        if value > min(_MAX_ITEMS, self._size):
            raise self._refusal(f"the number of {what}", value, f"at most {_MAX_ITEMS}, and in the file")
        return value

    def _text(self, what: str, most: int) -> str:
        length = self._number("Q")
        if not 0 < length < most:
            raise self._refusal(f"the length of {what}", length, f"less than {most}")
        start = self._at
        self._skip(what, length)
        text = self._data[start : self._at].decode("utf-8", "surrogateescape")
        if "\0" in text:  # llama.cpp reads another name: what stands before it
            raise self._refusal(what, ascii(text), "text without a zero byte")
        return text

    def _number(self, code: str) -> int:
        start = self._at
        self._skip("a number", struct.calcsize("<" + code))
        return int(struct.unpack_from("<" + code, self._data, start)[0])

    def _skip(self, what: str, size: int) -> None:
        if size > self._size - self._at:
            raise self._refusal(what, f"{size} bytes at {self._at}", f"within the file's {self._size}")
        self._at += size

    def _refusal(self, what: str, found: object, wanted: str, remedy: str = _REMEDY) -> ConversionError:
        return ConversionError(self._name, what, found=found, wanted=wanted, remedy=remedy)
