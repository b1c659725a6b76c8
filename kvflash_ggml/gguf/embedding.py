"""A signature of a model's embedding that quantising it hardly changes, and another training changes by half."""

from __future__ import annotations

import hashlib

import numpy as np

from . import types
from .reader import GGUF, Tensor, file_pieces, parts

TENSOR = "token_embd.weight"
ROWS, BITS = 64, 4
"""Tokens, evenly spaced over the vocabulary, and bits of each: 256 bits, 64 hexadecimal digits."""

_WIDEST = 1 << 16


def signature(file: GGUF) -> str | None:
    """Return the signature of a model, 64 hexadecimal digits; None without an embedding of a type that numpy reads.

    Each bit is the sign of a token's embedding, [hidden], times a fixed pattern of ones and minus ones. Two files of
    one model in types of four bits and more differ in few of 256 bits, two trainings in about 128.

    file: of the model, the first part if it is split. Raises ConversionError if a part is missing.
    """
    for part in parts(file):
        if (tensor := part.tensors.get(TENSOR)) is not None:
            return _signature(part, tensor)
    return None


def distance(one: str, other: str) -> int:
    """Return how many bits differ between two signatures."""
    return (int(one, 16) ^ int(other, 16)).bit_count()


def _signature(file: GGUF, tensor: Tensor) -> str | None:
    if len(tensor.shape) != 2 or tensor.shape[0] > _WIDEST:
        return None
    hidden, count = tensor.shape
    places = [tensor.offset + tensor.row * (row * (count - 1) // (ROWS - 1)) for row in range(ROWS)]
    raw = np.concatenate([piece for at in places for piece in file_pieces(file.path, at, tensor.row, row=tensor.row)])
    rows = types.dequantise(raw, tensor.kind)
    if rows is None:
        return None
    bits = (rows.reshape(ROWS, 1, hidden) * _pattern(hidden)).sum(-1) > 0
    return np.packbits(bits).tobytes().hex()


def _pattern(hidden: int) -> np.ndarray:
    """Return ones and minus ones, [ROWS, BITS, hidden], the same for every model of this width."""
    width = -(-hidden // 8)
    drawn = np.frombuffer(hashlib.shake_128(TENSOR.encode()).digest(ROWS * BITS * width), np.uint8)
    signs = np.unpackbits(drawn.reshape(ROWS, BITS, width), axis=-1)[:, :, :hidden]
    return signs.astype(np.float32) * 2 - 1
