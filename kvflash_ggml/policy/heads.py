"""Which attention heads a policy asks: pairs (pooled layer, head), in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from .base import KeyShape, ScoreRequest

Heads = npt.NDArray[np.int32]
"""Shape [n, 2], sorted: the index of a pooled layer, and of a query head in it. Units name KV heads in the same way."""


def as_heads(pairs: Iterable[tuple[int, int]]) -> Heads:
    """Sorted, each once."""
    return np.array(sorted(set(pairs)), np.int32).reshape(-1, 2)


def every_head(shapes: Sequence[KeyShape]) -> Heads:
    return as_heads((layer, head) for layer, shape in enumerate(shapes) for head in range(shape.n_head))


def units_of(heads: Heads, shapes: Sequence[KeyShape]) -> Heads:
    """The KV heads that these query heads read."""
    return as_heads((layer, head // shapes[layer].group) for layer, head in heads.tolist())


def split(request: ScoreRequest, shapes: Sequence[KeyShape]) -> list[Floats]:
    """The flat queries of a look as one array [rows, n_head, head] per layer."""
    sizes = [request.rows * s.n_head * s.head for s in shapes]
    parts = np.split(request.queries, np.cumsum(sizes)[:-1])
    return [part.reshape(request.rows, s.n_head, s.head) for part, s in zip(parts, shapes, strict=True)]


def queries_of(heads: Heads, request: ScoreRequest, shapes: Sequence[KeyShape]) -> Floats:
    """The queries of some heads, flat: per head [rows, head]."""
    layers = split(request, shapes)
    parts = [layers[layer][:, head].reshape(-1) for layer, head in heads.tolist()]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def newest(request: ScoreRequest, rows: int, shapes: Sequence[KeyShape]) -> ScoreRequest:
    """The look with its newest rows only."""
    if rows >= request.rows:
        return request
    queries = np.concatenate([part[-rows:].reshape(-1) for part in split(request, shapes)])
    return ScoreRequest(
        tokens=request.tokens, n_chunks=request.n_chunks, rows=rows, queries=queries, protected=request.protected
    )
