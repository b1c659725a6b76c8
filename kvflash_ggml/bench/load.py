"""What a server does under load: many short requests, more than it can take, and one beside the bare model."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KVFlashError
from .sockets import Server

if TYPE_CHECKING:
    from ..llama.llama import Llama

GREEDY = {"temperature": 0, "ignore_eos": True}
ANSWERED, GIVEN_UP, LEFT = "answered", "given up", "left"


@dataclass
class Talk:
    """A conversation of the soak: its text so far."""

    tokens: list[int] = field(default_factory=list)
    begun: int = 0


@dataclass
class Outcomes:
    """How requests ended, and after how many refusals those that were answered."""

    ends: Counter[str] = field(default_factory=Counter)
    retries: Counter[int] = field(default_factory=Counter)
    prompt: int = 0
    made: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, end: str, *, retries: int = 0, prompt: int = 0, made: int = 0) -> None:
        with self.lock:
            self.ends[end] += 1
            self.prompt += prompt
            self.made += made
            if end == ANSWERED:
                self.retries[retries] += 1

    @property
    def total(self) -> int:
        return sum(self.ends.values())


def soak(
    server: Server, text: Sequence[int], *, requests: int, conversations: int, length: int, clients: int, seed: int,
    tell: Callable[[dict[str, float]], None], samples: int = 20,
) -> tuple[Outcomes, list[dict[str, float]]]:  # fmt: skip
    """So many short requests, each of a random conversation, which begins again at `length` tokens; one of fifty
    clients leaves in the middle. What the process has, now and then; each is told at once.
    """
    dice, outcomes = random.Random(seed), Outcomes()
    free: queue.SimpleQueue[Talk] = queue.SimpleQueue()
    talks = [Talk(begun=dice.randrange(len(text))) for _ in range(conversations)]
    for talk in dice.sample(talks, len(talks)):
        free.put(talk)
    taken: list[dict[str, float]] = []

    def turn(number: int) -> None:
        own = random.Random(seed * requests + number)
        talk = free.get()
        try:
            if not talk.tokens or len(talk.tokens) > length:
                talk.begun = own.randrange(len(text))
                talk.tokens = _cut(text, talk.begun, own.randrange(64, 256))
            else:
                talk.tokens += _cut(text, own.randrange(len(text)), 24)
            asked = {"prompt": talk.tokens, "n_predict": 4, "return_tokens": True, **GREEDY}
            if own.random() < 0.02:
                with server.stream("/completion", {**asked, "n_predict": 64}) as (_, frames):
                    next(frames, None)
                outcomes.add(LEFT)
                talk.tokens = []
                return
            reply = server.ask("/completion", asked)
            if reply.status != 200:
                outcomes.add(f"status {reply.status}")
                return
            talk.tokens += reply.body["tokens"]
            outcomes.add(ANSWERED, prompt=reply.body["tokens_evaluated"], made=len(reply.body["tokens"]))
        finally:
            free.put(talk)

    def look() -> None:
        shown = server.metrics()
        taken.append({"requests": outcomes.total, **server.resources(), **_bytes(shown)})
        tell(taken[-1])

    step = max(1, requests // samples)
    for begin in range(0, requests, step):
        _at_once(clients, range(begin, min(requests, begin + step)), turn)
        look()
    return outcomes, taken


def overload(
    server: Server, text: Sequence[int], *, times: float, seconds: float, clients: int, lengths: tuple[int, int],
    patience_s: float, seed: int,
) -> tuple[Outcomes, dict[str, Any]]:  # fmt: skip
    """Requests come at random and `times` as fast as the server answers them; refused ones come again when they are
    told to. Every tenth client leaves in the middle. What became of each, and how fast it goes.
    """
    outcomes, waits = Outcomes(), list[float]()

    def asked(number: int) -> dict[str, Any]:
        own = random.Random(seed * 1_000_003 + number)
        # three of ten begin as others do
        begin = 0 if own.random() < 0.3 else own.randrange(len(text))
        low, high = lengths
        size = int(low * (high / low) ** own.random())
        return {"prompt": _cut(text, begin, size), "n_predict": own.choice((4, 16, 48)), **GREEDY}

    def request(number: int) -> None:
        try:
            send(number)
        except Exception as err:  # it is lost, and counts
            outcomes.add(type(err).__name__)

    def send(number: int) -> None:
        data, retries, began = asked(number), 0, time.monotonic()
        leaves = number % 10 == 0
        while True:
            if leaves:
                with server.stream("/completion", data) as (status, frames):
                    if status == 200:
                        next(frames, None)
                        outcomes.add(LEFT)
                        return
                    after = 1.0
            else:
                reply = server.ask("/completion", data)
                if reply.status == 200:
                    made = reply.body["tokens_predicted"]
                    outcomes.add(ANSWERED, retries=retries, prompt=reply.body["tokens_evaluated"], made=made)
                    waits.append(time.monotonic() - began)
                    return
                status, after = reply.status, reply.retry_after_s
            if status != 429:
                outcomes.add(f"status {status}")
                return
            retries += 1
            if time.monotonic() - began + after > patience_s:
                outcomes.add(GIVEN_UP)
                return
            time.sleep(after)

    began, probe = time.monotonic(), 12
    for number in range(probe):
        server.ask("/completion", asked(-1 - number))
    rate = times * probe / (time.monotonic() - began)
    dice, threads, number, unsent = random.Random(seed), list[threading.Thread](), 0, 0
    began = time.monotonic()
    until, due = began + seconds, began
    while due < until:
        time.sleep(max(0.0, due - time.monotonic()))
        threads = [one for one in threads if one.is_alive()]
        if len(threads) < clients:
            number += 1
            threads.append(threading.Thread(target=request, args=(number,)))
            threads[-1].start()
        else:
            unsent += 1
        due += dice.expovariate(rate)
    for one in threads:
        one.join()
    took = time.monotonic() - began
    shown = server.metrics()
    return outcomes, {
        "rate": rate, "sent": number, "clients_busy": unsent, "seconds": took,
        "wait_s_p50": float(np.percentile(waits, 50)) if waits else 0.0,
        "wait_s_p99": float(np.percentile(waits, 99)) if waits else 0.0,
        "lost": shown["conversations_lost_total"], **server.resources(), **_bytes(shown),
    }  # fmt: skip


def bare_speed(llm: Llama, tokens: Sequence[int], made: int, repeats: int) -> list[float]:
    """Tokens a second that a `Llama` generates behind a prompt, once it is warm."""
    rates = []
    for _ in range(repeats + 1):
        with closing(llm.generate(list(tokens), temp=0.0)) as stream:
            next(stream)
            began = time.perf_counter()
            for _ in range(made - 1):
                next(stream)
            rates.append((made - 1) / (time.perf_counter() - began))
    return rates[1:]


def served_speed(server: Server, tokens: Sequence[int], made: int, repeats: int) -> list[float]:
    """The same of a stream, from its first frame with text to its last, as its client sees them."""
    rates = []
    for _ in range(repeats + 1):
        times = []
        with server.stream("/completion", {"prompt": list(tokens), "n_predict": made, **GREEDY}) as (status, frames):
            if status != 200:
                raise KVFlashError(f"the server answers {status}")
            took: dict[str, Any] = {}
            for shown in frames:
                times.append(time.perf_counter())
                took = shown.get("timings", took)
        if not took:
            raise KVFlashError("the stream has ended early")
        rates.append((took["predicted_n"] - 1) / (times[-1] - times[0]))
    return rates[1:]


def _cut(text: Sequence[int], begin: int, count: int) -> list[int]:
    """Tokens of a text that begins again at its end."""
    begin %= len(text)
    cut = list(text[begin : begin + count])
    return cut if len(cut) == count else cut + _cut(text, 0, count - len(cut))


def _bytes(shown: dict[str, float]) -> dict[str, float]:
    return {name: shown[name] for name in ("device_bytes", "host_bytes", "parked_bytes")}


def _at_once(clients: int, numbers: Sequence[int], work: Callable[[int], None]) -> None:
    """The first error ends it, once all clients have ended."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        left.put(number)
    errors: list[BaseException] = []

    def client() -> None:
        while not errors:
            try:
                number = left.get_nowait()
            except queue.Empty:
                return
            try:
                work(number)
            except BaseException as err:
                errors.append(err)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
