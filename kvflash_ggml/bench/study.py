"""Which score finds the chunk that holds the answer: every policy on the same queries and keys.

Documents are read under plain recency. At the end of each question the queries of its last tokens and all keys are at
hand; every scorer then ranks the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..llama import Llama
from ..policy.base import REGISTRY, Floats, Keys, KeyShape, Look, Scorer
from ..policy.qk import QKScorer
from ..policy.statistics import split
from .asks import Ask, Case
from .outcomes import Plan
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
        self.look: Look | None = None
        self.keys: Keys | None = None

    def open(self, keys: Keys, n_chunks: int) -> None:
        self.keys = keys

    def seal(self, chunk: int) -> None: ...

    def cut(self, n_chunks: int) -> None: ...

    def score(self, look: Look) -> Floats | None:
        self.look = look
        return None

    def close(self) -> None: ...


class Columns:
    """The keys of one text, each thing computed once for all scorers. Implements `policy.base.Keys`.

    look: with the most rows that any scorer asks for.
    """

    def __init__(self, keys: Keys, look: Look) -> None:
        self.shapes: Sequence[KeyShape] = keys.shapes
        self._keys = keys
        self._look = look
        self._bounds: dict[int, npt.NDArray[np.uint8]] = {}
        self._coarse: dict[int, Floats] = {}
        self._exact: Floats | None = None
        self._read: dict[int, list[Floats]] = {}

    def read(self, chunk: int) -> list[Floats]:
        if chunk not in self._read:
            self._read[chunk] = self._keys.read(chunk)
        return self._read[chunk]

    def read_layer(self, chunk: int, layer: int) -> Floats:
        return self.read(chunk)[layer]

    def bounds_size(self, group: int) -> int:
        return self._keys.bounds_size(group)

    def bounds(self, chunk: int, group: int, out: npt.NDArray[np.uint8]) -> None:
        if group not in self._bounds:
            index = np.empty((self._look.n_chunks, self.bounds_size(group)), np.uint8)
            for c, row in enumerate(index):
                self._keys.bounds(c, group, row)
            self._bounds[group] = index
        out[:] = self._bounds[group][chunk]

    def score_bounds(self, group: int, bounds: npt.NDArray[np.uint8], look: Look) -> Floats:
        if group not in self._coarse:
            self._coarse[group] = self._keys.score_bounds(group, self._bounds[group], self._look)
        return self._newest(self._coarse[group], look.rows)[:, : len(bounds)]

    def score_keys(self, chunks: Sequence[int], look: Look) -> Floats:
        if self._exact is None:
            self._exact = self._keys.score_keys(range(self._look.n_chunks), self._look)
        return self._newest(self._exact, look.rows)[:, list(chunks)]

    def _newest(self, columns: Floats, rows: int) -> Floats:
        """Those of the newest rows."""
        parts, at = [], 0
        for shape in self.shapes:
            size = self._look.rows * shape.n_head
            parts.append(columns[at + size - rows * shape.n_head : at + size])
            at += size
        return np.concatenate(parts)


def newest(look: Look, rows: int, shapes: Sequence[KeyShape]) -> Look:
    """The look with its newest rows only."""
    rows = min(rows, look.rows)
    queries = np.concatenate([part[-rows:].reshape(-1) for part in split(look, shapes)])
    return Look(tokens=look.tokens, n_chunks=look.n_chunks, rows=rows, queries=queries, kept=look.kept)


def variants() -> dict[str, Callable[[], Scorer]]:
    """Every registered policy, and the default one with each of its settings changed."""

    def qk(**settings: Any) -> Callable[[], Scorer]:
        return lambda: QKScorer(**settings)

    out: dict[str, Callable[[], Scorer]] = {name: REGISTRY[name] for name in BY_KEYS}
    out["qk without followers"] = qk(followers=False)
    for group in (8, 16, 32, 64):
        out[f"bounds only, group {group}"] = qk(group=group, shortlist=0.0, least=0)
        out[f"qk group {group}"] = qk(group=group)
    for least in (8, 16, 32, 64):
        out[f"qk shortlist {least}"] = qk(shortlist=0.0, least=least)
    for rows in (1, 4, 8, 16, 32, 64):
        for combine in ("softmax", "z"):
            out[f"qk {combine}, rows {rows}"] = qk(combine=combine, query_rows=rows)
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


def study(
    model: str, *, context: int, pool: int, plan: Plan, text: str, options: dict[str, Any],
    made: dict[str, Callable[[], Scorer]] | None = None,
) -> Iterator[list[Rank]]:  # fmt: skip
    """The ranks of every variant, question by question."""
    made = variants() if made is None else made
    capture = Capture()
    llm = Llama(
        model,
        n_ctx=context + TAIL_ROOM,
        kvflash=pool,
        kvflash_policy=capture,
        flash_attn=True,
        verbose=False,
        **options,
    )
    try:
        for task, seed, case in cases(llm, plan, text, n_tokens=context):
            for ask in _asked(llm, case):
                assert capture.look is not None
                assert capture.keys is not None
                shift = shift_of(llm, case)
                yield list(_ranks(capture.keys, capture.look, made, ask=ask, shift=shift, task=task, seed=seed))
    finally:
        llm.close()


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
    keys: Keys, look: Look, made: dict[str, Callable[[], Scorer]], *, ask: Ask, shift: int, task: str, seed: int
) -> Iterator[Rank]:
    columns = Columns(keys, look)
    gold = [c for c in gold_chunks(ask, shift) if c not in look.kept and c < look.n_chunks]
    if not gold:
        return
    free = np.array([c for c in range(look.n_chunks) if c not in look.kept])
    for variant, factory in made.items():
        scorer = factory()
        scorer.open(columns, look.n_chunks)
        for chunk in range(look.n_chunks):
            scorer.seal(chunk)
        scores = scorer.score(newest(look, scorer.query_rows, keys.shapes))
        scorer.close()
        assert scores is not None
        order = free[np.argsort(-scores[free], kind="stable")].tolist()
        ranks = [order.index(c) for c in gold]
        yield Rank(
            variant=variant, task=task, label=ask.label, seed=seed, rank=min(ranks), last=max(ranks),
            n_chunks=look.n_chunks,
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
