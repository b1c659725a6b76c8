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
from ..policy.combine import softmax_max
from ..policy.qk import QKScorer
from ..policy.share import attention_shares

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Milliseconds, the best of a few: bounds of all chunks, keys of the shortlist, the rest, and the sum."""

    context: int
    rows: int
    threads: int
    bounds_ms: float
    keys_ms: float
    combine_ms: float
    total_ms: float
    index_mib: float


def measure(engine: Engine, *, contexts: Sequence[int], rows: Sequence[int], threads: Sequence[int]) -> list[Cost]:
    """Random bounds, keys and queries: what they are does not change what they cost."""
    return [_cost(engine, *case) for case in product(contexts, rows, threads)]


def _cost(engine: Engine, context: int, rows: int, threads: int) -> Cost:
    scorer = QKScorer()
    rng = np.random.default_rng(0)
    chunks = context // CHUNK
    bounds = rng.integers(0, 100, (chunks, engine.bounds_size(scorer.group)), np.uint8)
    queries = rng.standard_normal(rows * sum(h * d for _, h, d in engine.query_shapes), np.float32)
    count, size = scorer.shortlisted(chunks), engine.info.page_bytes
    slab = engine.alloc(count * size)
    engine.view(slab, count * size)[:] = bytes(count * size)
    images = [slab + i * size for i in range(count)]
    try:
        bounds_ms, coarse = _best(lambda: engine.score_bounds(scorer.group, bounds, rows, queries, threads))
        keys_ms, fine = _best(lambda: engine.score_keys(images, rows, queries, threads))
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
    )


def _best(work: Callable[[], T], repeats: int = 5) -> tuple[float, T]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3, result
