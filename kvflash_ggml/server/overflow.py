"""What leaves a chat that outgrows the context: its oldest messages, at borders of messages.

Nothing is kept of it: a chat of the same messages loses the same ones. Messages leave in pieces of about a quarter of
the context, so that the next turn loses no more, its prompt begins as this one, and only what is new is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import ContextFull

T = TypeVar("T")

SHARE = 4
"""Room for an answer: as many tokens as its request allows, but at most the context divided by this.

About as much leaves a chat at once.
"""

BYTES = 4
"""Of a token, about: where it has fewer, more leaves at once."""


def cuts(messages: Sequence[Mapping[str, Any]], n_ctx: int) -> list[list[int]]:
    """List what may be kept, as numbers of messages: each list has about n_ctx / SHARE tokens less than the one before.

    System messages at the front stay. What follows them begins with a user's message. Within a turn of calls its oldest
    calls leave with their results, and the user's message stays. The last list is the shortest that can be answered.
    """
    front = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    sizes = [len(json.dumps(one, ensure_ascii=False).encode("utf-8", "replace")) for one in messages]
    piece = n_ctx * BYTES // SHARE
    found: list[list[int]] = []
    shortest: list[int] | None = None
    gone, due, asks = 0, piece, -1
    for i in range(front, len(messages)):
        user = messages[i]["role"] == "user"
        stays = [] if user else [asks]
        if i > front and (user or (messages[i]["role"] == "assistant" and -1 < asks < i - 1)):
            shortest = [*range(front), *stays, *range(i, len(messages))]
            without = gone - sum(sizes[stay] for stay in stays)
            if without >= due:
                found.append(shortest)
                due = (without // piece + 1) * piece
        asks = i if user else asks
        gone += sizes[i]
    return found if shortest is None or shortest in found[-1:] else [*found, shortest]


def longest(
    kept: Sequence[list[int]], make: Callable[[list[int]], T], fits: Callable[[T], bool]
) -> tuple[list[int], T]:
    """Return the first list that fits, and what is made of it; the last one if none does, or ContextFull.

    A list behind one that fits must fit too.
    """
    low, high = 0, len(kept) - 1
    best = make(kept[-1])
    while low < high:
        middle = (low + high) // 2
        try:
            one = make(kept[middle])
        except ContextFull:
            low = middle + 1
            continue
        if fits(one):
            best, high = one, middle
        else:
            low = middle + 1
    return kept[high], best
