"""How well a document that refers back to itself is read: the probability of what it repeats, token by token.

Nothing is generated. What counts is what was resident when those tokens were read, so this is the measure of
reselection while a prompt is read. The end of the document, which is read twice, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from . import report
from .asks import Setting
from .opening import opened, reads_exactly
from .outcomes import Arm, Plan, arms
from .plans_texts import Reading as Asked
from .references import refer

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One document. nats: mean loss of the tokens that refer back. right: share of them that would be chosen."""

    task: str
    label: str
    seed: int
    tokens: int
    nats: float
    right: float
    page_ins: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document in tokens, and those of them, [first, end), that refer back. label: its row of results."""

    ids: list[int]
    label: str
    spans: list[tuple[int, int]]


Documents = dict[tuple[int, str, int], list[Document]]
"""Those of a model's tokenizer by context, kind and seed."""


def run(model: str, plan: Asked, options: dict[str, Any]) -> None:
    trials = Plan(tasks=plan.tasks, depths=(), trials=plan.trials, seed=plan.seed)
    rows: list[dict[str, Any]] = []
    documents: Documents = {}
    filler = plan.filler()
    for arm in arms(plan.contexts, plan.residency, plan.policies, full=plan.full):
        once = arm.policy in ("full", "lru") or reads_exactly(arm.policy)
        for reselect in (False,) if once else (True, False):
            readings = list(run_arm(model, arm, trials, filler, options, documents, reselect=reselect))
            made = summary(arm, readings, reselect=reselect)
            nats = ", ".join(f"{row['task']} {row['label']} {row['nats']:.3f}" for row in made)
            rows += made
            click.echo(f"{arm.policy} pool {arm.pool} of {arm.context}, reselect {reselect}: {nats}", err=True)
    report.rows(rows)
    report.told("reading", model, options | asdict(plan), "", rows=rows)


def run_arm(
    model: str, arm: Arm, plan: Plan, text: str, options: dict[str, Any], documents: Documents, *, reselect: bool
) -> Iterator[Reading]:
    """Every trial of every kind on one arm. reselect: also while the document is read, and not at its end only.

    documents: what earlier arms have read, and what this one adds: making one takes longer than a GPU needs to read it.
    """
    settings: dict[str, Any] = {"pool": arm.pool, "policy": arm.policy, "fields": {"reselect_prefill": reselect}}
    with opened(model, n_ctx=arm.context + 1, options=options, logits_all=True, **settings) as llm:

        def tokenize(words: str) -> list[int]:
            return list(llm.tokenize(words.encode(), add_bos=False, special=False))

        setting = Setting(text, tokenize, arm.context, ())
        for task in plan.tasks:
            for seed in range(plan.seed, plan.seed + plan.trials):
                key = (arm.context, task, seed)
                if key not in documents:
                    documents[key] = list(_documents(llm, task, setting, seed))
                for document in documents[key]:
                    seconds, page_ins = _read(llm, document.ids)
                    losses, right = losses_at(llm.scores, document.ids, document.spans)
                    yield Reading(
                        task=task, label=document.label, seed=seed, tokens=len(losses), nats=float(losses.mean()),
                        right=float(right.mean()), page_ins=page_ins, seconds=seconds,
                    )  # fmt: skip


def _documents(llm: Llama, task: str, setting: Setting, seed: int) -> Iterator[Document]:
    """One trial of a kind, in tokens: the first may be a bos."""
    for reference in refer(task, setting, seed=seed):
        ids = list(llm.tokenize(reference.document.encode(), special=False))
        shift = len(ids) - len(setting.tokenize(reference.document))
        yield Document(ids=ids, label=reference.label, spans=[(lo + shift, hi + shift) for lo, hi in reference.spans])


def _read(llm: Llama, ids: list[int]) -> tuple[float, int]:
    """Seconds it took, and pages that came back."""
    llm.reset()
    before = llm.kvflash.page_ins if llm.kvflash else 0
    began = time.perf_counter()
    llm.eval(ids)
    return time.perf_counter() - began, (llm.kvflash.page_ins if llm.kvflash else 0) - before


def losses_at(
    logits: npt.NDArray[np.float32], ids: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Loss of each token in the spans in nats, and whether it is the likeliest. Row i of the logits follows token i."""
    at = np.concatenate([np.arange(lo, hi) for lo, hi in spans])
    rows = logits[at - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    token = np.asarray(ids)[at]
    chosen = rows[np.arange(len(at)), token]
    return np.log(np.exp(rows).sum(axis=1)) - chosen, rows.argmax(axis=1) == token


def summary(arm: Arm, readings: Sequence[Reading], *, reselect: bool) -> list[dict[str, Any]]:
    """One row per kind and label: means over documents, and the standard error of the loss."""
    rows = []
    for task, label in dict.fromkeys((r.task, r.label) for r in readings):
        some = [r for r in readings if (r.task, r.label) == (task, label)]
        nats = np.array([r.nats for r in some])
        rows.append(
            {
                "context": arm.context,
                "policy": arm.policy,
                "pool": arm.pool,
                "reselect": reselect,
                "task": task,
                "label": label,
                "trials": len(some),
                "nats": float(nats.mean()),
                "error": float(nats.std(ddof=1) / len(nats) ** 0.5) if len(nats) > 1 else 0.0,
                "right": float(np.mean([r.right for r in some])),
                "page_ins": float(np.mean([r.page_ins for r in some])),
                "prefill_tps": arm.context * len(some) / sum(r.seconds for r in some),
            }
        )
    return rows
