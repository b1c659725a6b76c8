"""`kvflash-bench server`, `soak` and `overload`: `kvflash-run serve` in a process of its own, by sockets."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvflash_ggml.constants import KV_TYPES

from . import report
from .conversing import tokens_of
from .opening import opened
from .options import Factors, Numbers, model_argument, model_options, text_option, user_errors

_pool = click.option("--pool", type=Numbers(), default="1K", show_default=True, help="Slots of the pool.")
_clients = click.option("--clients", default=8, show_default=True, help="That ask at once.")
_seed = click.option("--seed", default=1, show_default=True)


@click.command()
@model_argument
@text_option
@click.option("--context", type=Numbers(), default="1K", show_default=True, help="Tokens of the prompt.")
@click.option("--answer", "made", default=256, show_default=True, help="Tokens of the answer.")
@click.option("--repeats", default=3, show_default=True)
@_pool
@model_options
def server(
    model: str, text: Sequence[Path], context: tuple[int, ...], made: int, repeats: int, pool: tuple[int, ...],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """How fast is an answer through the server, beside the bare Llama?"""
    from . import load
    from .sockets import served

    n_ctx = context[0] + made + 64
    with user_errors():
        with opened(model, n_ctx=n_ctx, options=options, pool=pool[0], policy="qk:exact") as llm:
            tokens = tokens_of(llm, text, context[0])[: context[0]]
            device = llm.kvflash.banner() if llm.kvflash else ""
            bare = load.bare_speed(llm, tokens, made, repeats)
        with served(model, serve_options(options, pool=pool[0], n_ctx=n_ctx)) as child:
            through = load.served_speed(child, tokens, made, repeats)
    best = max(through) / max(bare)
    rows = [[name, statistics.median(rates), max(rates)] for name, rates in (("bare", bare), ("served", through))]
    report.table(["arm", "tok/s, median", "best"], rows)
    report.document({"environment": report.environment(device), "model": Path(model).name, "pool": pool[0],
                     "context": context[0], "bare": bare, "served": through, "ratio_of_best": best})  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option("--requests", default=10_000, show_default=True)
@click.option("--conversations", "count", default=200, show_default=True)
@click.option("--length", type=Numbers(), default="1K", show_default=True, help="Tokens at which one begins again.")
@click.option("--park-memory", default="64M", show_default=True, help="Of the server; beyond, they go to a folder.")
@_clients
@_seed
@_pool
@model_options
def soak(
    model: str, text: Sequence[Path], requests: int, count: int, length: tuple[int, ...], park_memory: str,
    clients: int, seed: int, pool: tuple[int, ...], options: dict[str, Any],
) -> None:  # fmt: skip
    """Does a server grow? Many short requests over many conversations, some of whose clients leave."""
    from . import load
    from .sockets import served

    n_ctx = length[0] + 256
    with user_errors(), tempfile.TemporaryDirectory(prefix="kvflash-bench-") as folder:
        tokens = _text_tokens(model, text, options)
        kept = ("--park-memory", park_memory, "--session-dir", folder)
        with served(model, [*serve_options(options, pool=pool[0], n_ctx=n_ctx), *kept]) as child:
            outcomes, taken = load.soak(
                child, tokens, requests=requests, conversations=count, length=length[0], clients=clients, seed=seed,
                tell=lambda taken: click.echo(json.dumps(taken), err=True),
            )  # fmt: skip
    names = list(taken[0])
    shown = [[row[n] / 2**20 if n in ("rss", "anonymous") or n.endswith("_bytes") else row[n] for n in names]
             for row in taken]  # fmt: skip
    report.table([f"{n} MiB" if n in ("rss", "anonymous") or n.endswith("_bytes") else n for n in names], shown)
    report.table(["ended", "requests"], sorted(outcomes.ends.items()))
    report.document({"environment": report.environment(""), "model": Path(model).name, "pool": pool[0],
                     "clients": clients, "ends": dict(outcomes.ends), "samples": taken})  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option(
    "--times",
    type=Factors(),
    default="3",
    show_default=True,
    help="As many as it answers; several, one after the other.",
)
@click.option("--seconds", default=60.0, show_default=True, help="For each of them.")
@click.option("--lengths", type=Numbers(), default="200,4K", show_default=True, help="Of prompts: least and most.")
@click.option("--max-queue", default=16, show_default=True, help="Of the server.")
@click.option("--deadline", default=3600.0, show_default=True, help="Seconds that the server has for a request.")
@click.option("--patience", default=300.0, show_default=True, help="Seconds after which a refused client gives up.")
@_clients
@_seed
@_pool
@model_options
def overload(
    model: str, text: Sequence[Path], times: tuple[float, ...], seconds: float, lengths: tuple[int, ...],
    max_queue: int, deadline: float, patience: float, clients: int, seed: int, pool: tuple[int, ...],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Is anybody lost where as much is asked as can be answered, or more? And do clients, log and metrics agree?

    Requests come at random; refused clients come again when they are told to, and one of ten leaves at some moment.
    """
    from . import demand
    from .sockets import served

    if len(lengths) != 2:
        raise click.BadParameter("give the least and the most", param_hint="--lengths")
    phases: list[dict[str, Any]] = []
    with user_errors():
        wanted = demand.Demand(text=_text_tokens(model, text, options), lengths=(lengths[0], lengths[1]), seed=seed)
        line = serve_options(options, pool=pool[0], n_ctx=lengths[1] + 256)
        with served(model, [*line, "--max-queue", str(max_queue), "--timeout", str(deadline)], log=True) as child:
            answered = demand.capacity(child, wanted)
            for factor in times:
                outcomes, took = demand.overload(
                    child, wanted, rate=factor * answered, seconds=seconds, clients=clients, patience_s=patience,
                    first=sum(phase["sent"] for phase in phases),
                )  # fmt: skip
                phases.append({"times": factor, "ends": dict(outcomes.ends),
                               "refused_before": dict(outcomes.retries), **took})  # fmt: skip
                click.echo(json.dumps(phases[-1]), err=True)
    for phase in phases:
        shown = {name: value for name, value in phase.items() if not isinstance(value, dict)}
        report.table(["what", "value"], list(shown.items()))
        report.table(["ended", "requests"], sorted(phase["ends"].items()))
        report.table(["refused before", "answers"], sorted(phase["refused_before"].items()))
        sums = {name: pair for name, pair in phase["tokens"].items() if name != "agree"}
        report.table(["tokens", "of prompts", "of answers"], [[name, *pair] for name, pair in sums.items()])
        click.echo("they agree" if phase["tokens"]["agree"] else "THEY DO NOT AGREE")
    report.document({"environment": report.environment(""), "model": Path(model).name, "pool": pool[0],
                     "clients": clients, "capacity": answered, "phases": phases})  # fmt: skip


def serve_options(options: dict[str, Any], *, pool: int, n_ctx: int) -> list[str]:
    """Of `kvflash-run serve`, as a `Llama` with these keywords has them."""
    names = {kind: name for name, kind in KV_TYPES.items()}
    line = ["-c", str(n_ctx), "--kvflash", str(pool), "-ngl", str(options["n_gpu_layers"])]
    line += ["-b", str(options["n_batch"]), "-ub", str(options["n_ubatch"])]
    line += ["-ctk", names[options["type_k"]], "-ctv", names[options["type_v"]]]
    if options["n_threads"] is not None:
        line += ["-t", str(options["n_threads"])]
    if options["heads"] is not None:
        line += ["--kvflash-calibrate", str(options["heads"])]
    return line


def _text_tokens(model: str, text: Sequence[Path], options: dict[str, Any]) -> list[int]:
    with opened(model, n_ctx=512, options={**options, "n_gpu_layers": 0, "heads": None}) as llm:
        return tokens_of(llm, text, 1)
