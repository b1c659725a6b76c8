"""Clients of one server at once, ours or stock's: how much sooner they have their answers, and who has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import numpy as np

from kvflash_ggml.errors import KVFlashError

from .sockets import Server

PATIENCE_S = 3600
"""For an answer, which comes as a whole: of four with 4,700 tokens, two took a busy machine more than ten minutes."""


@dataclass(slots=True)
class Asked:
    """One answer. status: of HTTP, 0 for a broken connection. why: the error, if there is no answer."""

    status: int
    tokens: tuple[int, ...] = ()
    why: str = ""


def ask(server: Server, prompt: Sequence[int], most: int) -> Asked:
    """A greedy answer of exactly `most` tokens. No text of an earlier request is reused."""
    body = {
        "prompt": list(prompt), "n_predict": most, "temperature": 0, "ignore_eos": True, "return_tokens": True,
        "cache_prompt": False,
    }  # fmt: skip
    try:
        reply = server.ask("/completion", body, timeout_s=PATIENCE_S)
    except (OSError, HTTPException) as err:
        return Asked(0, why=type(err).__name__)
    if reply.status != 200:
        return Asked(reply.status, why=str(reply.body)[:200])
    return Asked(200, tuple(reply.body["tokens"]))


def one_after_the_other(server: Server, prompts: Sequence[Sequence[int]], most: int) -> tuple[float, list[Asked]]:
    """Seconds, and the answers."""
    began = time.perf_counter()
    answers = [ask(server, prompt, most) for prompt in prompts]
    return time.perf_counter() - began, answers


def at_once(server: Server, prompts: Sequence[Sequence[int]], most: int) -> tuple[float, list[Asked]]:
    """The same of clients that ask together: seconds until the last one has its answer, and the answers."""
    answers = [Asked(0)] * len(prompts)

    def client(number: int) -> None:
        answers[number] = ask(server, prompts[number], most)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(prompts))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, answers


def compared(server: Server, prompts: Sequence[Sequence[int]], most: int) -> dict[str, Any]:
    """Both, one after the other first. finished: answers of the clients at once that have all of their tokens. equal:
    of those, answers that are the lone ones. gain: how many times sooner they are done. alone_cpu_s, together_cpu_s: of
    the server's threads meanwhile.
    """
    spent = [server.cpu_seconds()]
    alone_s, alone = one_after_the_other(server, prompts, most)
    spent.append(server.cpu_seconds())
    together_s, together = at_once(server, prompts, most)
    spent.append(server.cpu_seconds())
    finished = [i for i, one in enumerate(together) if len(one.tokens) == most]
    whole = [i for i, one in enumerate(alone) if len(one.tokens) == most]
    return {
        "alone_s": alone_s,
        "together_s": together_s,
        "alone_cpu_s": spent[1] - spent[0],
        "together_cpu_s": spent[2] - spent[1],
        "gain": alone_s / together_s if len(finished) == len(whole) == len(prompts) else None,
        "finished_alone": len(whole),
        "finished": len(finished),
        "equal": sum(together[i].tokens == alone[i].tokens for i in finished),
        "why": sorted({one.why for one in together if one.why}),
    }


@dataclass(slots=True)
class Stream:
    """When each frame with a token has come."""

    times: list[float] = field(default_factory=list)
    status: int = 0


def gaps(
    server: Server, long: Sequence[int], others: Sequence[Sequence[int]], most: int, *, settle: int = 4
) -> dict[str, Any]:
    """Some clients' answers stream, until one with a long prompt has its first token: the gaps between their tokens.

    most: tokens that a client asks for, enough for all of that time. settle: tokens that each has before the prompt
    comes. KVFlashError if that has no answer.
    """
    done, begun = threading.Event(), threading.Semaphore(0)
    streams = [Stream() for _ in others]

    def client(stream: Stream, prompt: Sequence[int]) -> None:
        body = {"prompt": list(prompt), "n_predict": most, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        try:
            with server.stream("/completion", body) as (stream.status, frames):
                for count, _ in enumerate(frames):
                    stream.times.append(time.perf_counter())
                    if count == settle:
                        begun.release()
                    if done.is_set():
                        break
        finally:
            begun.release()

    threads = [threading.Thread(target=client, args=pair) for pair in zip(streams, others, strict=True)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    began = time.perf_counter()
    try:
        answer = ask(server, long, 1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    first_s = time.perf_counter() - began
    if answer.status != 200:
        raise KVFlashError(f"the long prompt is not answered: {answer.status} {answer.why}")
    between = [
        (b - a) * 1e3
        for stream in streams
        for a, b in zip(stream.times, stream.times[1:], strict=False)
        if b > began and a < began + first_s
    ]
    p50, p99 = np.percentile(between, (50, 99)).tolist() if between else (None, None)
    return {
        "first_s": first_s,
        "gap_ms_p50": p50,
        "gap_ms_p99": p99,
        "gap_ms_most": max(between, default=None),
        "tokens_meanwhile": len(between),
    }
