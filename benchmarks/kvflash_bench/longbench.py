"""LongBench's own files on a model: the full cache, and pools with each policy, answer and drafter."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from . import report
from .graded import Kept, Sample, by_task, settings_of, summary, tenth
from .plans_texts import LongBench
from .tasks_longbench import DATA_SETS, name_of_set, read, score

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


def run(model: str, plan: LongBench, options: dict[str, Any]) -> None:
    from .grading import ask_all  # here: it loads the library

    questions = read(plan.data, plan.tasks, plan.samples)
    text = hashlib.sha256("".join(one.context for some in questions.values() for one in some[:1]).encode())
    kept = Kept(plan.out, settings_of(model, data=text.hexdigest()[:16]))

    def made(llm: Llama, context: int, around: int, task: str, index: int) -> Sample:
        asked, kind = questions[task][index], DATA_SETS[name_of_set(task)]
        body = kind.prompt.format(context=asked.context, input=asked.input)
        room = context - kind.most - (0 if kind.plain else around)
        return Sample(
            task=task, index=index, body=shortened(llm, body, room), answers=asked.answers, most=kind.most,
            plain=kind.plain,
        )  # fmt: skip

    asked = [(index, name) for name, some in questions.items() for index in range(len(some))]
    found, device = ask_all(
        model, plan, options, sorted(asked, key=lambda one: one[0]), kept, made,
        lambda sample, reply: score(name_of_set(sample.task), reply, questions[sample.task][sample.index]),
    )  # fmt: skip
    rows = summary(found)
    report.table(*by_task(rows))
    click.echo()
    report.table(*by_kind(rows))
    report.told(
        "longbench", model, options | asdict(plan), device, rows=rows, samples=[asdict(record) for record in found]
    )


def shortened(llm: Llama, body: str, room: int) -> str:
    """Return a prompt of at most about `room` tokens: of a longer one the middle is left out, as LongBench does."""
    tokens = list(llm.tokenize(body.encode(), add_bos=False, special=False))
    if len(tokens) <= room:
        return body
    half = room // 2
    first, last = (llm.detokenize(some).decode("utf-8", "ignore") for some in (tokens[:half], tokens[-half:]))
    return first + last


def by_kind(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the table of LongBench's headings: the mean of the data sets of each."""
    kinds = dict.fromkeys(one.kind for one in DATA_SETS.values())
    found = [
        {
            kind: [value for task, value in row["tasks"].items() if DATA_SETS[name_of_set(task)].kind == kind]
            for kind in kinds
        }
        for row in rows
    ]
    shown = [kind for kind in kinds if any(means[kind] for means in found)]
    cells = [
        [row["context"], row["way"], *(tenth(sum(means[kind]) / len(means[kind])) for kind in shown)]
        for row, means in zip(rows, found, strict=True)
    ]
    return ["tokens", "cache", *shown], cells
