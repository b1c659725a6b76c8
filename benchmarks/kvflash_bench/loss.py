"""What a pool costs on plain text: the loss of the tokens that follow it, one by one, against the full cache.

Nothing is looked up and nothing is generated: every arm is given the same tokens. The text before them is read as any
prompt is, so through the pool where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from kvflash_ggml.policy.heads import log_shares

from . import report
from .opening import opened
from .outcomes import Arm, arms
from .plans_texts import Loss
from .reading import losses_at
from .tasks import SPREAD, compose

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """One document, arrays of shape [tokens]. losses: in nats. likeliest: the tokens that would have been chosen.

    divergence: mean KL divergence from the full cache, in nats. logs: log-probabilities, [tokens, n_vocab], of the full
    cache; None for other arms, which need none.
    """

    losses: npt.NDArray[np.float64]
    likeliest: npt.NDArray[np.intp]
    page_ins: int
    divergence: float = 0.0
    logs: npt.NDArray[np.float32] | None = None


def run(model: str, plan: Loss, options: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    full: list[Forced] = []
    filler = plan.filler()
    for arm in arms(plan.contexts, (), plan.policies, pools=plan.pools):
        forced = list(run_arm(model, arm, plan, filler, options, full))
        if arm.policy == "full":
            full = forced
        rows.append(summary(arm, forced, full))
        click.echo(f"{arm.policy} pool {arm.pool} of {arm.context}: {rows[-1]['nats']:.4f} nats", err=True)
    report.rows(rows)
    report.told("loss", model, options | asdict(plan), "", rows=rows)


def run_arm(
    model: str, arm: Arm, plan: Loss, text: str, options: dict[str, Any], full: Sequence[Forced]
) -> Iterator[Forced]:
    """Every document on one arm. full: the same documents with the full cache; none yet on its own arm."""
    # a document may get a bos token
    n_ctx = arm.context + plan.tokens + 1
    with opened(model, n_ctx=n_ctx, options=options, pool=arm.pool, policy=arm.policy) as llm:

        def tokenize(words: str) -> list[int]:
            return list(llm.tokenize(words.encode(), add_bos=False, special=False))

        for i, seed in enumerate(range(plan.seed, plan.seed + plan.documents)):
            document = compose(text, tokenize, lines=[], n_tokens=arm.context + plan.tokens, start=seed * SPREAD % 1)
            known = full[i].logs if full else None
            yield _force(llm, list(llm.tokenize(document.encode(), special=False)), plan.tokens, known)


def _force(llm: Llama, ids: list[int], count: int, known: npt.NDArray[np.float32] | None) -> Forced:
    """Read all but the last `count` tokens, and then give those one by one. known: `logs` of the full cache."""
    llm.reset()
    before = llm.kvflash.page_ins if llm.kvflash else 0
    llm.eval(ids[:-count])
    rows = np.empty((count, llm.n_vocab()), np.float32)
    for row, token in zip(rows, ids[-count:], strict=True):
        row[:] = llm.newest_logits()
        llm.eval([token])
    losses, _ = losses_at(rows, ids[-count - 1 :], [(1, count + 1)])
    page_ins = (llm.kvflash.page_ins if llm.kvflash else 0) - before
    logs = log_shares(rows)
    one = Forced(losses=losses, likeliest=rows.argmax(axis=1), page_ins=page_ins)
    return replace(one, logs=logs) if known is None else replace(one, divergence=divergence(known, logs))


def divergence(full: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return the mean KL divergence of some log-probabilities [tokens, n_vocab] from those of the full cache."""
    return float((np.exp(full) * (full - other)).sum(axis=1).mean())


def summary(arm: Arm, forced: Sequence[Forced], full: Sequence[Forced]) -> dict[str, Any]:
    """One row: means over the documents. full: the same documents with the full cache.

    `more`: nats beyond those of the full cache; `error`: the standard error of that. `agree`: share of the places where
    the likeliest token is that of the full cache. `KL`: mean divergence from the full cache, in nats.
    """
    nats = np.array([one.losses.mean() for one in forced])
    more = nats - [one.losses.mean() for one in full]
    agree = [(one.likeliest == other.likeliest).mean() for one, other in zip(forced, full, strict=True)]
    return {
        "context": arm.context,
        "policy": arm.policy,
        "pool": arm.pool,
        "documents": len(forced),
        "nats": float(nats.mean()),
        "more": float(more.mean()),
        "error": float(more.std(ddof=1) / len(more) ** 0.5) if len(more) > 1 else 0.0,
        "agree": float(np.mean(agree)),
        "KL": float(np.mean([one.divergence for one in forced])),
        "page_ins": float(np.mean([one.page_ins for one in forced])),
        "note": arm.note,
    }
