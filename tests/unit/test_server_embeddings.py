"""Embeddings and reranking, with vectors made of a text's tokens."""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.asgi import Client, Reply
from support.fake_embedder import FakeEmbedder
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.batching.encoder import EmbeddingModel
from kvflash_ggml.errors import NotFinite
from kvflash_ggml.server.app import ANSWERS, READS, RERANK

EMBED = "/v1/embeddings"


def post(data: dict[str, Any], path: str = EMBED, embedder: FakeEmbedder | None = None) -> Reply:
    return Server(embedder=embedder or FakeEmbedder()).post(path, data)


def ranker(**more: Any) -> FakeEmbedder:
    return FakeEmbedder(pooling="rank", **more)


def test_one_text() -> None:
    assert post({"model": "any", "input": "abc"}).json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [97.0, 3.0, 0.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["a", "bcd"], [[97, 1], [98, 3]]),
        ([97, 98], [[97, 2]]),
        ([[97], [98, 99]], [[97, 1], [98, 2]]),
        (["b", [97]], [[98, 1], [97, 1]]),
        (["b", 97], [[98, 2]]),
        ({"content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}, [[99, 2]]),
    ],
)
def test_texts_and_tokens(given: Any, wanted: list[list[float]]) -> None:
    data = post({"input": given}).json["data"]
    assert [one["embedding"][:2] for one in data] == wanted
    assert [one["index"] for one in data] == list(range(len(wanted)))


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_own_shape(path: str) -> None:
    assert post({"content": "ab"}, path).json == [{"index": 0, "embedding": [[97, 2, 0]]}]
    assert [one["index"] for one in post({"content": ["a", {"prompt_string": "b"}]}, path).json] == [0, 1]
    assert post({}, path).message == "input: it is missing"


def test_base64_is_what_openais_client_asks_for() -> None:
    coded = post({"input": "abc", "encoding_format": "base64"}).json["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == [97.0, 3.0, 0.0]


def test_fewer_dimensions_have_length_one() -> None:
    (found,) = post({"input": "abc", "dimensions": 2}).json["data"]
    assert np.hypot(*found["embedding"]) == pytest.approx(1)
    assert post({"input": "abc", "dimensions": 4}).status == 400


@pytest.mark.parametrize(
    "given",
    [
        "",
        [],
        [""],
        {"a": 1},
        None,
        ["a", 1.5],
        [[[1]], "a"],
        [-1],
        [300],
        ["a"] * 2049,
        [True],
        "x" * 17,
        {"content": [{"type": "image_url"}]},
        {"content": "x"},
    ],
)
def test_wrong_inputs(given: Any) -> None:
    reply = post({"input": given})
    assert (reply.status, bool(reply.message)) == (400, True)


def test_too_long_says_how_long() -> None:
    reply = post({"input": "x" * 17})
    assert reply.json["error"]["code"] == "context_length_exceeded"
    assert "--embedding-tokens" in reply.message


@pytest.mark.parametrize("last", ["x" * 17, ""])
@pytest.mark.parametrize("path", [EMBED, RERANK[0]])
def test_a_wrong_text_is_refused_before_others_are_computed(path: str, last: str) -> None:
    embedder = FakeEmbedder() if path == EMBED else ranker(template="{query}{document}")
    data = {"input": ["a", last]} if path == EMBED else {"query": "", "documents": ["a", last]}
    assert (post(data, path, embedder).status, embedder.seen) == (400, [])


@pytest.mark.parametrize("path", [EMBED, RERANK[0]])
def test_a_model_that_computes_no_numbers_is_told(path: str) -> None:
    embedder = ranker() if path == RERANK[0] else FakeEmbedder()
    embedder.embed = Mock(side_effect=NotFinite("it is not finite"))  # type: ignore[method-assign]
    reply = post({"input": "a"} if path == EMBED else {"query": "q", "documents": ["d"]}, path, embedder)
    assert (reply.status, reply.json["error"]["code"], reply.message) == (
        500,
        "numerical",
        "it is not finite",
    )


# --- ranks


@pytest.mark.parametrize("path", RERANK)
def test_documents_come_by_their_scores(path: str) -> None:
    reply = post({"query": "q", "documents": ["a", "abc", "ab"]}, path, ranker())
    assert [(one["index"], one["relevance_score"]) for one in reply.json["results"]] == [(1, 8.0), (2, 7.0), (0, 6.0)]
    assert reply.json["usage"] == {"prompt_tokens": 21, "total_tokens": 21}
    few = post({"query": "q", "documents": ["a", "abc"], "top_n": 1}, path, ranker()).json["results"]
    assert [one["index"] for one in few] == [1]


def test_the_shape_of_text_embeddings_inference() -> None:
    asked = {"query": "q", "texts": ["a", "abc", "ab"], "top_n": 2}
    plain = post(asked, RERANK[0], ranker()).json
    assert [set(one) for one in plain] == [{"index", "score"}] * 2
    told = post({**asked, "return_text": True}, RERANK[0], ranker()).json
    assert [(one["index"], one["text"]) for one in told] == [(1, "abc"), (2, "ab")]
    assert told[0]["score"] > told[1]["score"]


def test_the_prompt_of_a_pair() -> None:
    plain, templated = ranker(), ranker(template="<{query}|{document}>", most=99)
    asked = {"query": "q{document}", "documents": ["d"]}
    post({"query": "q", "documents": ["d"]}, RERANK[0], plain)
    post(asked, RERANK[0], templated)
    assert plain.seen == [b"\x01q\x02\x03d\x02"]
    assert templated.seen == [b"<q{document}|d>"]


@pytest.mark.parametrize("template", [None, "{query}{document}"])
def test_a_query_that_is_too_long_is_read_once(template: str | None) -> None:
    """And not once for each of 2,048 documents before the first is refused."""
    server, read = Server(embedder=ranker(template=template)), []
    tokenize = server.prompts.tokenize
    server.prompts.tokenize = lambda text, **more: (read.append(len(text)), tokenize(text, **more))[1]
    reply = server.post(RERANK[0], {"query": "q" * 1000, "documents": ["d"] * 2048})
    assert reply.json["error"]["code"] == "context_length_exceeded"
    assert 1000 <= sum(read) <= 1002


@pytest.mark.parametrize(
    "asked", [{"query": "q"}, {"query": "q", "documents": []}, {"query": "q", "documents": [1]}, {"documents": ["a"]}]
)
def test_wrong_pairs(asked: dict[str, Any]) -> None:
    assert post(asked, RERANK[0], ranker()).status == 400


# --- Ollama's


def test_ollamas_embeddings() -> None:
    said = post({"model": "fake", "input": ["abc", "d"]}, "/api/embed").json
    assert said["embeddings"] == [[97.0, 3.0, 0.0], [100.0, 1.0, 0.0]]
    assert (said["prompt_eval_count"], type(said["total_duration"])) == (4, int)
    assert post({"prompt": "abc"}, "/api/embeddings").json == {"embedding": [97.0, 3.0, 0.0]}
    assert post({"input": "x" * 99}, "/api/embed").json["embeddings"][0][1] == 16.0
    refused = post({"input": "x" * 99, "truncate": False}, "/api/embed")
    assert (refused.status, type(refused.json["error"])) == (400, str)
    assert "embedding" in post({}, "/api/show").json["capabilities"]


# --- when it is off, or busy


@pytest.mark.parametrize(
    ("path", "asked", "flag"),
    [
        (EMBED, {"input": "x"}, "--embeddings"),
        ("/api/embed", {"input": "x"}, "--embeddings"),
        (RERANK[0], {"query": "q", "documents": ["d"]}, "--reranking"),
    ],
)
def test_off_is_told_with_the_flag(path: str, asked: dict[str, Any], flag: str) -> None:
    other = FakeEmbedder() if flag == "--reranking" else ranker()
    for embedder in (None, other):
        reply = Server(embedder=embedder).post(path, asked)
        assert (reply.status, flag in str(reply.json["error"])) == (501, True)


def test_an_embedding_waits_for_the_answer_and_nobody_waits_for_all_of_them() -> None:
    embedder = FakeEmbedder()

    async def both(client: Client) -> tuple[Reply, Reply]:
        many = client.call("POST", EMBED, {"input": ["x"] * 500})
        answer = await client.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        during = len(embedder.seen)
        reply = await many.done()
        assert during < 500
        return answer, reply

    answer, reply = Server(FakeModel(), embedder=embedder).run(both)
    assert (answer.status, len(reply.json["data"])) == (200, 500)


def test_who_leaves_is_not_computed_for() -> None:
    embedder = FakeEmbedder()

    async def leave(client: Client) -> None:
        call = client.call("POST", EMBED, {"input": ["x"] * 2000})
        while len(embedder.seen) < 3:
            await asyncio.sleep(0.001)
        call.leave()
        await call.done()

    Server(FakeModel(), embedder=embedder).run(leave)
    assert len(embedder.seen) < 2000


def test_an_encoder_embeds_and_writes_nothing() -> None:
    """All that asks for text gets 501, and all that tells of the server works."""
    model = EmbeddingModel(Mock(), 16)

    async def ask(client: Client) -> dict[str, int]:
        return {
            path: (await client.post(path, {"input": "ab", "content": "ab", "tokens": [1]})).status for path in ANSWERS
        }

    found = Server(model=model, embedder=FakeEmbedder()).run(ask)
    assert {path for path, status in found.items() if status == 501} == ANSWERS.keys() - READS.keys()
    assert found["/v1/embeddings"] == found["/api/embed"] == found["/tokenize"] == 200
    for path in (
        "/metrics",
        "/props",
        "/slots",
        "/health",
        "/kvflash/state",
        "/v1/models",
        "/api/tags",
        "/api/ps",
        "/",
    ):
        assert Server(model=model, embedder=FakeEmbedder()).get(path).status == 200
