"""Clients of a bench: one whose connection breaks counts."""

from __future__ import annotations

import itertools
from typing import Any

from kvflash_ggml.bench import load
from kvflash_ggml.bench.sockets import Reply


class Breaking:
    """A server that drops every other connection, once its speed is known."""

    def __init__(self) -> None:
        self._asked = itertools.count()

    def ask(self, path: str, data: dict[str, Any]) -> Reply:
        number = next(self._asked)
        if number > 20 and number % 2:
            raise ConnectionResetError
        return Reply(200, {"tokens_predicted": 1, "tokens_evaluated": 1}, 0.0)

    stream = ask

    def metrics(self) -> dict[str, float]:
        return dict.fromkeys(("conversations_lost_total", "device_bytes", "host_bytes", "parked_bytes"), 0.0)

    def resources(self) -> dict[str, int]:
        return {}


def test_a_client_that_is_lost_counts() -> None:
    outcomes, took = load.overload(
        Breaking(), range(99), times=0.01, seconds=0.2, clients=8, lengths=(2, 9), patience_s=1, seed=1
    )  # type: ignore[arg-type]
    assert outcomes.total == took["sent"] > 20
    assert outcomes.ends["ConnectionResetError"] > 0
