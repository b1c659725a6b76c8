"""What a rule that pages in a chunk at the token that needs it could go by.

Answers are written with the whole text in view. At each token the shares of attention that the retrieval heads pay to
every chunk are noted, as the index of the default policy has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml.arrays import Floats
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.policy.base import ScoreRequest
from kvflash_ggml.policy.heads import log_shares
from kvflash_ggml.policy.qk import QKScorer

from . import report
from .opening import opened
from .outcomes import Outcome, Plan
from .plans_texts import Faults
from .tasks import SPREAD, compose

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

POOL = 512
"""Slots of the pool beside which the answers are written. They see the whole text whatever its size."""

SINKS, TAIL = 1, 2
"""Chunks at both ends of the text that a pool keeps in any case: they cause no fault."""

LAGS = 4
"""Tokens before a value's first one whose queries are looked at, its own included."""

MOST_FAULTS = 2
"""Of one token, in a simulated pool."""


class Recorder(QKScorer):
    """The default policy, which notes the shares of each token of an answer: {tokens of the text: [heads, chunks]}."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Floats] = {}

    def score(self, request: ScoreRequest) -> Floats | None:
        if request.rows == 1 and request.n_chunks:
            rows = self.dump(request.n_chunks)
            masses = self._keys.score_index(self.units, rows, self._heads, request)
            self.seen[len(request.tokens)] = np.exp(log_shares(masses))
        return super().score(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, or plain text without values. shares: by tokens of the text so far, [heads, chunks]."""

    task: str
    seed: int
    shares: dict[int, Floats]
    values: tuple[Outcome, ...] = ()

    def at(self, end: int) -> Floats:
        """Return the largest share in any head of each chunk that can fault, [chunks]; 0 for a chunk that cannot."""
        most: Floats = self.shares[end].max(axis=0)
        most[:SINKS] = 0
        most[max(0, (end - 1) // CHUNK - TAIL) :] = 0
        return most


def run(model: str, plan: Faults, options: dict[str, Any]) -> None:
    if min(plan.contexts) <= POOL:
        raise ConfigError(
            f"--contexts {min(plan.contexts)}: a text that fits a pool of {POOL} is not scored: give more"
        )
    answers = [answer for context in plan.contexts for answer in written(model, plan, context, options)]
    lags = [told(answers, lag) for lag in range(LAGS)]
    rows = [rule(answers, threshold, plan.pools) for threshold in plan.thresholds]
    report.rows(lags)
    report.rows(rows)
    report.told("faults", model, options | asdict(plan), "", lags=lags, rows=rows)


def written(model: str, plan: Faults, context: int, options: dict[str, Any]) -> Iterator[Answer]:
    """Answers to the questions of the plan, and plain text, each with its shares."""
    from . import recall  # here: it needs the library, and what is counted above needs none

    recorder = Recorder()
    fields = {"policy": recorder, "answer": "exact", "tau": 1}
    n_ctx = context + recall.TAIL_ROOM
    trials = Plan(tasks=plan.tasks, depths=(), trials=plan.trials, seed=plan.seed, fact_set=plan.fact_set)
    with opened(model, n_ctx=n_ctx, options=options, pool=POOL, policy="qk:exact", fields=fields) as llm:
        for task, seed, case in recall.cases(llm, trials, plan.filler(), n_tokens=context):
            recorder.seen = {}
            found = tuple(x for x in recall.run_case(llm, case, task=task, seed=seed) if isinstance(x, Outcome))
            yield Answer(task=task, seed=seed, shares=recorder.seen, values=found)
        for seed in range(plan.seed, plan.seed + plan.trials):
            recorder.seen = {}
            _go_on(llm, plan, context, seed)
            yield Answer(task="text", seed=seed, shares=recorder.seen)


def _go_on(llm: Llama, plan: Faults, context: int, seed: int) -> None:
    """Read a document of plain text, and then the tokens that follow it, one by one."""

    def tokenize(words: str) -> list[int]:
        return list(llm.tokenize(words.encode(), add_bos=False, special=False))

    text = compose(plan.filler(), tokenize, lines=[], n_tokens=context + plan.tokens, start=seed * SPREAD % 1)
    ids = list(llm.tokenize(text.encode(), special=False))
    llm.reset()
    llm.eval(ids[: -plan.tokens])
    for token in ids[-plan.tokens :]:
        llm.eval([token])


def told(answers: Sequence[Answer], lag: int) -> dict[str, Any]:
    """Return how surely the query `lag` tokens before a value's first token asks for its chunk; 0 for the token itself,
    from whose logits the value is drawn.

    `AUC` is the chance that the chunk has a larger share than the best chunk has at a token of plain text. `first` is
    how often no other chunk has a larger share. `share` is the median of the chunk's share.
    """
    wanted = list(_wanted(answers, lag))
    plain = [one.at(end).max() for one in answers if not one.values for end in one.shares]
    shares = [max(most[list(gold)]) for most, gold in wanted]
    return {
        "tokens before": lag,
        "values": len(shares),
        "AUC": auc(shares, plain),
        "first": float(np.mean([share == most.max() for share, (most, _) in zip(shares, wanted, strict=True)])),
        "share": float(np.median(shares)),
        "plain tokens": len(plain),
        "plain share": float(np.median(plain)),
    }


def auc(wanted: Sequence[float], others: Sequence[float]) -> float:
    """Return the chance that one of `wanted` is larger than one of `others`; half a chance if they are equal."""
    a, b = np.asarray(wanted)[:, None], np.asarray(others)[None]
    return float(((a > b) + 0.5 * (a == b)).mean())


def rule(answers: Sequence[Answer], threshold: float, pools: Sequence[int]) -> dict[str, Any]:
    """Return what a share of `threshold` as the rule would find.

    `asked` is the share of the values whose chunk is above it at the value's first token, and `asked before` at one of
    the two tokens before that. `plain` is the share of the tokens of plain text at which any chunk is above it. Per
    pool: the faults of 100 tokens of plain text and of answers, where a fault brings a chunk that is evicted, and the
    share of the values whose chunk is there in time: after the fault of the very token if it is computed `again`, or
    for the next one otherwise.
    """

    def above(lags: Sequence[int]) -> float:
        found = [[max(most[list(gold)]) > threshold for most, gold in _wanted(answers, lag)] for lag in lags]
        return float(np.mean(np.any(found, axis=0)))

    plain = [one.at(end).max() > threshold for one in answers if not one.values for end in one.shares]
    row: dict[str, Any] = {
        "threshold": threshold,
        "asked": above([0]),
        "asked before": above([1, 2]),
        "plain": float(np.mean(plain)),
    }
    for pool in pools:
        texts = [simulated(one, pool, threshold) for one in answers if not one.values]
        others = [simulated(one, pool, threshold) for one in answers if one.values]
        row[f"{pool} plain"] = 100 * sum(x.faults for x in texts) / max(1, sum(x.tokens for x in texts))
        row[f"{pool} answers"] = 100 * sum(x.faults for x in others) / max(1, sum(x.tokens for x in others))
        values = max(1, sum(x.values for x in others))
        row[f"{pool} in time"] = sum(x.before for x in others) / values
        row[f"{pool} again"] = sum(x.again for x in others) / values
    return row


@dataclass(slots=True)
class Simulated:
    """What a simulated pool did in an answer. before: values whose chunk was resident when the token was computed;
    again: or came with a fault of that token.
    """

    tokens: int = 0
    faults: int = 0
    values: int = 0
    before: int = 0
    again: int = 0


def simulated(answer: Answer, pool: int, threshold: float) -> Simulated:
    """Run the rule on the shares of an answer: a chunk above the threshold that is evicted takes the place of the chunk
    that had a share above it longest ago.
    """
    values = {value.began: set(value.gold) for value in answer.values if value.correct}
    room, ends, done = pool // CHUNK - SINKS - TAIL - 1, sorted(answer.shares), Simulated()
    tail = (ends[0] - 1) // CHUNK - TAIL
    asked = {chunk: chunk - tail for chunk in range(max(SINKS, tail - room), tail)}  # when; the prompt's newest chunks
    for end in ends:
        most, last = answer.at(end), (end - 1) // CHUNK
        able = [chunk for chunk in asked if chunk < last - TAIL]
        here = {*sorted(able, key=asked.__getitem__, reverse=True)[:room], *range(SINKS), *range(last - TAIL, last + 1)}
        above = [chunk for chunk in np.argsort(-most).tolist() if most[chunk] > threshold]
        new = [chunk for chunk in above if chunk not in here][:MOST_FAULTS]
        if end in values:
            done.values += 1
            done.before += values[end] <= here
            done.again += values[end] <= here.union(new)
        done.tokens += 1
        done.faults += len(new)
        asked.update(dict.fromkeys([*here.intersection(above), *new, *range(last - TAIL, last + 1)], end))
    return done


def _wanted(answers: Sequence[Answer], lag: int) -> Iterator[tuple[Floats, tuple[int, ...]]]:
    """Yield for each value that the full cache finds the shares `lag` tokens before it, and its chunks."""
    for one in answers:
        for value in one.values:
            if value.correct and value.began - lag in one.shares:
                yield one.at(value.began - lag), value.gold
