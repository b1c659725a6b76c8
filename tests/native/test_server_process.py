"""The server as it is started, by sockets: load, faults, and its end."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.harness import TEXT
from support.serving import Served, serve

from kvflash_bench import demand, load, main

OPTIONS = ("--kvflash", "1024", "-c", "8192", "--kvflash-tau", "16", "--kvflash-calibrate", "off", "-q")
WORDS = TEXT.read_text(encoding="utf-8").split()


def prompt(seed: int, words: int = 300) -> str:
    start = random.Random(seed).randrange(len(WORDS) - words)
    return " ".join(WORDS[start : start + words])


def completion(which: int, words: int = 300, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt(which, words), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def served(models: dict[str, Path]) -> Iterator[Served]:
    with serve(models["dense"], *OPTIONS, "--max-queue", "6") as server:
        yield server


def quiet(served: Served) -> dict[str, Any]:
    """The state once nothing runs."""
    for _ in range(3000):
        state: dict[str, Any] = served.get("/kvflash/state")[1]
        if state["queue"] == {"running": None, "waiting": 0, "put_aside": 0}:
            return state
        time.sleep(0.02)
    raise AssertionError(state)


def test_a_seed_repeats_whoever_else_asks(served: Served) -> None:
    asked = completion(1, temperature=1.0, seed=7, max_tokens=16, cache_prompt=False)
    first = served.post("/v1/completions", asked)[1]["choices"][0]["text"]
    served.post("/v1/completions", completion(2))
    assert served.post("/v1/completions", asked)[1]["choices"][0]["text"] == first


def test_json_by_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    for seed in range(6):
        data = {"messages": [{"role": "user", "content": prompt(seed, 30)}], "response_format": form, "seed": seed}
        reply = served.post("/v1/chat/completions", {**data, "temperature": 2, "max_tokens": 200})[1]
        assert set(json.loads(reply["choices"][0]["message"]["content"])) == {"city", "days"}


TREE = {
    "type": "object",
    "properties": {
        "node": {"type": "string", "maxLength": 4},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
    },
    "required": ["node", "children"],
    "additionalProperties": False,
}
"""Has a property of its own definition's name."""


def is_tree(value: Any) -> bool:
    return value.keys() == {"node", "children"} and all(is_tree(child) for child in value["children"])


def test_schemas_that_refer_to_themselves(served: Served) -> None:
    defined = {"$ref": "#/$defs/node", "$defs": {"node": TREE}}  # as pydantic writes it
    whole = {**TREE, "properties": {**TREE["properties"], "children": {"items": {"$ref": "#"}, "maxItems": 1}}}
    for schema in (defined, whole):
        form = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}}
        tool = {"type": "function", "function": {"name": "plant", "parameters": schema}}
        asked = {"messages": [{"role": "user", "content": "A tree"}], "max_tokens": 300}
        texts = []
        for seed in range(4):
            reply = served.post("/v1/chat/completions", {**asked, "response_format": form, "seed": seed})[1]
            if reply["choices"][0]["finish_reason"] == "stop":
                texts.append(reply["choices"][0]["message"]["content"])
            reply = served.post(
                "/v1/chat/completions", {**asked, "tools": [tool, {**tool}], "tool_choice": "required", "seed": seed}
            )[1]
            if reply["choices"][0]["finish_reason"] == "tool_calls":
                texts.append(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
        assert texts
        for text in texts:
            assert is_tree(json.loads(text)), text


def test_calls_of_tools(served: Served) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 12}},
                    "required": ["city"],
                },
            },
        }
        for name in ("weather", "clock")
    ]
    asked = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools, "max_tokens": 99}
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        reply = served.post("/v1/chat/completions", {**asked, "tool_choice": choice})[1]["choices"][0]
        (call,) = reply["message"]["tool_calls"]
        assert "city" in json.loads(call["function"]["arguments"])
        streamed = [
            call
            for frame in served.frames("/v1/chat/completions", {**asked, "tool_choice": choice})
            for call in frame["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert streamed[0]["function"]["name"] in ("weather", "clock")
        assert "city" in json.loads("".join(call["function"]["arguments"] for call in streamed))


def test_hostile_grammars_and_schemas(served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    bad = [
        {"grammar": "root ::= ("},
        {"grammar": "x ::= y"},
        {"grammar": "root ::= nothing"},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= ("a"{0,2000}){0,2000}'},
        {"grammar": 'root ::= "a\x00"'},
        {"grammar": f"root ::= {'(' * 200_000}"},
        *(
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
            for schema in (
                {"$ref": "#"},
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
                {"$ref": "https://example.com/schema"},
                {"$ref": "/etc/passwd"},
                {"type": "string", "minLength": 100_000_000},
                {"type": "string", "pattern": "^[a-z]{1,2000000}$"},
                {"type": "array", "minItems": 500, "items": {"type": "array", "minItems": 2000, "items": {}}},
                {"type": "object", "properties": {f"k{i}": {} for i in range(1300)}},
                {"type": "array", "items": {}, "minItems": 100_000_000},
                {"type": "string", "pattern": "^(a{1000000}){1000000}$"},
                {"type": "string", "pattern": "^((((((((("},
                {"type": "wizard"},
                {"enum": ["x" * 300_000]},
                deep,
            )
        ),
    ]
    for fields in bad:
        status, reply = served.post("/v1/chat/completions", {**chat, **fields})
        assert status == 400, (fields, reply)
        assert reply["error"]["message"]
    status, reply = served.post("/v1/chat/completions", {**chat, "grammar": 'root ::= "\ud800"'})  # U+FFFD is a text
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "\ufffd")
    for grammar in (r"root ::= [^\x00-\U0010FFFF]", 'root ::= "\u5abd"+', 'root ::= ""', 'root ::= "a"{5}'):
        status, _ = served.post(
            "/v1/chat/completions", {**chat, "grammar": grammar, "ignore_eos": True, "max_tokens": 40}
        )
        assert status == 200
    five = {**chat, "grammar": 'root ::= "a"{5}', "ignore_eos": True, "max_tokens": 40}
    (choice,) = served.post("/v1/chat/completions", five)[1]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("aaaaa", "stop")
    assert served.post("/v1/chat/completions", chat)[0] == 200


def test_who_leaves_frees_the_slot(served: Served) -> None:
    for n in (0, 1, 3):
        stream = served.frames("/v1/completions", completion(n, max_tokens=4000))
        for _ in range(n):
            next(stream)
        stream.close()
    quiet(served)
    assert served.post("/v1/completions", completion(9))[0] == 200


def test_clients_that_vanish_at_any_moment(served: Served) -> None:
    """In the middle of a head, of a body, of a prompt that is read, of an answer; with a farewell, and without."""
    asked = completion(77, cache_prompt=False)
    wanted = served.post("/v1/completions", asked)[1]["choices"][0]["text"]
    body = json.dumps(completion(3, 800, max_tokens=4000, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    sent = head + b"Content-Type: application/json\r\n\r\n" + body
    for reads in (b"", sent[:40], sent[: len(head) + 60], sent[:-1], sent, 0, 1, 400, 2000):
        for farewell in (True, False):
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
                if not farewell:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(reads if isinstance(reads, bytes) else sent)
                while isinstance(reads, int) and reads > 0:
                    reads -= len(connection.recv(500))
    quiet(served)
    assert served.post("/v1/completions", asked)[1]["choices"][0]["text"] == wanted
    assert value(served.get("/metrics")[1], "kvflash:conversations_lost_total") == 0


def test_half_requests_and_nonsense(served: Served) -> None:
    for data in (
        b"",
        b"GET",
        b"\x16\x03\x01\x02\x00",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(data)
    for _ in range(300):
        socket.create_connection(("127.0.0.1", served.port), timeout=10).close()
    assert served.get("/health")[0] == 200


def test_more_than_it_can_take(served: Served) -> None:
    """Eight clients of thirty requests, some of whom leave: every one is answered, refused, or has left."""
    outcomes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    before = served.get("/metrics")[1]

    def client(number: int) -> None:
        dice = random.Random(number)
        for _ in range(12):
            asked = completion(dice.randrange(8), dice.choice((20, 120, 400)), max_tokens=dice.choice((1, 6)))
            if dice.random() < 0.1:
                stream = served.frames("/v1/completions", asked)
                try:
                    next(stream, None)
                except AssertionError:  # refused
                    outcomes["refused"] += 1
                    continue
                stream.close()
                outcomes["left"] += 1
                continue
            while True:
                status, reply = served.post("/v1/completions", asked)
                if status == 200:
                    break
                assert status == 429, reply
                outcomes["refused"] += 1
                time.sleep(0.05)
            outcomes["answered"] += 1
            tokens["prompt"] += reply["usage"]["prompt_tokens"]
            tokens["made"] += reply["usage"]["completion_tokens"]

    clients = [threading.Thread(target=client, args=(n,)) for n in range(9)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    quiet(served)
    assert outcomes["answered"] + outcomes["left"] >= 9 * 12 - outcomes["refused"]
    after = served.get("/metrics")[1]

    def grew(name: str) -> float:
        return value(after, name) - value(before, name)

    # what those who left had read or were given comes on top
    assert grew("kvflash:prompt_tokens_total") >= tokens["prompt"]
    assert grew("kvflash:generation_tokens_total") >= tokens["made"]
    assert grew('kvflash:request_success_total{finished_reason="length"}') >= outcomes["answered"]
    assert value(after, "kvflash:conversations_lost_total") == 0


def test_what_measures_it(served: Served) -> None:
    """The load of `kvflash-bench soak` and `server`."""
    text = list(range(100, 1100))
    told: list[dict[str, float]] = []
    outcomes, taken = load.soak(
        served, text, requests=8, conversations=3, length=200, clients=2, seed=1, tell=told.append, samples=2
    )
    assert outcomes.total == 8
    assert set(outcomes.ends) <= {load.ANSWERED, load.LEFT}
    assert [sample["requests"] for sample in taken] == [4, 8]
    assert told == taken
    assert min(told[0][name] for name in ("rss", "threads", "descriptors", "device_bytes")) > 0
    (rate,) = load.served_speed(served, text[:70], 6, repeats=1)
    assert rate > 0


def test_load_that_is_measured(models: dict[str, Path]) -> None:
    """`kvflash-bench overload`: clients, log and metrics of a real server tell of the same tokens."""
    line = ["overload", models["dense"], "--times", "0.5,3", "--seconds", 1, "--lengths", "20,90", "--patience", 1]
    result = CliRunner().invoke(main, [str(x) for x in (*line, "-t", 1)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    phases = json.loads(result.stdout.splitlines()[-1])["phases"]
    assert [phase["times"] for phase in phases] == [0.5, 3]
    for phase in phases:
        assert sum(phase["ends"].values()) == phase["sent"]
        assert set(phase["ends"]) <= {demand.ANSWERED, demand.LEFT, demand.REFUSED}
        assert sum(phase["refused_before"].values()) == phase["ends"][demand.ANSWERED] > 0
        assert phase["tokens"]["agree"], phase["tokens"]


def value(metrics: str, name: str) -> float:
    return next((float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name + " ")), 0.0)


def test_an_address_that_is_taken(served: Served, models: dict[str, Path]) -> None:
    line = [sys.executable, "-m", "kvflash_ggml", "serve", str(models["dense"]), "--port", str(served.port), "-q"]
    done = subprocess.run([*line, "--kvflash", "1024", "-c", "2048"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {served.port}: Address already in use" in done.stderr


def test_its_end_and_the_next_start(models: dict[str, Path], tmp_path: Path) -> None:
    options = (*OPTIONS, "-np", "1", "--session-dir", str(tmp_path))
    with serve(models["hybrid"], *options) as server:
        for seed in (1, 2):
            server.post("/v1/completions", completion(seed))
        frames: list[Any] = []
        reader = threading.Thread(
            target=lambda: frames.extend(server.frames("/v1/completions", completion(3, max_tokens=300)))
        )
        reader.start()
        while len(frames) < 3:
            time.sleep(0.005)
        ends: list[int] = []
        waiting = [
            threading.Thread(target=lambda n=n: ends.append(server.post("/v1/completions", completion(n))[0]))
            for n in range(4, 9)
        ]
        for one in waiting:
            one.start()
        while server.get("/kvflash/state")[1]["queue"]["waiting"] < len(waiting):
            time.sleep(0.005)
        assert server.stop() == 0
        for one in (reader, *waiting):
            one.join(60)
        assert frames[-1]["choices"][0]["finish_reason"] == "length", "a running answer is carried to its end"
        assert ends == [200] * len(waiting), "and so is whoever was admitted"
    with serve(models["hybrid"], *options) as server:
        for seed in (1, 2, 3):
            reply = server.post("/v1/completions", completion(seed))[1]
            assert reply["usage"]["prompt_tokens"] - cached(reply) <= 64, (
                "a hybrid goes back to where the question began"
            )
        assert server.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_killed_in_the_middle(slots: int, models: dict[str, Path], tmp_path: Path) -> None:
    options = (
        *OPTIONS,
        "-np",
        str(slots),
        "--session-dir",
        str(tmp_path / "sessions"),
        "--kvflash-cache",
        str(tmp_path / "cache"),
    )
    with serve(models["dense"], *options) as server:
        server.post("/v1/completions", completion(1))
        for _ in range(3000):  # the folder is written behind the answer, a text's tail last
            if list((tmp_path / "cache").glob("*/*.tail")):
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the folder got no text")
        before = server.post("/v1/completions", completion(1))[1]  # a prompt that is known reads its last token alone
        streams = [server.frames("/v1/completions", completion(n, max_tokens=4000)) for n in range(2, 2 + slots)]
        for stream in streams:
            next(stream)
        server.stop(signal.SIGKILL)
    with serve(models["dense"], *options) as server:
        reply = server.post("/v1/completions", completion(1))[1]
        assert cached(reply) > 256
        assert reply["choices"] == before["choices"]
        assert server.post("/v1/completions", completion(2))[0] == 200
        assert server.stop() == 0
