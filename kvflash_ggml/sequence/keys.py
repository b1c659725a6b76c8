"""The keys of sealed chunks, for a policy to score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import system
from ..arrays import Floats
from ..host.store import HostStore
from ..policy.base import KeyShape, Pairs, Rows, ScoreRequest
from ..policy.heads import every_head, queries_of
from ..state.statistics import Row
from .device_index import Ahead, DeviceIndex, Room, no_room

if TYPE_CHECKING:
    from ..native.engine import PagedEngine


IDLE_THREADS = 16
"""Most threads of a score where the host has nothing else to do."""


def key_shapes(engine: PagedEngine) -> list[KeyShape]:
    """Return the pooled layers as a policy sees them."""
    return [KeyShape(n_head=x.n_head, n_head_kv=x.n_head_kv, head=x.head_k, scale=x.scale) for x in engine.layers]


def most_threads(*, idle: bool) -> int:
    """Return the threads of a score. idle: the host computes nothing meanwhile, and is busy with one core."""
    cores = system.cores()
    return max(min(4, cores), min(IDLE_THREADS, cores - 1) if idle else 1)


class HostKeys:
    """The keys of sealed chunks, read from the page images. Implements `policy.base.Keys`.

    room: returns where on the device index rows of the text go, and the bytes that there are for them. ahead: what a
    device has computed for the score of now.
    """

    def __init__(
        self, engine: PagedEngine, store: HostStore, *, threads: int | None = None, room: Callable[[], Room] = no_room
    ) -> None:
        self._engine = engine
        self._store = store
        self._threads = threads or most_threads(idle=False)
        self.shapes: Sequence[KeyShape] = key_shapes(engine)
        # rows of the newest score and their addresses: one tuple, so that an interrupt cannot separate them
        self._cached: tuple[list[Row], npt.NDArray[np.uint64]] = [], np.empty(0, np.uint64)
        self.device = DeviceIndex(engine, room)
        self.ahead: Ahead | None = None

    def read(self, chunk: int) -> list[Floats]:
        return self._engine.keys(np.frombuffer(self._store.bytes_of(chunk), np.uint8))

    def read_head(self, chunk: int, layer: int, head: int) -> Floats:
        with self._store.lease([chunk]) as (image,):  # not `bytes_of`: the decode would wait for a copy of all layers
            self._engine.wait(self._store.ticket(chunk))
            page = np.frombuffer(self._engine.view(image, self._engine.info.page_bytes), np.uint8)
            return self._engine.head_keys(page, layer, head)

    def index_size(self, units: Pairs) -> int:
        return self._engine.index_size(units)

    def index(self, chunk: int, units: Pairs) -> Row:
        out = np.empty(self.index_size(units), np.uint8)
        with self._store.lease([chunk]) as (image,):
            self._engine.wait(self._store.ticket(chunk))
            self._engine.build_index(units, image, out)
        return out

    def score_index(self, units: Pairs, rows: Rows, heads: Pairs, request: ScoreRequest) -> Floats:
        if len(rows) < request.n_chunks:
            return self._on_host(units, _addresses(rows), heads, request)
        addresses = self._addresses_of(rows)
        there = self.device.take(self.ahead, units, heads, request.rows)
        count = there.shape[1]
        here = self._on_host(units, addresses[count:], heads, request) if count < len(rows) else there[:, count:]
        self.device.send(addresses, rows[0].nbytes, units, heads)
        return np.concatenate([there, here], axis=1)

    def _on_host(self, units: Pairs, addresses: npt.NDArray[np.uint64], heads: Pairs, request: ScoreRequest) -> Floats:
        queries = queries_of(heads, request, self.shapes)
        return self._engine.score_index(units, heads, addresses, request.rows, queries, self._threads)

    def _addresses_of(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Return the addresses of rows. Most are known: asking all of them takes milliseconds, and the next token would
        wait.
        """
        known, addresses = self._cached
        if len(rows) < len(known) or not all(map(is_, rows, known)):
            known = []
            self.device.renew()
        addresses = np.concatenate([addresses[: len(known)], _addresses(rows[len(known) :])])
        self._cached = list(rows), addresses
        return addresses

    def truncate(self, n_chunks: int) -> None:
        """Release the rows from `n_chunks` on, which the last score used."""
        rows, addresses = self._cached
        self.device.truncate(n_chunks)
        self._cached = rows[:n_chunks], addresses[:n_chunks]

    def score_keys(self, chunks: Sequence[int], request: ScoreRequest, heads: Pairs | None = None) -> Floats:
        heads = every_head(self.shapes) if heads is None else heads
        queries = queries_of(heads, request, self.shapes)
        parts = []
        while len(chunks):
            with self._store.lease_some(chunks) as images:
                chunks = chunks[len(images) :]
                parts.append(self._engine.score_keys(heads, images, request.rows, queries, self._threads))
        return np.concatenate(parts, axis=1)


def _addresses(rows: Rows) -> npt.NDArray[np.uint64]:
    return np.array([row.__array_interface__["data"][0] for row in rows], np.uint64)
