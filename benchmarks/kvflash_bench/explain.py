"""Where the answers of one RULER sample stand, and whether a pool had their chunks when the reply needed them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from kvflash_ggml.arrays import Floats
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.trace.events import Change

from . import report
from .graded import Record, Sample
from .plans_texts import Explain
from .tasks_ruler import make, score

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

WORDS = 48
"""Letters of a chunk that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The pool in the step that made a text `length` tokens long. scores: the newest ones, of each chunk."""

    length: int
    resident: frozenset[int]
    scores: Floats | None


class Watch:
    """Notes what was resident, and the scores that chose it."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def changed(self, change: Change) -> None:
        newest = self.moments[-1].scores if change.scores is None and self.moments else change.scores
        self.moments.append(Moment(length=change.length, resident=frozenset(change.resident), scores=newest))

    def at(self, length: int) -> Moment:
        """Return the newest moment whose text has at most `length` tokens."""
        return [one for one in self.moments if one.length <= length][-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A sentence that an answer needs. value: the answer. chunks: those that the sentence lies in.

    needed: token of the full cache's reply where the value begins, counted from 0, or the first in which the pool's
    reply differs if that is sooner; None if the full cache does not name the value. full, pool: whether the reply names
    it.
    """

    sentence: str
    value: str
    chunks: tuple[int, ...]
    needed: int | None
    full: bool
    pool: bool


def needle(
    sentence: str, value: str, chunks: Sequence[int], *, full: str, pool: str, count: Callable[[str], int]
) -> Needle:
    """Return what is known of a sentence. full, pool: the replies. count: tokens of a part of a reply."""
    there = full.lower().find(value.lower())
    parted = next((i for i, (a, b) in enumerate(zip(full, pool, strict=False)) if a != b), min(len(full), len(pool)))
    return Needle(
        sentence=sentence, value=value, chunks=tuple(chunks), full=there >= 0, pool=value.lower() in pool.lower(),
        needed=None if there < 0 else count(full[: min(there, parted)]),
    )  # fmt: skip


def rows(found: Sequence[Needle], watch: Watch, prompt: int) -> list[dict[str, Any]]:
    """Return a row for each chunk of each sentence. prompt: tokens of the prompt.

    A reply's first token has seen what its prompt has seen. The pool holds what the prompt's end asks for from the step
    after that.
    """
    out = []
    for one in found:
        for chunk in one.chunks:
            row: dict[str, Any] = {"value": one.value, "full": one.full, "pool": one.pool, "chunk": chunk}
            row |= _seen(watch.at(prompt + 1), chunk, "end")
            row["token"] = one.needed
            row |= _seen(None if one.needed is None else watch.at(prompt + max(1, one.needed)), chunk, "then")
            out.append(row)
    return out


def places(moment: Moment, gold: Sequence[int], words: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return a row for each resident chunk, and each of the answers', the best first. words: of a chunk."""
    shown = sorted({*moment.resident, *gold}, key=lambda chunk: (-_score(moment, chunk), chunk))
    return [
        {"chunk": chunk, **_seen(moment, chunk), "answer": chunk in gold, "begins": words(chunk)} for chunk in shown
    ]


def _seen(moment: Moment | None, chunk: int, when: str = "") -> dict[str, Any]:
    """Return rank, share of attention and residency of a chunk. The rank is 1 for the best of all chunks."""
    names = [f"{when} {name}".strip() for name in ("rank", "share", "resident")]
    if moment is None:
        return dict.fromkeys(names)
    mine = _score(moment, chunk)
    if moment.scores is None or mine == -math.inf:
        return dict(zip(names, (None, None, chunk in moment.resident), strict=True))
    rank = 1 + int(np.count_nonzero(moment.scores > mine))
    return dict(zip(names, (rank, math.exp(mine), chunk in moment.resident), strict=True))


def _score(moment: Moment, chunk: int) -> float:
    """Return the score of a chunk; the worst of all if it has none yet."""
    return float(moment.scores[chunk]) if moment.scores is not None and chunk < len(moment.scores) else -math.inf


def run(model: str, plan: Explain, options: dict[str, Any]) -> None:
    from .inside import device_of  # here: they load the library, which counting does without
    from .opening import opened

    fields = {} if plan.tau is None else {"tau": plan.tau}
    watch = Watch()
    with opened(model, n_ctx=plan.context, options=options, swa_full=False) as llm:
        full, sample, _ = _answered(llm, plan, "full cache")
    with opened(
        model, n_ctx=plan.context, options=options, pool=plan.pool, policy=plan.policy, fields=fields, swa_full=False
    ) as llm:
        assert llm.kvflash is not None
        llm.kvflash.watch(watch)
        pool, _, chunks = _answered(llm, plan, f"{plan.pool} {plan.policy}")

        def count(words: str) -> int:
            return len(llm.tokenize(words.encode(), add_bos=False, special=False))

        values = sample.answers if len(sample.answers) == len(sample.gold) else sample.answers * len(sample.gold)
        found = [
            needle(line, value, chunks[line], full=full.reply, pool=pool.reply, count=count)
            for line, value in zip(sample.gold, values, strict=True)
        ]
        read = list(llm.input_ids[: pool.tokens])

        def words(chunk: int) -> str:
            some = [int(token) for token in read[chunk * CHUNK : (chunk + 1) * CHUNK]]
            return " ".join(llm.detokenize(some).decode("utf-8", "replace").split())[:WORDS]

        kept = places(watch.at(pool.tokens + 1), pool.gold, words)
        device = device_of(llm)
    for record in (full, pool):
        click.echo(f"{record.way}: scores {100 * record.score:.0f}, says: {record.reply.strip()}")
    click.echo(f"the prompt has {pool.tokens:,} tokens in {math.ceil(pool.tokens / CHUNK)} chunks\n")
    told = rows(found, watch, pool.tokens)
    report.rows(told)
    click.echo()
    report.rows(kept)
    report.told(
        "explain", model, options | asdict(plan), device, full=asdict(full), pool=asdict(pool),
        needles=[asdict(one) for one in found], rows=told, places=kept,
    )  # fmt: skip


def _answered(llm: Llama, plan: Explain, way: str) -> tuple[Record, Sample, dict[str, tuple[int, ...]]]:
    """Return what is replied to the sample, the sample, and the chunks of each of its sentences with an answer."""
    from .frame import frame_of
    from .grading import ask, chunks_of, tokens_around
    from .ruler import source_of

    frame = frame_of(llm)
    sample = make(
        plan.task, source_of(llm, plan.filler()), n_tokens=plan.context, seed=plan.seed, index=plan.index,
        frame=tokens_around(llm, frame),
    )  # fmt: skip
    record = ask(
        llm, frame, sample, lambda one, reply: score(one.task, reply, one.answers), context=plan.context, way=way
    )
    return record, sample, {line: chunks_of(llm, frame, replace(sample, gold=(line,))) for line in sample.gold}
