"""Which signal of an answer tells that the pool has lost a value.

Questions are answered by the full cache and by pools, from the same text that was read exactly. An answer is *lost* if
the full cache has it right and a pool has it wrong. At each scored token it is noted what the token asked for and what
was there. Then the full cache reads each answer of a pool, and says how much likelier another token was. Thresholds are
chosen on the documents of one set and counted on those of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from kvflash_ggml.arrays import Int32s, common_prefix
from kvflash_ggml.constants import POOL_STEP, round_up
from kvflash_ggml.trace.events import Change

from . import report
from .faults import auc
from .forms import SETS
from .opening import opened
from .outcomes import Outcome, Plan, Read
from .plans_texts import Doubts

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

CUT = 80
"""Tokens at a prompt's end that each pool reads itself, so that it scores the prompt."""

PRECISION = 0.9
"""Of a threshold: the share of the answers above it that are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What was noted from the end of the answer before to the end of this one; 0 where nothing was scored.

    mean, most: of the share of attention on evicted chunks, after pages moved. late: the largest share that a token's
    heads have for a chunk that was not resident when it was computed. left: that was not when the next one was. moves,
    again: page-ins per token, and those of chunks that had left within the answer. against: by how much at most, in
    nats, the whole text finds another token likelier than the one that was drawn.
    """

    mean: float
    most: float
    late: float
    left: float
    moves: float
    again: float
    against: float = 0.0


class Watch:
    """Notes the signals of a pool. `take` returns them and begins anew."""

    def __init__(self) -> None:
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._began = self._end = 0
        self._masses: list[float] = [0.0]
        self._late, self._left, self._moves, self._again = [0.0], [0.0], 0, 0

    def changed(self, change: Change) -> None:
        before, self._here, self._end = self._here, set(change.resident), change.length
        if not change.generating:
            self._gone.clear()
            self._began = change.length
            return
        self._gone |= before - self._here
        self._moves += len(change.recalled)
        self._again += len(self._gone.intersection(change.recalled))
        if change.scores is not None:
            shares = np.exp(change.scores)
            self._masses.append(change.evicted_mass or 0.0)
            for found, there in ((self._late, before), (self._left, self._here)):
                outside = np.ones(len(shares), np.bool_)
                outside[[chunk for chunk in there if chunk < len(shares)]] = False
                found.append(float(shares[outside].max(initial=0.0)))

    def take(self) -> Signals:
        tokens = max(1, self._end - self._began)
        masses = self._masses[1:] or [0.0]
        found = Signals(
            mean=float(np.mean(masses)), most=max(masses), late=max(self._late), left=max(self._left),
            moves=self._moves / tokens, again=self._again / tokens,
        )  # fmt: skip
        self._began = self._end
        self._masses, self._late, self._left, self._moves, self._again = [0.0], [0.0], [0.0], 0, 0
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer from a pool. full: whether the full cache has it right. tau: 0 for the default."""

    fact_set: str
    task: str
    pool: int
    tau: int
    full: bool
    correct: bool
    signals: Signals


def run(model: str, plan: Doubts, options: dict[str, Any]) -> None:
    answers = [one for context in plan.contexts for one in answered(model, plan, context, options)]
    for tau in plan.taus:
        some = [one for one in answers if one.tau == tau]
        click.echo(f"tau {tau or 'by default'}:")
        report.rows([counts(some, task) for task in plan.tasks])
        report.rows([told(some, name) for name in Signals.__slots__])
    report.told("doubts", model, options | asdict(plan), "", answers=[asdict(one) for one in answers])


def answered(model: str, plan: Doubts, context: int, options: dict[str, Any]) -> Iterator[Answer]:
    """Answers of every pool to the questions of both sets."""
    from . import recall  # here: it needs the library

    n_ctx = context + recall.TAIL_ROOM
    arms = [(round_up(n_ctx, POOL_STEP), 0), *((pool, tau) for pool in plan.pools for tau in plan.taus)]
    with ExitStack() as stack:
        file = Path(stack.enter_context(TemporaryDirectory())) / "text.kvf"
        llms: list[Llama] = []
        for pool, tau in arms:
            fields = {"tau": tau or None}
            one = opened(model, n_ctx=n_ctx, options=options, pool=pool, policy="qk:exact", fields=fields)
            llms.append(stack.enter_context(one))
        reader = llms[1]
        for fact_set in SETS:
            trials = Plan(tasks=plan.tasks, depths=(), trials=plan.trials, seed=plan.seed, fact_set=fact_set)
            for task, seed, case in recall.cases(reader, trials, plan.filler(), n_tokens=context):
                prompt = recall.prompt_tokens(reader, case)[:-CUT]
                reader.reset()
                reader.eval(prompt)
                reader.save_snapshot(file)
                full: list[bool] = []
                for (pool, tau), llm in zip(arms, llms, strict=True):
                    llm.load_snapshot(file)
                    found = list(_watched(llm, recall.run_case(llm, case, task=task, seed=seed, there=len(prompt))))
                    right = sum(outcome.correct for outcome, _, _ in found)
                    click.echo(f"{fact_set} {task} {pool} {tau}: {right} of {len(found)}", err=True)
                    if llm is llms[0]:
                        full = [outcome.correct for outcome, _, _ in found]
                        continue
                    told = {"fact_set": fact_set, "task": task, "pool": pool, "tau": tau}
                    for was, (outcome, signals, text) in zip(full, found, strict=True):
                        signals = replace(signals, against=against(llms[0], text, outcome.began))
                        yield Answer(full=was, correct=outcome.correct, signals=signals, **told)  # type: ignore[arg-type]


def against(full: Llama, text: Int32s, began: int) -> float:
    """Let the full cache read a text whose answer began at token `began`. See `Signals.against`; a token that ends the
    answer is not of the text.
    """
    full.n_tokens = min(began - 1, common_prefix(full.input_ids[: full.n_tokens], text))
    full.eval(text[full.n_tokens : began].tolist())
    most = 0.0
    for token in text[began:].tolist():
        row = full.newest_logits()
        most = max(most, float(row.max() - row[token]))
        full.eval([token])
    return most


def _watched(llm: Llama, results: Iterator[Outcome | Read]) -> Iterator[tuple[Outcome, Signals, Int32s]]:
    """Yield each answer, its signals, and the text that ends with it."""
    assert llm.kvflash is not None
    watch = Watch()
    llm.kvflash.watch(watch)
    for result in results:
        signals = watch.take()
        if isinstance(result, Outcome):
            yield result, signals, llm.input_ids[: llm.n_tokens].astype(np.int32)


def counts(answers: Sequence[Answer], task: str) -> dict[str, Any]:
    """Return how many answers to a task there are, and how many the pools have lost, have right, and have found."""
    some = [one for one in answers if one.task == task]
    return {
        "task": task,
        "answers": len(some),
        "full": sum(one.full for one in some),
        "lost": sum(one.full and not one.correct for one in some),
        "found": sum(one.correct and not one.full for one in some),
    }


def told(answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """Return how well a signal tells lost answers from kept ones, of those that the full cache has right.

    The threshold is the lowest that has PRECISION on the set that settings are chosen on; none if no threshold has.
    `hits` are the lost ones above it, of all lost ones, on the other set.
    """
    chosen, confirmed = ([one for one in answers if one.full and one.fact_set == which] for which in SETS)
    row: dict[str, Any] = {"signal": name}
    for which, some in (("choose", chosen), ("confirm", confirmed)):
        lost, kept = ([_of(one, name) for one in some if one.correct is right] for right in (False, True))
        row[f"AUC {which}"] = auc(lost, kept) if lost and kept else None
    above = threshold(chosen, name)
    caught = [one for one in confirmed if above is not None and _of(one, name) >= above]
    hits = sum(not one.correct for one in caught)
    precision = hits / len(caught) if caught else None
    return row | {
        "threshold": above, "precision": precision, "hits": hits, "of": sum(not one.correct for one in confirmed)
    }  # fmt: skip


def threshold(answers: Sequence[Answer], name: str) -> float | None:
    """Return the lowest value of a signal from which on at least PRECISION of the answers are lost."""
    for value in sorted({_of(one, name) for one in answers}):
        caught = [one for one in answers if _of(one, name) >= value]
        if sum(not one.correct for one in caught) >= PRECISION * len(caught):
            return value
    return None


def _of(answer: Answer, name: str) -> float:
    return float(getattr(answer.signals, name))
