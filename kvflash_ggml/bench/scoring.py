"""What one look costs on the host: with bounds and every head, and with an index of the keys of some heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..config import CHUNK
from ..native.engine import Engine, Int32s
from ..policy.combine import softmax_max
from ..policy.qk import QKScorer
from ..policy.share import attention_shares

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Milliseconds, the best of a few: bounds of all chunks, keys of the shortlist, the rest, and the sum.

    some_index_ms, some_keys_ms: the same from the index and from the keys of a few query heads.
    """

    context: int
    rows: int
    threads: int
    bounds_ms: float
    keys_ms: float
    combine_ms: float
    total_ms: float
    index_mib: float
    some_index_ms: float
    some_keys_ms: float
    some_index_mib: float


def measure(
    engine: Engine, *, contexts: Sequence[int], rows: Sequence[int], threads: Sequence[int], heads: int
) -> list[Cost]:
    """Bounds, keys and queries are made up: what they are does not change what they cost.

    heads: so many query heads, spread over all, are scored from an index.
    """
    return [_cost(engine, *case, heads) for case in product(contexts, rows, threads)]


def _cost(engine: Engine, context: int, rows: int, threads: int, n_heads: int) -> Cost:
    scorer = QKScorer()
    rng = np.random.default_rng(0)
    chunks = context // CHUNK
    bounds = rng.integers(0, 100, (chunks, engine.bounds_size(scorer.group)), np.uint8)
    queries = rng.standard_normal(rows * sum(h * d for _, h, d in engine.query_shapes), np.float32)
    count, size = scorer.shortlisted(chunks), engine.info.page_bytes
    slab = engine.alloc(count * size)
    engine.view(slab, count * size)[:] = bytes(count * size)
    images = [slab + i * size for i in range(count)]
    every = np.array([(i, h) for i, x in enumerate(engine.layers) for h in range(x.n_head)], np.int32)
    heads = every[np.linspace(0, len(every) - 1, n_heads).astype(int)]
    asked = queries[: rows * sum(engine.layers[i].head_k for i, _ in heads)]
    try:
        units, index = _index(engine, heads, slab, chunks)
        addresses = np.array([row.ctypes.data for row in index], np.uint64)
        some_index_ms, _ = _best(lambda: engine.score_index(units, heads, addresses, rows, asked, threads))
        some_keys_ms, _ = _best(lambda: engine.score_keys(heads, images, rows, asked, threads))
        bounds_ms, coarse = _best(lambda: engine.score_bounds(scorer.group, bounds, rows, queries, threads))
        keys_ms, fine = _best(lambda: engine.score_keys(every, images, rows, queries, threads))
        known = np.arange(count)
        combine_ms, _ = _best(lambda: (softmax_max(coarse), softmax_max(fine), attention_shares(coarse, known, fine)))
    finally:
        engine.free(slab)
    return Cost(
        context=context,
        rows=rows,
        threads=threads,
        bounds_ms=bounds_ms,
        keys_ms=keys_ms,
        combine_ms=combine_ms,
        total_ms=bounds_ms + keys_ms + combine_ms,
        index_mib=bounds.nbytes / 2**20,
        some_index_ms=some_index_ms,
        some_keys_ms=some_keys_ms,
        some_index_mib=chunks * index[0].nbytes / 2**20,
    )


def _index(engine: Engine, heads: Int32s, image: int, chunks: int) -> tuple[Int32s, list[npt.NDArray[np.uint8]]]:
    """The KV heads that these query heads read, and an index row per chunk, each a copy of that of one page image."""
    groups = [layer.n_head // layer.n_head_kv for layer in engine.layers]
    units = np.unique([(i, head // groups[i]) for i, head in heads], axis=0).astype(np.int32)
    row = np.empty(engine.index_size(units), np.uint8)
    engine.build_index(units, image, row)
    return units, [row.copy() for _ in range(chunks)]


def _best(work: Callable[[], T], repeats: int = 5) -> tuple[float, T]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3, result
