"""Turns a failure of the native seam into a Python error."""

from __future__ import annotations

from typing import Any

from ..errors import (
    DecodeError,
    DeviceLost,
    EncoderError,
    EngineError,
    HostMemoryError,
    KVFlashError,
    SnapshotError,
    UnsupportedError,
    UnsupportedModelError,
)
from ._kvf import ffi, lib

ERRORS: dict[int, type[KVFlashError]] = {
    lib.KVF_STATUS_ARGUMENT: EngineError,
    lib.KVF_STATUS_MEMORY: HostMemoryError,
    lib.KVF_STATUS_REFUSED: UnsupportedModelError,
    lib.KVF_STATUS_STATE: SnapshotError,
    lib.KVF_STATUS_DECODE: DecodeError,
    lib.KVF_STATUS_UNSUPPORTED: UnsupportedError,
    lib.KVF_STATUS_LOST: DeviceLost,
}


def check(status: int) -> None:
    """Raise the error of a status of the last call on this thread, unless it is success."""
    if status != lib.KVF_STATUS_SUCCESS:
        why, kind = reason(), ERRORS[status]
        encodes = kind is UnsupportedModelError and why.startswith("it is an encoder")
        raise (EncoderError if encodes else kind)(why)


def value(status: int, out: Any) -> Any:
    """Return what a call has written to `out`, a pointer to one value. Raises as `check`."""
    check(status)
    return out[0]


def reason() -> str:
    """Return why the last failed call on this thread failed."""
    return str(ffi.string(lib.kvf_last_error()).decode("utf-8", "replace"))
