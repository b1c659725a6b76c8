"""What a server does under load: many short requests, and one beside the bare model."""

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

from kvflash_ggml.errors import KVFlashError

from .sockets import Server

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

GREEDY = {"temperature": 0, "ignore_eos": True}
ANSWERED, LEFT = "answered", "left"


@dataclass
class Talk:
    """A conversation of the soak: its text so far."""

    tokens: list[int] = field(default_factory=list)
    begun: int = 0


@dataclass
class Outcomes:
    """How requests ended."""

    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, end: str) -> None:
        with self.lock:
            self.ends[end] += 1

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
                talk.tokens = cut(text, talk.begun, own.randrange(64, 256))
            else:
                talk.tokens += cut(text, own.randrange(len(text)), 24)
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
            outcomes.add(ANSWERED)
        finally:
            free.put(talk)

    def look() -> None:
        shown = server.metrics()
        taken.append({"requests": outcomes.total, **server.resources(), **kept_bytes(shown)})
        tell(taken[-1])

    step = max(1, requests // samples)
    for begin in range(0, requests, step):
        _at_once(clients, range(begin, min(requests, begin + step)), turn)
        look()
    return outcomes, taken


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


def cut(text: Sequence[int], begin: int, count: int) -> list[int]:
    """Tokens of a text that begins again at its end."""
    begin %= len(text)
    part = list(text[begin : begin + count])
    return part if len(part) == count else part + cut(text, 0, count - len(part))


def kept_bytes(shown: dict[str, float]) -> dict[str, float]:
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
