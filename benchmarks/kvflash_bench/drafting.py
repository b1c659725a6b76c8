"""What real drafters win on real text, and what they cost where they win nothing, with the controller deciding.

Each arm is a model of its own in one process: without drafts, and with one drafter each. They answer the same prompt in
turns, and what comes out is compared with what comes out without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml.arrays import Int32s, common_prefix
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.speculation.decision import Fixed

from . import report
from .greedy import generate, random_prompt
from .inside import device_of, speculator_of
from .opening import opened
from .plans import Drafters

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

PLAIN = "plain"
WRONG = "wrong"
"""A drafter that is never right."""

TREE = ":tree"
"""Ends the name of a drafter that proposes trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One arm. tps: tokens a second, the median; first_tps: of the first answer, in which costs are found out.

    of_plain: the median of each answer against the plain one of the same turn. drafted, accepted, won: tokens that were
    verified in all answers, those that were accepted, and what a step that verified won. idle: why the last step
    verified nothing. same_text: leading share of the plain text that came out.
    """

    drafter: str
    tps: float
    first_tps: float
    of_plain: float
    drafted: int
    accepted: int
    won: float | None
    idle: str | None
    same_text: float


@dataclass(slots=True)
class _Arm:
    name: str
    llm: Llama
    tps: list[float] = field(default_factory=list)
    same: float = 1.0


COLUMNS = {
    "drafter": "drafter", "tps": "tok/s", "first_tps": "first", "of_plain": "/plain", "drafted": "drafted",
    "accepted": "accepted", "won": "won", "same_text": "same text", "idle": "idle",
}  # fmt: skip


def run(model: str, plan: Drafters, options: dict[str, Any]) -> None:
    outcomes, device = measure(model, plan, plan.filler(), options)
    rows = [asdict(outcome) for outcome in outcomes]
    report.columns(COLUMNS, rows)
    report.told("drafters", model, options | asdict(plan), device, outcomes=rows)


def measure(model: str, plan: Drafters, text: str, options: dict[str, Any]) -> tuple[list[Outcome], str]:
    """What came of each arm, and the device."""
    with ExitStack() as stack:
        arms = [_Arm(name, stack.enter_context(_opened(model, plan, name, options))) for name in (PLAIN, *plan.types)]
        prompt = _prompt(arms[0].llm, text, plan)
        for _ in range(plan.repeats + 1):
            _turn(arms, prompt, plan)
        return [_outcome(arm, arms[0]) for arm in arms], device_of(arms[0].llm)


def _opened(model: str, plan: Drafters, name: str, options: dict[str, Any]) -> Any:
    drafts = None if name in (PLAIN, WRONG) else SpecConfig.read(name.removesuffix(TREE))
    fields = {"spec": drafts and replace(drafts, tree=name.endswith(TREE), width=plan.width)}
    # what drafts is given later; to be given something is what makes room
    keywords = {"draft_model": _nothing} if name == WRONG else {}
    n_ctx = plan.depth + plan.tokens + 256
    return opened(model, n_ctx=n_ctx, options=options, pool=plan.pool, policy="lru", fields=fields, **keywords)


def _nothing(text: Int32s) -> Int32s:
    return text[:0]


def _prompt(llm: Llama, text: str, plan: Drafters) -> list[int]:
    try:
        ids = llm.tokenize(text.encode(), special=False)
    except ConfigError:  # a model of random weights has no vocabulary
        ids = random_prompt(llm, plan.depth, 0)
    piece = ids[: plan.passage] if plan.passage else ids
    return (piece * -(-plan.depth // len(piece)))[: plan.depth]


def _turn(arms: Sequence[_Arm], prompt: list[int], plan: Drafters) -> None:
    plain: Int32s | None = None
    for arm in arms:
        if arm.name == WRONG and plain is not None and not arm.tps:
            arm.llm.draft_model = _wrong([*prompt, *plain.tolist()], arm.llm.n_vocab())
            speculator = speculator_of(arm.llm)
            if speculator is not None and plan.width is not None:
                speculator.controls = Fixed(plan.width)
        got, tps = generate(arm.llm, prompt, plan.tokens)
        arm.tps.append(tps)
        plain = got if plain is None else plain
        arm.same = min(arm.same, common_prefix(got, plain) / len(plain))


def _wrong(text: list[int], n_vocab: int) -> Callable[[Int32s], Int32s]:
    """Drafts eight tokens that are none of those that come."""
    known = np.array(text, np.int32)
    return lambda so_far: (known[len(so_far) : len(so_far) + 8] + 1) % n_vocab


def _outcome(arm: _Arm, plain: _Arm) -> Outcome:
    pool = arm.llm.kvflash
    spec = None if pool is None else pool.spec
    total = None if spec is None else spec.total
    return Outcome(
        drafter=arm.name,
        tps=float(np.median(arm.tps[1:])),
        first_tps=arm.tps[0],
        of_plain=float(np.median(np.divide(arm.tps[1:], plain.tps[1:]))),
        drafted=0 if total is None else total.drafted,
        accepted=0 if total is None else total.accepted,
        won=None if total is None else total.mean_length,
        idle=None if spec is None else spec.off or spec.idle,
        same_text=arm.same,
    )
