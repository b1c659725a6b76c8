"""A device that scores by an index, computed by the host: what is asked of it is the same."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvflash_ggml.native.engine import PagedEngine


class IndexThere:
    """Takes the place of the device in every engine from now on. scored: chunks of each call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.scored: list[int] = []
        self._memory = np.empty(0, np.uint8)
        patch.setattr(PagedEngine, "open_index", lambda engine, size: self._open(size))
        patch.setattr(PagedEngine, "put_index", lambda engine, *what: self._put(*what))
        patch.setattr(PagedEngine, "score_device_index", lambda engine, *what: self._score(engine, *what))

    def _open(self, size: int) -> int:
        self._memory = np.zeros(size, np.uint8)
        return size

    def _put(self, offset: int, addresses: npt.NDArray[np.uint64], size: int) -> None:
        for i, address in enumerate(addresses.tolist()):
            row = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
            self._memory[offset + i * size :][:size] = row

    def _score(self, engine: Any, units: Any, heads: Any, offset: int, count: int, rows: Any, out: Any) -> None:
        sizes = [int(np.prod(shape)) for shape in engine.query_shapes]
        flat = np.empty(sum(sizes), np.float32)
        engine.wait(engine.read_queries(flat))
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        layers = [part.reshape(shape) for part, shape in zip(parts, engine.query_shapes, strict=True)]
        queries = np.concatenate([layers[layer][rows, head].reshape(-1) for layer, head in heads.tolist()])
        first, size = self._memory.ctypes.data + offset, engine.index_size(units)
        addresses = np.array([first + i * size for i in range(count)], np.uint64)
        out[:] = engine.score_index(units, heads, addresses, len(rows), queries, 1)
        self.scored.append(count)
