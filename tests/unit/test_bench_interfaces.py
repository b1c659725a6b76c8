"""The bench's session through each interface, on a model made of a few lines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.asgi import Client
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_bench.interfaces import INTERFACES, Read, ratio, replay


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_session_of_forty_turns_is_read_once(interface: str, stateful: bool) -> None:
    async def work(client: Client) -> list[Read]:
        loop = asyncio.get_running_loop()

        def ask(path: str, body: dict[str, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(client.post(path, body), loop).result().json

        results = [f"result {turn} " * 20 for turn in range(40)]
        return await asyncio.to_thread(replay, ask, interface, system="be of use " * 40, results=results, most=32)

    done = Server(FakeModel(n_ctx=1 << 15, stateful=stateful)).run(work)
    assert len(done) == 40
    assert done[0].read == done[0].new == done[0].prompt
    assert ratio(done) <= 1.05
