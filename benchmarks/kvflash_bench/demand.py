"""As many requests as a server answers, fewer, or more: how each ends, and whether all who count agree."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvflash_ggml.batching.messages import DEADLINE, QUEUE_DEADLINE
from kvflash_ggml.errors import KVFlashError

from .load import ANSWERED, GREEDY, LEFT, Outcomes, cut, kept_bytes
from .sockets import Reply, Server

LATE, REFUSED = "past its deadline", "refused"
PATH = "/v1/completions"
SHARED, LEAVING = 0.3, 0.1
"""How many requests begin as others do, for half of their prompts, and how many clients leave."""

PROBES = 24
QUIET_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What clients ask for. lengths: least and most tokens of prompts, evenly by their logarithms."""

    text: Sequence[int]
    lengths: tuple[int, int]
    seed: int

    def request(self, number: int) -> dict[str, Any]:
        own = random.Random(self.seed * 1_000_003 + number)
        low, high = self.lengths
        size = int(low * (high / low) ** own.random())
        same = size // 2 if own.random() < SHARED else 0
        prompt = cut(self.text, 0, same) + cut(self.text, own.randrange(len(self.text)), size - same)
        return {"prompt": prompt, "max_tokens": own.choice((4, 16, 48)), **GREEDY}


@dataclass
class Told(Outcomes):
    """Of those that were answered also: after how many refusals, after how long, and their tokens by their ids."""

    retries: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)

    def answered(self, reply: Reply, *, retries: int, wait: float) -> None:
        usage = reply.body["usage"]
        with self.lock:
            self.ends[ANSWERED] += 1
            self.retries[retries] += 1
            self.waits.append(wait)
            self.usage[reply.body["id"]] = usage["prompt_tokens"], usage["completion_tokens"]


def capacity(server: Server, demand: Demand) -> float:
    """Requests a second that are answered, or run out of time, one after the other."""
    began = time.monotonic()
    for number in range(PROBES):
        reply = server.ask(PATH, demand.request(-1 - number))
        if reply.status != 200 and not _late(reply):
            raise KVFlashError(f"the server answers {reply.status}")
    return PROBES / (time.monotonic() - began)


def overload(
    server: Server, demand: Demand, *, rate: float, seconds: float, clients: int, patience_s: float, first: int = 0
) -> tuple[Told, dict[str, Any]]:
    """Requests come at random, so many a second; refused ones come again when they are told to. What became of each.

    Of ten clients one leaves at some moment: it hears nothing for too long, or has enough of its answer. patience_s:
    after which a refused one gives up. first: the number of the first request.
    """
    outcomes, before = Told(), _settled(server)

    def request(number: int) -> None:
        try:
            _ask(server, demand, number, outcomes, patience_s=patience_s, stays_s=10 / rate)
        except Exception as err:  # it is lost, and counts
            outcomes.add(type(err).__name__)

    began = time.monotonic()
    sent, unsent = _poisson(request, rate=rate, seconds=seconds, clients=clients, first=first, seed=demand.seed)
    took = time.monotonic() - began
    shown = _settled(server)
    return outcomes, {
        "rate": rate, "sent": sent, "clients_busy": unsent, "seconds": took,
        "answers_per_second": outcomes.ends[ANSWERED] / took,
        **{f"wait_s_p{n}": float(np.percentile(outcomes.waits or [0.0], n)) for n in (50, 99)},
        **_books(outcomes, server, before, shown),
        "lost": shown["conversations_lost_total"] - before["conversations_lost_total"],
        **server.resources(), **kept_bytes(shown),
    }  # fmt: skip


def _poisson(
    request: Callable[[int], None], *, rate: float, seconds: float, clients: int, first: int, seed: int
) -> tuple[int, int]:
    """Each on a thread of its own. Returns how many there were, and for how many no client was left."""
    dice, threads, number, unsent = random.Random(seed + first), list[threading.Thread](), first, 0
    due = time.monotonic()
    until = due + seconds
    while due < until:
        time.sleep(max(0.0, due - time.monotonic()))
        threads = [one for one in threads if one.is_alive()]
        if len(threads) < clients:
            threads.append(threading.Thread(target=request, args=(number,)))
            threads[-1].start()
            number += 1
        else:
            unsent += 1
        due += dice.expovariate(rate)
    for one in threads:
        one.join()
    return number - first, unsent


def _ask(server: Server, demand: Demand, number: int, outcomes: Told, *, patience_s: float, stays_s: float) -> None:
    data, own, retries, began = demand.request(number), random.Random(number), 0, time.monotonic()
    leaves = own.random() < LEAVING
    while True:
        try:
            if leaves and own.random() < 0.5:
                with server.stream(PATH, data, timeout_s=own.uniform(0, stays_s)) as (status, frames):
                    if status == 200:
                        for _ in range(own.randrange(data["max_tokens"])):
                            next(frames, None)
                        return outcomes.add(LEFT)
                reply = Reply(status, None, 1.0)
            elif leaves:
                reply = server.ask(PATH, data, timeout_s=own.uniform(0, stays_s))
            else:
                reply = server.ask(PATH, data)
        except TimeoutError:
            return outcomes.add(LEFT if leaves else TimeoutError.__name__)
        if reply.status == 200:
            return outcomes.answered(reply, retries=retries, wait=time.monotonic() - began)
        if reply.status != 429:
            return outcomes.add(LATE if _late(reply) else f"status {reply.status}")
        retries += 1
        if time.monotonic() - began + reply.retry_after_s > patience_s:
            return outcomes.add(REFUSED)
        time.sleep(reply.retry_after_s)


def _late(reply: Reply) -> bool:
    return reply.body is not None and reply.body["error"]["code"] in (DEADLINE, QUEUE_DEADLINE)


def _settled(server: Server) -> dict[str, float]:
    """The metrics once nothing runs or waits, and the log has a line for each request that has ended."""
    until = time.monotonic() + QUIET_S
    while True:
        shown = server.metrics()
        busy = sum(shown[f"num_requests_{name}"] for name in ("running", "waiting", "put_aside"))
        if not busy and len(server.log) == _ended(shown):
            return shown
        if time.monotonic() > until:
            raise KVFlashError(
                f"{busy:.0f} requests have not ended, and the log has {len(server.log)} of {_ended(shown):.0f}"
            )
        time.sleep(0.05)


def _ended(shown: dict[str, float]) -> float:
    return sum(value for name, value in shown.items() if name.startswith("request_success_total"))


def _books(
    outcomes: Told, server: Server, before: dict[str, float], after: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Tokens of prompts and answers: of the clients that have one, of their lines in the log, of all lines since, and
    in the metrics. agree: the first two are equal, line by line, and so are the others.
    """
    since = list(server.log.values())[int(_ended(before)) :]
    mine = [(server.log[id]["prompt"], server.log[id]["generated"]) for id in outcomes.usage]
    counted = {
        "clients": _sum(list(outcomes.usage.values())),
        "their_lines": _sum(mine),
        # a client that left before its prompt began has it in the log, and not in the metrics
        "log": _sum([(line["prompt"] * (line["ttft_ms"] > line["queue_ms"]), line["generated"]) for line in since]),
        "metrics": tuple(
            int(after[name] - before[name]) for name in ("prompt_tokens_total", "generation_tokens_total")
        ),
    }
    agree = mine == list(outcomes.usage.values()) and counted["log"] == counted["metrics"]
    finished = Counter(line["finish"] for line in since)
    return {"tokens": {**counted, "agree": agree}, "log_finished": dict(finished)}


def _sum(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
