"""Asks samples of every arm, one text each, and keeps what is finished."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.native import vocabulary

from . import outcomes
from .asks import Frame
from .frame import frame_of
from .graded import Kept, Record, Sample, Way, ways
from .inside import device_of
from .opening import answering, opened
from .recall import RESIDENCY

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

    from .plans_texts import Graded

SEAMS = 4
"""Tokens that a prompt may have more than its parts: at each seam of template, body and lead."""

Make = Callable[["Llama", int, int, str, int], Sample]
"""Of a model, the tokens of the context, those of the template, a task and an index."""

Score = Callable[[Sample, str], float]
"""Of a sample and a reply: 0 to 1."""


def ask_all(
    model: str,
    plan: Graded,
    options: dict[str, Any],
    asked: Sequence[tuple[int, str]],
    kept: Kept,
    make: Make,
    score: Score,
) -> tuple[list[Record], str]:  # fmt: skip
    """Return what every arm of the plan says to the same samples, and the device. asked: index and task of each.

    What is kept is not asked again. Ctrl-C says how many samples are kept.
    """
    residency = plan.residency if plan.residency is not None else () if plan.pools else RESIDENCY
    arms = outcomes.arms(plan.contexts, residency, plan.policies, pools=plan.pools, full=plan.full)
    todo = ways(arms, plan.answers, plan.drafts, plan.width)
    samples: dict[tuple[int, str, int], Sample] = {}
    found: list[Record] = []
    device = ""
    try:
        with click.progressbar(length=len(asked) * len(todo), label="samples", file=sys.stderr) as bar:
            for way in todo:
                here = [(way.arm.context, way.name, task, index) for index, task in asked]
                left = [key for key in here if key not in kept.records]
                bar.update(len(here) - len(left))
                if left:
                    device = _ask_way(model, way, left, options, samples, kept, make, score, bar) or device
                found += [kept.records[key] for key in here]
    except KeyboardInterrupt:
        where = f"kept in {plan.out}: the same command goes on from there" if plan.out else "lost: keep them with --out"
        click.echo(f"\n{len(kept.records)} finished samples are {where}", err=True)
        raise
    return found, device


def _ask_way(
    model: str, way: Way, keys: list[tuple[int, str, str, int]], options: dict[str, Any],
    samples: dict[tuple[int, str, int], Sample], kept: Kept, make: Make, score: Score, bar: Any,
) -> str:  # fmt: skip
    """Ask the samples that are not kept yet. Returns the device it ran on."""
    arm = way.arm
    fields = answering(way.answer, way.width, way.drafts)
    with opened(
        model, n_ctx=arm.context, options=options, pool=arm.pool, policy=arm.policy, fields=fields, swa_full=False
    ) as llm:
        frame = frame_of(llm)
        around = tokens_around(llm, frame)
        for context, name, task, index in keys:
            place = context, task, index
            if place not in samples:
                samples[place] = make(llm, context, around, task, index)
            kept.add(ask(llm, frame, samples[place], score, context=context, way=name))
            bar.update(1)
        return device_of(llm)


def tokens_around(llm: Llama, frame: Frame) -> int:
    """Return how many tokens a prompt has beside its sample, at most."""
    return len(_tokens(llm, frame, _prompt(frame, "", ""))) + SEAMS


def _prompt(frame: Frame, body: str, lead: str) -> str:
    """The message of the user in the template, and the beginning of the answer."""
    return f"{frame.before_document}{body}{frame.before_answer if frame.special else chr(10)}{lead}"


def _tokens(llm: Llama, frame: Frame, prompt: str) -> list[int]:
    return list(llm.tokenize(prompt.encode(), special=frame.special))


def ask(llm: Llama, frame: Frame, sample: Sample, score: Score, *, context: int, way: str) -> Record:
    """Read a sample and have it answered, greedily. A reply ends where it can score no more."""
    frame = Frame() if sample.plain else frame
    prompt = _tokens(llm, frame, _prompt(frame, sample.body, sample.lead))
    began = time.perf_counter()
    llm.reset()
    ids: list[int] = []
    reply, gold = "", chunks_of(llm, frame, sample)
    missing: set[int] = set()
    never = set(gold)
    for token in llm.generate(prompt, temp=0.0):
        if llm.kvflash is not None and ids:
            resident = set(llm.kvflash.resident_chunks)
            if len(ids) == 1:
                missing = set(gold) - resident
            never -= resident
        if vocabulary.is_end(vocabulary.of(llm.model), token):
            break
        ids.append(int(token))
        reply = llm.detokenize(ids).decode("utf-8", "replace")
        if len(ids) >= sample.most or score(sample, reply) == 1:
            break
    return Record(
        context=context,
        way=way,
        task=sample.task,
        index=sample.index,
        score=score(sample, reply),
        answers=sample.answers,
        reply=reply,
        tokens=len(prompt),
        seconds=time.perf_counter() - began,
        gold=gold,
        missing=tuple(sorted(missing)),
        never=tuple(sorted(never & missing)),
    )


def chunks_of(llm: Llama, frame: Frame, sample: Sample) -> tuple[int, ...]:
    """Return the chunks that hold the sentences with the answers, ascending."""
    chunks: set[int] = set()
    for line in sample.gold:
        before = frame.before_document + sample.body.rpartition(line)[0]
        first, last = (len(_tokens(llm, frame, text)) for text in (before, before + line))
        chunks.update(pos // CHUNK for pos in range(first, last))
    return tuple(sorted(chunks))
