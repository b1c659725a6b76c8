"""What was accepted at the same places of the same texts, with the full cache and in a pool. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from kvflash_ggml.speculation.draft import Draft, DraftStats

from .outcomes import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One text on one target. drafts: at each place, None where nothing was drafted. chosen: the likeliest next token.

    tally: what was accepted of the drafts. read_page_ins, page_ins: pages that came back while the text was read, and
    while it went on.
    """

    drafts: Sequence[Draft | None]
    chosen: Sequence[int]
    tally: DraftStats
    read_page_ins: int
    page_ins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One text, forced to go on in the same way with the full cache and in a pool.

    target: what the pool accepts of what was drafted with the full cache. drafts: what the full cache accepts of what
    was drafted in the pool. None where these were not looked at.
    """

    full: Walk
    pool: Walk
    target: DraftStats | None = None
    drafts: DraftStats | None = None

    def tallies(self) -> dict[str, DraftStats]:
        """What is known, by its name."""
        known = {"full": self.full.tally, "pool": self.pool.tally, "target": self.target, "drafts": self.drafts}
        return {name: tally for name, tally in known.items() if tally is not None}


def total(tallies: Sequence[DraftStats]) -> DraftStats:
    """All of them as one, without times."""
    return DraftStats(
        steps=sum(one.steps for one in tallies),
        drafted=sum(one.drafted for one in tallies),
        accepted=sum(one.accepted for one in tallies),
        reached=[sum(at) for at in zip_longest(*(one.reached for one in tallies), fillvalue=0)],
        agreed=[sum(at) for at in zip_longest(*(one.agreed for one in tallies), fillvalue=0)],
    )


def points(full: Sequence[DraftStats], other: Sequence[DraftStats]) -> tuple[float | None, float | None]:
    """How many points of a hundred more of what was drafted is accepted than with the full cache; its standard error.

    Each is given for the same texts in the same order. The share is that of all texts together. Places of one text are
    not independent of each other, so the error is that over texts; None for a single one. Both are None where nothing
    was drafted.
    """
    first, second = _influence(full), _influence(other)
    if first is None or second is None:
        return None, None
    (share, one), (share_other, two) = first, second
    more, apart = share_other - share, two - one
    error = None if len(apart) < 2 else 100 * float(apart.std(ddof=1)) / len(apart) ** 0.5
    return 100 * more, error


def _influence(tallies: Sequence[DraftStats]) -> tuple[float, np.ndarray] | None:
    """Accepted of what was drafted, and how much each text adds to that share: linear about the means."""
    drafted = np.array([one.drafted for one in tallies], float)
    accepted = np.array([one.accepted for one in tallies], float)
    if not drafted.sum():
        return None
    share = float(accepted.sum() / drafted.sum())
    return share, (accepted - share * drafted) / drafted.mean()


def summary(arm: Arm, drafter: str, task: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One row: a drafter on the texts of a task in one pool, beside the full cache on the same texts.

    `points`: how much more is accepted in the pool, each arm with its own drafts. `target`: how much more by the pool
    of what was drafted with the full cache, so what comes of the tokens that the pool chooses. `drafts`: how much more
    by the full cache of what was drafted in the pool, so what comes of what the drafter is given there. Each with its
    error. agree: share of the places where both choose the same next token. first_same, first_other: how often the
    first drafted token is accepted at these places and at the others, with the full cache and in the pool. by_text: the
    counts, so that runs can be added up.
    """
    known = [pair.tallies() for pair in pairs]
    arms = {name: [one[name] for one in known] for name in known[0]}
    full, pool = total(arms["full"]), total(arms["pool"])
    row: dict[str, Any] = {
        "drafter": drafter,
        "task": task,
        "context": arm.context,
        "policy": arm.policy,
        "pool": arm.pool,
        "residency": arm.residency,
        "note": arm.note,
        "texts": len(pairs),
        "places": pool.steps,
        **_choices(pairs),
        "full": full.rate,
        "share": pool.rate,
        "full_positions": full.per_position,
        "positions": pool.per_position,
        "full_won": full.mean_length,
        "won": pool.mean_length,
        "read_page_ins": sum(pair.pool.read_page_ins for pair in pairs),
        "page_ins": sum(pair.pool.page_ins for pair in pairs),
    }
    for name, arm_name in (("points", "pool"), ("target", "target"), ("drafts", "drafts")):
        other = arms.get(arm_name)
        more, error = (None, None) if other is None else points(arms["full"], other)
        row |= {name: more, "error" if name == "points" else f"{name}_error": error}
    return row | {"by_text": [{name: _counts(tally) for name, tally in one.items()} for one in known]}


def _choices(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Where both choose the same token and where not, and what is drafted there."""
    same = np.concatenate([np.equal(pair.full.chosen, pair.pool.chosen) for pair in pairs])
    right = np.array([[first for pair in pairs for first in _firsts(getattr(pair, arm))] for arm in ("full", "pool")])
    drafted = ~np.isnan(right).any(axis=0)
    firsts = [right[:, drafted & where] for where in (same, ~same)]
    told = [tuple(some.mean(axis=1).tolist()) if some.size else None for some in firsts]
    return {"agree": float(same.mean()), "first_same": told[0], "first_other": told[1]}


def _firsts(walk: Walk) -> list[float]:
    """At each place, was the first drafted token the one that is chosen? NaN where nothing was drafted."""
    drafted = zip(walk.drafts, walk.chosen, strict=True)
    return [np.nan if draft is None else float(draft.tokens[0] == chosen) for draft, chosen in drafted]


def _counts(tally: DraftStats) -> dict[str, Any]:
    return {name: getattr(tally, name) for name in ("steps", "drafted", "accepted", "reached", "agreed")}
