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
    assert server.scheduler.totals.missed == 0


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
