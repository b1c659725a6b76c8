"""What the first bytes of a model's file tell: whether it is one, and of which architecture."""

from __future__ import annotations

import struct
from pathlib import Path

from ..errors import ConfigError

_MAGIC = b"GGUF"
_OLD = (b"lmgg", b"tjgg", b"fmgg", b"algg")  # the magic numbers of ggml, ggjt, ggmf and ggla, as they lie in a file
_SHOWN = 3

# magic, version, numbers of tensors and fields; length and text of the first key; type and length of its value
_FIELD = struct.Struct("<4s4x16x8x20sIQ")
_STRING = 8
_LONGEST = 64


def check(path: Path) -> None:
    """ConfigError for what is there and is no GGUF file. A path that does not exist is upstream's to report."""
    try:
        start = _start(path)
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
    """The first bytes of a file, None if there is none. ConfigError if there is something else."""
    if path.is_dir():
        raise _refusal(path, f"is a folder: give {_files(path)}")
    if not path.exists():
        return None
    if not path.is_file():  # to open a pipe would wait for whoever writes into it
        raise _refusal(path, "is a pipe or a device: give the path of a .gguf file")
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def architecture(path: Path) -> str | None:
    """Of a GGUF file whose first field it is, as everybody writes it; None otherwise."""
    with path.open("rb") as file:
        start = file.read(_FIELD.size + _LONGEST)
    if len(start) < _FIELD.size:
        return None
    magic, key, kind, length = _FIELD.unpack_from(start)
    if (magic, key, kind) != (_MAGIC, b"general.architecture", _STRING) or length > _LONGEST:
        return None
    return start[_FIELD.size : _FIELD.size + length].decode("utf-8", "replace")


def _files(folder: Path) -> str:
    names = sorted(file.name for file in folder.glob("*.gguf"))
    if not names:
        return "the path of a .gguf file"
    return "one of its files, " + ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"Failed to load model from file: {path} {why}")
