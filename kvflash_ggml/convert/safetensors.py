"""Reads the tensors of a Hugging Face checkpoint, and checks every number of their headers before using it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..gguf import types
from ..gguf.reader import file_pieces
from ..gguf.types import Bytes, TensorType

INDEX = "model.safetensors.index.json"

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32"}
_MAX_HEADER = 100 << 20
_MAX_JSON = 64 << 20
_MAX_DIMS = 8
_REMEDY = "Fetch the checkpoint again."


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor in a checkpoint. shape: the length of a row last. offset: bytes from the file's beginning."""

    name: str
    path: Path
    kind: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return types.nbytes(self.kind, self.shape)

    def pieces(self) -> Iterator[Bytes]:
        """Yield its rows, [n, bytes of a row], at most reader.PIECE bytes at a time."""
        return file_pieces(self.path, self.offset, self.nbytes, row=self.shape[-1] * self.kind.size)


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """Read a JSON object from an untrusted file. ConversionError if it is none, OSError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON + 1)
        if len(data) > _MAX_JSON:
            raise ValueError(f"more than {_MAX_JSON} bytes")
        return _object(data)
    except (ValueError, RecursionError) as error:
        raise ConversionError(
            path.name, what, found=f"unreadable ({error})", wanted="a JSON object with one of each key", remedy=_REMEDY
        ) from error


def read_folder(folder: Path) -> dict[str, TensorSource]:
    """Return every tensor of a checkpoint by name. ConversionError for a bad header, or a missing file or tensor."""
    index = folder / INDEX
    found: dict[str, TensorSource] = {}
    for path in _indexed(index) if index.is_file() else _alone(folder):
        for source in read_header(path):
            if source.name in found:
                raise _refusal(path, f"the tensor {source.name!r}", f"in {found[source.name].path.name} too", "once")
            found[source.name] = source
    return found


def read_header(path: Path) -> list[TensorSource]:
    """Return the tensors of one file. ConversionError if its header is not sound."""
    if not path.is_file():
        raise _refusal(path, "the file", "not there", "what the index names")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise _refusal(path, "the length of the header", length, f"2 to {min(_MAX_HEADER, max(size - 8, 0))}")
        text = file.read(length)
    try:
        header = _object(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "the header", f"unreadable ({error})", "a JSON object with one of each key") from error
    header.pop("__metadata__", None)
    start = 8 + length
    sources = [_source(path, name, facts, start=start, room=size - start) for name, facts in header.items()]
    end = start
    for source in sorted(sources, key=lambda source: (source.offset, source.nbytes)):
        if source.offset < end:
            raise _refusal(path, f"the place of {source.name!r}", source.offset, f"behind other tensors, {end} or more")
        end = source.offset + source.nbytes
    return sources


def _source(path: Path, name: str, facts: Any, *, start: int, room: int) -> TensorSource:
    what = f"the entry of {name!r}"
    if not isinstance(facts, dict):
        raise _refusal(path, what, facts, "an object")
    dtype: Any = facts.get("dtype")
    shape: Any = facts.get("shape")
    offsets: Any = facts.get("data_offsets")
    kind = types.BY_NAME.get(_DTYPES.get(dtype, "")) if isinstance(dtype, str) else None
    if kind is None:
        raise ConversionError(
            path.name, f"the dtype of {name!r}", found=dtype, wanted=f"one of {', '.join(_DTYPES)}",
            remedy="Fetch the checkpoint in one of these types.",
        )  # fmt: skip
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMS or 0 in shape:
        raise _refusal(path, f"the shape of {name!r}", shape, f"up to {_MAX_DIMS} positive lengths")
    if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= room:
        raise _refusal(path, f"the place of {name!r}", offsets, f"a range within the {room} bytes of the file")
    shape = tuple(shape) or (1,)
    if types.nbytes(kind, shape) != offsets[1] - offsets[0]:
        wanted = f"{types.nbytes(kind, shape)} bytes for {list(shape)}"
        raise _refusal(path, f"the place of {name!r}", f"{offsets[1] - offsets[0]} bytes", wanted)
    return TensorSource(name, path, kind, shape, start + offsets[0])


def _indexed(index: Path) -> list[Path]:
    names = read_json(index, what="the index").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise _refusal(index, "weight_map", names, "the file of each tensor")
    files = sorted(set(names.values()))
    for name in files:
        if name != Path(name).name or name in ("", ".", ".."):
            raise _refusal(index, "a file in weight_map", name, "a name without a folder")
    listed = {source.name for name in files for source in read_header(index.parent / name)}
    if missing := sorted(names.keys() - listed):
        raise _refusal(index, f"the tensor {missing[0]!r}", "in none of its files", "where weight_map says")
    return [index.parent / name for name in files]


def _alone(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        pickled = not files and any(folder.glob("*.bin"))
        raise ConversionError(
            folder.name, "the .safetensors files without an index", found=found,
            wanted="one file, or an index beside them",
            remedy="With --target-model-dir llama.cpp's own converter reads torch's files." if pickled else _REMEDY,
        )  # fmt: skip
    return files


def _object(text: bytes) -> dict[str, Any]:
    value = json.loads(text.decode("utf-8"), object_pairs_hook=_one_of_each)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 48 for x in value)


def _refusal(path: Path, what: str, found: object, wanted: str) -> ConversionError:
    return ConversionError(path.name, what, found=found, wanted=wanted, remedy=_REMEDY)
