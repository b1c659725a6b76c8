"""`kvflash-bench conversations` and `agent`: what a server does, without the network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvflash_ggml.errors import ConfigError

from . import report
from .filler import read_text
from .opening import opened
from .options import Bytes, Numbers, model_argument, model_options, text_option, user_errors

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

_pool = click.option("--pool", type=Numbers(), default="1K", show_default=True, help="Slots of the pool.")
_tau = click.option("--tau", default=16, show_default=True, help="Fixed, so that nothing depends on the clock.")
_reading = click.option(
    "--reading", type=click.Choice(("auto", "exact", "pool")), default="auto", show_default=True,
    help="What tokens of a prompt see: all of the text, or what the pool holds.",
)  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option("--count", default=32, show_default=True, help="Conversations.")
@click.option("--length", type=Numbers(), default="8K", show_default=True, help="Tokens of each one's first prompt.")
@click.option("--turns", default=3, show_default=True)
@click.option("--question", default=64, show_default=True, help="Tokens of each later prompt that are new.")
@click.option("--answer", "most", default=16, show_default=True, help="Tokens of each answer.")
@click.option("--check", type=int, help="How many are compared with a lone run.  [default: all]")
@click.option(
    "--beside",
    default=0,
    show_default=True,
    help="Processes that make lone runs meanwhile; 0: one makes them afterwards, and disturbs no times.",
)
@click.option("--seconds", type=float, help="What has been done by then is reported.  [default: all is done]")
@click.option("--park-memory", type=Bytes(), default="1G", show_default=True, help="Beyond, they go to a folder.")
@click.option("--host-limit", type=Bytes(), help="Of page images in memory; beyond, they go to a spill file.")
@click.option("--seed", default=1, show_default=True)
@_pool
@_tau
@_reading
@model_options
def conversations(
    model: str, text: Sequence[Path], count: int, length: tuple[int, ...], turns: int, question: int, most: int,
    check: int | None, beside: int, seconds: float | None, park_memory: int, host_limit: int | None, seed: int,
    pool: tuple[int, ...], tau: int, reading: str, options: dict[str, Any],
) -> None:  # fmt: skip
    """Many conversations take turns at random on one pool; is each answer that of a lone run?"""
    from . import alone, serving

    began = time.monotonic()
    until = began + (float("inf") if seconds is None else seconds)
    tell = report.now_and_then()
    with user_errors(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflash-bench-"))
        fields: dict[str, Any] = {"tau": tau, "reading": reading}
        if host_limit is not None:
            fields |= {"host_limit": host_limit, "spill": Path(folder)}
        n_ctx = length[0] + turns * (question + most) + 64
        keywords: dict[str, Any] = dict(n_ctx=n_ctx, options=options, pool=pool[0], policy="qk", fields=fields)
        with opened(model, **keywords) as llm:  # before others: it finds the heads that all of them ask
            tokens = tokens_of(llm, text, count * 64 + length[0])
            playing = serving.make_conversations(tokens, count=count, length=length[0], turns=turns, more=question)
            order = serving.in_turns(playing, seed=seed)
            compared = list(dict.fromkeys(order))[:check]  # those that begin first, should time run out
            alone_of = partial(alone.lone_runs, model, keywords, compared, most=most)
            runs = stack.enter_context(alone_of(processes=beside)) if beside else None
            device = llm.kvflash.banner() if llm.kvflash else ""
            with serving.served(llm, park_bytes=park_memory, folder=Path(folder)) as scheduler:
                result = serving.play(scheduler, order, most=most, until=until, tell=tell)
        result["played_s"] = time.monotonic() - began
        if runs is None:
            runs = stack.enter_context(alone_of(processes=1))
        result = {**alone.compare(compared, runs, until=until, tell=tell), **result}
    result = {"conversations": count, **result, "seconds": time.monotonic() - began}
    report.table(["what", "value"], list(result.items()))
    report.document({"environment": report.environment(device), "model": Path(model).name, **result})


@click.command()
@model_argument
@text_option
@click.option("--system", type=Numbers(), default="8K", show_default=True, help="Tokens of the system prompt.")
@click.option("--turns", default=40, show_default=True)
@click.option("--result", default=400, show_default=True, help="Tokens of a tool's result.")
@click.option("--answer", "most", default=32, show_default=True, help="Tokens of an answer.")
@click.option(
    "--side-every", default=5, show_default=True, help="A short request of its own after so many turns; 0: none."
)
@click.option(
    "--reread-every", default=8, show_default=True, help="Turns whose whole prompt a stock cache reads; 0: none."
)
@_pool
@_tau
@_reading
@model_options
def agent(
    model: str, text: Sequence[Path], system: tuple[int, ...], turns: int, result: int, most: int, side_every: int,
    reread_every: int, pool: tuple[int, ...], tau: int, reading: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """An agent's transcript, turn by turn: time to the first token, beside reading all of it again."""
    from . import serving

    need = system[0] + turns * (result + most) + 64
    with user_errors():
        fields = {"tau": tau, "reading": reading}
        with opened(model, n_ctx=need, options=options, pool=pool[0], policy="qk", fields=fields) as llm:
            tokens = tokens_of(llm, text, need)
            device = llm.kvflash.banner() if llm.kvflash else ""
            with serving.served(llm, park_bytes=8 << 30, folder=None) as scheduler:  # a server's, unless it is told
                done, prompts = serving.run_agent(
                    scheduler, tokens, system=system[0], turns=turns, result=result, most=most, side_every=side_every
                )
        again: dict[int, float] = {}
        if reread_every:
            plain = {name: value for name, value in options.items() if name != "heads"}
            with opened(model, n_ctx=need, options=plain) as llm:
                wanted = {*range(0, turns, reread_every), turns - 1}
                again = {turn: serving.reread_ms(llm, prompts[turn]) for turn in sorted(wanted)}
    rows = [
        [turn.turn, "side" if turn.side else "", turn.prompt, turn.read, turn.first_ms, turn.restore_ms,
         None if turn.side else again.get(turn.turn)]
        for turn in done
    ]  # fmt: skip
    report.table(["turn", "", "prompt", "read", "first ms", "restore ms", "reread ms"], rows)
    found = {"turns": [asdict(turn) for turn in done], "reread_ms": again}
    report.document({"environment": report.environment(device), "model": Path(model).name, **found})


def tokens_of(llm: Llama, text: Sequence[Path], least: int) -> list[int]:
    """The text in tokens, over and over until there are enough."""
    tokens = list(llm.tokenize(read_text(text).encode(), add_bos=False, special=False))
    if not tokens:
        raise ConfigError("the text is empty: give one with --text")
    while len(tokens) < least:
        tokens += tokens
    return tokens
