"""An error names the field that is wrong, as the client has called it, on every interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.fake_embedder import FakeEmbedder
from support.fake_model import FakePrompts
from support.fake_server import Server

from kvflash_ggml.errors import ContextFull
from kvflash_ggml.server.prompts import GAP

LONG, VAST = "x" * 5000, "x" * 9000
"""More tokens than the context has; more than are tokenised at once."""

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SEEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SCHEMA = {"type": "object", "properties": {"x": {"$ref": "elsewhere"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}
INFILL = {"input_prefix": "a", "input_suffix": "b"}
TOKEN, CONTEXT, VALUE = "is no token", "context_length_exceeded", "invalid_value"


class Prompts(FakePrompts):
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if len(text) >= len(VAST):
            raise ContextFull(f"the text has {len(text)} bytes")
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


def said(content: Any) -> Sequence[dict[str, Any]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "data", "param", "code"),
    [
        ("/v1/embeddings", {"input": [300]}, "input", VALUE),
        ("/v1/embeddings", {"input": ["a", [97, -1]]}, "input", VALUE),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", VALUE),
        ("/v1/embeddings", {"input": "x" * 17}, "input", CONTEXT),
        ("/v1/embeddings", {"input": VAST}, "input", CONTEXT),
        ("/embedding", {"content": [300]}, "content", VALUE),
        ("/embedding", {"content": ""}, "content", VALUE),
        ("/embedding", {"content": VAST}, "content", CONTEXT),
        ("/v1/completions", {"prompt": [300]}, "prompt", VALUE),
        ("/v1/completions", {"prompt": ""}, "prompt", VALUE),
        ("/v1/completions", {"prompt": LONG}, "prompt", CONTEXT),
        ("/v1/completions", {"prompt": VAST}, "prompt", CONTEXT),
        ("/v1/completions", {"prompt": ["a", *[97] * 5000, "b"]}, "prompt", CONTEXT),
        ("/v1/completions", {"prompt": "a", "suffix": VAST}, "suffix", CONTEXT),
        ("/v1/completions", {"prompt": "a", "grammar": "none"}, "grammar", VALUE),
        ("/v1/completions", {"prompt": "a", "json_schema": SCHEMA}, "json_schema", "invalid_schema"),
        ("/completion", {"prompt": LONG}, "prompt", CONTEXT),
        ("/completion", {"prompt": [300]}, "prompt", VALUE),
        ("/completion", {"prompt": "a", "grammar": "none"}, "grammar", VALUE),
        ("/infill", {**INFILL, "input_prefix": LONG}, "input_prefix", CONTEXT),
        ("/infill", {**INFILL, "input_suffix": VAST}, "input_suffix", CONTEXT),
        ("/infill", {**INFILL, "input_extra": [{"text": VAST}]}, "input_extra", CONTEXT),
        ("/v1/chat/completions", {"messages": said(LONG)}, "messages", CONTEXT),
        ("/v1/chat/completions", {"messages": said(VAST)}, "messages", CONTEXT),
        ("/v1/chat/completions", {"messages": said([PICTURE])}, "messages.1.content", "not_text"),
        ("/v1/chat/completions/input_tokens", {"messages": said(VAST)}, "messages", CONTEXT),
        ("/v1/responses", {"input": LONG}, "input", CONTEXT),
        ("/v1/responses", {"input": VAST}, "input", CONTEXT),
        ("/v1/responses", {"input": said([{"type": "input_image", "image_url": "x"}])}, "input", "not_text"),
        ("/v1/responses", {"input": "a", "text": {"format": FORM}}, "text.format", "invalid_schema"),
        ("/v1/responses/input_tokens", {"input": VAST}, "input", CONTEXT),
        ("/tokenize", {"content": VAST}, "content", CONTEXT),
        ("/detokenize", {"tokens": [300]}, "tokens", VALUE),
    ],
)
def test_fields_of_openais_and_llama_servers(path: str, data: dict[str, Any], param: str, code: str) -> None:
    prompts = Prompts(gap={name: 250 + i for i, name in enumerate(GAP)})
    if path == "/v1/responses" and code == "not_text":
        prompts.sees = True  # or it is left out
        code = "invalid_image"
    error = Server(prompts=prompts, embedder=FakeEmbedder()).post(path, data).json["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert code == CONTEXT or param in error["message"]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"query": VAST, "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a", VAST]}, "documents"),
        ({"query": "a", "documents": ["a", "x" * 17]}, "documents"),
        ({"query": "a", "texts": [VAST]}, "texts"),
    ],
)
def test_fields_of_a_reranker(data: dict[str, Any], param: str) -> None:
    server = Server(prompts=Prompts(), embedder=FakeEmbedder(pooling="rank"))
    error = server.post("/v1/rerank", data).json["error"]
    assert (error["param"], error["code"]) == (param, CONTEXT)


@pytest.mark.parametrize(
    ("path", "data", "begins"),
    [
        ("/api/embed", {"input": ["a", 5]}, "input: element 1 is the integer 5, and must be a text"),
        ("/api/embed", {"input": [97, 98]}, "input: element 0 is the integer 97, and must be a text"),
        ("/api/embed", {"input": [["a"]]}, "input: element 0 is a list, and must be a text"),
        ("/api/embed", {"input": {"content": "a"}}, "input: it is an object, and must be a text or a list of texts"),
        ("/api/embed", {"input": []}, "input: it is an empty list"),
        ("/api/embeddings", {"prompt": ""}, "prompt: a text is empty"),
        ("/api/chat", {"messages": said("a"), "format": SCHEMA}, "the schema in format refers to 'elsewhere'"),
        ("/api/generate", {"prompt": "a", "raw": True, "format": SCHEMA}, "the schema in format refers to 'elsewhere'"),
        ("/api/generate", {"prompt": "a", "images": ["AA=="]}, "prompt: the model 'fake' sees no images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, "messages: the model"),
    ],
)
def test_fields_of_ollama(path: str, data: dict[str, Any], begins: str) -> None:
    reply = Server(prompts=Prompts(), embedder=FakeEmbedder()).post(path, {**data, "stream": False})
    assert reply.status == 400
    assert reply.json["error"].startswith(begins), reply.json


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        ({"messages": said([SEEN])[1:]}, "messages: the model 'fake' sees no images"),
        ({"messages": said("a"), "output_config": {"format": FORM}}, "the schema in output_config.format refers to"),
        ({"messages": said(LONG)}, "prompt is too long: "),
    ],
)
def test_fields_of_anthropics(data: dict[str, Any], begins: str) -> None:
    reply = Server(prompts=Prompts()).post("/v1/messages", {"max_tokens": 9, **data})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith(begins), reply.json


@pytest.mark.parametrize(
    ("path", "data", "param"),
    [
        ("/v1/chat/completions", {"messages": said("a")}, "messages"),
        ("/apply-template", {"messages": said("a")}, "messages"),
        ("/v1/responses", {"input": "a"}, "input"),
    ],
)
def test_messages_that_a_template_refuses(path: str, data: dict[str, Any], param: str) -> None:
    error = Server(prompts=Prompts(template=None)).post(path, data).json["error"]
    assert (error["param"], error["message"]) == (param, "no chat template")


@pytest.mark.parametrize(
    ("path", "data", "message"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages: it has 0 elements, and 1 is the least: give it more"),
        (
            "/v1/chat/completions",
            {"messages": said("x"), "tools": [{"type": "function", "function": {}}] * 129},
            "tools: it has 129 elements, and 128 is the most: send fewer",
        ),
        (
            "/v1/chat/completions",
            {"messages": said("x"), "kvflash": {"conversation": "x" * 129}},
            "kvflash.conversation: a text of 129 characters, and 128 is the most: shorten it",
        ),
        (
            "/v1/chat/completions",
            {"messages": said([{"text": "x"}])},
            "messages.1.content: a part has no type: text, image_url or input_audio",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format: the text.format has the type json_schema, and no schema: give it one",
        ),
        (
            "/v1/messages",
            {"messages": said("x"), "tool_choice": {"type": "required"}},
            "tool_choice.type: it is 'required', and must be 'auto', 'any', 'tool' or 'none'",
        ),
        ("/v1/messages", {"messages": said("x"), "tool_choice": {}}, "tool_choice.type: it is missing"),
    ],
)
def test_errors_say_what_the_limit_is_in_the_clients_words(path: str, data: dict[str, Any], message: str) -> None:
    reply = Server().post(path, data)
    assert (reply.status, reply.message) == (400, message)
