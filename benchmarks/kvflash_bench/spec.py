"""What verifying drafts takes and wins, with a drafter that is as good as it is told to be.

A plain run records a greedy continuation; the oracle drafts it, wrong as often as it has to be. Everything else is
real, and what comes out is the recorded text, which is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml.arrays import Int32s, common_prefix
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.speculation.decision import Fixed
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.loop import Speculator

from . import lossless, report
from .greedy import compute_for, generate, random_prompt
from .inside import device_of, speculator_of, use_speculator
from .opening import opened
from .oracle import Oracle, rates_of
from .plans import Spec

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One width and one acceptance at one depth; width 1 is plain decoding.

    won: tokens a step. step_ms, p95_ms: of steps that verify, drafts not included. switch_ms: what the first of them
    takes longer. tps: tokens a second; speedup: against plain decoding of the same process; of_formula: against
    won / (step + draft). break_even: tokens a step has to win. same_text: leading share of the recorded text that came
    out.
    """

    depth: int
    width: int
    accept: float
    won: float
    step_ms: float
    p95_ms: float
    switch_ms: float
    tps: float
    speedup: float
    of_formula: float
    break_even: float
    same_text: float


class Timed(Fixed):
    """Keeps how long steps take, plain ones where it has one row. won: tokens of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seconds: list[float] = []
        self.won = 0

    def record(
        self, rows: int, seconds: float, draft: Draft | None = None, path: Sequence[int] = (), *,
        stopped: bool = False, beside: int = 0,
    ) -> None:  # fmt: skip
        """See `Controls`."""
        if rows == self._rows:
            self.seconds.append(seconds)
            self.won += 1 + len(path)


@dataclass(slots=True)
class _Arm:
    """Runs of one width and acceptance at one depth."""

    depth: int
    width: int
    accept: float
    watches: list[Timed]
    tps: list[float]
    same: float = 1.0


COLUMNS = {
    "depth": "tokens", "width": "rows", "accept": "asked", "won": "won", "step_ms": "step ms", "p95_ms": "p95 ms",
    "switch_ms": "switch ms", "tps": "tok/s", "speedup": "speed-up", "of_formula": "/formula",
    "break_even": "break-even", "same_text": "same text",
}  # fmt: skip


def run(model: str, plan: Spec, options: dict[str, Any]) -> None:
    if plan.drafts:
        lossless.run(model, plan, options)
        return
    points, bare_tps, device = measure(model, plan, options)
    rows = rows_of(points, bare_tps)
    report.columns(COLUMNS, rows)
    report.told("spec", model, options | asdict(plan), device, bare_tps=bare_tps, points=rows)


def measure(model: str, plan: Spec, options: dict[str, Any]) -> tuple[list[Point], float | None, str]:
    """The points, plain decoding's tokens a second in a context without room for drafts, and the device."""
    bare = _bare(model, plan, options) if plan.bare else None
    with _opened(model, plan, options, SpecConfig(width=max(2, *plan.widths))) as llm:
        device = device_of(llm)
        points = [point for depth in plan.depths for point in _measure(llm, random_prompt(llm, depth, plan.seed), plan)]
        return points, bare, device


def _bare(model: str, plan: Spec, options: dict[str, Any]) -> float:
    with _opened(model, plan, options, None) as llm:
        prompt = random_prompt(llm, plan.depths[0], plan.seed)
        generate(llm, prompt, plan.tokens)  # which builds the graphs
        return float(np.median([generate(llm, prompt, plan.tokens)[1] for _ in range(plan.repeats)]))


def _opened(model: str, plan: Spec, options: dict[str, Any], spec: SpecConfig | None) -> Any:
    fields = {"spec": spec}
    n_ctx = max(plan.depths) + plan.tokens + 256
    return opened(model, n_ctx=n_ctx, options=options, pool=plan.pool, policy="lru", fields=fields)


def _measure(llm: Llama, prompt: list[int], plan: Spec) -> list[Point]:
    own = speculator_of(llm)
    try:
        use_speculator(llm, None)
        text, _ = generate(llm, prompt, plan.tokens)
        pairs = [(width, accept) for width in plan.widths if width > 1 for accept in plan.accept if accept <= width]
        arms = [_Arm(len(prompt), width, accept, [], []) for width, accept in [(1, 1.0), *pairs]]
        for repeat in range(plan.repeats):
            for arm in arms:
                _run_arm(llm, arm, prompt, text, plan, repeat)
    finally:
        use_speculator(llm, own)
    return list(_points(arms, plan))


def _run_arm(llm: Llama, arm: _Arm, prompt: list[int], text: Int32s, plan: Spec, repeat: int) -> None:
    watch = Timed(arm.width)
    oracle = Oracle(
        np.concatenate([np.array(prompt, np.int32), text]),
        [rates_of(arm.accept, arm.width - 1)],
        n_vocab=llm.n_vocab(),
        seed=plan.seed + repeat,
        origin=len(prompt),
        seconds=plan.draft_ms / 1e3,
        sleep=compute_for,
    )
    drafters = [oracle] if arm.width > 1 else []
    use_speculator(llm, Speculator(drafters, watch, n_vocab=llm.n_vocab(), ends=()))
    got, tps = generate(llm, prompt, plan.tokens)
    arm.watches.append(watch)
    arm.tps.append(tps)
    arm.same = min(arm.same, common_prefix(got, text) / len(text))


def _points(arms: Sequence[_Arm], plan: Spec) -> Iterator[Point]:
    plain = arms[0]
    plain_s = float(np.median(np.concatenate([watch.seconds[1:] for watch in plain.watches])))
    plain_tps = float(np.median(plain.tps))
    for arm in arms:
        took = [watch.seconds for watch in arm.watches]
        steady = np.concatenate([seconds[1:] for seconds in took])
        if not len(steady):
            continue
        step, first = float(np.median(steady)), [seconds[0] for seconds in took if seconds]
        steps = sum(len(seconds) for seconds in took)
        drafting = plan.draft_ms / 1e3 if arm.width > 1 else 0.0
        won, tps = sum(watch.won for watch in arm.watches) / steps, float(np.median(arm.tps))
        yield Point(
            depth=arm.depth,
            width=arm.width,
            accept=arm.accept,
            won=won,
            step_ms=step * 1e3,
            p95_ms=float(np.percentile(steady, 95)) * 1e3,
            switch_ms=max(0.0, float(np.median(first)) - step) * 1e3,
            tps=tps,
            speedup=tps / plain_tps,
            of_formula=tps * (step + drafting) / won,
            break_even=(step + drafting) / plain_s,
            same_text=arm.same,
        )


def rows_of(points: Sequence[Point], bare: float | None) -> list[dict[str, Any]]:
    """The points as they are printed; with_room: plain decoding with room for drafts, against without."""
    rows = [asdict(point) for point in points]
    if bare is not None:
        rows[0]["with_room"] = points[0].tps / bare
    return rows
