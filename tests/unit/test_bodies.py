"""Bodies that strangers send: what reads them holds up nobody, keeps little, and answers with a sentence."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from support.asgi import Client, Reply
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.server import bodies, exchange
from kvflash_ggml.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest

MIB = 1 << 20
HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT, RAW = "/v1/chat/completions", "/v1/completions", "/completion"


def filled(head: str, unit: str, tail: str, size: int = MIB) -> bytes:
    """JSON of about this size: many times the same element."""
    return (head + ",".join([unit] * (size // (len(unit) + 1))) + tail).encode()


def keys(value: str, size: int = MIB) -> str:
    return ",".join(f'"k{i}":{value}' for i in range(size // (8 + len(value))))


WRONG: dict[str, tuple[str, bytes]] = {
    "messages of numbers": (CHAT, filled('{"messages":[', "1", "]}")),
    "messages of nothing": (CHAT, filled('{"messages":[', "{}", "]}")),
    "parts of numbers": (CHAT, filled('{"messages":[{"role":"user","content":[', "1", "]}]}")),
    "tool calls of numbers": (CHAT, filled('{"messages":[{"role":"user","tool_calls":[', "1", "]}]}")),
    "prompts of objects": (TEXT, filled('{"prompt":[', "{}", "]}")),
    "prompts of null": (TEXT, filled('{"prompt":[', "null", "]}")),
    "prompts of many texts": (TEXT, filled('{"prompt":[', '""', "]}")),
    "prompts of many lists": (TEXT, filled('{"prompt":[', "[1]", "]}")),
    "a text among tokens": (TEXT, filled('{"prompt":[', "1", ',"x"]}')),
    "a number among texts": (TEXT, b'{"prompt":["x",1.5]}'),
    "lists of texts": (TEXT, filled('{"prompt":[[', '"x"', "]]}")),
    "raw lists": (RAW, filled('{"prompt":[', "[]", "]}")),
    "stops": (CHAT, filled('{"messages":[],"stop":[', '"a"', "]}")),
    "stops of numbers": (CHAT, filled('{"messages":[],"stop":[', "1", "]}")),
    "biases": (TEXT, ('{"prompt":"x","logit_bias":{' + keys("1000") + "}}").encode()),
    "pairs of biases": (TEXT, filled('{"prompt":"x","logit_bias":[', "[1,1]", "]}")),
    "tools": (CHAT, filled('{"messages":[{"role":"user"}],"tools":[', "{}", "]}")),
    "pins": (TEXT, filled('{"prompt":"x","kvflash":{"pins":[', "[]", "]}}")),
    "a long pin": (TEXT, filled('{"prompt":"x","kvflash":{"pins":[[', "1", "]]}}")),
    "tokens": ("/detokenize", filled('{"tokens":[', '"x"', "]}")),
    "no tokens": ("/detokenize", filled('{"tokens":[', "-1", "]}")),
    "more tokens than are written": ("/detokenize", filled('{"tokens":[', "1", "]}")),
    "no text": ("/tokenize", filled('{"content":[', "1", "]}")),
    "a template's messages": ("/apply-template", filled('{"messages":[', "1", "]}")),
    "brackets": (TEXT, b"[" * MIB),
    "unbalanced quotes": (TEXT, b'"\\"' * (MIB // 3)),
    "too many values": (TEXT, filled("[", "1", "]", 3 * MIB)),
    "no object": (TEXT, filled("[", "1", "]")),
    "another encoding": (TEXT, '{"prompt":"x"}'.encode("utf-16")),
    "not a number": (TEXT, b'{"prompt":"x","temperature":NaN}'),
    "an infinity": (TEXT, b'{"prompt":"x","temperature":-Infinity}'),
    "a large number": (TEXT, b'{"prompt":"x","temperature":1e999}'),
    "a long number": (TEXT, b'{"prompt":"x","seed":' + b"9" * MIB + b"}"),
    "a long integer of tokens": (TEXT, b'{"prompt":[' + b"9" * 4000 + b"]}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bodies_hold_up_nobody_and_have_few_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, raw = WRONG[name]
    threads: list[tuple[str, int]] = []
    errors: list[int] = []

    def recording(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            threads.append((what, threading.get_ident()))
            try:
                return function(*args, **more)
            except ValidationError as err:
                errors.append(err.error_count())
                raise

        return call

    async def work(client: Client) -> tuple[int, Reply]:
        reply = await client.call("POST", path, raw=raw).done()
        return threading.get_ident(), reply

    server = Server()
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", recording("loads", json.loads))
        for kind in (ChatRequest, CompletionRequest, DetokenizeRequest):
            patched.setattr(kind, "model_validate", recording("validate", kind.model_validate))
        loop, reply = server.run(work)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert len(reply.body) < 1000
    assert [what for what, thread in threads if thread == loop] == []
    assert max(errors, default=0) <= 2  # what is missing of one element


@pytest.mark.parametrize(("count", "status"), [(4096, 200), (4097, 400)])
def test_objects_are_not_too_wide_for_templates(count: int, status: int) -> None:
    wide = {f"k{i}": i for i in range(count)}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(wide)}}
    answered = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    for asked in ({"messages": HELLO, "chat_template_kwargs": wide}, {"messages": answered}):
        reply = Server(FakeModel(n_ctx=1 << 17)).post(CHAT, asked)
        assert (reply.status, b"4097 names, and 4096 is the most" in reply.body) == (status, status == 400)


@pytest.mark.parametrize("name", ["messages of numbers", "prompts of objects", "biases", "tools", "stops"])
def test_a_wrong_body_takes_a_small_multiple_of_its_size(name: str) -> None:
    path, raw = WRONG[name]
    tracemalloc.start()
    try:
        assert Server().run(lambda client: client.call("POST", path, raw=raw).done()).status == 400
        assert tracemalloc.get_traced_memory()[1] < 48 * len(raw)
    finally:
        tracemalloc.stop()


BIASED: dict[str, Any] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": [97]}, "/completion": {"prompt": [97]}}


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/tokenize", {"content": "é x", "with_pieces": True}),
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [97, 98]}),
        ("/apply-template", {"messages": HELLO}),
        (TEXT, {"prompt": [97, 98], "echo": True}),
        *((path, {**asked, "logit_bias": {"x": 1}}) for path, asked in BIASED.items()),
        (TEXT, {"prompt": "x", "json_schema": {"type": "object"}}),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}),
    ],
)
def test_what_a_model_is_asked_runs_on_other_threads(path: str, data: Any) -> None:
    server, threads = Server(), set()
    for name in ("chat", "tokenize", "detokenize", "check_grammar", "schema_grammar"):
        function = getattr(server.prompts, name)

        def call(*args: Any, function: Callable[..., Any] = function, **more: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*args, **more)

        setattr(server.prompts, name, call)

    async def work(client: Client) -> int:
        assert (await client.post(path, data)).status == 200
        return threading.get_ident()

    assert server.run(work) not in threads
    assert threads


def test_answers_are_written_on_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, render = [], exchange.LongJSON.render

    def recording(self: exchange.LongJSON, content: Any) -> bytes:
        threads.append(threading.get_ident())
        return render(self, content)

    monkeypatch.setattr(exchange.LongJSON, "render", recording)

    async def work(client: Client) -> int:
        assert (await client.post(CHAT, {"messages": HELLO, "logprobs": True})).status == 200
        return threading.get_ident()

    assert Server().run(work) not in threads
    assert threads


def test_answers_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder lets no other thread run: it took seconds for 2,048 embeddings, or tokens with 20 others each."""
    reply = Server().post(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "n": 3})
    rows = {"object": "list", "data": [{"index": i, "embedding": [0.5] * 50} for i in range(50)]}
    for value in (reply.json, rows, [rows], {}, [], {"é": ["\u2028", None, True]}):
        parts, dumps = [], json.dumps

        def recording(*args: Any, parts: list[str] = parts, dumps: Any = dumps, **more: Any) -> str:
            parts.append(dumps(*args, **more))
            return parts[-1]

        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", recording)
            body = bytes(exchange.LongJSON(value).body)
        assert json.loads(body) == value
        assert max(map(len, parts), default=0) <= max(2000, len(body) // 10)
    with pytest.raises(ValueError, match="JSON compliant"):
        exchange.LongJSON({"a": [float("nan")]})


def test_a_client_leaves_threads_to_others() -> None:
    """However many slow bodies one client sends, another's are read meanwhile."""
    server, gate = Server(keys=("a", "b")), threading.Event()
    tokenize = server.prompts.tokenize

    def slow(text: str, **more: Any) -> list[int]:
        if text == "slow":
            assert gate.wait(30)
        return tokenize(text, **more)

    server.prompts.tokenize = slow  # type: ignore[method-assign]

    async def work(client: Client) -> None:
        calls = [client.call("POST", "/tokenize", {"content": "slow"}, authorization="Bearer a") for _ in range(32)]
        try:
            reply = await client.post("/tokenize", {"content": "x"}, authorization="Bearer b")
        finally:
            gate.set()
        assert reply.json == {"tokens": [ord("x")]}
        assert {(await call.done()).status for call in calls} == {200}

    server.run(work)


# --- depth


@pytest.mark.parametrize("depth", [bodies.MAX_DEPTH + 1, 960, 970, 985, 999, 5000])
@pytest.mark.parametrize("kind", ["schema", "tool", "arguments", "kwargs", "unknown"])
def test_what_is_nested_too_deep_is_refused_by_name(kind: str, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": deep}}
    tool = '{"type":"function","function":{"name":"f","parameters":' + deep + "}}"
    more = {
        "schema": f'"json_schema":{deep}',
        "tool": f'"tools":[{tool}]',
        "arguments": f'"messages":{json.dumps([*HELLO, {"role": "assistant", "tool_calls": [call]}])}',
        "kwargs": f'"chat_template_kwargs":{deep}',
        "unknown": f'"nobody":{deep}',
    }[kind]
    data = f'{{"messages":{json.dumps(HELLO)},{more}}}'.encode()
    reply = Server().run(lambda client: client.call("POST", CHAT, raw=data).done())
    assert (reply.status, f"{bodies.MAX_DEPTH} is the most" in reply.message) == (400, True)


def test_depth_is_counted_outside_of_texts() -> None:
    text = '[{"\\' * 1000
    assert bodies.loads(json.dumps({text: [text]}).encode()) == {text: [text]}
    assert bodies.loads(("[" * bodies.MAX_DEPTH + "]" * bodies.MAX_DEPTH).encode()) is not None
    assert bodies.loads(b"[" + b"[]," * 5000 + b"[]]") == [[]] * 5001
    assert bodies.loads(json.dumps(["," * 200_000, "{:" * 200_000]).encode()) is not None


@pytest.mark.parametrize("size", [MIB - 2, MIB - 1, MIB, MIB + 1, 2 * MIB + 1])
def test_texts_that_cross_parts_stay_texts(size: int) -> None:
    text = "x" * (size - 5) + '[[\\"[' + "y" * 10
    assert bodies.loads(json.dumps([text, text]).encode()) == [text, text]


def test_what_json_may_be() -> None:
    assert bodies.loads(b"\xef\xbb\xbf[1]") == [1]
    assert bodies.loads(b'{"a":1,"a":2}') == {"a": 2}
    assert bodies.loads(b'"\\ud83d\\ude00 \\\\ud83d"') == "😀 \\ud83d"


@pytest.mark.parametrize("raw", [b"", b" ", b"nul", b"\xff", b"[1,]", b"01", b"\\", b"NaN", b'"\xed\xa0\x80"'])
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        bodies.loads(raw)
    assert not isinstance(error.value, bodies.Refused)


def test_many_names_and_objects_are_refused() -> None:
    for raw in (b"[" + b"{}," * (1 << 18) + b"1]", ("{" + keys("1", 4 * MIB) + "}").encode()):
        with pytest.raises(bodies.Refused, match="names or more, and 131072"):
            bodies.loads(raw)


def test_encoded_bodies_are_named() -> None:
    reply = Server().run(lambda client: client.call("POST", TEXT, raw=b"\x1f\x8b", content_encoding="gzip").done())
    assert (reply.status, "'gzip'" in reply.message) == (415, True)


# --- names of the renderer


@pytest.mark.parametrize(
    "name",
    ["self", "messages", "tools", "functions", "function_call", "tool_choice", "eos_token", "bos_token",
     "raise_exception", "strftime_now", "add_generation_prompt", "more", "args", "1", ""],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
def test_names_for_templates(path: str, name: str) -> None:
    reply = Server().post(path, {"messages": HELLO, "chat_template_kwargs": {name: 1}})
    assert reply.status == (200 if name in ("more", "args") else 400)
    assert reply.status == 200 or repr(name) in reply.message


def test_a_model_that_writes_half_a_surrogate_or_a_deep_call() -> None:
    from support.fake_model import FakeModel

    for arguments in ('{"a":"\\ud83d"}', "[" * 2000 + "]" * 2000):
        said = '<tool_call>\n{"name":"f","arguments":' + arguments + "}\n</tool_call>"
        model = FakeModel(reply=lambda prompt, said=said: said.encode(), n_ctx=8192)  # type: ignore[misc]
        data = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}
        reply = Server(model).post(CHAT, data)
        assert (reply.status, said in reply.json["choices"][0]["message"]["content"]) == (200, True)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_no_answer_can_have(number: str) -> None:
    with pytest.raises(ValueError, match=number):
        bodies.loads(f'{{"a": [{number}]}}'.encode())


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("\\ud83d", "\ufffd"),
        ("x\\uDE00y", "x\ufffdy"),
        ("\\ud83d\\ude00\\ud83d", "\U0001f600\ufffd"),
        ("\\\\ud83d", "\\ud83d"),
        ("\\\\\\ud83d", "\\\ufffd"),
        ('\\"\\udfff', '"\ufffd'),
    ],
)
def test_half_of_a_surrogate_pair_becomes_a_replacement(written: str, read: str) -> None:
    """Programs cut texts in the middle of a character."""
    assert bodies.loads(f'{{"a": "{written}", "{written}": 1}}'.encode()) == {"a": read, read: 1}


def test_half_of_a_surrogate_pair_in_an_earlier_call() -> None:
    from support.fake_model import FakeModel

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":"\\ud83d"}'}}
    said = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    server = Server(FakeModel())
    assert server.post(CHAT, {"messages": said}).status == 200
