"""Embeddings beside a pool are upstream's, and the pool's text stays as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import rewritten
from support.harness import TEXT, write_adapter, write_reranker
from support.rounding import ON_GPU
from support.serving import serve

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError, ContextFull, EncoderError, UnsupportedModelError
from kvflash_ggml.gguf.reader import Field

POOL = KVFlashConfig(pool=512, embedding=512)

WORDS = TEXT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reranker(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "reranker.gguf"
    write_reranker(models["dense"], path)
    return path


@pytest.fixture
def llama(models: dict[str, Path], loaded: None) -> Iterator[Callable[..., Any]]:
    from kvflash_ggml import Llama

    opened: list[Any] = []

    def open_(path: Path, **keywords: Any) -> Any:
        opened.append(Llama(str(path), verbose=False, **keywords))
        return opened[-1]

    yield open_
    for llm in opened:
        llm.close()


@pytest.mark.parametrize("pooling", [None, "last"])
def test_the_library_keeps_its_log(
    pooling: Any, models: dict[str, Path], llama: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without `verbose`, also of a model whose file names no pooling."""
    from kvflash_ggml.llama.serving import embedder_of

    llm = llama(models["dense"], n_ctx=1024, kvflash=POOL)
    capfd.readouterr()
    assert embedder_of(llm, pooling=pooling, most_tokens=256).pooling == (pooling or "mean")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_as_upstream(kind: str, pooling: Any, models: dict[str, Path], llama: Callable[..., Any]) -> None:
    import llama_cpp

    from kvflash_ggml.llama.serving import embedder_of

    llm = llama(models[kind], n_ctx=2048, kvflash=replace(POOL, deterministic=True))

    def answer() -> str:
        llm.reset()
        return str(llm.create_completion(WORDS[:3000], max_tokens=8, temperature=0)["choices"][0]["text"])

    before = answer()
    embedder = embedder_of(llm, pooling=pooling)
    kinds = {"mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN, "last": llama_cpp.LLAMA_POOLING_TYPE_LAST}
    stock = llama(
        models[kind], n_ctx=512, n_batch=512, n_ubatch=512, embedding=True, pooling_type=kinds[pooling], flash_attn=True
    )
    for text in ("Hello", WORDS[:800]):
        found = embedder.embed(llm.tokenize(text.encode()))
        wanted = np.array(stock.embed(text, normalize=True))
        assert found.values @ wanted == pytest.approx(1, abs=1e-3)
        assert np.linalg.norm(found.values) == pytest.approx(1, abs=1e-5)
    assert answer() == before


def test_an_adapter_counts(models: dict[str, Path], llama: Callable[..., Any], tmp_path: Path) -> None:
    """It is set for a context, and embeddings have one of their own."""
    from kvflash_ggml.llama.serving import embedder_of

    adapter = {"lora_path": write_adapter(tmp_path / "lora.gguf", layers=6, width=256, out=256), "lora_scale": 8.0}
    ours = embedder_of(llama(models["dense"], n_ctx=512, kvflash=POOL, **adapter))
    plain = embedder_of(llama(models["dense"], n_ctx=512, kvflash=POOL))
    stock = llama(models["dense"], n_ctx=512, embedding=True, pooling_type=1, flash_attn=True, **adapter)
    tokens = stock.tokenize(WORDS[:800].encode())
    wanted = np.array(stock.embed(WORDS[:800], normalize=True))
    assert ours.embed(tokens).values @ wanted == pytest.approx(1, abs=1e-3)
    assert plain.embed(tokens).values @ wanted < 0.99


def test_a_model_without_a_kind_of_pooling_takes_the_mean(models: dict[str, Path], llama: Callable[..., Any]) -> None:
    from kvflash_ggml.llama.serving import embedder_of

    llm = llama(models["dense"], n_ctx=1024, kvflash=POOL)
    embedder = embedder_of(llm)
    assert (embedder.pooling, embedder.most) == ("mean", 512)
    with pytest.raises(ContextFull, match="513 tokens, and 512 is the most"):
        embedder.embed(np.zeros(513, np.int32))
    assert embedder.embed(np.zeros(512, np.int32)).tokens == 512


def test_memory_is_left_for_it(models: dict[str, Path], llama: Callable[..., Any]) -> None:
    import llama_cpp

    from kvflash_ggml.arrays import address
    from kvflash_ggml.llama.embedding import reserve_bytes
    from kvflash_ggml.llama.fitting import beside
    from kvflash_ggml.llama.parameters import defaults, read
    from kvflash_ggml.llama.serving import embedder_of

    llm = llama(models["dense"], n_ctx=1024, kvflash=POOL)
    said = reserve_bytes(address(llm.model), llm.context_params, POOL)
    taken = embedder_of(llm).bytes
    if ON_GPU:  # what it takes of the host is taken, and not kept free
        assert 0.6 * taken < said < taken
    else:
        assert said == pytest.approx(taken, rel=0.2)
    assert reserve_bytes(address(llm.model), llama_cpp.llama_context_default_params(), KVFlashConfig()) == 0

    def reserved(config: KVFlashConfig) -> int:
        return beside(str(models["dense"]), read({"kvflash": config}, defaults)).reserved

    assert reserved(POOL) - reserved(KVFlashConfig(pool=512)) == pytest.approx(said, rel=0.2)


def test_what_cannot_be(models: dict[str, Path], llama: Callable[..., Any]) -> None:
    from kvflash_ggml.llama.serving import embedder_of

    without = llama(models["dense"], n_ctx=512, kvflash=KVFlashConfig(pool=512))
    with pytest.raises(ConfigError, match="embedding=N"):
        embedder_of(without)
    plain = llama(models["dense"], n_ctx=512, kvflash=POOL)
    with pytest.raises(ConfigError, match="no head that ranks"):
        embedder_of(plain, pooling="rank")


def test_a_server_of_both(models: dict[str, Path]) -> None:
    with serve(
        models["dense"], "--kvflash", "512", "-c", "2048", "--embeddings", "--embedding-tokens", "256"
    ) as server:
        status, reply = server.post("/v1/embeddings", {"input": ["Hello", "Hello", "Good night"]})
        assert status == 200
        one, same, other = (np.array(entry["embedding"]) for entry in reply["data"])
        assert one @ same == pytest.approx(1, abs=1e-4)
        assert one @ other < 0.9999
        assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})[0] == 200
        assert server.post("/v1/embeddings", {"input": WORDS[:4000]})[0] == 400
        assert server.post("/v1/rerank", {"query": "q", "documents": ["d"]})[0] == 501
        assert server.stop() == 0


@pytest.fixture(scope="module")
def encoder(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which each token sees all others."""
    path = tmp_path_factory.mktemp("models") / "encoder.gguf"

    def change(fields: dict[str, Field]) -> None:
        name = f"{fields['general.architecture'].value}.attention.causal"
        fields[name] = Field.of(name, False)

    return rewritten(models["dense"], path, change)


def test_a_server_of_an_encoder(encoder: Path, llama: Callable[..., Any]) -> None:
    """It has no pool, which it says, and embeds as upstream does. It needs no option."""
    stock = llama(encoder, n_ctx=256, n_batch=256, n_ubatch=256, embedding=True, pooling_type=1)
    with pytest.raises(EncoderError, match="it is an encoder: its attention is not causal"):
        llama(encoder, n_ctx=512, kvflash=256)
    told = subprocess.run(
        [sys.executable, "-m", "kvflash_ggml", "serve", encoder, "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("an encoder: it embeds texts")
    with serve(encoder, "--embedding-tokens", "256") as server:
        texts = ["Hello", WORDS[:500]]
        status, reply = server.post("/v1/embeddings", {"input": texts})
        assert status == 200
        for text, entry in zip(texts, reply["data"], strict=True):
            wanted = np.array(stock.embed(text, normalize=True))
            assert np.array(entry["embedding"]) @ wanted == pytest.approx(1, abs=1e-3)
        status, reply = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        assert (status, "ask /v1/embeddings" in reply["error"]["message"]) == (501, True)
        for path in ("/metrics", "/props", "/slots", "/kvflash/state", "/v1/models", "/health"):
            assert server.ask(path).status == 200
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bert", "this model is an encoder: it embeds texts and writes none"),
        ("t5encoder", "this model is an encoder: it embeds texts and writes none"),
        ("t5", "this model's decoder reads what its encoder has made of a text, and Llama asks no encoder"),
    ],
)
def test_a_model_that_writes_nothing_by_itself(kind: str, why: str, model: Callable[[str], Path]) -> None:
    """It was upstream's bare AssertionError, an answer of nothing, or the end of the process."""
    from kvflash_ggml import Llama

    with closing(Llama(str(model(f"of {kind}")), n_ctx=64, verbose=False)) as llm:
        for ask in (lambda: llm.eval([5, 6]), lambda: llm.create_completion([5, 6], max_tokens=1)):
            with pytest.raises(UnsupportedModelError, match=why):
                ask()


def test_a_server_that_ranks(reranker: Path) -> None:
    asked = {"query": "What is a panda?", "documents": ["A bear.", "Hi there.", "A bear."]}
    with serve(reranker, "--kvflash", "512", "-c", "2048", "--reranking") as server:
        status, reply = server.post("/v1/rerank", asked)
        assert status == 200
        scores = {one["index"]: one["relevance_score"] for one in reply["results"]}
        assert scores[0] == pytest.approx(scores[2], abs=1e-5) != pytest.approx(scores[1], abs=1e-5)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert all(0 <= score <= 1 for score in scores.values())
