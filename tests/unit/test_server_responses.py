"""OpenAI's responses, on a model made of a few lines."""

from __future__ import annotations

import base64
import json
import logging
import time
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from support.asgi import Client, Reply
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.batching.messages import Access
from kvflash_ggml.server import fields, requestlog
from kvflash_ggml.server.kept import Kept, KeptItems

TOOLS = [
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "patch", "description": "Changes.", "format": {"type": "grammar", "definition": "x: y"}},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close", "parameters": {}}]},
    {"type": "web_search"},
]

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ask(data: dict[str, Any] | None = None, *, server: Server | None = None, **more: Any) -> Reply:
    return (server or Server()).post("/v1/responses", {"model": "any", "input": "hello", **(data or {}), **more})


def saying(text: str) -> Server:
    return Server(FakeModel(reply=lambda prompt: text.encode()))


def told(items: list[Any], **more: Any) -> list[dict[str, Any]]:
    """What the template gets of these items."""
    server = Server()
    reply = ask(server=server, input=items, **more)
    assert reply.status == 200, reply.json
    return server.prompts.rendered[-1]


# --- answers


def test_a_response() -> None:
    reply = ask(max_output_tokens=50, metadata={"a": "b"}).json
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "an answer", "annotations": [], "logprobs": []}]
    assert (reply["status"], reply["object"], reply["metadata"]) == ("completed", "response", {"a": "b"})
    assert reply["usage"] == {
        "input_tokens": 23, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 32,
    }  # fmt: skip
    cut = ask(max_output_tokens=2).json
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in cut["output"]] == ["incomplete"]
    *_, done, end = ask(max_output_tokens=2, stream=True).frames
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert end["response"]["output"] == [done["item"]]


def test_a_stream_has_every_event_in_its_order() -> None:
    said = (
        "Let me see."
        + call("clock", {"zone": "CET"})
        + call("patch", {"input": "*** Begin"})
        + call("agents__close", {})
    )
    reply = ask(server=saying(said), tools=TOOLS, stream=True)
    kinds = [frame["type"].removeprefix("response.") for frame in reply.frames]
    names = [line[16:] for line in bytes(reply.body).decode().split("\n") if line.startswith("event: ")]
    assert names == kinds
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert short == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [frame["sequence_number"] for frame in reply.frames] == list(range(len(kinds)))
    whole = reply.frames[-1]["response"]
    assert whole["output"] == [f["item"] for f in reply.frames if f["type"] == "response.output_item.done"]
    text, clock, patch, close = whole["output"]
    assert text["content"][0]["text"] == "Let me see."
    assert (clock["type"], clock["name"], json.loads(clock["arguments"])) == ("function_call", "clock", {"zone": "CET"})
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert (close["name"], close["namespace"]) == ("close", "agents")
    added = [frame["item"]["id"] for frame in reply.frames if frame["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in whole["output"]]


def test_tokens_are_counted_as_they_are_read() -> None:
    asked = {"instructions": "Be brief.", "input": [USER], "tools": TOOLS}
    counted = Server().post("/v1/responses/input_tokens", asked).json
    assert counted == {"object": "response.input_tokens", "input_tokens": ask(asked).json["usage"]["input_tokens"]}


def test_an_empty_input_is_answered() -> None:
    """Codex sends one to see whether the server is there."""
    assert ask(input=[], max_output_tokens=1).status == 200
    assert ask(input="", max_output_tokens=1).status == 200


def test_what_codex_wants_of_the_models() -> None:
    assert "models" not in Server().get("/v1/models").json
    reply = Server().get("/v1/models?client_version=0.169.0").json
    assert (reply["models"], reply["data"][0]["id"]) == ([], "fake")


# --- what a model is told


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "One."},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "user", "content": [{"type": "text", "text": "what time?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "clock", "arguments": '{"zone": "CET"}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
        {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "close", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "output_text", "text": "done"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "message", "role": "developer", "content": "Three."},
    ]
    system, user, answer, *results, late = told(items, instructions="Zero.", tools=TOOLS)
    assert (system["role"], system["content"]) == ("system", "Zero.\n\nOne.\n\nTwo.")
    assert user["content"] == "hello\n\nwhat time?"
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in answer["tool_calls"]]
    assert calls == [("clock", {"zone": "CET"}), ("patch", {"input": "x"}), ("agents__close", {})]
    assert [(one["role"], one["tool_call_id"], one["name"], one["content"]) for one in results] == [
        ("tool", "a", "clock", "noon"), ("tool", "b", "patch", "done"),
        ("tool", "c", "agents__close", "[input_image: left out, since this model reads text only]"),
    ]  # fmt: skip
    assert (late["role"], late["content"]) == ("user", "<system-reminder>\nThree.\n</system-reminder>")


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}, "Hm."),
        ({"summary": [{"type": "summary_text", "text": "Hm."}], "content": None}, "Hm."),
        ({"summary": []}, ""),
        ({"encrypted_content": "gAAAA"}, ""),
        ({"summary": [], "encrypted_content": "kvflash:" + base64.b64encode(b"Hm.").decode()}, "Hm."),
        ({"summary": [], "encrypted_content": "kvflash:?"}, ""),
    ],
)
def test_reasoning_with_content_or_summary_or_neither(item: dict[str, Any], thought: str) -> None:
    _, answer, _ = told([USER, {"type": "reasoning", **item}, {"role": "assistant", "content": "x"}, USER])
    assert answer["reasoning_content"] == thought


def test_tools_that_come_as_an_item() -> None:
    server = saying(call("clock", {}))
    more = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    assert ask(server=server, input=[more, USER]).json["output"][0]["name"] == "clock"
    reply = Server().post("/v1/responses/input_tokens", {"input": [more, USER]})
    assert reply.json["input_tokens"] == len("tools\nuser: hello\nassistant: ")


# --- going on from a response


def test_a_response_goes_on_from_another() -> None:
    async def work(client: Client) -> None:
        first = (await client.post("/v1/responses", {"input": "x" * 300})).json
        asked = {"input": "and now?", "previous_response_id": first["id"], "stream": True}
        second = (await client.post("/v1/responses", asked)).frames[-1]["response"]
        third = (
            await client.post("/v1/responses", {**asked, "previous_response_id": second["id"], "stream": False})
        ).json
        assert second["previous_response_id"] == first["id"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 300
        cached, read = (third["usage"][name] for name in ("input_tokens_details", "input_tokens"))
        assert read - cached["cached_tokens"] < 40

    server = Server()
    server.run(work)
    roles = [message["role"] for message in server.prompts.rendered[-1]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("how", ["unknown", "not stored", "private", "erased"])
def test_a_response_that_is_not_kept(how: str) -> None:
    async def work(client: Client) -> Reply:
        more = {"not stored": {"store": False}, "private": {"kvflash": {"cache_prompt": False}}}.get(how, {})
        id = (await client.post("/v1/responses", {"input": "x" * 300, **more})).json["id"]
        if how == "erased":
            (known,) = (await client.get("/kvflash/conversations")).json["data"]
            await client.call("DELETE", f"/kvflash/conversations/{known['id']}").done()
        id = "resp_1" if how == "unknown" else id
        gone = await client.get(f"/v1/responses/{id}")
        assert (gone.status, gone.json["error"]["code"]) == (404, "response_not_found")
        return await client.post("/v1/responses", {"input": "go on", "previous_response_id": id})

    reply = Server().run(work)
    assert (reply.status, reply.json["error"]["code"]) == (400, "previous_response_not_found")


def test_a_response_of_another_key_is_not_known() -> None:
    async def work(client: Client) -> list[Reply]:
        id = (await client.post("/v1/responses", {"input": "x" * 300}, x_api_key="one")).json["id"]
        asked = {"input": "go on", "previous_response_id": id}
        paths = ("/v1/responses", "/v1/responses/input_tokens")
        return [await client.post(path, asked, x_api_key=key) for key in ("two", "one") for path in paths]

    *theirs, mine, counted = Server(keys=("one", "two"), isolate_keys=True).run(work)
    assert [reply.status for reply in theirs] == [400, 400]
    assert {reply.json["error"]["code"] for reply in theirs} == {"previous_response_not_found"}
    assert (mine.status, counted.status) == (200, 200)


def kept(text: str, *, key: str = "a", conversation: str = "c") -> Kept:
    return Kept(items=(json.dumps([text]).encode(),), conversation=conversation, salt="", key=key)


def test_the_items_of_one_key_do_not_push_out_those_of_another() -> None:
    items = KeptItems(capacity=20_000)
    items.keep("mine", kept("x" * 4000))
    for i in range(9):
        items.keep(f"theirs{i}", kept("x" * 4000, key="b"))
    items.keep("huge", kept("x" * 90_000, key="b"))
    items.keep("last", kept("x" * 4000, key="b"))
    found = {id for id in ("mine", *(f"theirs{i}" for i in range(9)), "huge", "last") if items.find(id, Access())}
    assert found == {"mine", "last"}


def test_items_of_responses_share_those_before_them() -> None:
    async def work(client: Client) -> str:
        id = None
        for _ in range(20):
            asked = {"input": "x" * 3000, **({"previous_response_id": id} if id else {})}
            id = (await client.post("/v1/responses", asked)).json["id"]
        return str(id)

    server = Server(FakeModel(n_ctx=1 << 17))
    found = server.front.items.find(server.run(work), Access())
    assert found is not None
    assert len(found.items) == 40
    assert len(json.loads(found.json())) == 40


def test_nothing_is_kept_of_what_was_erased() -> None:
    async def work(client: Client) -> str:
        id = (await client.post("/v1/responses", {"input": "x" * 300})).json["id"]
        assert server.front.items.find(id, Access()) is not None
        (known,) = (await client.get("/kvflash/conversations")).json["data"]
        await client.call("DELETE", f"/kvflash/conversations/{known['id']}").done()
        return str(id)

    server = Server()
    assert server.front.items.find(server.run(work), Access()) is None


def test_a_chain_of_responses_has_the_bounds_of_a_body() -> None:
    async def work(client: Client) -> list[Reply]:
        junk = [{"type": "hologram", "data": "x" * 60_000}, USER]
        replies = [await client.post("/v1/responses", {"input": junk})]
        for _ in range(2):
            asked = {"input": junk, "previous_response_id": replies[-1].json["id"]}
            replies.append(await client.post("/v1/responses", asked))
        return replies

    *_, last = Server(max_body=100_000).run(work)
    assert (last.status, last.json["error"]["code"]) == (413, "body_too_large")


# --- tolerance


def test_many_names_that_are_not_known_are_noted_once_each() -> None:
    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    request = HttpRequest({"type": "http", "headers": [], fields.IGNORED: [f"a{i}" for i in range(1000)]})
    fields.note(request, [*(Name(f"b{i}") for i in range(1000)), "a1"])
    assert len(request.scope[fields.IGNORED]) == 2000
    assert Name.compared < 5000


def test_what_is_not_known_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    items = [USER, {"type": "hologram"}, {"type": "item_reference", "id": "x"}, {"type": "compaction"}]
    asked = {"input": items, "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}, "novelty": 1}

    async def work(client: Client) -> list[Reply]:
        return [await client.post("/v1/responses", asked) for _ in range(3)]

    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    replies = Server().run(work)
    assert [reply.status for reply in replies] == [200] * 3
    left_out = "novelty, input.hologram, input.item_reference, input.compaction, tools.web_search"
    assert replies[0].headers["x-kvflash-ignored"] == f"{left_out}, tool_choice.allowed_tools"
    assert len([record for record in caplog.records if "ignored" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    "data",
    [
        {"input": 5},
        {"input": [5]},
        {"input": [{"role": "wizard", "content": "x"}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call", "call_id": 5}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": 5}]},
        {"input": [{"type": "reasoning", "summary": 5}]},
        {"input": [{"type": "additional_tools", "tools": 5}]},
        {"tools": 5},
        {"tools": [{"type": "function", "name": 5}]},
        {"tools": [{"type": "namespace", "name": "a", "tools": [5]}]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}},
        {"tool_choice": "sometimes"},
        {"text": {"format": {"type": "json_schema", "schema": 5}}},
        {"max_output_tokens": "x"},
        {"previous_response_id": 5},
        {"metadata": {"a": 5}},
        {"metadata": {"a": "x" * 513}},
        {"metadata": {f"{i}": "x" for i in range(17)}},
        {"chat_template_kwargs": {"a": float("inf")}},
    ],
)
def test_what_is_refused(data: dict[str, Any]) -> None:
    reply = ask(data)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_a_client_that_waits_gets_events() -> None:
    """Codex counts events, and gives up without them."""

    async def work(client: Client) -> list[Any]:
        call = client.call("POST", "/v1/responses", {"input": "hello", "stream": True})
        reply = await call.until(lambda reply: len(reply.frames) > 3)
        call.leave()
        await call.done()
        return reply.frames[:4]

    frames = Server(FakeModel(on_step=lambda: time.sleep(0.1)), ping_s=0.01).run(work)
    assert [frame["type"] for frame in frames] == ["response.created", *["response.in_progress"] * 3]
    assert [frame["sequence_number"] for frame in frames] == [0, 1, 2, 3]


def test_a_stream_that_fails_says_so() -> None:
    def fail() -> None:
        raise MemoryError

    reply = ask(server=Server(FakeModel(on_step=fail)), stream=True)
    assert reply.frames[-1]["type"] == "response.failed"
    assert reply.frames[-1]["response"]["error"]["code"] == "internal_error"


def test_what_a_failure_cuts_is_not_complete() -> None:
    model = FakeModel()

    def fail() -> None:
        if model.steps > 6:
            raise MemoryError

    model.on_step = fail
    *_, done, failed = ask(server=Server(model), stream=True).frames
    assert (done["type"], failed["type"]) == ("response.output_item.done", "response.failed")
    assert done["item"]["content"][0]["text"] in ("a", "an", "an ", "an a", "an an", "an ans")
    assert done["item"]["status"] == failed["response"]["output"][0]["status"] == "incomplete"


def test_a_conversation_of_openais_servers_is_refused() -> None:
    """The model would answer without what went before. `null` is none."""
    for conversation in ("conv_1", {"id": "conv_1"}):
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            reply = Server().post(path, {"input": "x", "conversation": conversation})
            assert (reply.status, reply.json["error"]["param"]) == (400, "conversation")
            assert "send previous_response_id, or all items" in reply.message
    assert Server().post("/v1/responses", {"input": "x", "conversation": None, "max_output_tokens": 1}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_response_is_told_again(stream: bool) -> None:
    """Also one that goes on from another: its output is its own."""

    async def work(client: Client) -> None:
        before: str | None = None
        for text in ("first", "second"):
            asked = {"input": text, "stream": stream, "metadata": {"a": "b"}, "previous_response_id": before}
            reply = await client.post("/v1/responses", asked)
            told = reply.frames[-1]["response"] if stream else reply.json
            before = told["id"]
            for front in ("/v1", ""):
                again = (await client.get(f"{front}/responses/{before}")).json
                assert again == {name: value for name, value in told.items() if name in again}
                assert {"id", "object", "created_at", "model", "output", "status", "usage", "metadata"} <= again.keys()
                assert again["output"]

    Server().run(work)


def test_a_response_is_erased() -> None:
    """Later ones go on, since they have its items. Its conversation stays."""

    async def work(client: Client) -> None:
        before: str | None = None
        ids = []
        for text in ("first" * 60, "second"):
            before = (await client.post("/v1/responses", {"input": text, "previous_response_id": before})).json["id"]
            ids.append(before)
        for front, id in zip(("/v1", ""), ids, strict=True):
            path = f"{front}/responses/{id}"
            assert (await client.call("DELETE", path).done()).json == {"id": id, "object": "response", "deleted": True}
            for method in ("GET", "DELETE"):
                gone = await client.call(method, path).done()
                assert (gone.status, gone.json["error"]["code"]) == (404, "response_not_found")
            goes_on = await client.post("/v1/responses", {"input": "third", "previous_response_id": ids[1]})
            assert goes_on.status == (200 if id == ids[0] else 400)
        assert (await client.get("/kvflash/conversations")).json["data"]

    Server().run(work)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, ({"type": "text"}, "auto")),
        ({"text": {"verbosity": "low"}, "tool_choice": "none"}, ({"type": "text"}, "none")),
        ({"text": {"format": {"type": "json_object"}}}, ({"type": "json_object"}, "auto")),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
            ({"type": "json_schema", "name": "a", "schema": {}}, "auto"),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "clock"}},
            ({"type": "text"}, {"type": "function", "name": "clock"}),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            ({"type": "text"}, "required"),
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_tells_what_was_asked(asked: dict[str, Any], told: tuple[Any, Any], stream: bool) -> None:
    reply = ask(asked, server=saying("{}"), stream=stream)
    response = reply.frames[-1]["response"] if stream else reply.json
    assert (response["text"]["format"], response["tool_choice"]) == told


def test_what_is_not_included_is_told() -> None:
    reply = ask(include=["reasoning.encrypted_content", "message.output_text.logprobs", 5])
    assert reply.status == 200
    assert reply.headers["x-kvflash-ignored"] == "include.message.output_text.logprobs, include.5"
    assert "x-kvflash-ignored" not in ask(include=["reasoning.encrypted_content"]).headers
