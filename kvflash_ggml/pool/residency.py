"""Which chunks stay in the pool: pure functions of a table, its protected chunks, and a ranking."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .plan import ABSENT, Chunk, Images

Ranking = npt.NDArray[np.floating]
"""A score per chunk, of the running request. Chunks newer than the ranking count as best."""

Chunks = npt.NDArray[np.intp]
"""Chunk numbers, ascending."""


def protected(first: int, last: int, *, sinks: int, tail: int, pins: Iterable[int]) -> set[int]:
    """Return the chunks that may not leave while chunks [first, last] are appended: sinks, pins, these chunks, and the
    tail.

    A step within two chunks, such as the end of a prompt, has the tail of its last chunk: one block more to choose
    with. The chunk before the step always stays: llama.cpp continues only from a position that is in memory.
    """
    short = last - first <= 1
    anchor = last if short else first
    window = range(max(0, min(first - 1, anchor - tail)), last + 1)
    return {*range(min(sinks, last + 1)), *(pin for pin in pins if pin <= last), *window}


def known(ranking: Ranking | None, count: int) -> npt.NDArray[np.float64]:
    """Return the scores of `count` chunks. Chunks newer than the ranking count as best, and so do all without a
    ranking.
    """
    scores = np.full(count, np.inf)
    if ranking is not None:
        scores[: len(ranking)] = ranking[:count]
    return scores


def resident(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """Return the chunks that have a block, ascending. This reads every chunk; a `Layout` keeps the result."""
    return tuple(c for c, chunk in enumerate(chunks) if chunk.block != ABSENT)


def others(count: int, without: Iterable[int]) -> Chunks:
    """Return the first `count` chunks except the chunks in `without`."""
    able = np.ones(count, np.bool_)
    able[[c for c in without if c < count]] = False
    return able.nonzero()[0]


def best(
    here: Iterable[int], sealed: int, images: Images, keep: set[int], ranking: Ranking | None, room: int
) -> set[int]:
    """Return the `room` best sealed chunks that `keep` does not name. Of equal scores, the newest text stays.

    here: resident chunks. images: the chunks that the host has. The other resident chunks cannot leave, and come first.
    """
    able = others(sealed, keep)
    can_leave = np.ones(sealed, np.bool_)
    can_leave[[c for c in here if c < sealed and c not in images]] = False
    order = np.lexsort((-able, -known(ranking, sealed)[able], can_leave[able]))
    return set(able[order[: max(0, room)]].tolist())


def victims(
    chunks: Sequence[Chunk], here: Iterable[int], images: Images, keep: set[int], ranking: Ranking | None
) -> list[int]:
    """Return the chunks that can leave, in the order to evict them: lowest score, or least recently used without a
    ranking.

    here: resident chunks. Only chunks in `images`, which the host has, can leave: eviction moves nothing and cannot
    fail.
    """

    def value(c: int) -> float:
        return float(ranking[c]) if ranking is not None and c < len(ranking) else math.inf

    able = [c for c in here if c in images and c not in keep]
    return sorted(able, key=lambda c: (value(c), chunks[c].last_use, c))


def few_moves(ranking: Ranking, inside: Chunks, outside: Chunks, *, margin: float, max_moves: int) -> Ranking | None:
    """Return a ranking by which at most `max_moves` evicted chunks come back; None if none is worth it.

    inside: resident chunks. outside: evicted chunks. The best evicted chunks come back, each in place of a resident
    chunk that it beats by `margin`. In the result every evicted chunk ranks below every resident one, in the old order:
    a streamed step that sees more than the pool goes by that order. The other chunks keep their scores.
    """
    inside, outside = inside[inside < len(ranking)], outside[outside < len(ranking)]
    if not len(inside) or not len(outside) or ranking[outside].max() < ranking[inside].min() + margin:
        return None  # the usual case
    leave = inside[np.lexsort((inside, ranking[inside]))]
    come = outside[np.lexsort((-outside, -ranking[outside]))]
    at_once = min(max_moves, len(leave), len(come))
    new, old = ranking[come[:at_once]], ranking[leave[:at_once]]
    count = int(((new >= old + margin) & (new > old)).sum())  # the first of them: the gain only falls
    if count == 0:
        return None
    there, gone = np.append(leave[count:], come[:count]), np.append(come[count:], leave[:count])
    worst = ranking[there].min()
    above = ranking[gone].max() - worst
    few: Ranking = ranking.copy()
    few[gone] = -np.inf
    if np.isfinite(above):
        few[gone] = np.minimum(ranking[gone] - max(above, 0), np.nextafter(worst, -np.inf))
    return few
