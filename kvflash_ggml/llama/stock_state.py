"""The state of a context without a pool, as llama.cpp writes it."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp


def read(ctx: Any) -> bytes:
    """The whole context."""
    data = bytearray(llama_cpp.llama_state_get_size(ctx))
    buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
    used = llama_cpp.llama_state_get_data(ctx, buffer, len(data))
    return bytes(data[:used])


def write(ctx: Any, data: bytes) -> None:
    """Put it back. RuntimeError, with upstream's words, if llama.cpp refuses it."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(ctx, buffer, len(data)) != len(data):
        raise RuntimeError("Failed to set llama state data")
