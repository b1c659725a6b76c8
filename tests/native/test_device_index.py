"""Scores by an index on a device against those of the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import beside
from support.beside import PROMPT
from support.harness import CHUNK, KV_TYPES, Bare, same_bits
from support.index_there import IndexThere
from support.inside import inside
from support.rounding import ON_GPU

from kvflash_ggml.errors import EngineError, UnsupportedError
from kvflash_ggml.sequence.prefill import extend

N_TOKENS = 7 * CHUNK
ROWS = 4


@pytest.fixture
def indexed(bare: Callable[..., Bare], tokens: npt.NDArray[np.int32]) -> Callable[[str], tuple[Any, Any, list[Any]]]:
    """An engine that has read a text, all its KV heads, and the index rows of the chunks."""

    def make(kind: str) -> tuple[Any, Any, list[Any]]:
        run = bare(kind, pool=1024, n_ctx=2048, type_kv=KV_TYPES["f16"], query_rows=ROWS)
        extend(run.session, tokens[:N_TOKENS] % run.n_vocab)
        engine = run.session.engine
        units = np.array([(i, h) for i, x in enumerate(engine.layers) for h in range(x.n_head_kv)], np.int32)
        rows = []
        for chunk in range(N_TOKENS // CHUNK):
            page, row = run.session.store.page(chunk), np.empty(engine.index_size(units), np.uint8)
            engine.wait(page.ticket)
            engine.build_index(units, page.address, row)
            rows.append(row)
        return engine, units, rows

    return make


def kept(engine: Any) -> list[Any]:
    """Put random queries in the rows of an engine, and return them by layer, [rows, n_head, head]."""
    sizes = [int(np.prod(shape)) for shape in engine.query_shapes]
    flat = np.random.default_rng(1).standard_normal(sum(sizes)).astype(np.float32)
    engine.write_queries(flat)
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, engine.query_shapes, strict=True)]


def there(engine: Any, units: Any, heads: Any, offset: int, count: int, rows: Any) -> Any:
    out = np.empty((len(heads) * len(rows), count), np.float32)
    engine.score_device_index(units, heads, offset, count, rows, out)
    engine.wait(engine.read_queries(np.empty(sum(map(np.prod, engine.query_shapes)), np.float32)))
    return out


def addresses(rows: list[Any]) -> Any:
    return np.array([row.ctypes.data for row in rows], np.uint64)


@pytest.mark.skipif(not ON_GPU, reason="no device but the host")
@pytest.mark.parametrize("kind", ["dense", "hybrid", "uneven"])
def test_the_device_scores_as_the_host_does(indexed: Any, kind: str) -> None:
    engine, units, index = indexed(kind)
    size, before = len(index[0]), 3 * len(index[0]) // 256 * 256
    assert engine.open_index(before + 9 * size) >= before + 9 * size
    engine.put_index(before, addresses(index[:2]), size)
    engine.put_index(before + 2 * size, addresses(index[2:]), size)
    layers, flat = engine.layers, kept(engine)
    every = np.array([(i, h) for i, x in enumerate(layers) for h in range(x.n_head)], np.int32)
    for heads in (every, every[::3], every[-1:]):
        read = sorted({(i, h // (layers[i].n_head // layers[i].n_head_kv)) for i, h in heads.tolist()})
        assert len(read) <= len(units)
        for rows in (np.array([2], np.int32), np.array([3, 0, 1, 2], np.int32)):
            queries = np.concatenate([flat[i][rows, h].reshape(-1) for i, h in heads.tolist()])
            host = engine.score_index(units, heads, addresses(index), len(rows), queries, 1)
            np.testing.assert_allclose(
                there(engine, units, heads, before, len(index), rows), host, rtol=1e-5, atol=1e-4
            )
            some = there(engine, units, heads, before + 2 * size, 3, rows)
            np.testing.assert_allclose(some, host[:, 2:5], rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="no device but the host")
def test_what_is_not_there_is_refused(indexed: Any) -> None:
    engine, units, index = indexed("dense")
    size, heads, newest = len(index[0]), units[:1], np.zeros(1, np.int32)
    with pytest.raises(EngineError):
        engine.put_index(0, addresses(index), size)  # not opened
    engine.open_index(2 * size)
    for offset, count in ((-size, 1), (0, 3), (size, 2), (0, 0), (2**62, 1)):
        with pytest.raises(EngineError):
            there(engine, units, heads, offset, count, newest)
        with pytest.raises(EngineError):
            engine.put_index(offset, addresses(index[:count]), size)
    for rows in (np.zeros(65, np.int32), np.array([-1], np.int32), np.array([ROWS], np.int32), newest[:0]):
        with pytest.raises(EngineError):
            there(engine, units, heads, 0, 1, rows)


@pytest.mark.skipif(ON_GPU, reason="a device may have the kernel")
def test_a_host_has_no_index_for_a_device(indexed: Any) -> None:
    engine, units, index = indexed("dense")
    with pytest.raises(UnsupportedError):
        engine.open_index(1024)
    with pytest.raises(EngineError):
        there(engine, units, units[:1], 0, len(index), np.zeros(1, np.int32))


@pytest.mark.skipif(not ON_GPU, reason="no device but the host")
def test_a_model_scores_there(
    llama: Callable[..., Any], tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole index is there, or nothing of it, or a half."""
    from kvflash_ggml.native.engine import PagedEngine

    seen, score, half = [], PagedEngine.score_device_index, 0

    def counted(self: Any, units: Any, heads: Any, offset: int, count: int, *rest: Any) -> Any:
        seen.append(count)
        return score(self, units, heads, offset, count, *rest)

    monkeypatch.setattr(PagedEngine, "score_device_index", counted)
    for part in ("all", "none", "half"):
        size = {"all": None, "none": 0, "half": half}[part]
        llm = llama(n_ctx=4096, kvflash=512, kvflash_policy="qk", kvflash_tau=4, kvflash_index=size)
        seen.clear()
        ids = tokens[:3100] % llm.n_vocab()
        llm.eval(ids[:3000].tolist())
        for token in ids[3000:].tolist():
            llm.eval([token])
        assert llm.kvflash.page_ins > 0
        assert (llm.kvflash.index_bytes > 0) == bool(seen) == (part != "none")
        assert ("on the GPU" in llm.kvflash.banner()) == (part != "none")
        if part == "all":
            assert max(seen) == 3100 // CHUNK
            half = inside(llm).session.scoring.scorer.index_bytes // 2
        if part == "half":
            assert max(seen) == 32
        llm.close()


@pytest.mark.parametrize("part", [1.0, 0.2])
def test_several_texts_have_the_scores_of_the_host(
    bare: Callable[..., Bare], tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """All of their index is on the device, or the first chunks of each text."""
    prompts = [tokens[1000 * i : 1000 * i + PROMPT - 100 * i] for i in range(3)]
    script = np.stack([tokens[5000 + 100 * i :][:150] for i in range(3)], 1)
    plain, there = beside.make(bare, 3, tau=4), beside.make(bare, 3, tau=4)
    want = beside.answers(plain, prompts, len(script), script)
    device, pool = IndexThere(monkeypatch), there.session.pool
    pool.make_index(int(part * there.session.scoring.scorer.index_bytes))
    found = beside.answers(there, prompts, len(script), script)
    assert all(same_bits(*pair) for pair in zip(chain(*found), chain(*want), strict=True))
    for mine, its in zip(there.sessions, plain.sessions, strict=True):
        assert [c.block for c in mine.table.chunks] == [c.block for c in its.table.chunks]
        assert mine.paging.page_ins == its.paging.page_ins > 0
    assert len(device.scored) > 3 * 100, "at every token of each text"
    most = (PROMPT + 150) // CHUNK
    assert max(device.scored) == most if part == 1 else max(device.scored) < most


@pytest.mark.parametrize("reading", ["pool", "exact"])
def test_a_text_that_is_cut_and_restored_has_them_too(
    llama: Callable[..., Any], tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    device = IndexThere(monkeypatch)

    def told(size: int | None) -> list[Any]:
        """The scores of each token of some turns, then the chunks in the pool, and page-ins."""
        fields = {"kvflash_policy": "qk", "kvflash_tau": 4, "kvflash_reading": reading, "kvflash_index": size}
        llm, seen = llama(n_ctx=4096, kvflash=512, **fields), []
        ids = (tokens % llm.n_vocab()).tolist()

        def answer(first: int) -> None:
            for token in ids[first : first + 40]:
                llm.eval([token])
                seen.append(inside(llm).session.relevance.ranking.tobytes())
            table = inside(llm).session.table
            seen.append(([c.block for c in table.chunks], llm.kvflash.page_ins))

        llm.eval(ids[:2500])
        answer(2500)
        state = llm.save_state()
        answer(4000)
        llm.n_tokens = 1500  # other chunks follow
        llm.eval(ids[6000:7000])
        answer(7000)
        llm.load_state(state)
        answer(4000)
        llm.reset()
        llm.eval(ids[3000:4500])
        answer(4500)
        assert llm.kvflash.page_ins > 0
        assert (llm.kvflash.last.ranked == "exact") == (reading == "exact")
        llm.close()
        return seen

    want = told(0)
    assert not device.scored
    assert told(None) == want
    assert len(device.scored) > 4 * 40
