"""Keys of page images and index rows, read and scored on the host: beside a decode, on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s
from ..constants import CHUNK
from ..errors import EngineError
from ._kvf import ffi, lib
from .info import EngineInfo, Layer
from .status import check, value

Addresses = Sequence[int] | npt.NDArray[np.uint64]


class HostScoring:
    """The part of `Engine` that touches no device."""

    _engine: Any
    info: EngineInfo
    layers: Sequence[Layer]

    def keys(self, page: npt.NDArray[np.uint8]) -> list[Floats]:
        """The keys of a page image, dequantised: per layer [CHUNK, n_head_kv, head_k]."""
        return [
            np.stack([self.head_keys(page, i, head) for head in range(x.n_head_kv)], axis=1)
            for i, x in enumerate(self.layers)
        ]

    def head_keys(self, page: npt.NDArray[np.uint8], layer: int, head: int) -> Floats:
        """The keys of one KV head of a page image, dequantised: [CHUNK, head_k]."""
        kind = gguf.GGMLQuantizationType[self.info.type_k.upper()]
        x = self.layers[layer]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        width = x.head_k // block * size
        rows = page[x.k_offset : x.k_offset + CHUNK * x.k_row].reshape(CHUNK, x.k_row)
        keys: Floats = gguf.quants.dequantize(rows[:, head * width : (head + 1) * width].copy(), kind)
        return keys

    def index_size(self, units: Int32s) -> int:
        """Bytes of the index row of a chunk. units: the KV heads in it, (pooled layer, KV head) [n, 2], ascending."""
        size = ffi.new("int64_t *")
        return int(value(lib.kvf_index_size(self._engine, len(units), _heads(units), size), size))

    def build_index(self, units: Int32s, image: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` (shape [index_size]) with the keys of these KV heads in a page image, at 4 bits."""
        data = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        check(lib.kvf_index_build(self._engine, len(units), _heads(units), ffi.cast("uint8_t *", image), data))

    def score_index(
        self, units: Int32s, heads: Int32s, addresses: Addresses, rows: int, queries: Floats,
        threads: int,
    ) -> Floats:  # fmt: skip
        """`score_keys` from the index rows at these addresses: `units` are those they were built for."""
        which = len(units), _heads(units)
        return self._score(lib.kvf_index_score, which, heads, addresses, rows, queries, threads)

    def score_keys(self, heads: Int32s, images: Addresses, rows: int, queries: Floats, threads: int) -> Floats:
        """Log of the attention mass per page image, before normalisation; shape [len(heads) * rows, n].

        heads: query heads, (pooled layer, head) [k, 2], ascending. queries: flat, per head [rows, head_k].
        """
        return self._score(lib.kvf_keys_score, (), heads, images, rows, queries, threads)

    def _score(
        self, call: Callable[..., int], which: Sequence[object], heads: Int32s, addresses: Addresses, rows: int,
        queries: Floats, threads: int,
    ) -> Floats:  # fmt: skip
        out = np.empty((len(heads) * rows, len(addresses)), np.float32)
        chunks = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(addresses, np.uint64))
        check(call(self._engine, *which, len(heads), _heads(heads), len(addresses), chunks, rows,
                   ffi.from_buffer("float[]", queries), ffi.from_buffer("float[]", out), threads))  # fmt: skip
        return out


def _heads(heads: Int32s) -> object:
    if heads.ndim != 2 or heads.shape[1] != 2:
        raise EngineError(f"heads are (layer, head) in rows, not an array of shape {heads.shape}")
    return ffi.from_buffer("kvf_head[]", np.ascontiguousarray(heads, np.int32))
