"""What coding agents have sent, answered request by request. Their texts are made up, and most tools left out."""

from __future__ import annotations

import json
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
