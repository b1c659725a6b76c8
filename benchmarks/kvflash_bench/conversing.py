"""`kvflash-bench conversations`: what a server does, without the network."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvflash_ggml.errors import ConfigError

from . import alone, fleet, report, serving
from .opening import opened
from .plans_texts import Conversations
from .sockets import serve_options

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


def run(model: str, plan: Conversations, options: dict[str, Any]) -> None:
    began = time.monotonic()
    until = began + (float("inf") if plan.seconds is None else plan.seconds)
    tell = report.now_and_then()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflash-bench-"))
        fields: dict[str, Any] = {"tau": plan.tau, "reading": plan.reading}
        if plan.host_limit is not None:
            fields |= {"host_limit": plan.host_limit, "spill": Path(folder)}
        n_ctx = plan.length + plan.turns * (plan.question + plan.answer) + 64
        pool = plan.pool // plan.parallel
        keywords: dict[str, Any] = dict(n_ctx=n_ctx, options=options, pool=pool, policy="qk", fields=fields)
        seats = {"pool": plan.pool, "fields": fields | {"parallel": plan.parallel, "pool_share": "strict"}}
        with opened(model, **(keywords | seats)) as llm:  # before others: it finds the heads that all of them ask
            tokens = tokens_of(llm, plan.filler(), plan.count * 64 + plan.length)
            playing = serving.make_conversations(
                tokens, count=plan.count, length=plan.length, turns=plan.turns, more=plan.question
            )
            order = serving.in_turns(playing, seed=plan.seed)
            compared = list(dict.fromkeys(order))[: plan.compared]  # those that begin first, should time run out
            alone_of = partial(alone.lone_runs, model, keywords, compared, most=plan.answer)
            runs = stack.enter_context(alone_of(processes=plan.beside)) if plan.beside else None
            device = llm.kvflash.banner() if llm.kvflash else ""
            if plan.servers:
                result = fleet.play(
                    model, order, options=_serve_options(plan, options, n_ctx), servers=plan.servers,
                    folder=Path(folder), most=plan.answer, kill_every=plan.kill_every, end_every=plan.end_every,
                    seed=plan.seed, tell=tell,
                )  # fmt: skip
            else:
                with serving.served(llm, park_bytes=plan.park_memory, folder=Path(folder)) as scheduler:
                    result = serving.play(scheduler, order, most=plan.answer, until=until, tell=tell)
        result["played_s"] = time.monotonic() - began
        if runs is None:
            runs = stack.enter_context(alone_of(processes=1))
        result = {**alone.compare(compared, runs, until=until, tell=tell), **result}
    result = {"conversations": plan.count, **result, "seconds": time.monotonic() - began}
    report.table(["what", "value"], list(result.items()))
    report.told("conversations", model, options | asdict(plan), device, **result)


def _serve_options(plan: Conversations, options: dict[str, Any], n_ctx: int) -> list[str]:
    line = serve_options(options, pool=plan.pool, n_ctx=n_ctx)
    line += ["--kvflash-tau", str(plan.tau), "--kvflash-reading", plan.reading]
    line += ["-np", str(plan.parallel), "--pool-share", "strict"]
    return [*line, "--park-memory", str(plan.park_memory), "--store-bandwidth", str(plan.store_bandwidth)]


def tokens_of(llm: Llama, text: str, least: int) -> list[int]:
    """The text in tokens, over and over until there are enough."""
    tokens = list(llm.tokenize(text.encode(), add_bos=False, special=False))
    if not tokens:
        raise ConfigError("the text is empty: give one with --text")
    while len(tokens) < least:
        tokens += tokens
    return tokens
