"""`kvflash-bench server`, `soak` and `overload`: `kvflash-run serve` in a process of its own, by sockets."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict
from typing import Any

import click

from . import demand, load, plans_texts, report
from .conversing import tokens_of
from .opening import opened
from .sockets import serve_options, served


def speed(model: str, plan: plans_texts.Server, options: dict[str, Any]) -> None:
    """The verb `server`."""
    n_ctx = plan.context + plan.answer + 64
    with opened(model, n_ctx=n_ctx, options=options, pool=plan.pool, policy="qk:exact") as llm:
        tokens = tokens_of(llm, plan.filler(), plan.context)[: plan.context]
        device = llm.kvflash.banner() if llm.kvflash else ""
        bare = load.bare_speed(llm, tokens, plan.answer, plan.repeats)
    with served(model, serve_options(options, pool=plan.pool, n_ctx=n_ctx)) as child:
        through = load.served_speed(child, tokens, plan.answer, plan.repeats)
    best = max(through) / max(bare)
    rows = [[name, statistics.median(rates), max(rates)] for name, rates in (("bare", bare), ("served", through))]
    report.table(["arm", "tok/s, median", "best"], rows)
    found = {"pool": plan.pool, "context": plan.context, "bare": bare, "served": through, "ratio_of_best": best}
    report.told("server", model, options | asdict(plan), device, **found)


def soak(model: str, plan: plans_texts.Soak, options: dict[str, Any]) -> None:
    """The verb `soak`."""
    n_ctx = plan.length + 256
    with tempfile.TemporaryDirectory(prefix="kvflash-bench-") as folder:
        tokens = text_tokens(model, plan.filler(), options)
        kept = ("--park-memory", plan.park_memory, "--session-dir", folder, "-np", str(plan.parallel))
        with served(model, [*serve_options(options, pool=plan.pool, n_ctx=n_ctx), *kept]) as child:
            outcomes, taken = load.soak(
                child, tokens, requests=plan.requests, conversations=plan.conversations, length=plan.length,
                clients=plan.clients, seed=plan.seed, tell=lambda taken: click.echo(json.dumps(taken), err=True),
            )  # fmt: skip
    names = list(taken[0])
    shown = [[row[n] / 2**20 if n in ("rss", "anonymous") or n.endswith("_bytes") else row[n] for n in names]
             for row in taken]  # fmt: skip
    report.table([f"{n} MiB" if n in ("rss", "anonymous") or n.endswith("_bytes") else n for n in names], shown)
    report.table(["ended", "requests"], sorted(outcomes.ends.items()))
    found = {"pool": plan.pool, "clients": plan.clients, "ends": dict(outcomes.ends), "samples": taken}
    report.told("soak", model, options | asdict(plan), "", **found)


def overload(model: str, plan: plans_texts.Overload, options: dict[str, Any]) -> None:
    """The verb `overload`."""
    least, most = plan.lengths
    phases: list[dict[str, Any]] = []
    wanted = demand.Demand(
        text=text_tokens(model, plan.filler(), options), lengths=(least, most), seed=plan.seed
    )  # fmt: skip
    line = [*serve_options(options, pool=plan.pool, n_ctx=most + 256), "-np", str(plan.parallel)]
    with served(model, [*line, "--max-queue", str(plan.max_queue), "--timeout", str(plan.deadline)], log=True) as child:
        answered = demand.capacity(child, wanted)
        for factor in plan.times:
            outcomes, took = demand.overload(
                child, wanted, rate=factor * answered, seconds=plan.seconds, clients=plan.clients,
                patience_s=plan.patience, first=sum(phase["sent"] for phase in phases),
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
    found = {"pool": plan.pool, "clients": plan.clients, "capacity": answered, "phases": phases}
    report.told("overload", model, options | asdict(plan), "", **found)


def text_tokens(model: str, text: str, options: dict[str, Any]) -> list[int]:
    """Tokens of a text. The weights stay where the file is mapped: nothing is computed."""
    mapped = {**options, "n_gpu_layers": 0, "use_extra_bufts": False, "heads": None}
    with opened(model, n_ctx=512, options=mapped) as llm:
        return tokens_of(llm, text, 1)
