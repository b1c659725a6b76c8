"""Which score finds the chunk that holds the answer: every policy on the same queries and keys.

Documents are read under plain recency. At the end of each question the queries of its last tokens and all keys are at
hand; every scorer then ranks the same chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from kvflash_ggml.arrays import Floats
from kvflash_ggml.calibration.known import of_llama
from kvflash_ggml.calibration.run import calibrate
from kvflash_ggml.llama.llama import Llama
from kvflash_ggml.policy.base import REGISTRY, Keys, KeyShape, Pairs, Scorer, ScoreRequest
from kvflash_ggml.policy.heads import every_head, newest
from kvflash_ggml.policy.qk import QKScorer
from kvflash_ggml.runtime.model import weights_of
from kvflash_ggml.state.statistics import Row

from . import (
    policies,  # noqa: F401 (registers)
    report,
)
from .asks import Ask, Case
from .inside import session_of
from .outcomes import Plan, arms
from .plans_texts import Scores
from .recall import TAIL_ROOM, cases, gold_chunks, prompt_tokens, shift_of, tail_tokens

ROWS = 64
"""Newest queries that are captured."""

SHARES = (0.01, 0.02, 0.04, 0.08)
"""Of the chunks, in which the answer's are looked for."""

BY_KEYS = ("qk", "qk-mean", "quest", "meanstd", "oracle")
"""Policies that need nothing but queries and keys."""


class Capture:
    """A policy that changes nothing and remembers the last look."""

    name = "capture"
    index_bytes = 0

    def __init__(self, rows: int = ROWS) -> None:
        self.query_rows = rows
        self.request: ScoreRequest | None = None
        self.keys: Keys | None = None

    def open(self, keys: Keys, n_chunks: int) -> None:
        self.keys = keys

    def seal(self, chunk: int) -> None: ...

    def truncate(self, n_chunks: int) -> None: ...

    def score(self, request: ScoreRequest) -> Floats | None:
        self.request = request
        return None

    def close(self) -> None: ...


class Columns:
    """The keys of one text, with what all scorers ask for computed once. Implements `policy.base.Keys`.

    request: with the most rows that any scorer asks for.
    """

    def __init__(self, keys: Keys, request: ScoreRequest) -> None:
        self.shapes: Sequence[KeyShape] = keys.shapes
        self._keys = keys
        self._request = request
        self._all = every_head(keys.shapes)
        self._exact: Floats | None = None
        self._read: dict[int, list[Floats]] = {}

    def read(self, chunk: int) -> list[Floats]:
        if chunk not in self._read:
            self._read[chunk] = self._keys.read(chunk)
        return self._read[chunk]

    def read_head(self, chunk: int, layer: int, head: int) -> Floats:
        keys: Floats = self.read(chunk)[layer][:, head]
        return keys

    def index_size(self, units: Pairs) -> int:
        return self._keys.index_size(units)

    def index(self, chunk: int, units: Pairs) -> Row:
        return self._keys.index(chunk, units)

    def score_index(self, units: Pairs, rows: Sequence[Row], heads: Pairs, request: ScoreRequest) -> Floats:
        return self._keys.score_index(units, rows, heads, request)

    def score_keys(self, chunks: Sequence[int], request: ScoreRequest, heads: Pairs | None = None) -> Floats:
        if self._exact is None:
            self._exact = self._keys.score_keys(range(self._request.n_chunks), self._request)
        columns = self._exact.reshape(len(self._all), self._request.rows, -1)
        if heads is not None:
            places = {tuple(head): i for i, head in enumerate(self._all.tolist())}
            columns = columns[[places[tuple(head)] for head in heads.tolist()]]
        columns = columns[:, self._request.rows - request.rows :]
        return columns.reshape(-1, columns.shape[2])[:, list(chunks)]


def variants(heads: Pairs | None) -> dict[str, Callable[[], Scorer]]:
    """Every registered policy, and the default one with each of its settings changed. heads: None asks all."""

    def qk(**settings: Any) -> Callable[[], Scorer]:
        return lambda: QKScorer(**({"heads": heads, "exact_work": 0.0} | settings))

    out: dict[str, Callable[[], Scorer]] = {name: REGISTRY[name] for name in BY_KEYS}
    out["qk, retrieval heads"] = qk()
    out["qk, all heads"] = qk(heads=None)
    out["qk, real keys only"] = qk(exact_work=math.inf)
    out["qk, index only"] = qk(share=0.0, least=0)
    out["qk without successors"] = qk(successors=False)
    for rows in (1, 4, 8, 16, 32, 64):
        out[f"qk, rows {rows}"] = qk(query_rows=rows)
    for age in (0.0, 0.05, 0.1):
        out[f"qk, age {age:g}"] = qk(age=age)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where one variant put the answer of one question.

    rank: of the first gold chunk among those that are not kept anyway, 0 the best; last: of the last gold chunk.
    """

    variant: str
    task: str
    label: str
    seed: int
    rank: int
    last: int
    n_chunks: int


def run(model: str, plan: Scores, options: dict[str, Any]) -> None:
    trials = Plan(tasks=plan.tasks, depths=plan.depths, trials=plan.trials, seed=plan.seed, fact_set=plan.fact_set)
    rows: list[dict[str, Any]] = []
    filler = plan.filler()
    for arm in arms(plan.contexts, (plan.residency,), ("lru",), full=False):
        assert arm.pool is not None
        ranks = []
        for some in study(model, context=arm.context, pool=arm.pool, plan=trials, text=filler, options=options):
            ranks += some
            if some:
                click.echo(f"{some[0].task} {some[0].label} of {arm.context}: seed {some[0].seed}", err=True)
        rows += [{"context": arm.context} | row for row in summary(ranks)]
    report.rows(rows)
    report.told("scores", model, options | asdict(plan), "", residency=plan.residency, rows=rows)


def study(
    model: str, *, context: int, pool: int, plan: Plan, text: str, options: dict[str, Any],
    made: dict[str, Callable[[], Scorer]] | None = None,
) -> Iterator[list[Rank]]:  # fmt: skip
    """The ranks of every variant, question by question."""
    capture = Capture()
    llm = Llama(
        model,
        n_ctx=context + TAIL_ROOM,
        kvflash=pool,
        kvflash_policy=capture,
        kvflash_reading="pool",
        flash_attn=True,
        verbose=False,
        **{name: value for name, value in options.items() if name != "heads"},
    )
    try:
        made = variants(_heads(llm)) if made is None else made
        for task, seed, case in cases(llm, plan, text, n_tokens=context):
            for ask in _asked(llm, case):
                assert capture.request is not None
                assert capture.keys is not None
                shift = shift_of(llm, case)
                yield list(_ranks(capture.keys, capture.request, made, ask=ask, shift=shift, task=task, seed=seed))
    finally:
        llm.close()


def _heads(llm: Llama) -> Pairs | None:
    """The retrieval heads of the model, found now."""
    session = session_of(llm)
    assert session is not None
    found = calibrate(weights_of(llm), model_id=of_llama(llm), settings=llm.context_params)
    return found.among([layer.il for layer in session.engine.layers])


def _asked(llm: Llama, case: Case) -> Iterator[Ask]:
    """Each question that has a place in the text, once it has been read."""
    llm.reset()
    llm.eval(prompt_tokens(llm, case))
    state = llm.save_state()
    for ask in case.asks:
        if ask.gold:
            llm.load_state(state)
            llm.eval(tail_tokens(llm, case, ask))
            yield ask


def _ranks(
    keys: Keys,
    request: ScoreRequest,
    made: dict[str, Callable[[], Scorer]],
    *,
    ask: Ask,
    shift: int,
    task: str,
    seed: int,
) -> Iterator[Rank]:
    columns = Columns(keys, request)
    gold = [c for c in gold_chunks(ask, shift) if c not in request.protected and c < request.n_chunks]
    if not gold:
        return
    free = np.array([c for c in range(request.n_chunks) if c not in request.protected])
    for variant, factory in made.items():
        scorer = factory()
        scorer.open(columns, request.n_chunks)
        for chunk in range(request.n_chunks):
            scorer.seal(chunk)
        scores = scorer.score(newest(request, scorer.query_rows, keys.shapes))
        scorer.close()
        assert scores is not None
        order = free[np.argsort(-scores[free], kind="stable")].tolist()
        ranks = [order.index(c) for c in gold]
        yield Rank(
            variant=variant, task=task, label=ask.label, seed=seed, rank=min(ranks), last=max(ranks),
            n_chunks=request.n_chunks,
        )  # fmt: skip


def summary(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Per task and variant: how often the answer is among the best so many chunks."""
    out = []
    for task, variant in dict.fromkeys((r.task, r.variant) for r in ranks):
        some = [r for r in ranks if (r.task, r.variant) == (task, variant)]
        row: dict[str, Any] = {"task": task, "variant": variant, "trials": len(some)}
        for share in SHARES:
            row[f"top {share:.0%}"] = sum(r.rank < max(1, round(share * r.n_chunks)) for r in some) / len(some)
        first = np.array([r.rank for r in some])
        row |= {
            "top 1": float((first == 0).mean()),
            "all in 2": float((np.array([r.last for r in some]) < 2).mean()),
            "mean rank": float(first.mean()),
            "worst": int(first.max()),
            "worst of all": max(r.last for r in some),
        }
        out.append(row)
    return out
