"""Chunks scored by the native library against the same in numpy, for every shape a look can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support.harness import CHUNK, KV_TYPES, Bare

from kvflash_ggml.errors import EngineError
from kvflash_ggml.sequence.prefill import extend

Q4_0 = gguf.GGMLQuantizationType.Q4_0
BLOCK = 32
N_TOKENS = 7 * CHUNK
LATENT = pytest.param("latent", "f16", marks=pytest.mark.slow)  # compiles the generator of such models first
KINDS = [*((kind, kv_type) for kind in ("dense", "hybrid") for kv_type in KV_TYPES), ("uneven", "f16"), LATENT]


@pytest.fixture
def opened(bare: Callable[..., Bare], tokens: npt.NDArray[np.int32]) -> Callable[[str, str], tuple[Any, list[int]]]:
    """An engine that has read a text, and the page images of its chunks."""

    def make(kind: str, kv_type: str) -> tuple[Any, list[int]]:
        run = bare(kind, pool=1024, n_ctx=2048, type_kv=KV_TYPES[kv_type], query_rows=4)
        extend(run.session, tokens[:N_TOKENS] % run.n_vocab)
        engine, pages = run.session.engine, [run.session.store.page(chunk) for chunk in range(N_TOKENS // CHUNK)]
        for page in pages:
            engine.wait(page.ticket)  # a device may still be writing it
        return engine, [page.address for page in pages]

    return make


def page_of(engine: Any, image: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(engine.view(image, engine.info.page_bytes), np.uint8)


def keys_of(engine: Any, image: int) -> list[Any]:
    """The keys of a page image by the package `gguf`: per layer [CHUNK, n_head_kv, head_k]."""
    kind = gguf.GGMLQuantizationType[engine.info.type_k.upper()]
    found = []
    for x in engine.layers:
        rows = page_of(engine, image)[x.k_offset :][: CHUNK * x.k_row].reshape(CHUNK, x.k_row)
        width = gguf.quants.quant_shape_to_byte_shape((x.head_k,), kind)[0]
        heads = [rows[:, head * width : (head + 1) * width].copy() for head in range(x.n_head_kv)]
        found.append(np.stack([gguf.quants.dequantize(head, kind) for head in heads], axis=1))
    return found


def random(rows: int, size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal(size).astype(np.float32)


def every(engine: Any, count: str) -> npt.NDArray[np.int32]:
    """All heads of a kind: "n_head" or "n_head_kv"."""
    return np.array([(i, h) for i, x in enumerate(engine.layers) for h in range(getattr(x, count))], np.int32)


def kv_head(layer: Any, head: int) -> int:
    return head // (layer.n_head // layer.n_head_kv)


def random_queries(engine: Any, heads: Any, rows: int) -> npt.NDArray[np.float32]:
    return random(rows, rows * sum(engine.layers[i].head_k for i, _ in heads))


def expected_masses(engine: Any, keys: list[Any], heads: Any, rows: int, queries: Any) -> list[list[float]]:
    """Per column and chunk the log of the mass. keys: per chunk and layer [CHUNK, n_head_kv, head_k]."""
    masses, at = [], 0
    for i, head in heads:
        layer = engine.layers[i]
        for query in queries[at : at + rows * layer.head_k].reshape(rows, layer.head_k):
            scores = [layer.scale * (k[i][:, kv_head(layer, head)] @ query) for k in keys]
            masses.append([np.log(np.exp(x).sum()) for x in scores])
        at += rows * layer.head_k
    return masses


def selections(engine: Any) -> Iterator[npt.NDArray[np.int32]]:
    """All heads; one; the last of every layer, and the first beside it where there are two."""
    heads = every(engine, "n_head")
    yield heads
    yield heads[len(heads) // 2 :][:1]
    yield np.array([h for h in heads if h[1] in {0, engine.layers[h[0]].n_head - 1}], np.int32)


def check_masses(score: Callable[..., Any], engine: Any, keys: list[Any], addresses: list[int]) -> None:
    """score(heads, addresses, rows, queries, threads) of these keys: right, whatever is asked at once."""
    for heads in selections(engine):
        for rows in (1, 3):
            queries = random_queries(engine, heads, rows)
            masses = np.array(expected_masses(engine, keys, heads, rows, queries))
            scores = score(heads, addresses, rows, queries, 1)
            np.testing.assert_allclose(scores, masses, atol=0.02 * np.abs(masses).max())
            for threads in (1, 2, 3):
                for n in (1, 150):  # less and more than are multiplied at once
                    repeated = np.resize(np.array(addresses, np.uint64), n)
                    wanted = np.resize(scores.T, (n, len(scores))).T
                    np.testing.assert_array_equal(score(heads, repeated, rows, queries, threads), wanted)


@pytest.mark.parametrize(("kind", "kv_type"), KINDS)
def test_keys_are_those_of_the_page(opened: Any, kind: str, kv_type: str) -> None:
    engine, images = opened(kind, kv_type)
    for image in images:
        for found, wanted in zip(engine.keys(page_of(engine, image)), keys_of(engine, image), strict=True):
            np.testing.assert_array_equal(found, wanted)
    with pytest.raises(EngineError, match="KV head"):
        engine.head_keys(page_of(engine, images[0]), 0, engine.layers[0].n_head_kv)
    with pytest.raises(EngineError, match=r"a page image of 16 bytes, it has \d+"):
        engine.head_keys(page_of(engine, images[0])[:16], 0, 0)


@pytest.mark.parametrize(("kind", "kv_type"), KINDS)
def test_masses_are_those_of_the_keys(opened: Any, kind: str, kv_type: str) -> None:
    engine, images = opened(kind, kv_type)
    check_masses(engine.score_keys, engine, [keys_of(engine, image) for image in images], images)


@pytest.mark.parametrize(("kind", "kv_type"), KINDS)
def test_index_holds_the_keys_at_four_bits(opened: Any, kind: str, kv_type: str) -> None:
    engine, images = opened(kind, kv_type)
    units = every(engine, "n_head_kv")[1:]
    for image in images:
        row = np.empty(engine.index_size(units), np.uint8)
        engine.build_index(units, image, row)
        keys, at = keys_of(engine, image), 0
        for layer, head in units:
            exact = keys[layer][:, head]
            exact = np.pad(exact, ((0, 0), (0, -exact.shape[1] % BLOCK))).reshape(-1, BLOCK)
            size = exact.size // BLOCK * (2 + BLOCK // 2)
            stored = gguf.quants.dequantize(row[at : at + size].reshape(len(exact), -1), Q4_0)
            step = np.abs(exact).max(axis=1, keepdims=True) / 8
            assert (np.abs(stored - exact) <= 1.01 * step).all()
            assert np.abs(stored - exact).mean() < 0.3 * step.mean()
            at += size
        assert at == len(row)


@pytest.mark.parametrize(("kind", "kv_type"), KINDS)
def test_masses_are_those_of_the_index(opened: Any, kind: str, kv_type: str) -> None:
    engine, images = opened(kind, kv_type)
    units = every(engine, "n_head_kv")
    index = [np.empty(engine.index_size(units), np.uint8) for _ in images]
    keys: list[Any] = [[] for _ in images]
    for image, row, of_chunk in zip(images, index, keys, strict=True):
        engine.build_index(units, image, row)
        at = 0
        for x in engine.layers:
            width = x.head_k + -x.head_k % BLOCK
            size = CHUNK * x.n_head_kv * width // BLOCK * (2 + BLOCK // 2)
            stored = gguf.quants.dequantize(row[at : at + size].reshape(-1, size // (CHUNK * x.n_head_kv)), Q4_0)
            of_chunk.append(stored.reshape(x.n_head_kv, CHUNK, width)[:, :, : x.head_k].swapaxes(0, 1))
            at += size

    def score(heads: Any, addresses: Any, rows: int, queries: Any, threads: int) -> Any:
        return engine.score_index(units, heads, addresses, rows, queries, threads)

    check_masses(score, engine, keys, [row.ctypes.data for row in index])


def test_index_of_some_heads(opened: Any) -> None:
    """The columns of some heads do not depend on what else is in the index."""
    engine, images = opened("hybrid", "q8_0")
    heads = every(engine, "n_head")[1::3]
    read = sorted({(layer, kv_head(engine.layers[layer], head)) for layer, head in heads.tolist()})
    queries = random_queries(engine, heads, 2)
    found = []
    for units in (every(engine, "n_head_kv"), np.array(read, np.int32)):
        index = [np.empty(engine.index_size(units), np.uint8) for _ in images]
        for image, row in zip(images, index, strict=True):
            engine.build_index(units, image, row)
        found.append(engine.score_index(units, heads, [row.ctypes.data for row in index], 2, queries, 2))
    np.testing.assert_array_equal(found[0], found[1])


def test_what_cannot_be_scored_is_refused(opened: Any) -> None:
    engine, images = opened("dense", "f16")
    layers, last = len(engine.layers), engine.layers[-1]
    none = np.empty((0, 2), np.int32)
    fine = np.array([(0, 0), (layers - 1, last.n_head_kv - 1)], np.int32)
    index = np.empty(engine.index_size(fine), np.uint8)
    engine.build_index(fine, images[0], index)

    def scored(units: Any = fine, heads: Any = fine[:1], chunks: int = 1, rows: int = 1) -> None:
        queries = np.zeros(max(1, rows) * 4096, np.float32)
        with pytest.raises(EngineError):
            engine.score_index(units, heads, [index.ctypes.data] * chunks, rows, queries, 1)
        if units is fine:
            with pytest.raises(EngineError):
                engine.score_keys(heads, images[:chunks], rows, queries, 1)

    wrong = [none, fine[::-1], fine[[0, 0]], [(-1, 0)], [(layers, 0)], [(0, -1)]]
    for heads in (*wrong, [(0, last.n_head)]):
        scored(heads=np.array(heads, np.int32).reshape(-1, 2))
    for bad in (*wrong, [(0, last.n_head_kv)]):
        units = np.array(bad, np.int32).reshape(-1, 2)
        with pytest.raises(EngineError):
            engine.index_size(units)
        with pytest.raises(EngineError):
            engine.build_index(units, images[0], index)
        scored(units=units)
    scored(chunks=0)
    scored(rows=0)
    for heads in ([(1, 0)], [(0, last.n_head - 1)], [(0, 0), (1, 0)]):  # of KV heads that the index lacks
        with pytest.raises(EngineError):
            engine.score_index(fine, np.array(heads, np.int32), [index.ctypes.data], 1, np.zeros(4096, np.float32), 1)
