"""Fields of requests: none is taken for another type, and none is missing that a request is nothing without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_server import Server

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT, RAW, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
MESSAGES, RESPONSES, OLLAMA, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hello"},
    RAW: {"prompt": "hello"},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    RESPONSES: {"input": "hello"},
    OLLAMA: {"messages": HELLO, "stream": False},
    GENERATE: {"prompt": "hello", "stream": False},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": HELLO},
}
INTEGERS: dict[str, Iterable[str]] = {
    CHAT: ("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "top_logprobs", "min_tokens", "mirostat"),
    TEXT: ("max_tokens", "n", "seed", "logprobs", "best_of"),
    RAW: ("n_predict", "n_probs", "seed", "repeat_last_n"),
    INFILL: ("n_predict",),
    MESSAGES: ("max_tokens", "top_k"),
    RESPONSES: ("max_output_tokens",),
    OLLAMA: ("options.num_predict", "options.seed", "options.top_k"),
    GENERATE: ("options.num_predict",),
    "/v1/embeddings": ("dimensions",),
    "/v1/rerank": ("top_n",),
    "/api/embed": ("dimensions",),
}
NUMBERS = dict.fromkeys((CHAT, TEXT, RAW, MESSAGES, RESPONSES), ("temperature", "top_p")) | {
    OLLAMA: ("options.temperature",),
    GENERATE: ("options.min_p",),
}
SWITCHES: dict[str, Iterable[str]] = {
    **dict.fromkeys((TEXT, RAW, MESSAGES, RESPONSES, OLLAMA, GENERATE), ("stream", "kvflash.drafts")),
    CHAT: ("stream", "logprobs", "parallel_tool_calls", "stream_options.include_usage", "ignore_eos", "cache_prompt"),
    TEXT: ("stream", "echo"),
    RESPONSES: ("stream", "store", "parallel_tool_calls"),
    "/api/embed": ("truncate",),
    "/tokenize": ("add_special", "with_pieces"),
    "/apply-template": ("enable_thinking",),
}


def with_field(path: str, name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.rpartition(".")
    return {**LEAST[path], **({outer: {inner: value}} if outer else {name: value})}


def said(path: str, reply: Reply) -> str:
    """What the error of an interface says, in its shape."""
    error = reply.json["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str)
        return error
    assert error["type"] == "invalid_request_error"
    assert reply.json.get("type") == ("error" if path == MESSAGES else None)
    return str(error["message"])


def refused(cases: Iterable[tuple[str, dict[str, Any], str]]) -> None:
    """Send each body to its path: 400, and the error begins with these words."""

    async def work(client: Client) -> None:
        for path, data, words in cases:
            reply = await client.post(path, data)
            assert reply.status == 400, (path, data, bytes(reply.body))
            assert said(path, reply).startswith(words), (path, data, said(path, reply))

    Server().run(work)


@pytest.mark.parametrize(
    ("fields", "wrong", "kind"),
    [
        (INTEGERS, {'the text "3"': "3", "true": True, "the number 3.5": 3.5, "a list": [3]}, "an integer"),
        (NUMBERS, {'the text "0.5"': "0.5", "true": True, "an object": {}}, "a number"),
        (SWITCHES, {'the text "yes"': "yes", "the integer 1": 1, 'the text "true"': "true"}, "true or false"),
    ],
)
def test_no_type_is_taken_for_another(fields: dict[str, Iterable[str]], wrong: dict[str, Any], kind: str) -> None:
    refused(
        (path, with_field(path, name, value), f"{name}: it is {shown}, and must be {kind}")
        for path, names in fields.items()
        for name in names
        for shown, value in wrong.items()
    )


def test_integers_of_clients_that_have_none() -> None:
    """Lua and R write 3.0 for 3."""

    async def work(client: Client) -> None:
        for path, used in {
            CHAT: lambda told: told["usage"]["completion_tokens"],
            TEXT: lambda told: told["usage"]["completion_tokens"],
            RAW: lambda told: told["tokens_predicted"],
            MESSAGES: lambda told: told["usage"]["output_tokens"],
            RESPONSES: lambda told: told["usage"]["output_tokens"],
            OLLAMA: lambda told: told["eval_count"],
        }.items():
            name = next(iter(INTEGERS[path]))
            reply = await client.post(path, {**with_field(path, name, 3.0), "kvflash": {"pins": [[0.0, 1.0]]}})
            assert (reply.status, used(reply.json)) == (200, 3)

    Server().run(work)


MISSING = {
    **{path: tuple(least) for path, least in LEAST.items() if not path.startswith("/api/")},
    MESSAGES: ("messages",),
    "/api/embed": ("input",),
    "/api/embeddings": ("prompt",),
}


def test_what_a_request_is_nothing_without() -> None:
    """max_tokens has a usual value, and Ollama's clients ask for nothing to load a model."""
    refused(
        (path, {**LEAST[path], left_out: None}, f"{left_out}: it is missing")
        for path, names in MISSING.items()
        for left_out in names
    )
    refused((path, {}, f"{names[0]}: it is missing") for path, names in MISSING.items())


SILENT = {"role": "user"}
A_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_messages_without_content() -> None:
    refused(
        [
            (CHAT, {"messages": [SILENT]}, "messages.0: content is missing"),
            (CHAT, {"messages": [*HELLO, {"role": "assistant", "name": "x"}]}, "messages.1: content is missing"),
            (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role: it is missing"),
            ("/apply-template", {"messages": [SILENT]}, "messages.0: content is missing"),
            (MESSAGES, {"messages": [SILENT]}, "messages.0.content: it is missing"),
            (
                MESSAGES,
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                "messages.0.content.0.text: it",
            ),
            (RESPONSES, {"input": [SILENT]}, "input.0.content: it is missing"),
            (
                RESPONSES,
                {"input": [{"type": "function_call", "name": "f", "arguments": ""}]},
                "input.0.call_id: it is mi",
            ),
            (
                RESPONSES,
                {"input": [{"type": "function_call", "call_id": "a", "name": 5}]},
                "input.0.name: it is the integ",
            ),
        ]
    )

    async def work(client: Client) -> None:
        for answer in ({"tool_calls": [A_CALL]}, {"reasoning_content": "Hm."}, {"content": None}):
            asked = {"messages": [*HELLO, {"role": "assistant", **answer}, {"role": "user", "content": None}]}
            assert (await client.post(CHAT, asked)).status == 200
        assert (await client.post(OLLAMA, {"messages": [SILENT], "stream": False})).status == 200

    Server().run(work)


def test_calls_and_tools() -> None:
    def calling(**call: Any) -> dict[str, Any]:
        return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{**A_CALL, **call}]}]}

    where = "messages.1.tool_calls.0"
    refused([
        (CHAT, calling(id=5), f"{where}.id: it is the integer 5, and must be a text"),
        (CHAT, calling(function={"arguments": "{}"}), f"{where}.function.name: it is missing"),
        (CHAT, calling(function={"name": "f", "arguments": 5}), f"{where}.function.arguments: it is the integer 5"),
        (CHAT, {"messages": [{**HELLO[0], "name": 5}]}, "messages.0.name: it is the integer 5, and must be a text"),
        (MESSAGES, {**LEAST[MESSAGES], "tools": [{"name": "f"}]}, "tools.0.input_schema: it is missing"),
        (MESSAGES, {**LEAST[MESSAGES], "tool_choice": {"type": "tool"}}, "tool_choice.name: it is missing"),
    ])  # fmt: skip


def test_errors_name_fields_as_the_client_does() -> None:
    refused([
        (MESSAGES, {**LEAST[MESSAGES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
         'tool_choice.disable_parallel_tool_use: it is the text "yes", and must be true or false'),
        (MESSAGES, {**LEAST[MESSAGES], "tool_choice": {"type": "each"}}, "tool_choice.type: it is 'each'"),
        (MESSAGES, {**LEAST[MESSAGES], "output_config": {"format": "json"}}, 'output_config.format: it is the text'),
        (MESSAGES, {**LEAST[MESSAGES], "thinking": {"type": True}}, "thinking.type: it is true, and must be a text"),
        (RESPONSES, {"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort: it is the integer 3, and must be a"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, 'text.format.type: it is the text "xml"'),
        (OLLAMA, {**LEAST[OLLAMA], "options": {"temperature": "x"}}, 'options.temperature: it is the text "x"'),
        (CHAT, {**LEAST[CHAT], "tool_choice": {"type": "function"}}, "tool_choice.function: it is missing"),
        (CHAT, {**LEAST[CHAT], "n": 17}, "n: it is the integer 17, and must be less than or equal to 16"),
        (CHAT, {**LEAST[CHAT], "user": "x", "stop": [5]}, "stop: element 0 is the integer 5, and must be a text"),
    ])  # fmt: skip
