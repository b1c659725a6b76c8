"""Chunks scored by the native library against the same in numpy, for every shape a look can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from harness import CHUNK, KV_TYPES, Bare

GROUP = 32
N_TOKENS = 7 * CHUNK


def expected(engine: Any, keys: list[Any], rows: int, queries: Any) -> tuple[list[float], list[float]]:
    """Per column the bound of a chunk and the log of its mass."""
    bounds, masses, at = [], [], 0
    for layer, k in zip(engine.layers, keys, strict=True):
        count = rows * layer.n_head * layer.head_k
        q = queries[at : at + count].reshape(rows * layer.n_head, layer.head_k)
        at += count
        groups = k.reshape(-1, GROUP, layer.n_head_kv, layer.head_k)
        most, least = groups.max(axis=1), groups.min(axis=1)
        for i, query in enumerate(q):
            kv_head = i % layer.n_head // (layer.n_head // layer.n_head_kv)
            reached = np.maximum(query * most[:, kv_head], query * least[:, kv_head]).sum(axis=1)
            bounds.append(layer.scale * reached.max())
            masses.append(np.log(np.exp(layer.scale * (k[:, kv_head] @ query)).sum()))
    return bounds, masses


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_scores_are_those_of_the_keys(
    bare: Callable[..., Bare], tokens: npt.NDArray[np.int32], kind: str, kv_type: str
) -> None:
    session = bare(kind, pool=1024, n_ctx=2048, type_kv=KV_TYPES[kv_type], query_rows=4).session
    session.extend(tokens[:N_TOKENS])
    engine, store = session.engine, session.store
    chunks = range(N_TOKENS // CHUNK)
    images = [store.fetch(chunk) for chunk in chunks]
    pages = [np.frombuffer(store.bytes_of(chunk), np.uint8) for chunk in chunks]
    index = np.empty((len(images), engine.bounds_size(GROUP)), np.uint8)
    for image, row in zip(images, index, strict=True):
        engine.bounds(GROUP, image, row)
    for rows in (1, 3):
        size = rows * sum(n_head * head for _, n_head, head in engine.query_shapes)
        queries = np.random.default_rng(rows).standard_normal(size).astype(np.float32)
        each = [expected(engine, engine.keys(page), rows, queries) for page in pages]
        bounds, masses = (np.array([pair[i] for pair in each]).T for i in (0, 1))
        scale = np.abs(bounds).max()
        np.testing.assert_allclose(engine.score_keys(images, rows, queries, 1), masses, atol=0.02 * scale)
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(
                engine.score_keys(images, rows, queries, threads), engine.score_keys(images, rows, queries, 1)
            )
            for n in (1, len(images), 150):  # less and more than are multiplied at once
                scores = engine.score_bounds(GROUP, np.resize(index, (n, index.shape[1])), rows, queries, threads)
                np.testing.assert_allclose(scores, np.resize(bounds.T, (n, len(bounds))).T, atol=0.02 * scale)
