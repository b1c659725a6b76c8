"""Lossless answers: the pool really drafts and a streamed step verifies, but how often the pool is right is told.

What a model of random weights draws from a pool says nothing of what a real one draws. So the pool decodes here as it
always does, and is then told what it has drawn: the recorded text, with errors at the asked rate. Who drafts for the
pool is told the same, with errors of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml.arrays import Floats, Int32s, common_prefix
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.llama.speculating import HOPES, SERIAL
from kvflash_ggml.runtime.pool_drafter import Draw, PoolDrafter
from kvflash_ggml.sequence.step import EVERY
from kvflash_ggml.speculation.decision import WIDTHS, Controller, Controls, Fixed
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.guarded import GuardedDrafter
from kvflash_ggml.speculation.loop import Speculator

from . import report
from .greedy import compute_for, generate, random_prompt
from .inside import device_of, likeliest, paged, speculator_of, step, text_of, use_speculator
from .opening import opened
from .oracle import Oracle
from .plans import Spec

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One arm. "full": the full cache. "exact": a streamed step a token. "pool": what is resident alone. "lossless":
    drafts of a fixed length. "chosen": of the length that the controller chooses. source: where somebody drafts for the
    pool, how often that is what it draws; the controllers of both choose then.

    won: tokens a step. pool_steps, drafts: steps of the pool for one, and tokens drafted, on average. draft_ms,
    step_ms: of a step, to draft and to verify, or of a plain step. alone_ms: a streamed step of so many rows by itself,
    and the drafts at the pool's own speed; formula_tps: what those would win. of_formula, of_exact, of_full: tok/s
    against these. same_text: leading share of the recorded text that came out.
    """

    arm: str
    right: float | None
    source: float | None
    drafts: float
    pool_steps: float
    won: float
    draft_ms: float
    step_ms: float
    alone_ms: float | None
    tps: float
    formula_tps: float | None
    of_formula: float | None
    of_exact: float | None
    of_full: float | None
    same_text: float


class Source(Oracle):
    """Drafts what the pool is going to draw, as far as it is told to."""

    def hear(self, at: int, tokens: Int32s) -> None:
        """This is what comes at a position, as the pool has it."""
        self._text[at : at + len(tokens)] = tokens[: len(self._text) - at]


class Told(PoolDrafter):
    """Decodes on the pool, by itself or with drafts of a source, and draws what the oracle says."""

    def __init__(self, llm: Llama, oracle: Oracle, source: Source | None, nested: Speculator | None) -> None:
        super().__init__(text_of(llm), nested)
        self._oracle, self._source = oracle, source
        self._said: list[int] = []
        self._length = 0

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See `Drafter`."""
        self._oracle.observe(start, tokens, rows)
        self._length = start + len(tokens)

    def truncate(self, length: int) -> None:
        """See `Drafter`."""
        self._oracle.truncate(length)
        self._length = min(self._length, length)

    def propose(self, root: int, most: int) -> Draft | None:
        """See `Drafter`."""
        said = self._oracle.propose(root, most)
        if said is None:
            return None
        self._said = said.tokens.tolist()
        if self._source is not None:
            self._source.hear(self._length, np.append(np.int32(root), said.tokens))
        return super().propose(root, len(said))

    def _drawing(self, rows: int, drawn: list[int], copy: Any) -> Draw:
        super()._drawing(rows, drawn, None)  # which waits for the step
        at = len(drawn)
        return lambda row: self._said[at + row]


@dataclass(slots=True)
class _Arm:
    name: str
    drafts: int = 0
    right: float | None = None
    source: float | None = None
    tps: list[float] = field(default_factory=list)
    steps: int = 0
    won: int = 0
    drafted: int = 0
    pool_steps: int = 0
    draft_s: float = 0.0
    step_s: float = 0.0
    same: float = 1.0


COLUMNS = {
    "arm": "arm", "right": "right", "source": "source", "drafts": "drafts", "pool_steps": "pool steps", "won": "won",
    "draft_ms": "draft ms", "step_ms": "step ms", "alone_ms": "alone ms", "tps": "tok/s", "of_formula": "/formula",
    "of_exact": "/exact", "of_full": "/full", "same_text": "same text",
}  # fmt: skip


def run(model: str, plan: Spec, options: dict[str, Any]) -> None:
    points, device = measure(model, plan, options)
    rows = [asdict(point) for point in points]
    report.columns(COLUMNS, rows)
    report.told("spec", model, options | asdict(plan), device, points=rows)


def measure(model: str, plan: Spec, options: dict[str, Any]) -> tuple[list[Point], str]:
    """The points, and the device."""
    full_tps = _full(model, plan, options) if plan.full else None
    rows = max(plan.drafts) + 1
    fields = {"reading": "exact", "answer": "lossless", "spec": SpecConfig(width=rows)}
    n_ctx = plan.depths[0] + plan.tokens + 256
    with opened(model, n_ctx=n_ctx, options=options, pool=plan.pool, policy="lru", fields=fields) as llm:
        arms, alone = _measure(llm, plan)
        return list(_points(arms, alone, full_tps)), device_of(llm)


def _full(model: str, plan: Spec, options: dict[str, Any]) -> float:
    """Tokens a second of the full cache. It reads once: where it is recurrent, it could not go back."""
    n_ctx = plan.depths[0] + plan.tokens + 256
    with opened(model, n_ctx=n_ctx, options=options) as llm:
        return generate(llm, random_prompt(llm, plan.depths[0], plan.seed), plan.tokens)[1]


def _measure(llm: Llama, plan: Spec) -> tuple[list[_Arm], dict[int, float]]:
    """The arms, and seconds of streamed steps by their rows."""
    session, own = paged(llm), speculator_of(llm)
    exactly = session.reading
    prompt = random_prompt(llm, plan.depths[0], plan.seed)
    arms = [_Arm("exact"), _Arm("pool")]
    sources, most = (None, *plan.source), max(plan.drafts)
    pairs = [(right, count) for right in plan.right for count in plan.drafts]
    arms += [_Arm("lossless", count, right, source) for right, count in pairs for source in sources]
    arms += [_Arm("chosen", most, right, source) for right in plan.right for source in sources]
    try:
        use_speculator(llm, None)
        text, _ = generate(llm, prompt, plan.tokens)
        alone = {count + 1: _streamed(llm, text, count + 1, plan.repeats) for count in (0, *plan.drafts)}
        controllers = {id(arm): _controllers(arm, plan) for arm in arms}
        for repeat in range(plan.repeats):
            for arm in arms:
                session.reading = replace(exactly, answers_exactly=arm.name != "pool")
                _run_arm(llm, arm, controllers[id(arm)], prompt, text, replace(plan, seed=plan.seed + repeat))
    finally:
        session.reading, session.follower = exactly, own
        use_speculator(llm, own)
    return arms, alone


def _controllers(arm: _Arm, plan: Spec) -> tuple[Controls, Controls]:
    """What decides about drafts of the pool, and for it: kept from run to run, as a model keeps them."""
    if arm.name != "chosen":
        return Fixed(arm.drafts + 1), Fixed(min(plan.source_rows, arm.drafts + 1))
    widths = [width for width in WIDTHS if width <= arm.drafts + 1]
    return Controller(widths, serial=SERIAL, hopes=HOPES), Controller(widths)


def _streamed(llm: Llama, text: Int32s, rows: int, repeats: int) -> float:
    """Seconds of a step of so many rows that sees the whole text; the first one builds a graph, and does not count."""
    tokens, took = np.resize(text, rows), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        step(llm, tokens, EVERY, stream=True)
        likeliest(llm)
        took.append(time.perf_counter() - began)
    return float(np.median(took[1:]))


def _run_arm(
    llm: Llama, arm: _Arm, controls: tuple[Controls, Controls], prompt: list[int], text: Int32s, plan: Spec
) -> None:
    speculator = paged(llm).follower = _speculator(llm, arm, controls, prompt, text, plan)
    use_speculator(llm, speculator)
    got, tps = generate(llm, prompt, len(text))
    tally = speculator.last
    arm.tps.append(tps)
    arm.steps += tally.steps + tally.plain_steps
    arm.won += tally.steps + tally.plain_steps + tally.accepted + tally.lucky
    arm.drafted += tally.drafted
    on_pool = None if speculator.nested is None else speculator.nested.last
    arm.pool_steps += tally.drafted if on_pool is None else on_pool.steps + on_pool.plain_steps
    arm.draft_s += tally.seconds_draft
    arm.step_s += tally.seconds_verify + tally.seconds_plain
    arm.same = min(arm.same, common_prefix(got, text) / len(text))


def _speculator(
    llm: Llama, arm: _Arm, controls: tuple[Controls, Controls], prompt: list[int], text: Int32s, plan: Spec
) -> Speculator:
    """One whose pool is told what it draws; nobody drafts where nothing is to be right."""
    if arm.right is None:
        return Speculator([], controls[0], n_vocab=llm.n_vocab(), ends=())
    whole = np.concatenate([np.array(prompt, np.int32), text])
    settings: dict[str, Any] = {"n_vocab": llm.n_vocab(), "origin": len(prompt)}
    oracle, source, nested = Oracle(whole, [arm.right], seed=plan.seed, **settings), None, None
    if arm.source is not None:
        settings |= {"seconds": plan.draft_ms / 1e3, "sleep": compute_for}
        source = Source(whole.copy(), [arm.source], seed=plan.seed + 1, **settings)
        nested = Speculator([source], controls[1], n_vocab=llm.n_vocab(), ends=())
    told = GuardedDrafter(Told(llm, oracle, source, nested))
    asked = [] if nested is None else nested.active
    return Speculator([told, *asked], controls[0], n_vocab=llm.n_vocab(), ends=(), nested=nested)


def _points(arms: Sequence[_Arm], alone: dict[int, float], full_tps: float | None) -> Iterator[Point]:
    tps = {arm.name: float(np.median(arm.tps)) for arm in arms[:2]}
    pool_s = next(arm.step_s / arm.steps for arm in arms if arm.name == "pool")
    if full_tps is not None:
        yield Point(
            arm="full", right=None, source=None, drafts=0, pool_steps=0, won=1, draft_ms=0, step_ms=1e3 / full_tps,
            alone_ms=None, tps=full_tps, formula_tps=None, of_formula=None, of_exact=full_tps / tps["exact"],
            of_full=1, same_text=1,
        )  # fmt: skip
    for arm in arms:
        speed, won = float(np.median(arm.tps)), arm.won / arm.steps
        drafts = arm.drafted / arm.steps  # fewer where the recorded text ends
        known = None
        if arm.name in ("exact", "lossless") and arm.source is None:
            known = alone[arm.drafts + 1] + drafts * pool_s
        yield Point(
            arm=arm.name,
            right=arm.right,
            source=arm.source,
            drafts=drafts,
            pool_steps=arm.pool_steps / arm.steps,
            won=won,
            draft_ms=arm.draft_s / arm.steps * 1e3,
            step_ms=arm.step_s / arm.steps * 1e3,
            alone_ms=None if known is None else known * 1e3,
            tps=speed,
            formula_tps=None if known is None else won / known,
            of_formula=None if known is None else speed * known / won,
            of_exact=speed / tps["exact"],
            of_full=None if full_tps is None else speed / full_tps,
            same_text=arm.same,
        )
