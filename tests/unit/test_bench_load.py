"""Clients of a bench: how each ends counts, and so do tokens."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest

from kvflash_bench import demand
from kvflash_bench.options import Factors
from kvflash_bench.sockets import Reply, Server, begun, running
from kvflash_ggml.batching.messages import DEADLINE

WANTED = demand.Demand(text=range(99), lengths=(2, 9), seed=1)


class Fake:
    """A server that answers at once. ends: what becomes of requests, in turn, once its speed is known."""

    def __init__(self, *ends: int | type[Exception]) -> None:
        self.log: dict[str, dict[str, Any]] = {}
        self._ends = itertools.cycle(ends)
        self._numbers = itertools.count()
        self._finished: Counter[str] = Counter()
        self._lock = threading.Lock()

    def ask(self, path: str, data: dict[str, Any], *, timeout_s: float = 0) -> Reply:
        with self._lock:
            number = next(self._numbers)
            end = 200 if number < demand.PROBES else next(self._ends)
            if isinstance(end, type):
                raise end
            if end == 429:
                return Reply(429, {"error": {"code": "queue_full"}}, 9.0)
            finish = {200: "length", 504: DEADLINE}[end]
            made = data["max_tokens"] if end == 200 else 0
            prompt, queued = len(data["prompt"]), 1.0  # in the log also where nothing was read
            self._finished[finish] += 1
            times = {"queue_ms": queued, "ttft_ms": 2 * queued if end == 200 else queued}
            self.log[f"id-{number}"] = {"prompt": prompt, "generated": made, "finish": finish, **times}
            if end == 504:
                return Reply(504, {"error": {"code": DEADLINE}}, 0.0)
        return Reply(200, {"id": f"id-{number}", "usage": {"prompt_tokens": prompt, "completion_tokens": made}}, 0.0)

    @contextmanager
    def stream(self, path: str, data: dict[str, Any], *, timeout_s: float) -> Iterator[tuple[int, Iterator[Any]]]:
        yield 429 if self.ask(path, data).status == 429 else 200, iter(())

    def metrics(self) -> dict[str, float]:
        lines = self.log.values()
        return {
            **dict.fromkeys(("conversations_lost_total", "device_bytes", "host_bytes", "parked_bytes"), 0.0),
            **dict.fromkeys(("num_requests_running", "num_requests_waiting", "num_requests_put_aside"), 0.0),
            "prompt_tokens_total": float(sum(line["prompt"] for line in lines if line["ttft_ms"] > line["queue_ms"])),
            "generation_tokens_total": float(sum(line["generated"] for line in lines)),
            **{f'request_success_total{{finished_reason="{name}"}}': n for name, n in self._finished.items()},
        }

    def resources(self) -> dict[str, int]:
        return {}


def run(server: Any) -> tuple[demand.Told, dict[str, Any]]:
    return demand.overload(server, WANTED, rate=1000, seconds=0.2, clients=400, patience_s=1)


def test_how_each_ends() -> None:
    server: Any = Fake(200, 429, ConnectionResetError, 504)
    assert demand.capacity(server, WANTED) > 0
    outcomes, took = run(server)
    assert outcomes.total == took["sent"] > 20
    assert set(outcomes.ends) == {
        demand.ANSWERED, demand.LEFT, demand.REFUSED, demand.LATE, "ConnectionResetError"
    }  # fmt: skip
    assert took["tokens"]["agree"]
    assert took["tokens"]["clients"] == took["tokens"]["their_lines"]
    assert took["log_finished"].keys() == {"length", DEADLINE}


@pytest.mark.parametrize("where", ["metrics", "log"])
def test_tokens_that_are_lost(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Fake(200)
    settled = demand._settled

    def changed(server: Any) -> dict[str, float]:
        shown = settled(server)
        if server.log and where == "metrics":
            shown["prompt_tokens_total"] -= 1
        elif server.log:
            next(iter(server.log.values()))["prompt"] -= 1
            shown["prompt_tokens_total"] -= 1
        return shown

    monkeypatch.setattr(demand, "_settled", changed)
    assert not run(server)[1]["tokens"]["agree"]


def test_what_is_asked_for() -> None:
    asked = [WANTED.request(number) for number in range(200)]
    assert asked == [WANTED.request(number) for number in range(200)]
    assert {len(one["prompt"]) for one in asked} == set(range(2, 9))
    assert 30 < sum(one["prompt"][:1] == [0] for one in asked if len(one["prompt"]) > 3) < 80, "some begin as others do"


@pytest.mark.parametrize("value", ["", "x", "1,", "0", "-1", "nan", "1e9"])
def test_factors_that_are_none(value: str) -> None:
    with pytest.raises(click.BadParameter, match="such as"):
        Factors().convert(value, None, None)


def test_a_server_that_ends_while_it_is_asked_says_why() -> None:
    program = """
import os, socket, sys
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(f"serving it at http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    connection, _ = listener.accept()
    connection.recv(1)
    print("there is no vocabulary", file=sys.stderr, flush=True)
    os.abort()
"""
    with running(Server(begun([sys.executable, "-c", program]))) as server:
        with pytest.raises(ConnectionError):
            server.ask("/completion", {})
        assert re.match(r"(?s)ended by signal 6: .*there is no vocabulary", server.end())
