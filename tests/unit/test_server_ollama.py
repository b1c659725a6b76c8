"""Ollama's interface, on a model made of a few lines. Bodies are as Ollama's Python client and Open WebUI send them."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import Any

import pytest
from support.asgi import Reply
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.server import ollama
from kvflash_ggml.server.turns import text_of

CHAT, GENERATE = "/api/chat", "/api/generate"

HELLO = [{"role": "user", "content": "hello"}]

PROMPT = len("user: hello\nassistant: ")

CLIENT = {"model": "fake", "stream": False, "messages": HELLO, "tools": []}
"""`ollama.Client().chat(model="fake", messages=...)`."""

OPEN_WEBUI = {"model": "fake", "messages": HELLO, "options": {"temperature": 0.2, "num_ctx": 64}, "stream": True}

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "required": ["zone"], "properties": {"zone": {"type": "string"}}},
    },
}


def post(data: dict[str, Any], path: str = CHAT, server: Server | None = None, **more: Any) -> Reply:
    return (server or Server()).post(path, {"model": "fake", **data, **more})


def saying(text: str) -> Server:
    return Server(FakeModel(reply=lambda prompt: text.encode()))


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in bytes(reply.body).decode().splitlines()]


def told(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.json
    return reply.headers["x-kvflash-ignored"].split(", ") if "x-kvflash-ignored" in reply.headers else []


# --- answers


def test_a_chat_as_a_whole() -> None:
    reply = post(CLIENT)
    said = reply.json
    times = {name: said.pop(name) for name in list(said) if name.endswith("_duration")}
    datetime.fromisoformat(said.pop("created_at").replace("Z", "+00:00"))
    assert said == {
        "model": "fake", "message": {"role": "assistant", "content": "an answer"}, "done": True, "done_reason": "stop",
        "prompt_eval_count": PROMPT, "eval_count": 9,
    }  # fmt: skip
    assert set(times) == {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
    assert all(type(value) is int for value in times.values())
    assert times.pop("total_duration") == pytest.approx(sum(times.values()), abs=3)
    assert told(reply) == []


def test_a_stream_is_the_default() -> None:
    reply = post({"messages": HELLO})
    *pieces, last = lines(reply)
    assert "".join(one["message"]["content"] for one in pieces) == "an answer"
    assert not any(one["done"] for one in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 9)


def test_a_prompt() -> None:
    server = Server()
    asked = {"prompt": "hello", "suffix": "", "system": "be short", "stream": False}  # as an older client of Ollama's
    reply = post(asked, GENERATE, server)
    assert (reply.json["response"], reply.json["done"]) == ("an answer", True)
    assert [one["role"] for one in server.prompts.rendered[-1]] == ["system", "user"]
    *pieces, last = lines(post({"prompt": "hello"}, GENERATE))
    assert "".join(one["response"] for one in pieces) == "an answer"
    assert last["prompt_eval_count"] == PROMPT
    raw = post({"prompt": "hello", "raw": True, "stream": False}, GENERATE)
    assert (raw.json["response"], raw.json["prompt_eval_count"]) == ("an answer", len("hello"))


def test_curl_needs_no_header() -> None:
    def call(**headers: str) -> Reply:
        body, form = b'{"model": "fake", "prompt": "hello", "stream": false}', "application/x-www-form-urlencoded"
        reply = Server().run(
            lambda client: client.call("POST", GENERATE, raw=body, content_type=form, **headers).done()
        )
        assert isinstance(reply, Reply)
        return reply

    assert call().json["done"] is True
    assert call(origin="https://elsewhere.example").status == 403


@pytest.mark.parametrize(("path", "empty"), [(CHAT, "message"), (GENERATE, "response")])
def test_nothing_is_asked_to_load_the_model(path: str, empty: str) -> None:
    said = post({"keep_alive": "5m"}, path).json
    assert (said["done_reason"], empty in said) == ("load", True)


def test_calls_come_whole() -> None:
    *_, called, last = lines(post({"messages": HELLO, "tools": [CLOCK]}, server=saying(f"Let me see.{CALL}")))
    (call,) = called["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": {"zone": "CET"}}
    assert (last["done_reason"], last["message"]) == ("stop", {"role": "assistant", "content": ""})
    whole = post({"messages": HELLO, "tools": [CLOCK], "stream": False}, server=saying(CALL)).json["message"]
    assert [one["function"]["name"] for one in whole["tool_calls"]] == ["clock"]


def test_results_find_their_calls() -> None:
    server = Server()
    calls = [{"function": {"name": name, "arguments": {"n": i}}} for i, name in enumerate(("one", "two", "two"))]
    given = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "two"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3", "tool_name": "two"},
    ]
    assert post({"messages": given, "stream": False}, server=server).status == 200
    _, asked, *results = server.prompts.rendered[-1]
    ids = [call["id"] for call in asked["tool_calls"]]
    assert len(set(ids)) == 3
    assert asked["reasoning_content"] == "hm"
    assert asked["tool_calls"][1]["function"] == {"name": "two", "arguments": {"n": 1}}
    assert [(one["tool_call_id"], one["name"]) for one in results] == [
        (ids[1], "two"), (ids[0], "one"), (ids[2], "two"),
    ]  # fmt: skip


def test_many_calls_without_results_are_no_work_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, threads = 0, set()

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    def recording(*args: Any) -> str:
        threads.add(threading.get_ident())
        return Name(text_of(*args))

    monkeypatch.setattr(ollama, "text_of", recording)
    calls = [{"function": {"name": "f"}}] * 500
    given = [*HELLO, {"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "tool_name": "g"}] * 500]
    assert post({"messages": given}).status == 200
    assert compared < 10_000
    assert threads
    assert threading.get_ident() not in threads, "which the loop runs on"


# --- what is asked for


def test_options_are_those_of_any_answer() -> None:
    reply = post({"messages": HELLO, "options": {"num_predict": 3, "temperature": 0, "top_k": 40, "seed": 7}})
    assert lines(reply)[-1]["done_reason"] == "length"
    assert told(reply) == []
    assert lines(post({"messages": HELLO, "options": {"stop": ["answ"]}}))[-1]["eval_count"] < 9
    wrong = post({"messages": HELLO, "options": {"temperature": "hot"}})
    assert (wrong.status, wrong.json) == (400, {"error": wrong.json["error"]})
    assert "temperature" in wrong.json["error"]
    assert lines(post({"messages": HELLO, "options": {"num_predict": -2}}))[-1]["eval_count"] == 9


def test_what_has_no_effect_is_told() -> None:
    assert told(post(OPEN_WEBUI)) == []
    # every parameter of Open WebUI's settings: what is the server's own is told
    asked = OPEN_WEBUI["options"] | {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3, "mirostat": 0, "mirostat_eta": 0.1,
        "mirostat_tau": 5.0, "repeat_last_n": 64, "repeat_penalty": 1.1, "tfs_z": 1.0, "stop": ["x"], "num_predict": 16,
    }  # fmt: skip
    fixed = {"num_batch": 512, "num_keep": 24, "use_mmap": True, "use_mlock": False, "num_thread": 4, "num_gpu": 1}
    reply = post(OPEN_WEBUI, options=asked | fixed, keep_alive="5m")
    assert told(reply) == [f"options.{name}" for name in fixed]
    assert lines(reply)[-1]["done"]
    options = {"num_gpu": 1, "num_ctx": 1 << 30, "messages": [], "n": 4, "mirostat": 0}
    reply = post({"messages": HELLO, "options": options, "context": [1], "keep_alive": -1, "think": False})
    assert sorted(told(reply)) == ["context", "options.messages", "options.n", "options.num_ctx", "options.num_gpu"]
    strict = Server(strict=True).post(CHAT, {"messages": HELLO, "options": {"num_gpu": 1}})
    assert strict.status == 400
    assert "num_gpu" in strict.json["error"]


def test_formats() -> None:
    for form in ("json", {"type": "object", "properties": {}}):
        assert post({"messages": HELLO, "format": form, "stream": False}).status == 200
    assert post({"messages": HELLO, "format": ""}).status == 200
    refused = post({"messages": HELLO, "format": "yaml"})
    assert (refused.status, "format" in refused.json["error"]) == (400, True)
    assert post({"messages": HELLO, "format": {"$ref": "http://x"}}).status == 400


def test_pictures_are_refused() -> None:
    for path, data in ((CHAT, {"messages": [{**HELLO[0], "images": ["x"]}]}), (GENERATE, {"images": ["x"]})):
        reply = post({"prompt": "x", **data}, path)
        assert (reply.status, "sees no images" in reply.json["error"]) == (400, True)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 1}], ["x"],
        [{"role": "assistant", "tool_calls": [1]}], [{"role": "assistant", "tool_calls": [{"function": "x"}]}],
        [{"role": "assistant", "tool_calls": 1}], [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
    ],
)  # fmt: skip
def test_wrong_messages(messages: list[Any]) -> None:
    reply = post({"messages": messages})
    assert reply.status == 400
    assert isinstance(reply.json["error"], str)


# --- errors


def test_errors_have_ollamas_shape() -> None:
    server = Server(keys=("k",))
    refused = server.post(CHAT, CLIENT)
    assert (refused.status, type(refused.json["error"])) == (401, str)
    assert Server(keys=("k",)).post(CHAT, CLIENT, authorization="Bearer k").status == 200
    assert Server().get("/api/nowhere").json == {"error": "there is nothing at /api/nowhere"}
    assert "kvflash-run pull" in Server().post("/api/pull", {}).json["error"]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("a secret")

    server = Server(FakeModel(on_step=fail))
    *_, last = lines(post({"messages": HELLO}, server=server))
    assert list(last) == ["error"]
    assert "secret" not in last["error"]


# --- what there is


def test_what_is_served() -> None:
    assert Server().get("/api/version").json["version"].split(".")[0].isdecimal()
    (listed,) = Server().get("/api/tags").json["models"]
    (running,) = Server().get("/api/ps").json["models"]
    assert (listed["name"], listed["model"], listed["details"]["family"]) == ("fake", "fake", "fake")
    assert running["context_length"] > 0
    for text in (listed["modified_at"], running["expires_at"]):
        datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_a_model_is_shown() -> None:
    shown = Server().post("/api/show", {"model": "fake:latest"}).json
    assert shown["model_info"]["general.architecture"] == "fake"
    assert shown["model_info"]["fake.context_length"] > 0
    assert shown["capabilities"][:2] == ["completion", "tools"]
    assert Server().post("/api/show", {"name": "other"}).status == 404
