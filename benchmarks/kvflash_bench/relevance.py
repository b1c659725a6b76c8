"""The verbs that measure what is found and what is lost: recall, scores, reading, loss."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvflash_ggml.native import library

from .options import (
    POLICIES,
    Names,
    Numbers,
    Shares,
    model_argument,
    model_options,
    set_option,
    text_option,
    user_errors,
)

RESIDENCY = (6.25, 3.0)
"""Pools that recall is measured in unless others are named, in % of the context."""


@click.command()
@model_argument
@text_option
@click.option("--contexts", type=Numbers(), default="8K", show_default=True, help="Tokens of each document.")
@click.option("--residency", type=Shares(), help="Pools, in % of the context.  [default: 6.25,3 without --pools]")
@click.option("--pools", type=Numbers(), default=(), help="Pools, in tokens.")
@click.option("--policies", type=Names(), default="qk:exact,qk,lru", show_default=True, help=POLICIES)
@click.option("--full/--no-full", default=True, show_default=True, help="Also run the full cache.")
@click.option(
    "--tasks",
    type=Names(),
    default="single,multikey4",
    show_default=True,
    help="Of single, multikey4, multivalue, vartrack, jsonkv, words, reworded, chat; for models that were not trained "
    "to recall: forms (twelve facts in a document, asked verbatim and reworded in the model's chat template) and late "
    "(the same, after some eighty other tokens of the answer).",
)
@set_option
@click.option("--depths", type=Shares(), default="10,50,90", show_default=True, help="Of the facts asked for, in %.")
@click.option("--trials", default=16, show_default=True, help="Of each task; a trial asks once at every depth.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--drafter",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Small model for the policy of that name.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw recall against residency (PNG).")
@model_options
def recall(
    model: str, text: tuple[Path, ...], contexts: tuple[int, ...], residency: tuple[float, ...] | None,
    pools: tuple[int, ...], policies: tuple[str, ...], full: bool, tasks: tuple[str, ...], fact_set: str,
    depths: tuple[float, ...], trials: int, seed: int, drafter: Path | None, plot: Path | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Questions about a long text that are answered right: the full cache, and policies in pools."""
    from . import plot as plots
    from .filler import read_text

    with user_errors():
        filler = read_text(text)
        if plot is not None:
            plots.check()
    library.load()
    from . import outcomes as results
    from . import report
    from .recall import run_arm as run_recall

    shares = tuple(d / 100 for d in depths)
    plan = results.Plan(tasks=tasks, depths=shares, trials=trials, seed=seed, fact_set=fact_set)
    if residency is None:
        residency = () if pools else RESIDENCY
    by_full: list[results.Outcome] = []
    rows: list[dict[str, Any]] = []
    replies: list[dict[str, Any]] = []
    with user_errors():
        for arm in results.arms(contexts, residency, policies, pools=pools, full=full):
            outcomes, reads = run_recall(model, arm, plan, filler, options, drafter=drafter)
            if arm.policy == "full":
                by_full = outcomes
            rows += results.summary(arm, outcomes, reads, by_full)
            where = {"context": arm.context, "pool": arm.pool, "policy": arm.policy}
            replies += [where | asdict(outcome) for outcome in outcomes]
            hits = sum(outcome.correct for outcome in outcomes)
            click.echo(f"{arm.policy} pool {arm.pool} of {arm.context}: {hits} of {len(outcomes)} {arm.note}", err=True)
    report.table(results.HEADER, [results.cells(row) for row in rows])
    for line in results.verdicts(rows):
        click.echo(line)
    if plot is not None:
        plots.recall(rows, plot, title=Path(model).stem)
    report.document({"bench": "recall", "model": Path(model).name, "options": options | asdict(plan),
                     "environment": report.environment(""), "rows": rows, "outcomes": replies})  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option("--contexts", type=Numbers(), default="8K", show_default=True, help="Tokens of each document.")
@click.option("--residency", default=6.25, show_default=True, help="Pool, in % of the context.")
@click.option("--tasks", type=Names(), default="single,multikey4", show_default=True)
@set_option
@click.option("--depths", type=Shares(), default="10,50,90", show_default=True, help="Of the facts asked for, in %.")
@click.option("--trials", default=4, show_default=True, help="Of each task; a trial asks once at every depth.")
@click.option("--seed", default=0, show_default=True)
@model_options
def scores(
    model: str, text: tuple[Path, ...], contexts: tuple[int, ...], residency: float, tasks: tuple[str, ...],
    fact_set: str, depths: tuple[float, ...], trials: int, seed: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """How high each score ranks the chunk of the answer, all on the same queries and keys of texts read under lru."""
    from .filler import read_text

    with user_errors():
        filler = read_text(text)
    library.load()
    from . import report, study
    from .outcomes import Plan, arms

    plan = Plan(tasks=tasks, depths=tuple(d / 100 for d in depths), trials=trials, seed=seed, fact_set=fact_set)
    rows: list[dict[str, Any]] = []
    with user_errors():
        for arm in arms(contexts, (residency,), ("lru",), full=False):
            assert arm.pool is not None
            ranks = []
            for some in study.study(model, context=arm.context, pool=arm.pool, plan=plan, text=filler, options=options):
                ranks += some
                if some:
                    click.echo(f"{some[0].task} {some[0].label} of {arm.context}: seed {some[0].seed}", err=True)
            rows += [{"context": arm.context} | row for row in study.summary(ranks)]
    if rows:
        report.table(list(rows[0]), [list(row.values()) for row in rows])
    report.document({"bench": "scores", "model": Path(model).name, "residency": residency, "rows": rows,
                     "options": options | asdict(plan), "environment": report.environment("")})  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option("--contexts", type=Numbers(), default="8K", show_default=True, help="Tokens of each document.")
@click.option("--residency", type=Shares(), default="6.25", show_default=True, help="Pools, in % of the context.")
@click.option("--policies", type=Names(), default="qk:exact,qk,lru", show_default=True, help=POLICIES)
@click.option("--full/--no-full", default=True, show_default=True, help="Also run the full cache.")
@click.option("--tasks", type=Names(), default="copy,table,scattered", show_default=True)
@click.option("--trials", default=8, show_default=True, help="Of each task.")
@click.option("--seed", default=0, show_default=True)
@model_options
def reading(
    model: str, text: tuple[Path, ...], contexts: tuple[int, ...], residency: tuple[float, ...],
    policies: tuple[str, ...], full: bool, tasks: tuple[str, ...], trials: int, seed: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """Loss of what a document repeats while it is read: with reselection meanwhile, and at the prompt's end only."""
    from .filler import read_text

    with user_errors():
        filler = read_text(text)
    library.load()
    from . import report
    from .opening import reads_exactly
    from .outcomes import Plan, arms
    from .reading import Documents, run_arm, summary

    plan = Plan(tasks=tasks, depths=(), trials=trials, seed=seed)
    rows: list[dict[str, Any]] = []
    documents: Documents = {}
    with user_errors():
        for arm in arms(contexts, residency, policies, full=full):
            once = arm.policy in ("full", "lru") or reads_exactly(arm.policy)
            for reselect in (False,) if once else (True, False):
                readings = list(run_arm(model, arm, plan, filler, options, documents, reselect=reselect))
                made = summary(arm, readings, reselect=reselect)
                nats = ", ".join(f"{row['task']} {row['label']} {row['nats']:.3f}" for row in made)
                rows += made
                click.echo(f"{arm.policy} pool {arm.pool} of {arm.context}, reselect {reselect}: {nats}", err=True)
    if rows:
        report.table(list(rows[0]), [list(row.values()) for row in rows])
    report.document({"bench": "reading", "model": Path(model).name, "rows": rows,
                     "options": options | asdict(plan), "environment": report.environment("")})  # fmt: skip


@click.command()
@model_argument
@text_option
@click.option("--contexts", type=Numbers(), default="4K", show_default=True, help="Tokens of each document.")
@click.option("--pools", type=Numbers(), default="512", show_default=True, help="Pools, in tokens.")
@click.option("--policies", type=Names(), default="qk:exact,qk,lru", show_default=True, help=POLICIES)
@click.option("--documents", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Counted after a document.")
@click.option("--seed", default=0, show_default=True, help="Of the first document.")
@model_options
def loss(
    model: str, text: tuple[Path, ...], contexts: tuple[int, ...], pools: tuple[int, ...], policies: tuple[str, ...],
    documents: int, tokens: int, seed: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """Loss of the tokens that follow a real text, and how often the likeliest one is that of the full cache."""
    from .filler import read_text

    with user_errors():
        filler = read_text(text)
    library.load()
    from . import report
    from .loss import Plan, run_arm, summary
    from .outcomes import arms

    plan = Plan(documents=documents, tokens=tokens, seed=seed)
    rows: list[dict[str, Any]] = []
    with user_errors():
        for arm in arms(contexts, (), policies, pools=pools):
            forced = list(run_arm(model, arm, plan, filler, options))
            if arm.policy == "full":
                full = forced
            rows.append(summary(arm, forced, full))
            click.echo(f"{arm.policy} pool {arm.pool} of {arm.context}: {rows[-1]['nats']:.3f} nats", err=True)
    report.table(list(rows[0]), [list(row.values()) for row in rows])
    report.document({"bench": "loss", "model": Path(model).name, "rows": rows, "options": options | asdict(plan),
                     "environment": report.environment("")})  # fmt: skip
