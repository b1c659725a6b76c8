"""RULER's thirteen tasks on a model: the full cache, and pools with each policy, answer and drafter.

Every arm is asked the very same questions. Each sample is a text of its own, read in one call with its question, and
the model's chat template stands around it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llama_cpp

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.constants import CHUNK

from . import outcomes, plot, report
from .frame import frame_of
from .inside import device_of
from .opening import opened
from .plans_texts import Ruler
from .recall import RESIDENCY
from .ruler_table import NOTES, Kept, Record, Way, by_length, by_task, summary, ways
from .tasks_ruler import Sample, Source, make, score

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

    from .asks import Frame


def run(model: str, plan: Ruler, options: dict[str, Any]) -> None:
    text = plan.filler()
    kept = Kept(plan.out, {
        "model": Path(model).name, "bytes": Path(model).stat().st_size, "seed": plan.seed,
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
    })  # fmt: skip
    residency = plan.residency if plan.residency is not None else () if plan.pools else RESIDENCY
    arms = outcomes.arms(plan.contexts, residency, plan.policies, pools=plan.pools, full=plan.full)
    asked = [(index, task) for index in range(plan.samples) for task in plan.tasks]
    found, device = [], ""
    try:
        with click.progressbar(length=len(asked) * len(arms), label="samples", file=sys.stderr) as bar:
            todo = ways(arms, plan.answers, plan.drafts)
            bar.length = len(asked) * len(todo)
            samples: dict[tuple[int, str, int], Sample] = {}
            for way in todo:
                here = [(way.arm.context, way.name, task, index) for index, task in asked]
                left = [key for key in here if key not in kept.records]
                bar.update(len(here) - len(left))
                if left:
                    device = _run_way(model, way, left, plan, text, options, samples, kept, bar) or device
                found += [kept.records[key] for key in here]
    except KeyboardInterrupt:
        where = f"kept in {plan.out}: the same command goes on from there" if plan.out else "lost: keep them with --out"
        click.echo(f"\n{len(kept.records)} finished samples are {where}", err=True)
        raise
    rows = summary(found)
    report.table(*by_task(rows))
    click.echo()
    report.table(*by_length(rows))
    for note in NOTES:
        click.echo(note)
    if plan.plot is not None:
        plot.ruler(rows, plan.plot, title=Path(model).stem)
    report.told("ruler", model, options | asdict(plan), device, rows=rows, samples=[asdict(record) for record in found])


def _run_way(
    model: str, way: Way, keys: list[tuple[int, str, str, int]], plan: Ruler, text: str, options: dict[str, Any],
    samples: dict[tuple[int, str, int], Sample], kept: Kept, bar: Any,
) -> str:  # fmt: skip
    """Ask the samples that are not kept yet. Returns the device it ran on."""
    arm = way.arm
    fields: dict[str, Any] = {"answer": way.answer} | ({"spec": SpecConfig.read(way.drafts)} if way.drafts else {})
    with opened(model, n_ctx=arm.context, options=options, pool=arm.pool, policy=arm.policy, fields=fields) as llm:
        frame = frame_of(llm)
        source = Source(text, lambda words: len(llm.tokenize(words.encode(), add_bos=False, special=False)))
        around = len(_tokens(llm, _prompt(frame, "", "")))
        for context, name, task, index in keys:
            place = context, task, index
            if place not in samples:
                samples[place] = make(
                    task, source, n_tokens=context, seed=plan.seed, index=index, frame=around + SEAMS
                )  # fmt: skip
            kept.add(_ask(llm, frame, samples[place], context=context, way=name))
            bar.update(1)
        return device_of(llm)


SEAMS = 4
"""Tokens that a prompt may have more than its parts: at each seam of template, body and lead."""


def _prompt(frame: Frame, body: str, lead: str) -> str:
    """The message of the user in the template, and the beginning of the answer."""
    return f"{frame.before_document}{body}{frame.before_answer if frame.special else chr(10)}{lead}"


def _tokens(llm: Llama, prompt: str) -> list[int]:
    return list(llm.tokenize(prompt.encode(), special=True))


def _ask(llm: Llama, frame: Frame, sample: Sample, *, context: int, way: str) -> Record:
    """Read a sample and have it answered, greedily. A reply ends where it can score no more."""
    prompt = _tokens(llm, _prompt(frame, sample.body, sample.lead))
    began = time.perf_counter()
    llm.reset()
    ids: list[int] = []
    reply, gold = "", _gold(llm, frame, sample)
    missing: set[int] = set()
    never = set(gold)
    for token in llm.generate(prompt, temp=0.0):
        if llm.kvflash is not None and ids:
            resident = set(llm.kvflash.resident_chunks)
            if len(ids) == 1:
                missing = set(gold) - resident
            never -= resident
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            break
        ids.append(int(token))
        reply = llm.detokenize(ids).decode("utf-8", "replace")
        if len(ids) >= sample.most or score(sample.task, reply, sample.answers) == 1:
            break
    return Record(
        context=context,
        way=way,
        task=sample.task,
        index=sample.index,
        score=score(sample.task, reply, sample.answers),
        answers=sample.answers,
        reply=reply,
        tokens=len(prompt),
        seconds=time.perf_counter() - began,
        gold=gold,
        missing=tuple(sorted(missing)),
        never=tuple(sorted(never & missing)),
    )


def _gold(llm: Llama, frame: Frame, sample: Sample) -> tuple[int, ...]:
    """Chunks that hold the sentences with the answers."""
    chunks: set[int] = set()
    for line in sample.gold:
        before = frame.before_document + sample.body.rpartition(line)[0]
        first, last = (len(_tokens(llm, text)) for text in (before, before + line))
        chunks.update(pos // CHUNK for pos in range(first, last))
    return tuple(sorted(chunks))
