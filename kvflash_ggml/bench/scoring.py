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

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Milliseconds, the best of a few: bounds of all chunks, keys of the shortlist, arithmetic over columns, and the sum."""

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
    scorer = QKScorer()
    rng = np.random.default_rng(0)
    out = []
    for context, n_rows, n_threads in product(contexts, rows, threads):
        chunks = context // CHUNK
        bounds = rng.integers(0, 100, (chunks, engine.bounds_size(scorer.group)), np.uint8)
        queries = rng.standard_normal(n_rows * sum(h * d for _, h, d in engine.query_shapes), np.float32)
        count = scorer.shortlisted(chunks)
        slab = engine.alloc(count * engine.info.page_bytes)
        engine.view(slab, count * engine.info.page_bytes)[:] = bytes(count * engine.info.page_bytes)
        images = [slab + i * engine.info.page_bytes for i in range(count)]
        try:
            bounds_ms, coarse = _best(lambda: engine.score_bounds(scorer.group, bounds, n_rows, queries, n_threads))
            keys_ms, fine = _best(lambda: engine.score_keys(images, n_rows, queries, n_threads))
            combine_ms, _ = _best(lambda: (softmax_max(coarse), softmax_max(fine)))
        finally:
            engine.free(slab)
        total = bounds_ms + keys_ms + combine_ms
        out.append(
            Cost(
                context=context,
                rows=n_rows,
                threads=n_threads,
                bounds_ms=bounds_ms,
                keys_ms=keys_ms,
                combine_ms=combine_ms,
                total_ms=total,
                index_mib=bounds.nbytes / 2**20,
            )
        )
    return out


def _best(work: Callable[[], T], repeats: int = 5) -> tuple[float, T]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3, result
