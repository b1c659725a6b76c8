"""Agents that work at once on one server: a long prompt, then small results of tools with times to think between."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvflash_ggml.errors import KVFlashError

from .sockets import Server

QUICK, QUICK_S, SLOW_S = 0.86, (0.1, 1.0), (2.0, 10.0)
"""How many tools come back within a second, as public traces have it; how long these take, and the others."""


@dataclass(eq=False)
class Session:
    """said: the first prompt, the tools' results, and a question about a fact in the first prompt, in tokens. right:
    whether an answer to it is. answers, first_s, read: of each turn, its tokens, the seconds until the first one, and
    the tokens of its prompt that were read.
    """

    said: list[list[int]]
    right: Callable[[str], bool]
    answers: list[tuple[int, ...]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    last: str = ""

    @property
    def prompt(self) -> list[int]:
        """Of the next turn: all that was said and answered, and what comes now."""
        text = [token for said, answer in zip(self.said, self.answers, strict=False) for token in (*said, *answer)]
        return text + self.said[len(self.answers)]

    def turn(self, server: Server, most: int) -> None:
        """Ask, and wait for the whole answer. KVFlashError if there is none."""
        body = {"prompt": self.prompt, "n_predict": most, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        began, first_s, end, said = time.monotonic(), None, dict[str, Any](), ""
        with server.stream("/completion", body) as (status, frames):
            if status != 200:
                raise KVFlashError(f"the server answers {status}")
            for shown in frames:
                first_s = time.monotonic() - began if first_s is None else first_s
                said += shown.get("content", "")
                end = shown
        if first_s is None or len(end.get("tokens", ())) != most:
            raise KVFlashError(f"the answer has ended early: {end}")
        self.answers.append(tuple(end["tokens"]))
        self.first_s.append(first_s)
        self.read.append(end["timings"]["prompt_n"])
        self.last = said

    def again(self) -> Session:
        """The same, before anything is asked."""
        return Session(self.said, self.right)


def play(server: Server, users: Sequence[Sequence[Session]], most: int, *, seed: int, thinks: bool) -> float:
    """Each user plays his sessions one after the other, all users at once. Seconds. The first error ends it."""
    errors: list[BaseException] = []

    def user(number: int) -> None:
        dice = random.Random(seed * 1009 + number)
        try:
            for session in users[number]:
                for _ in session.said:
                    if errors:
                        return
                    session.turn(server, most)
                    if thinks:
                        time.sleep(dice.uniform(*(QUICK_S if dice.random() < QUICK else SLOW_S)))
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=user, args=(number,)) for number in range(len(users))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.monotonic() - began


def told(sessions: Sequence[Session], alone: Sequence[Session]) -> dict[str, Any]:
    """read_ratio: tokens read of those that were said. known: of the later prompts, the share that was said before.
    first_s_p95: of all turns; later_s_p95: without the first of each session. equal: answers that are those of the lone
    runs. right: sessions whose fact is found; right_alone: of the lone ones.
    """
    said = sum(len(part) for one in sessions for part in one.said)
    later = [(sum(map(len, one.said[:i])), len(part)) for one in sessions for i, part in enumerate(one.said) if i]
    return {
        "sessions": len(sessions),
        "turns": sum(len(one.answers) for one in sessions),
        "longest": max(sum(map(len, (*one.said, *one.answers))) for one in sessions),
        "known": float(np.median([before / (before + new) for before, new in later])),
        "read_ratio": sum(sum(one.read) for one in sessions) / said,
        "first_s_p95": float(np.percentile([s for one in sessions for s in one.first_s], 95)),
        "later_s_p95": float(np.percentile([s for one in sessions for s in one.first_s[1:]], 95)),
        "equal": sum(
            mine == its
            for one, other in zip(sessions, alone, strict=True)
            for mine, its in zip(one.answers, other.answers, strict=True)
        ),
        "right": sum(one.right(one.last) for one in sessions),
        "right_alone": sum(one.right(one.last) for one in alone),
    }
