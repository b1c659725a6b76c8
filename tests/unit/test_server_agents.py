"""What coding agents have sent, answered request by request. Their texts are made up, and most tools left out."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel
from support.fake_server import Server

RECORDED = sorted((Path(__file__).parents[1] / "support" / "recorded").glob("*.json"))

LEFT_OUT = {"claude-code": None, "codex": "tools.web_search", "opencode": None}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("stateful", [False, True])
def test_a_task_of_three_calls_is_read_once(path: Path, stateful: bool) -> None:
    """Each request but the first prefills what is new, and a part of the answer that a template writes otherwise."""
    requests: list[Any] = json.loads(path.read_text(encoding="utf-8"))

    async def work(client: Client) -> list[tuple[Reply, int]]:
        replies = []
        for request in requests:
            before = server.model.read_tokens
            reply = await client.post(request["path"], request["body"])
            replies.append((reply, server.model.read_tokens - before))
        return replies

    model = FakeModel(
        n_ctx=1 << 17, stateful=stateful, reply=lambda prompt: b"Step %d." % (1 + prompt.count(b"\ntool: "))
    )
    server = Server(model)
    replies = server.run(work)
    assert [reply.status for reply, _ in replies] == [200] * len(requests)
    assert {reply.headers.get("x-kvflash-ignored") for reply, _ in replies} == {LEFT_OUT[path.stem]}
    assert max(read for _, read in replies[-3:]) < 250
    assert server.scheduler.outcomes.totals.missed == 0


JUNK: list[Any] = [
    None,
    5,
    -1,
    "",
    "x",
    "\x00",
    [],
    {},
    [5],
    [[]],
    {"type": 5},
    {"type": "text"},
    True,
    1e300,
    "x" * 300,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is a value in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_hostile_body_makes_the_server_fail(path: Path) -> None:
    """Each of 300 bodies has one or two values of another kind. It is answered, or refused with a typed error."""
    request = json.loads(path.read_text(encoding="utf-8"))[-1]
    counting = {"/v1/messages": "/v1/messages/count_tokens", "/v1/responses": "/v1/responses/input_tokens"}
    chance = random.Random(7)

    async def work(client: Client) -> None:
        for _ in range(300):
            body = copy.deepcopy(request["body"])
            for _ in range(chance.choice((1, 2))):
                *before, last = chance.choice(places(body))
                parent = body
                for key in before:
                    parent = parent[key]
                parent[last] = chance.choice(JUNK)
            body |= {"max_tokens": 1, "stream": False} if request["path"] not in counting else {}
            reply = await client.post(counting.get(request["path"], request["path"]), body)
            assert reply.status in (200, 400, 501), (reply.status, body)
            assert reply.status == 200 or reply.message

    Server(FakeModel(n_ctx=1 << 17)).run(work)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'


def ask(path: str, server: Server, *names: str, stop: str = "", stream: bool = False) -> Reply:
    """The same question through one of the interfaces. names: of tools. stop: a stop string."""
    hello = [{"role": "user", "content": "hello"}]
    data: dict[str, Any] = {"stream": stream, "max_tokens": 500}
    if "/messages" in path:
        data |= {"messages": hello, "tools": [{"name": name, "input_schema": SCHEMA} for name in names]}
        data |= {"stop_sequences": [stop]} if stop else {}
    elif "/responses" in path:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
        data = {"input": hello, "tools": tools, "stream": stream}
    else:
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
        data |= {"messages": hello, "tools": tools, **({"stop": [stop]} if stop else {})}
    return server.post(path, data)


def saying(text: str, **more: Any) -> Server:
    return Server(FakeModel(reply=lambda prompt: text.encode(), **more))


INTERFACES = ["chat/completions", "messages", "responses"]


def told(reply: Reply) -> tuple[str, list[str], str]:
    """The text of an answer, its calls by name, and why it ended."""
    if "choices" in reply.json:
        (choice,) = reply.json["choices"]
        message = choice["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        return message["content"] or "", calls, choice["finish_reason"]
    if "output" in reply.json:
        items = reply.json["output"]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        return "".join(texts), [item["name"] for item in items if "call_id" in item], reply.json["status"]
    blocks = reply.json["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [block["name"] for block in blocks if "name" in block], reply.json["stop_reason"]


@pytest.mark.parametrize("front", ["/v1", ""])
@pytest.mark.parametrize("interface", INTERFACES)
def test_the_version_may_be_left_out_of_a_path(interface: str, front: str) -> None:
    assert ask(f"{front}/{interface}", Server()).status == 200
    wrong = Server().post(f"{front}/{interface}", {"messages": 5, "input": 5})
    assert (wrong.status, "type" in wrong.json) == (400, interface == "messages")


@pytest.mark.parametrize("front", ["/v1", ""])
@pytest.mark.parametrize(
    ("interface", "counting", "field"),
    [
        ("chat/completions", "chat/completions/input_tokens", "prompt_tokens"),
        ("messages", "messages/count_tokens", "input_tokens"),
        ("responses", "responses/input_tokens", "input_tokens"),
    ],
)
def test_each_interface_counts_what_it_would_read(interface: str, counting: str, field: str, front: str) -> None:
    """Upstream's `test_chat_completions_token_count`. The body is the one that would be answered."""
    read = ask(f"/v1/{interface}", Server(), "clock").json["usage"][field]
    assert read > len("user: hello\nassistant: ")
    server = Server()
    object_ = {} if interface == "messages" else {"object": "response.input_tokens"}
    assert ask(f"{front}/{counting}", server, "clock").json == {"input_tokens": read, **object_}
    assert server.model.read_tokens == 0


BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It"}]


@pytest.mark.parametrize("fields", [
    {}, {"continue_final_message": True}, {"continue_final_message": "content", "add_generation_prompt": False},
    {"continue_final_message": None},
])  # fmt: skip
def test_an_answer_that_has_begun_is_gone_on_with(fields: dict[str, Any]) -> None:
    """vLLM's names for it, as upstream's `test_chat_template_continue_final_message_vllm_compat` has them."""
    reply = Server().post("/v1/chat/completions", {"messages": BEGUN, **fields})
    assert reply.json["usage"]["prompt_tokens"] == len("user: hello\nassistant: It")
    assert "x-kvflash-ignored" not in reply.headers


def test_how_an_answer_begins_may_not_be_asked_for_twice() -> None:
    """`test_chat_template_continue_final_message_mutual_exclusion`"""
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    reply = Server().post("/v1/chat/completions", {"messages": BEGUN, **fields})
    assert (reply.status, "excludes continue_final_message" in reply.message) == (400, True)


def test_beginnings_that_no_answer_has_are_told() -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    reply = Server().post("/v1/chat/completions", {"messages": BEGUN[:1], **fields})
    assert reply.status == 200
    assert reply.headers["x-kvflash-ignored"] == "continue_final_message=True, add_generation_prompt=False"


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("name", ["a b", "", "é", "x" * 129, "a/b"])
def test_a_tool_whose_name_no_format_has_is_left_out(interface: str, name: str) -> None:
    reply = ask(f"/v1/{interface}", saying(CALL), name, "clock")
    assert (reply.status, told(reply)[1]) == (200, ["clock"])
    assert reply.headers["x-kvflash-ignored"].startswith("tools.")
    assert told(ask(f"/v1/{interface}", saying(CALL), name))[:2] == (CALL, []), "no tool is offered"


def test_a_custom_tool_without_a_name_is_left_out() -> None:
    data = {"input": "hello", "tools": [{"type": "custom"}, {"type": "namespace", "tools": [{"type": "function"}]}]}
    reply = Server().post("/v1/responses", data)
    assert (reply.status, reply.headers["x-kvflash-ignored"]) == (200, "tools.")


@pytest.mark.parametrize(
    ("interface", "ends"), [("chat/completions", ("stop", "tool_calls")), ("messages", ("stop_sequence", "tool_use"))]
)
def test_a_stop_string_within_a_call_ends_a_text(interface: str, ends: tuple[str, str]) -> None:
    """A call with half of its arguments would be executed."""
    reply = ask(f"/v1/{interface}", saying(f"Yes. {CALL}"), "clock", stop='"CE')
    assert told(reply) == ("Yes. " + CALL[: CALL.index('"CE')], [], ends[0])
    whole = ask(f"/v1/{interface}", saying(f"Yes. {CALL}"), "clock", stop="</tool_call>")
    assert told(whole)[2] in ends


@pytest.mark.parametrize(
    ("interface", "end"), [("chat/completions", "stop"), ("messages", "end_turn"), ("responses", "completed")]
)
def test_interfaces_agree_on_why_an_odd_answer_ended(interface: str, end: str) -> None:
    text, calls, why = told(ask(f"/v1/{interface}", saying(f"{CALL}<tool_call>no"), "clock"))
    assert (text, calls, why) == ("<tool_call>no", ["clock"], end)


@pytest.mark.parametrize("interface", INTERFACES)
def test_what_was_said_before_a_failure_is_told(interface: str) -> None:
    """The parser holds it back, since a call could begin so."""
    said = "Yes. <tool_call>\n{"
    steps = iter(range(1000))

    def fail() -> None:
        if next(steps) > len(said):
            raise RuntimeError("no device")

    reply = ask(f"/v1/{interface}", saying(said + "x" * 50, on_step=fail), "clock", stream=True)
    assert reply.status == 200
    assert b"error" in reply.body
    deltas = [frame.get("delta", frame) for frame in reply.frames if isinstance(frame, dict)]
    if interface == "chat/completions":
        deltas = [frame["choices"][0]["delta"] for frame in reply.frames[:-1] if frame.get("choices")]
        texts = [delta.get("content") or "" for delta in deltas]
    elif interface == "messages":
        texts = [delta.get("text") or "" for delta in deltas]
    else:
        texts = [delta for delta in deltas if isinstance(delta, str)]
    assert "".join(texts).startswith(said[:-1])
