"""Do drafts fit a pool as well as the full cache? What is accepted of them, at the same places of the same texts.

Forced is how a text goes on: a document of plain text by its own next tokens, a question by what the full cache answers
greedily. At each of these places the drafter proposes a few tokens, the target computes them all in one step, and those
count as accepted that are the target's own greedy choice, up to the first that is not. Then the draft is forgotten, and
the text goes on with the forced token. So both arms are asked at the same places, after the same tokens; compared are
the drafts that each arm's drafter makes of what its own target computes, verified by that target. "The full cache" is a
pool that holds all of the text, which computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvflash_ggml.arrays import common_prefix
from kvflash_ggml.config import SPEC_DEFAULT_WINDOW, SpecConfig
from kvflash_ggml.constants import POOL_STEP, round_up
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.session.selection import TAU
from kvflash_ggml.spec.draft import Draft
from kvflash_ggml.spec.tally import Tally
from kvflash_ggml.spec.tree import rows as arranged

from .inside import device_of, drafted, likeliest, paged, speculator_of, verify_and_drop
from .opening import opened
from .outcomes import Arm, arms
from .outcomes import Plan as Asked
from .places import Pair, Walk, summary
from .recall import TAIL_ROOM, cases, prompt_tokens, tail_tokens
from .spec import generate
from .tasks import SPREAD, compose

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

TEXT = "text"
"""The task of plain text; the others are those of `recall`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """types: drafters as `SpecConfig.read` takes one. drafts: tokens of a draft. window: those that a drafting model
    sees. tasks: TEXT, and those of `recall`.

    tokens: forced after each text, places at which is drafted. crossed: also verify each arm's drafts by the other.
    depths, trials, seed: of tasks; a trial of TEXT is one document.
    """

    types: tuple[str, ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    drafts: int
    tokens: int
    trials: int
    depths: tuple[float, ...]
    seed: int = 0
    crossed: bool = False
    window: int = SPEC_DEFAULT_WINDOW

    @property
    def room(self) -> int:
        """Tokens of context beside a document."""
        return TAIL_ROOM + self.tokens + self.drafts


@dataclass(frozen=True, slots=True)
class Forced:
    """A text, and the tokens by which it goes on."""

    task: str
    prompt: list[int]
    goes_on: list[int]


def run(
    model: str, plan: Plan, pools: dict[str, Any], text: str, options: dict[str, Any],
    seen: Callable[[dict[str, Any]], None],
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """A row for each drafter, context, pool and task, and the device. pools: of `arms`. seen: called with each row."""
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
                for arm in arms([context], full=False, **pools):
                    for row in _arm(model, plan, arm, name, options, texts, full, known):
                        rows.append(row)
                        seen(row)
    return rows, device


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
    n_ctx = context + plan.room
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
    with opened(model, n_ctx=context + plan.room, options=options) as llm:

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
    before = session.page_ins
    llm.eval(text.prompt)
    read = session.page_ins
    tally, made, chosen = Tally(), list[Draft | None](), list[int]()
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
    page_ins = {"read_page_ins": read - before, "page_ins": session.page_ins - read}
    return Walk(drafts=made, chosen=chosen, tally=tally, **page_ins)
