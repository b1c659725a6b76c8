"""Requests to a scheduler, as the server's front would send them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from kvflash_ggml.batching.messages import Event, Failed, Finished, Piece, Request, Sampling
from kvflash_ggml.batching.scheduler import Limits, Scheduler

from .rounding import LOGPROB, ON_GPU

GREEDY = Sampling(temperature=0.0)
_numbers = count()


@dataclass
class Asked:
    """An answer on its way."""

    request: Request
    inbox: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    events: list[Event] = field(default_factory=list)

    def next(self, timeout: float = 60) -> Event:
        self.events.append(self.inbox.get(timeout=timeout))
        return self.events[-1]

    def wait(self, timeout: float = 60) -> Finished | Failed:
        """Its end."""
        while not (self.events and isinstance(self.events[-1], Finished | Failed)):
            self.next(timeout)
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))


def request(tokens: Sequence[int], most: int = 8, **more: Any) -> Request:
    given = {"sampling": GREEDY} | more
    return Request(id=f"r{next(_numbers)}", tokens=np.asarray(tokens, np.int32), max_tokens=most, **given)


def ask(
    scheduler: Scheduler,
    tokens: Sequence[int],
    most: int = 8,
    *,
    full: Callable[[], bool] = lambda: False,
    seen: Callable[[Asked, Event], object] = lambda asked, event: None,
    **more: Any,
) -> Asked:
    """seen: called with each event, on the engine's thread: whatever it does comes before the next step."""
    asked = Asked(request(tokens, most, **more))

    def sink(event: Event) -> None:
        asked.inbox.put(event)
        seen(asked, event)

    scheduler.submit(asked.request, sink, full=full)
    return asked


def answer(scheduler: Scheduler, tokens: Sequence[int], most: int = 8, **more: Any) -> Finished:
    """Ask, and wait. AssertionError if it fails."""
    end = ask(scheduler, tokens, most, **more).wait()
    assert isinstance(end, Finished), end
    return end


@contextmanager
def served(llm: Any, limits: Limits | None = None) -> Iterator[Scheduler]:
    """A scheduler of a `Llama`."""
    from kvflash_ggml.batching.llama import LlamaModel  # here: unit tests have no llama_cpp

    running = Scheduler(LlamaModel(llm), limits=limits)
    running.start()
    try:
        yield running
    finally:
        running.close()


def assert_alike(mine: Asked, its: Asked, least: int = 0) -> None:
    """The same tokens; where rounding may choose the other one of two that are nearly as likely, up to there, but the
    `least` first ones. A GPU rounds so much more that ties come sooner, and that a sampled draw may be another.
    """
    end, its_end = mine.wait(), its.wait()
    assert isinstance(end, Finished), end
    assert isinstance(its_end, Finished)
    rows = [
        [one for event in asked.events if isinstance(event, Piece) for one in event.logprobs] for asked in (mine, its)
    ]
    assert len(end.tokens) == len(its_end.tokens) == len(rows[0]) == len(rows[1])
    for place, (one, other) in enumerate(zip(*rows, strict=True)):
        if one.token != other.token:
            assert place >= (min(least, 1) if ON_GPU else least), "so many tokens were the same"
            if ON_GPU and mine.request.sampling.temperature > 0:
                near = {token: logprob for token, _, logprob in one.top}
                assert all(abs(near[token] - logp) < LOGPROB.here for token, _, logp in other.top if token in near)
            else:
                assert abs(other.top[0][2] - other.top[1][2]) < LOGPROB.here
            return
        assert abs(one.logprob - other.logprob) < LOGPROB.here
