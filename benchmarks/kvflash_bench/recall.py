"""How many questions about a long text are answered right: the full cache, and each policy at each residency.

A document is read once; its questions are then asked one by one from the same saved state, with greedy decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.llama.llama import Llama
from kvflash_ggml.native import vocabulary

from . import outcomes as results
from . import plot, report
from .asks import Ask, Case, Frame, Setting
from .frame import frame_of
from .inside import session_of, wait
from .opening import DRAFTER, answering, base_policy, opened, preview_share
from .outcomes import Arm, Outcome, Plan, Read
from .plans_texts import Recall
from .previews import Pick, pick_of
from .tasks_kinds import FREE, make

TAIL_ROOM = 768
"""Tokens of context beside the document, for questions and answers."""

MAX_NEW = 40
"""Tokens an answer may take."""


RESIDENCY = (6.25, 3.0)
"""Pools unless others are named, in % of the context."""


def run(model: str, plan: Recall, options: dict[str, Any]) -> None:
    trials = Plan(tasks=plan.tasks, depths=plan.depths, trials=plan.trials, seed=plan.seed, fact_set=plan.fact_set)
    residency = plan.residency if plan.residency is not None else () if plan.pools else RESIDENCY
    by_full: list[Outcome] = []
    rows: list[dict[str, Any]] = []
    replies: list[dict[str, Any]] = []
    filler = plan.filler()
    for arm in results.arms(plan.contexts, residency, plan.policies, pools=plan.pools, full=plan.full):
        fields = answering(plan.answer, plan.width)
        outcomes, reads = run_arm(model, arm, trials, filler, options, drafter=plan.drafter, fields=fields)
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
    if plan.plot is not None:
        plot.recall(rows, plan.plot, title=Path(model).stem)
    report.told("recall", model, options | asdict(plan), "", rows=rows, outcomes=replies)


def run_arm(
    model: str,
    arm: Arm,
    plan: Plan,
    text: str,
    options: dict[str, Any],
    *,
    drafter: Path | None = None,
    seen: Callable[[Outcome], None] | None = None,
    fields: dict[str, Any] | None = None,
) -> tuple[list[Outcome], list[Read]]:
    """Every trial of every task on one arm. drafter: of the policy of that name. seen: called with each outcome.

    fields: of a pool's KVFlashConfig.
    """
    share = preview_share(arm.policy)
    fields = dict(fields or {})
    if base_policy(arm.policy) == DRAFTER and share is None:
        fields["scorer"] = drafter
    n_ctx = arm.context + TAIL_ROOM
    outcomes: list[Outcome] = []
    reads: list[Read] = []
    with (
        opened(model, n_ctx=n_ctx, options=options, pool=arm.pool, policy=arm.policy, fields=fields) as llm,
        pick_of(llm, share, drafter if base_policy(arm.policy) == DRAFTER else None) as pick,
    ):
        for task, seed, case in cases(llm, plan, text, n_tokens=arm.context):
            asked = run_case(llm, case, task=task, seed=seed)
            for result in asked if pick is None else run_previews(llm, case, pick, task=task, seed=seed):
                if isinstance(result, Read):
                    reads.append(result)
                    continue
                outcomes.append(result)
                if seen is not None:
                    seen(result)
    return outcomes, reads


def cases(llm: Llama, plan: Plan, text: str, *, n_tokens: int) -> Iterator[tuple[str, int, Case]]:
    """(task, seed, case) of every trial, for the tokenizer of `llm`."""

    def tokenize(words: str) -> list[int]:
        return list(llm.tokenize(words.encode(), add_bos=False, special=False))

    frame = frame_of(llm) if FREE.intersection(plan.tasks) else Frame()
    setting = Setting(text, tokenize, n_tokens, plan.depths, frame, plan.fact_set)
    for task in plan.tasks:
        for trial in range(plan.trials):
            for case in make(task, setting, seed=plan.seed + trial):
                yield task, plan.seed + trial, case


def prompt_tokens(llm: Llama, case: Case) -> list[int]:
    """The document, with a bos token where the model wants one."""
    return list(llm.tokenize(case.document.encode(), special=case.special))


def tail_tokens(llm: Llama, case: Case, ask: Ask) -> list[int]:
    """The question."""
    return list(llm.tokenize(ask.tail.encode(), add_bos=False, special=case.special))


def shift_of(llm: Llama, case: Case) -> int:
    """Tokens that stand before the document."""
    plain = llm.tokenize(case.document.encode(), add_bos=False, special=case.special)
    return len(prompt_tokens(llm, case)) - len(plain)


def gold_chunks(ask: Ask, shift: int) -> list[int]:
    """Chunks that hold the answer. shift: tokens before the document."""
    return sorted({pos // CHUNK for lo, hi in ask.gold for pos in range(lo + shift, hi + shift)})


def run_case(llm: Llama, case: Case, *, task: str, seed: int, there: int = 0) -> Iterator[Outcome | Read]:
    """Read the document and ask its questions. A single prompt is read in one call with its document.

    there: tokens of the document that the llm has read already.
    """
    document = prompt_tokens(llm, case)
    shift = shift_of(llm, case)
    alone = all(ask.goes_on for ask in case.asks[1:])
    before = _counters(llm)
    if not there:
        llm.reset()
    if alone:
        document += tail_tokens(llm, case, case.asks[0])
    yield _read(llm, lambda: document[there:])
    state = None if alone else llm.save_state()
    for ask in case.asks:
        if ask.goes_on:
            before = _counters(llm)
        elif state is not None:
            llm.load_state(state)
            before = _counters(llm)
            llm.eval(tail_tokens(llm, case, ask))
        yield _outcome(llm, ask, gold_chunks(ask, shift), before, task=task, seed=seed)


def run_previews(llm: Llama, case: Case, pick: Pick, *, task: str, seed: int) -> Iterator[Outcome | Read]:
    """Ask the questions of a document, each of a preview of its own: the places that are picked are read."""
    document = prompt_tokens(llm, case)
    shift = shift_of(llm, case)
    for ask in case.asks:
        prompt, before, places = document + tail_tokens(llm, case, ask), _counters(llm), set[int]()

        def picked(prompt: list[int] = prompt, places: set[int] = places) -> list[int]:
            places.update(pick(prompt).tolist())
            return [prompt[at] for at in sorted(places)]

        llm.reset()
        yield _read(llm, picked)
        gold = [at + shift for span in ask.gold for at in range(*span)]
        outcome = _outcome(llm, ask, [], before, task=task, seed=seed)
        yield replace(outcome, resident=places.issuperset(gold) if gold else None)


def _read(llm: Llama, tokens: Callable[[], list[int]]) -> Read:
    """Read what `tokens` says after what has been read; to choose it counts too."""
    before, began, cpu = _counters(llm), time.perf_counter(), time.process_time()
    read = tokens()
    llm.eval(read)
    wait(llm)
    return Read(
        tokens=len(read),
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        page_ins=_counters(llm)[0] - before[0],
    )


def _outcome(
    llm: Llama, ask: Ask, gold: Sequence[int], before: tuple[int, int, float], *, task: str, seed: int
) -> Outcome:
    """Have a question answered that has been read. gold: chunks of its answer. before: the counters before it."""
    for token in llm.tokenize(ask.said.encode(), add_bos=False, special=False):
        llm.eval([token])
    began = llm.n_tokens
    reply, count, seconds, resident = _answer(llm, ask, gold)
    after = _counters(llm)
    return Outcome(
        task=task,
        label=ask.label,
        seed=seed,
        correct=ask.is_correct(reply),
        answer=ask.answer,
        reply=reply,
        resident=resident,
        page_ins=int(after[0] - before[0]),
        looks=int(after[1] - before[1]),
        look_seconds=after[2] - before[2],
        decode_tokens=count,
        decode_seconds=seconds,
        began=began,
        gold=tuple(gold),
    )


def _answer(llm: Llama, ask: Ask, gold: Sequence[int]) -> tuple[str, int, float, bool | None]:
    """Greedy text after what has been read, the steps it took and their time, and was its chunk on the device?"""
    if llm.kvflash is not None and llm.kvflash.spec is not None:
        return _verified(llm, ask, gold)
    ids: list[int] = []
    seconds = 0.0
    resident = _holds(llm, gold)
    reply = ""
    while len(ids) < MAX_NEW and not ask.is_settled(reply):
        ids.append(int(np.argmax(llm.newest_logits())))
        if vocabulary.is_end(vocabulary.of(llm.model), ids[-1]):
            break
        began = time.perf_counter()
        llm.eval(ids[-1:])
        wait(llm)
        seconds += time.perf_counter() - began
        if len(ids) == 1:  # what a prompt that was read exactly has found comes with this step
            resident = _holds(llm, gold)
        reply = llm.detokenize(ids).decode("utf-8", "replace")
    return reply, len(ids), seconds, resident


def _verified(llm: Llama, ask: Ask, gold: Sequence[int]) -> tuple[str, int, float, bool | None]:
    """The same where the whole text verifies what the pool drafts. The text ends with the answer then too."""
    ids, reply, began, resident = list[int](), "", time.perf_counter(), _holds(llm, gold)
    vocab = vocabulary.of(llm.model)
    with closing(llm.generate(llm.input_ids[: llm.n_tokens].tolist(), temp=0.0)) as drawn:
        for token in drawn:
            ids.append(token)
            reply = llm.detokenize(ids).decode("utf-8", "replace")
            if len(ids) == MAX_NEW or ask.is_settled(reply) or vocabulary.is_end(vocab, token):
                break
    seconds = time.perf_counter() - began
    if not vocabulary.is_end(vocab, ids[-1]):
        llm.eval(ids[-1:])  # it was drawn, and is not of the text yet
    return reply, len(ids), seconds, resident


def _holds(llm: Llama, chunks: Sequence[int]) -> bool | None:
    """Are all of them on the device? None without a pool, or chunks."""
    return set(chunks) <= set(llm.kvflash.resident_chunks) if llm.kvflash is not None and chunks else None


def _counters(llm: Llama) -> tuple[int, int, float]:
    """Page-ins, looks, and seconds spent scoring since the beginning."""
    session = session_of(llm)
    if session is None:
        return 0, 0, 0.0
    chooser = session.scoring
    return session.paging.page_ins, chooser.passes if chooser else 0, chooser.seconds if chooser else 0.0
