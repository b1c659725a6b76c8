"""Who stays in the pool and who leaves: pure functions of a table, its protections, and a ranking of the chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .plan import ABSENT, Chunk, Images

Ranking = npt.NDArray[np.floating]
"""A score per chunk, of the running request. Chunks that are newer count as best."""


def protected(first: int, last: int, *, sinks: int, tail: int, pins: Iterable[int]) -> set[int]:
    """Chunks that may not leave while [first, last] is appended: sinks, pins, the span and the window before it.

    A span within two chunks, such as the end of a prompt, has the window of its last: a block more to choose with. The
    chunk before the span always stays: llama.cpp goes on only from a position that is in memory.
    """
    short = last - first <= 1
    anchor = last if short else first
    window = range(max(0, min(first - 1, anchor - tail)), last + 1)
    return {*range(min(sinks, last + 1)), *(pin for pin in pins if pin <= last), *window}


def known(ranking: Ranking | None, count: int) -> npt.NDArray[np.float64]:
    """The scores of `count` chunks; those newer than the ranking, or all without one, count as best."""
    scores = np.full(count, np.inf)
    if ranking is not None:
        scores[: len(ranking)] = ranking[:count]
    return scores


def best(sealed: int, images: Images, keep: set[int], ranking: Ranking | None, room: int) -> set[int]:
    """The `room` best of the sealed chunks that are not kept anyway; of equals, the newest text stays.

    images: the chunks that the host has. The others cannot leave, and come first.
    """
    able = np.array([c for c in range(sealed) if c not in keep], np.intp)
    can_leave = np.array([c in images for c in able.tolist()], np.bool_)
    order = np.lexsort((-able, -known(ranking, sealed)[able], can_leave))
    return set(able[order[: max(0, room)]].tolist())


def victims(chunks: Sequence[Chunk], images: Images, keep: set[int], ranking: Ranking | None) -> list[int]:
    """The chunks that could leave, the first to go first: lowest score, or least recently used without a ranking.

    Only `images`, the chunks that the host has, can leave: eviction itself moves nothing and cannot fail.
    """

    def value(c: int) -> float:
        return float(ranking[c]) if ranking is not None and c < len(ranking) else math.inf

    able = [c for c, chunk in enumerate(chunks) if chunk.block != ABSENT and c not in keep and c in images]
    return sorted(able, key=lambda c: (value(c), chunks[c].last_use, c))


def clearly_better(ranking: Ranking, resident: Sequence[int], evicted: Sequence[int], margin: float) -> bool:
    """Is an evicted chunk better by `margin` than the worst resident one?"""
    inside = [c for c in resident if c < len(ranking)]
    outside = [c for c in evicted if c < len(ranking)]
    return bool(inside) and bool(outside) and float(ranking[outside].max() - ranking[inside].min()) >= margin
