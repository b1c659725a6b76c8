"""RULER's thirteen tasks on a model: the full cache, and pools with each policy, answer and drafter."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import plot, report
from .graded import Kept, Sample, by_task, settings_of, summary
from .grading import ask_all
from .plans_texts import Ruler
from .ruler_table import NOTES, by_length
from .tasks_ruler import Source, make, score

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


def run(model: str, plan: Ruler, options: dict[str, Any]) -> None:
    text = plan.filler()
    kept = Kept(plan.out, settings_of(model, seed=plan.seed, text=hashlib.sha256(text.encode()).hexdigest()[:16]))

    def made(llm: Llama, context: int, around: int, task: str, index: int) -> Sample:
        return make(task, source_of(llm, text), n_tokens=context, seed=plan.seed, index=index, frame=around)

    asked = [(index, task) for index in range(plan.samples) for task in plan.tasks]
    found, device = ask_all(
        model, plan, options, asked, kept, made, lambda sample, reply: score(sample.task, reply, sample.answers)
    )
    rows = summary(found)
    report.table(*by_task(rows))
    click.echo()
    report.table(*by_length(rows))
    for note in NOTES:
        click.echo(note)
    if plan.plot is not None:
        plot.ruler(rows, plan.plot, title=Path(model).stem)
    report.told("ruler", model, options | asdict(plan), device, rows=rows, samples=[asdict(record) for record in found])


def source_of(llm: Llama, text: str) -> Source:
    """Return what samples are made of, with the tokens of this model."""
    return Source(text, lambda words: len(llm.tokenize(words.encode(), add_bos=False, special=False)))
