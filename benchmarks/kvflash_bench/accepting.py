"""Do drafts fit a pool as well as the full cache? What is accepted of them, at the same places of the same texts.

Forced is how a text goes on: a document of plain text by its own next tokens, a question by what the full cache answers
greedily. At each of these places the drafter proposes a few tokens, the target computes them all in one step, and those
count as accepted that are the target's own greedy choice, up to the first that is not. Then the draft is forgotten, and
the text goes on with the forced token. So both arms are asked at the same places, after the same tokens; compared are
the drafts that each arm's drafter makes of what its own target computes, verified by that target. "The full cache" is a
pool that holds all of the text, which computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from kvflash_ggml.arrays import common_prefix
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.constants import POOL_STEP, round_up
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.sequence.selection import TAU
from kvflash_ggml.speculation.draft import Draft, DraftStats
from kvflash_ggml.speculation.tree import rows as arranged

from . import report
from .greedy import generate
from .inside import device_of, drafted, likeliest, paged, speculator_of, verify_and_drop
from .opening import opened
from .outcomes import Arm, arms
from .outcomes import Plan as Asked
from .places import Pair, Walk, summary
from .plans import Acceptance as Plan
from .recall import TAIL_ROOM, cases, prompt_tokens, tail_tokens
from .tasks import SPREAD, compose

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

TEXT = "text"
"""The task of plain text; the others are those of `recall`."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A text, and the tokens by which it goes on."""

    task: str
    prompt: list[int]
    goes_on: list[int]


RESIDENCY = (50.0, 25.0, 12.5)
"""Pools unless others are named, in % of the context."""

COLUMNS = {
    "drafter": "drafter", "task": "task", "context": "context", "policy": "policy", "pool": "pool", "texts": "texts",
    "places": "places", "agree": "agree", "full": "full", "share": "in pool", "points": "points", "error": "error",
    "target": "by target", "drafts": "by drafts", "full_won": "full won", "won": "won",
    "read_page_ins": "page-ins reading", "page_ins": "page-ins", "note": "note",
}  # fmt: skip


def run(model: str, plan: Plan, options: dict[str, Any]) -> None:
    rows, device = measure(model, plan, plan.filler(), options)
    report.columns(COLUMNS, rows)
    report.told("acceptance", model, options | asdict(plan), device, rows=rows)


def measure(model: str, plan: Plan, text: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """A row for each drafter, context, pool and task, and the device."""
    residencies = plan.residency if plan.residency is not None else () if plan.pools else RESIDENCY
    rows, device = [], ""
    for name in plan.types:
        _spec(name, plan)  # before anything takes long
    for context in plan.contexts:
        texts = list(_texts(model, plan, context, text, options))
        for name in plan.types:
            with ExitStack() as stack:
                full = stack.enter_context(_opened(model, plan, context, name, options))
                device = device_of(full)
                known = [_walk(full, one, plan) for one in texts]
                for arm in arms([context], residencies, plan.policies, pools=plan.pools, full=False):
                    for row in _arm(model, plan, arm, name, options, texts, full, known):
                        rows.append(row)
                        told = f"{row['drafter']} {row['task']} pool {row['pool']}: {row['points']} points"
                        click.echo(told, err=True)
    return rows, device


def _room(plan: Plan) -> int:
    """Tokens of context beside a document."""
    return TAIL_ROOM + plan.tokens + plan.drafts


def _arm(
    model: str, plan: Plan, arm: Arm, name: str, options: dict[str, Any], texts: Sequence[Forced], full: Llama,
    known: Sequence[Walk],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One drafter in one pool. known: what came of each text with the full cache."""
    pairs = []
    with _opened(model, plan, arm.context, name, options, arm) as llm:
        for text, one in zip(texts, known, strict=True):
            pair = Pair(full=one, pool=_walk(llm, text, plan))
            if plan.crossed:
                target, drafts = _walk(llm, text, plan, one.drafts), _walk(full, text, plan, pair.pool.drafts)
                pair = replace(pair, target=target.tally, drafts=drafts.tally)
            pairs.append(pair)
    for task in plan.tasks:
        some = [pair for pair, text in zip(pairs, texts, strict=True) if text.task == task]
        yield summary(arm, name, task, some)


def _opened(model: str, plan: Plan, context: int, name: str, options: dict[str, Any], arm: Arm | None = None) -> Any:
    """A model with one drafter, always asked for so many tokens; without an arm all of a text stays in the pool.

    What is resident does not depend on the clock, so that a run can be repeated.
    """
    n_ctx = context + _room(plan)
    fields = {"spec": _spec(name, plan), "tau": TAU}
    pool, policy = (round_up(n_ctx, POOL_STEP), "lru") if arm is None else (arm.pool, arm.policy)
    return opened(model, n_ctx=n_ctx, options=options, pool=pool, policy=policy, fields=fields)


def _spec(name: str, plan: Plan) -> SpecConfig:
    """ConfigError if it names nobody."""
    spec = SpecConfig.read(name)
    if spec is None:
        raise ConfigError(f"{name!r} drafts nothing: name a drafter")
    return replace(spec, width=plan.drafts + 1, window=plan.window)


def _texts(model: str, plan: Plan, context: int, text: str, options: dict[str, Any]) -> Iterator[Forced]:
    with opened(model, n_ctx=context + _room(plan), options=options) as llm:

        def tokenize(words: str) -> list[int]:
            return list(llm.tokenize(words.encode(), add_bos=False, special=False))

        for trial in range(plan.trials if TEXT in plan.tasks else 0):
            start = (plan.seed + trial) * SPREAD % 1
            document = compose(text, tokenize, lines=[], n_tokens=context + plan.tokens, start=start)
            ids = list(llm.tokenize(document.encode(), special=False))
            yield Forced(TEXT, ids[: -plan.tokens], ids[-plan.tokens :])
        asked = tuple(task for task in plan.tasks if task != TEXT)
        trials = Asked(tasks=asked, depths=plan.depths, trials=plan.trials, seed=plan.seed)
        for task, _, case in cases(llm, trials, text, n_tokens=context):
            for ask in case.asks:
                said = llm.tokenize(ask.said.encode(), add_bos=False, special=False)
                prompt = [*prompt_tokens(llm, case), *tail_tokens(llm, case, ask), *said]
                yield Forced(task, prompt, generate(llm, prompt, plan.tokens)[0].tolist())


def _walk(llm: Llama, text: Forced, plan: Plan, drafts: Sequence[Draft | None] | None = None) -> Walk:
    """Read a text, and go on by its forced tokens. drafts: verify these, instead of asking the drafter."""
    session, speculator = paged(llm), speculator_of(llm)
    assert speculator is not None
    llm.reset()
    speculator.begin(len(text.prompt))
    before = session.paging.page_ins
    llm.eval(text.prompt)
    read = session.paging.page_ins
    tally, made, chosen = DraftStats(), list[Draft | None](), list[int]()
    for place, root in enumerate(text.goes_on):
        draft = drafted(llm, root) if drafts is None else drafts[place]
        made.append(draft)
        if draft is None:
            llm.eval([root])
            chosen.append(likeliest(llm))
            continue
        rows = arranged(root, draft.padded(plan.drafts, root))  # a step of always as many rows
        picks = verify_and_drop(llm, rows.tokens)
        tally.verified(draft, range(common_prefix(draft.tokens, picks)), 0.0)
        chosen.append(int(picks[0]))
    if speculator.off is not None:
        raise ConfigError(f"{', '.join(speculator.types) or 'the drafter'} does not draft any more: {speculator.off}")
    page_ins = {"read_page_ins": read - before, "page_ins": session.paging.page_ins - read}
    return Walk(drafts=made, chosen=chosen, tally=tally, **page_ins)
