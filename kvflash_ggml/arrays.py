"""Arrays by what they hold, room for bytes, addresses, and what two texts have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.signedinteger[Any]]
Buffer = bytes | bytearray | memoryview


def room_for(size: int) -> memoryview:
    """Return `size` bytes to be written, with any content.

    Of numpy, which asks for large pages: to touch each small one for the first time can take longer than to read a
    file into it.
    """
    return np.empty(size, np.uint8).data


def address(pointer: Any) -> int:
    """Return where a pointer of llama_cpp's points to; 0 for a null pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Count the leading tokens that two texts share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def numbers(tokens: Sequence[int] | Int32s | Int64s) -> Int64s:
    """Return tokens as int64. TypeError for anything but a row of whole numbers: nothing is rounded."""
    try:
        found = np.asarray(tokens) if len(tokens) else np.empty(0, np.int64)
    except ValueError as err:  # lists of several lengths
        raise TypeError(f"tokens are whole numbers in a row: {err}") from err
    if found.ndim != 1:
        raise TypeError(f"tokens are whole numbers in a row, not in {found.ndim} dimensions: give one text at a time")
    if not np.can_cast(found.dtype, np.int64, "same_kind"):
        raise TypeError(f"tokens are whole numbers, not {found.dtype}: give what tokenize() has returned")
    return found.astype(np.int64, copy=False)
