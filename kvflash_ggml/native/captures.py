"""What steps leave behind for scoring: the newest queries, and attention masses that a streamed step has computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import EngineError
from ._kvf import ffi, lib
from .info import EngineInfo, Layer
from .status import check, value


class Captures:
    """The part of `Engine` that reads them."""

    _engine: Any
    info: EngineInfo
    layers: Sequence[Layer]

    @property
    def query_shapes(self) -> list[tuple[int, int, int]]:
        """Per pooled layer (rows, n_head, head_k): the shapes of the captured queries.

        There is a row more than `info.query_rows`; what is in it means nothing.
        """
        rows = self.info.query_rows + 1 if self.info.query_rows else 0
        return [(rows, layer.n_head, layer.head_k) for layer in self.layers]

    def read_queries(self, out: Floats, rows: Int32s | None = None) -> int:
        """Copy the captured queries of all layers to `out` (flat), behind the compute submitted so far; or `rows`.

        Returns the ticket. The query of a token is in the row that `query_row` named when it was evaluated.
        """
        ticket = ffi.new("uint64_t *")
        data = ffi.from_buffer("float[]", self._queries(out), require_writable=True)
        rows = np.arange(self.info.query_rows + 1, dtype=np.int32) if rows is None else rows
        which = ffi.from_buffer("int32_t[]", rows)
        return int(value(lib.kvf_query_read(self._engine, len(rows), which, data, ticket), ticket))

    def write_queries(self, rows: Floats) -> None:
        """Put back what `read_queries` has read."""
        check(lib.kvf_query_write(self._engine, ffi.from_buffer("float[]", self._queries(rows))))

    def _queries(self, rows: Floats) -> Floats:
        size = sum(math.prod(shape) for shape in self.query_shapes)
        if rows.size != size or rows.dtype != np.float32:
            raise EngineError(f"{rows.size} values ({rows.dtype}) for queries, all layers have {size} (float32)")
        return rows

    def read_masses(self, out: Floats) -> int:
        """Copy to `out` [heads * rows, chunks] what the newest streamed step was asked for, see `Streamed.asked`.

        Of the whole chunks that it has seen, in their order, and then those with its own tokens: as `score_keys` gives
        it, from every key. Behind the compute submitted so far; returns the ticket. UnsupportedError, with the reason,
        if it could not be computed beside the step.
        """
        ticket = ffi.new("uint64_t *")
        data = ffi.from_buffer("float[]", out, require_writable=True)
        return int(value(lib.kvf_masses_read(self._engine, data, out.size, ticket), ticket))

    def masses_bytes(self, device: int) -> int:
        """Bytes that masses take of a device by now, by its index in `info.devices`. They are kept for the next."""
        return int(lib.kvf_masses_bytes(self._engine, device))
