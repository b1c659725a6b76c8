"""What one look of the default policy costs on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, dataclass
from itertools import product
from typing import Any, TypeVar

import click
import numpy as np

from kvflash_ggml.constants import CHUNK, KV_TYPES
from kvflash_ggml.native.engine import PagedEngine
from kvflash_ggml.policy.base import ScoreRequest
from kvflash_ggml.policy.heads import as_heads, every_head
from kvflash_ggml.policy.qk import QKScorer
from kvflash_ggml.sequence.keys import HostKeys

from . import report
from .inside import paged
from .opening import opened
from .plans import Scoring

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
    """The host's page images of a text that was never read (host.store.HostStore): every chunk has one of IMAGES."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine = engine
        self._size = engine.info.page_bytes
        self._slab = engine.alloc(IMAGES * self._size)
        engine.view(self._slab, IMAGES * self._size)[:] = bytes(IMAGES * self._size)

    def ticket(self, chunk: int) -> int:
        return 0

    def lease(self, chunks: Sequence[int]) -> AbstractContextManager[list[int]]:
        return nullcontext([self._slab + chunk % IMAGES * self._size for chunk in chunks])

    lease_some = lease

    def bytes_of(self, chunk: int) -> bytes:
        with self.lease([chunk]) as (image,):
            return bytes(self._engine.view(image, self._size))

    def close(self) -> None:
        self._engine.free(self._slab)


def run(model: str, plan: Scoring, options: dict[str, Any]) -> None:
    kind = KV_TYPES[plan.cache_type_k]
    with opened(model, n_ctx=4096, options={"type_k": kind, "type_v": kind}, pool=1024, policy="qk-all") as llm:
        engine = paged(llm).engine
        most = sum(layer.n_head for layer in engine.layers)
        if max(plan.heads) > most:
            raise click.BadParameter(f"{max(plan.heads)}, but this model has {most} query heads", param_hint="--heads")
        points = measure(
            engine, contexts=plan.contexts, rows=plan.rows, threads=plan.threads, heads=plan.heads
        )  # fmt: skip
    header = ["context", "rows", "threads", "heads", "index ms", "keys ms", "look ms", "index MiB"]
    report.table(header, [astuple(point) for point in points])
    rows = [asdict(point) for point in points]
    report.told("scoring", model, asdict(plan), "CPU", type_k=plan.cache_type_k, points=rows)


def measure(
    engine: PagedEngine, *, contexts: Sequence[int], rows: Sequence[int], threads: Sequence[int], heads: Sequence[int]
) -> list[Cost]:
    """Keys and queries are made up: what they are does not change what they cost.

    heads: how many query heads count, spread over the layers and their KV heads; 0 for all.
    """
    return [_cost(engine, *case) for case in product(contexts, rows, threads, heads)]


def _cost(engine: PagedEngine, context: int, rows: int, threads: int, n_heads: int) -> Cost:
    store = MadeUp(engine)
    keys = HostKeys(engine, store, threads=threads)  # type: ignore[arg-type]
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
        request = ScoreRequest(
            tokens=np.zeros(context, np.int32),
            n_chunks=chunks,
            rows=rows,
            queries=np.random.default_rng(0).standard_normal(size, np.float32),
            protected=frozenset({0, *range(chunks - 5, chunks)}),
        )
        units, index, best = scorer.units, scorer.dump(chunks), range(scorer.rescored(chunks))
        index_ms, _ = _best(lambda: keys.score_index(units, index, heads, request))
        keys_ms, _ = _best(lambda: keys.score_keys(best, request, heads))
        look_ms, _ = _best(lambda: scorer.score(request))
        index_mib = scorer.index_bytes / 2**20
        scorer.close()
    finally:
        store.close()
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
