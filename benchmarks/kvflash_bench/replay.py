"""`kvflash-bench replay`: sessions of coding agents on a server with so many bytes for its KV cache, and on stock's."""

from __future__ import annotations

import json
import queue
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvflash_ggml.constants import POOL_STEP
from kvflash_ggml.errors import ConfigError

from . import plot, report, stock, transcripts
from .conversing import tokens_of
from .inside import device_of, paged
from .opening import opened
from .plans_texts import Replay
from .sockets import Server, serve_options, served

OURS, STOCK = "ours", "unpatched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A turn in tokens."""

    said: tuple[int, ...]
    answer: int
    gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. prompt, new, read: tokens of the prompt, those that no request of its session had before, and those
    that the server computed. made: tokens of the answer. first_s, seconds: until its first token, and its last. why:
    the error, if it was not answered.
    """

    turn: int
    prompt: int
    new: int
    read: int = 0
    made: int = 0
    first_s: float = 0.0
    seconds: float = 0.0
    why: str = ""


@dataclass(slots=True)
class Play:
    """What came of sessions. planned: requests of all of them. seconds: of all."""

    planned: int
    asked: list[Asked] = field(default_factory=list)
    seconds: float = 0.0


def ask(server: Server, prompt: Sequence[int], *, turn: int, new: int, most: int) -> tuple[Asked, list[int]]:
    """Return what came of one request, and the tokens of its answer: exactly `most`, or it has failed."""
    body = {"prompt": list(prompt), "n_predict": most, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    asked = Asked(turn=turn, prompt=len(prompt), new=new)
    began, first_s, tokens, end = time.monotonic(), 0.0, list[int](), dict[str, Any]()
    try:
        with server.stream("/completion", body) as (status, frames):
            if status != 200:
                return replace(asked, why=f"status {status}"), []
            for end in frames:
                first_s = first_s or time.monotonic() - began
                tokens += end.get("tokens", ())
    except (OSError, HTTPException, ValueError) as err:
        return replace(asked, why=type(err).__name__), []
    tokens = tokens[-most:]  # one of the servers says all of them again at the end
    timings = end.get("timings", {})
    if len(tokens) < most or "prompt_n" not in timings:
        return replace(asked, why=f"it ends after {len(tokens)} tokens: {str(end.get('error', ''))[:200]}"), []
    return replace(
        asked, read=timings["prompt_n"], made=most, first_s=first_s, seconds=time.monotonic() - began
    ), tokens


def play(server: Server, sessions: Sequence[Sequence[Spoken]], users: int, *, gaps: float, until: float) -> Play:
    """Each of the users plays a session after the other, turn by turn; a session ends with a request that fails.

    gaps: factor of the times that tools take. until: of `time.monotonic`: nothing is asked later.
    """
    done, left = Play(planned=sum(map(len, sessions))), queue.SimpleQueue[Sequence[Spoken]]()
    for session in sessions:
        left.put(session)

    def user() -> None:
        while True:
            try:
                session = left.get_nowait()
            except queue.Empty:
                return
            text: list[int] = []
            for number, turn in enumerate(session):
                time.sleep(max(0.0, min(gaps * turn.gap_s, until - time.monotonic())))
                if time.monotonic() >= until:
                    return
                text += turn.said
                found, tokens = ask(server, text, turn=number, new=len(turn.said), most=turn.answer)
                done.asked.append(found)
                if found.why:
                    break
                text += tokens

    threads = [threading.Thread(target=user) for _ in range(users)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.seconds = time.monotonic() - began
    return done


def told(done: Play) -> dict[str, Any]:
    """Return a row. first p95: seconds to the first token, 95 % of all requests that were answered; later: without the
    first of each session. read: tokens computed of those that were new.
    """
    good = [one for one in done.asked if not one.why]
    later = [one.first_s for one in good if one.turn]
    return {
        "requests": done.planned,
        "finished": len(good),
        "failed": len(done.asked) - len(good),
        "longest": max((one.prompt for one in good), default=0),
        "first p95": _at([one.first_s for one in good], 95),
        "later p50": _at(later, 50),
        "later p95": _at(later, 95),
        "read": sum(one.read for one in good) / sum(one.new for one in good) if good else None,
        "tok/s": sum(one.made for one in good) / done.seconds,
        "seconds": done.seconds,
    }


def _at(values: Sequence[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


def sizes(kv: int, *, token: int, stage: int) -> tuple[int, int]:
    """Return the tokens of our pool and of stock's cache that take `kv` bytes.

    token, stage: bytes of a token, and of the layer buffers of exact reading, which ours has beside the pool.
    ConfigError if nothing is left for a pool.
    """
    pool, cells = ((kv - used) // token // POOL_STEP * POOL_STEP for used in (stage, 0))
    if pool < 2 * POOL_STEP:
        least = stage + 2 * POOL_STEP * token
        raise ConfigError(f"{kv:,} bytes for the KV cache are too few for these sessions: give --kv {least} or more")
    return pool, cells


def run(model: str, plan: Replay, options: dict[str, Any]) -> None:
    if plan.plot is not None:
        plot.check()
    scripts = _scripts(model, plan, options)
    with opened(model, n_ctx=512, options={**options, "heads": None}, vocab_only=True) as llm:
        spoken = [_spoken(one, lambda text: tokens_of(llm, text, 0)) for one in scripts]
    longest = max(sum(len(turn.said) + turn.answer for turn in session) for session in spoken)
    n_ctx = longest + 64
    with opened(model, n_ctx=n_ctx, options=options, pool=1024, policy="qk:exact") as llm:  # finds the heads, once
        assert llm.kvflash is not None
        token, stage, device = paged(llm).engine.info.page_bytes // 64, llm.kvflash.stage_bytes, device_of(llm)
    pool, cells = sizes(plan.kv, token=token, stage=stage)
    click.echo(f"{plan.kv:,} bytes: a pool of {pool:,} tokens with layer buffers, or {cells:,} cells", err=True)
    rows = []
    for users in plan.users:
        mine = [spoken[i % len(spoken)] for i in range(users)]
        for arm in (OURS, STOCK) if plan.stock is not None else (OURS,):
            with _server(model, plan, options, arm, pool=pool, cells=cells, n_ctx=n_ctx, users=users) as server:
                ask(server, [1] * 8, turn=0, new=8, most=4)  # warm
                until = time.monotonic() + plan.seconds
                done = play(server, mine, users, gaps=plan.gaps, until=until)
            why = sorted({one.why for one in done.asked if one.why})
            rows.append(
                {"arm": arm, "users": users, **told(done), "why": why, "asked": [asdict(x) for x in done.asked]}
            )
            click.echo(json.dumps({name: rows[-1][name] for name in rows[-1] if name != "asked"}), err=True)
    report.rows([{name: row[name] for name in row if name not in ("asked", "why")} for row in rows])
    if plan.plot is not None:
        plot.replay(rows, plan.plot, title=f"{Path(model).stem}, {plan.kv / 2**20:,.0f} MiB for the KV cache")
    found = {"pool": pool, "cells": cells, "token_bytes": token, "stage_bytes": stage, "n_ctx": n_ctx}
    report.told("replay", model, options | asdict(plan), device, **found, rows=rows)


def _scripts(model: str, plan: Replay, options: dict[str, Any]) -> list[transcripts.Transcript]:
    if plan.sessions:
        return transcripts.read(plan.sessions)[: max(plan.users)]
    text = plan.filler()
    with opened(model, n_ctx=512, options={**options, "heads": None}, vocab_only=True) as llm:
        letters = len(text) / len(tokens_of(llm, text, 0))
    made = transcripts.make(
        text, max(plan.users), start=plan.start, end=plan.end, known=plan.known / 100, answer=plan.answer,
        letters=letters, seed=plan.seed,
    )  # fmt: skip
    if plan.write is not None:
        plan.write.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
    return [transcripts.of_document(one) for one in made]


def _spoken(script: transcripts.Transcript, tokenize: Callable[[str], Sequence[int]]) -> list[Spoken]:
    parts = [turn.said for turn in script.turns]
    parts[0] = script.system + parts[0]
    return [
        Spoken(said=tuple(tokenize(said)), answer=turn.answer, gap_s=turn.gap_s)
        for said, turn in zip(parts, script.turns, strict=True)
    ]


def _server(
    model: str, plan: Replay, options: dict[str, Any], arm: str, *, pool: int, cells: int, n_ctx: int, users: int
) -> AbstractContextManager[Server]:
    if arm == OURS:
        line = [*serve_options(options, pool=pool, n_ctx=n_ctx), "-np", str(users), "--park-memory", str(plan.host)]
        return served(model, [*line, *shlex.split(plan.serve)])
    assert plan.stock is not None
    more = ["--cache-ram", str(plan.host >> 20)]
    return stock.served(plan.stock, model, cells=cells, parallel=users, options=options, more=more)
