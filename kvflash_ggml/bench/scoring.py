"""What one look of the default policy costs on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from ..config import CHUNK
from ..native.engine import Engine
from ..policy.base import Floats, KeyShape, Look
from ..policy.heads import Heads, as_heads, every_head, queries_of
from ..policy.qk import QKScorer
from ..reselect import key_shapes
from ..saved import Row

T = TypeVar("T")

IMAGES = 256
"""Page images that are made up: more than any cache of a processor holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Milliseconds, the best of a few: scores from the index, from as many real keys, and a whole look."""

    context: int
    rows: int
    threads: int
    heads: int
    index_ms: float
    keys_ms: float
    look_ms: float
    index_mib: float


class MadeUp:
    """Keys of a text that was never read (policy.base.Keys): every chunk has one of IMAGES page images."""

    def __init__(self, engine: Engine, threads: int) -> None:
        self.shapes: Sequence[KeyShape] = key_shapes(engine)
        self._engine = engine
        self._threads = threads
        size = engine.info.page_bytes
        self._slab = engine.alloc(IMAGES * size)
        engine.view(self._slab, IMAGES * size)[:] = bytes(IMAGES * size)
        self._images = [self._slab + i * size for i in range(IMAGES)]

    def read(self, chunk: int) -> list[Floats]:
        return [self.read_layer(chunk, layer) for layer in range(len(self.shapes))]

    def read_layer(self, chunk: int, layer: int) -> Floats:
        page = self._engine.view(self._images[chunk % IMAGES], self._engine.info.page_bytes)
        return self._engine.layer_keys(np.frombuffer(page, np.uint8), layer)

    def index_size(self, units: Heads) -> int:
        return self._engine.index_size(units)

    def index(self, chunk: int, units: Heads) -> Row:
        row = np.empty(self.index_size(units), np.uint8)
        self._engine.build_index(units, self._images[chunk % IMAGES], row)
        return row

    def score_index(self, units: Heads, rows: Sequence[Row], heads: Heads, look: Look) -> Floats:
        addresses = np.fromiter((row.__array_interface__["data"][0] for row in rows), np.uint64, len(rows))
        queries = queries_of(heads, look, self.shapes)
        return self._engine.score_index(units, heads, addresses, look.rows, queries, self._threads)

    def score_keys(self, chunks: Sequence[int], look: Look, heads: Heads | None = None) -> Floats:
        heads = every_head(self.shapes) if heads is None else heads
        images = [self._images[chunk % IMAGES] for chunk in chunks]
        queries = queries_of(heads, look, self.shapes)
        return self._engine.score_keys(heads, images, look.rows, queries, self._threads)

    def close(self) -> None:
        self._engine.free(self._slab)


def measure(
    engine: Engine, *, contexts: Sequence[int], rows: Sequence[int], threads: Sequence[int], heads: Sequence[int]
) -> list[Cost]:
    """Keys and queries are made up: what they are does not change what they cost.

    heads: how many query heads count, spread over the layers and their KV heads; 0 for all.
    """
    return [_cost(engine, *case) for case in product(contexts, rows, threads, heads)]


def _cost(engine: Engine, context: int, rows: int, threads: int, n_heads: int) -> Cost:
    keys = MadeUp(engine, threads)
    try:
        every = every_head(keys.shapes)
        count = n_heads or len(every)
        heads = as_heads(map(tuple, every[np.linspace(0, len(every) - 1, count).astype(int)].tolist()))
        chunks = context // CHUNK
        scorer = QKScorer(heads=heads)
        scorer.open(keys, chunks)
        for chunk in range(chunks):
            scorer.seal(chunk)
        size = rows * sum(h * d for _, h, d in engine.query_shapes)
        look = Look(
            tokens=np.zeros(context, np.int32),
            n_chunks=chunks,
            rows=rows,
            queries=np.random.default_rng(0).standard_normal(size, np.float32),
            kept=frozenset({0, *range(chunks - 5, chunks)}),
        )
        units, index, best = scorer.units, scorer.dump(chunks), range(scorer.rescored(chunks))
        index_ms, _ = _best(lambda: keys.score_index(units, index, heads, look))
        keys_ms, _ = _best(lambda: keys.score_keys(best, look, heads))
        look_ms, _ = _best(lambda: scorer.score(look))
        index_mib = scorer.index_bytes / 2**20
        scorer.close()
    finally:
        keys.close()
    return Cost(
        context=context,
        rows=rows,
        threads=threads,
        heads=count,
        index_ms=index_ms,
        keys_ms=keys_ms,
        look_ms=look_ms,
        index_mib=index_mib,
    )


def _best(work: Callable[[], T], repeats: int = 5) -> tuple[float, T]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3, result
