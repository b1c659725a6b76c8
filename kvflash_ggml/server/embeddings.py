"""`/v1/embeddings`, `/v1/rerank` and Ollama's `/api/embed`: texts in, vectors or scores out."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, PlainValidator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ..arrays import Floats, Int32s
from ..errors import NotFinite
from .completions import prompt_tokens
from .errors import ApiError, blaming, invalid
from .exchange import LongJSON
from .front import Front
from .schema import Prompt, Whole, _all, _Asked, _prompts, named

if TYPE_CHECKING:
    from ..llama.embedding import Embedded, Embedder

MAX_TEXTS = 2048
"""In one request, as OpenAI has it."""


def _input(value: Any) -> list[Prompt]:
    if value == []:
        raise ValueError("it is an empty list, and must be a text or a list of texts or tokens")
    return _prompts(value, MAX_TEXTS)


def _texts(value: Any) -> list[Prompt]:
    """The texts of a request of Ollama's, which knows no tokens."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError(f"it is {named(value)}, and must be a text or a list of texts")
    return _input(_all(texts, str, "a text"))


Input = Annotated[list[Prompt], PlainValidator(_input)]
Texts = Annotated[list[Prompt], PlainValidator(_texts)]


class EmbeddingsRequest(_Asked):
    """content: of clients that speak to llama-server's own endpoint, whose answer has another shape."""

    input: Input | None = None
    content: Input | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = Field(None, ge=1)
    user: str | None = None


Documents = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]


class RerankRequest(_Asked):
    """texts: of clients that speak to Hugging Face's text-embeddings-inference, whose answer has another shape."""

    query: str
    documents: Documents | None = None
    texts: Documents | None = None
    return_text: bool = False
    top_n: Whole | None = Field(None, ge=1)


class OllamaEmbedRequest(_Asked):
    """truncate: cut what is too long, which is an error otherwise. keep_alive: without effect."""

    input: Texts
    truncate: bool = True
    dimensions: Whole | None = Field(None, ge=1)
    keep_alive: str | float | None = None


class OllamaPromptRequest(_Asked):
    prompt: str
    keep_alive: str | float | None = None


async def embeddings(front: Front, http: HttpRequest, asked: EmbeddingsRequest) -> Response:
    """Make an embedding of each text. Needs --embeddings."""
    where, texts = ("input", asked.input) if asked.content is None else ("content", asked.content)
    if texts is None:
        raise invalid("input", "it is missing")
    found, count = await _embedded(front, http, texts, where=where, dimensions=asked.dimensions)
    return await front.work(http, lambda: LongJSON(_listed(front, asked, found, count)))


def _listed(front: Front, asked: EmbeddingsRequest, found: Sequence[Floats], count: int) -> Any:
    if asked.content is not None:
        return [{"index": i, "embedding": [one.tolist()]} for i, one in enumerate(found)]
    written: Any = _base64 if asked.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": i, "embedding": written(one)} for i, one in enumerate(found)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": front.settings.alias, "usage": usage}


async def rerank(front: Front, http: HttpRequest, asked: RerankRequest) -> Response:
    """Score documents for a query, best first. Needs --reranking."""
    where, documents = ("documents", asked.documents) if asked.texts is None else ("texts", asked.texts)
    if documents is None:
        raise invalid("documents", "it is missing")
    embedder = _embedder(front, ranks=True)
    scores, count = [], 0
    read = partial(_pair, front, embedder, asked.query, where=where)
    async for pair in _read(front, http, embedder, documents, read, where):
        found = await _one(front, http, embedder, pair)
        scores.append(float(found.values[0]))
        count += found.tokens
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n]
    if asked.texts is not None:
        shown = [{"text": text} if asked.return_text else {} for text in documents]
        return JSONResponse([{"index": i, "score": scores[i], **shown[i]} for i in best])
    return JSONResponse(
        {
            "model": front.settings.alias,
            "object": "list",
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "results": [{"index": i, "relevance_score": scores[i]} for i in best],
        }
    )


async def ollama_embed(front: Front, http: HttpRequest, asked: OllamaEmbedRequest) -> Response:
    """Make an embedding of each text, as Ollama does. Needs --embeddings."""
    began = time.monotonic()
    shape: Any = {"dimensions": asked.dimensions, "cut": asked.truncate}
    found, count = await _embedded(front, http, asked.input, where="input", **shape)
    said = {
        "model": front.settings.alias,
        "total_duration": round((time.monotonic() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": count,
    }
    return await front.work(http, lambda: LongJSON({**said, "embeddings": [one.tolist() for one in found]}))


async def ollama_prompt(front: Front, http: HttpRequest, asked: OllamaPromptRequest) -> Response:
    """Make the embedding of one text, as Ollama once did. Needs --embeddings."""
    (found,), _ = await _embedded(front, http, [asked.prompt], where="prompt", cut=True)
    return JSONResponse({"embedding": found.tolist()})


def _embedder(front: Front, *, ranks: bool) -> Embedder:
    """Return the embedder. ApiError, 501, if the server was not started for this."""
    embedder = front.embedder
    if embedder is None or (embedder.pooling == "rank") is not ranks:
        what, flag = ("reranking", "--reranking and a reranker") if ranks else ("embeddings", "--embeddings")
        raise ApiError(501, f"this server has no context for {what}: start one with {flag}", code="not_served")
    return embedder


async def _embedded(
    front: Front,
    http: HttpRequest,
    texts: Sequence[Prompt],
    *,
    where: str,
    dimensions: int | None = None,
    cut: bool = False,
) -> tuple[list[Floats], int]:
    """Return the embeddings of texts, and how many tokens they have. Others are answered between two of them.

    where: the field that has the texts.
    """
    embedder = _embedder(front, ranks=False)
    found, count = [], 0
    read, most = partial(prompt_tokens, front, where=where), embedder.most if cut else None
    async for tokens in _read(front, http, embedder, texts, read, where, most):
        one = await _one(front, http, embedder, tokens)
        if dimensions is not None and dimensions > len(one.values):
            raise invalid("dimensions", f"{dimensions}, and this model has {len(one.values)}: ask for no more")
        values = one.values[:dimensions]
        found.append(values if dimensions is None else values / max(float(np.linalg.norm(values)), 1e-12))
        count += one.tokens
    return found, count


async def _read(
    front: Front,
    http: HttpRequest,
    embedder: Embedder,
    texts: Sequence[Any],
    read: Callable[[Any], list[int]],
    where: str,
    most: int | None = None,
) -> AsyncIterator[Int32s]:
    """Yield the tokens of each text. ApiError before the first one if any is empty or too long.

    read: makes the tokens of one. where: the field that has the texts. most: cut each to so many tokens.
    """

    async def tokens_of(text: Any) -> Int32s:
        await _check_there(http)
        tokens = (await front.work(http, read, text))[:most]
        if not tokens:
            raise invalid(where, "a text is empty")
        with blaming(where):
            embedder.check(len(tokens))
        return np.array(tokens, np.int32)

    for text in texts if len(texts) > 1 else ():
        await tokens_of(text)  # and not kept: a query is in each of 2,048 pairs
    for text in texts:
        yield await tokens_of(text)


async def _one(front: Front, http: HttpRequest, embedder: Embedder, tokens: Int32s) -> Embedded:
    """Evaluate a text between two answers, unless the client has left."""
    await _check_there(http)
    try:
        return await front.engine(lambda: embedder.embed(tokens))
    except NotFinite as err:
        raise ApiError(500, str(err), code="numerical") from None


async def _check_there(http: HttpRequest) -> None:
    if await http.is_disconnected():
        raise ApiError(499, "the client has left", code="cancelled")


def _pair(front: Front, embedder: Embedder, query: str, document: str, where: str) -> list[int]:
    """Make the prompt of a document as llama-server does: by the model's template, or with marks between the two.

    A query is read again for each. where: the field that has the documents.
    """
    template = embedder.template

    def tokenize(text: str, where: str, *, parse_special: bool = False) -> list[int]:
        with blaming(where):
            return front.prompts.tokenize(text, add_special=False, parse_special=parse_special)

    if template is not None:
        begin, between, end = _split(template)
        return tokenize(f"{begin}{query}{between}{document}{end}", where, parse_special=True)
    marks = embedder.marks
    return [
        *marks["bos"], *tokenize(query, "query"), *marks["eos"], *marks["sep"],
        *tokenize(document, where), *marks["eos"],
    ]  # fmt: skip


def _split(template: str) -> tuple[str, str, str]:
    """Split a template around the query and the document, which may contain each other's marks themselves."""
    begin, _, rest = template.partition("{query}")
    between, _, end = rest.partition("{document}")
    return begin, between, end


def _base64(values: Floats) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
