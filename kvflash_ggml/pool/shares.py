"""How many blocks of a pool each of several texts may use, and which ones. The functions are pure and move nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The blocks of one text, and the blocks that it asks for.

    home: its own blocks when all shares are equal. held: the blocks that its chunks are in. kept: how many blocks it
    cannot give up. wants: how many blocks its request can fill at most; None for a text without a request.
    """

    home: Sequence[int]
    held: Collection[int] = ()
    kept: int = 0
    wants: int | None = None


def sizes(claims: Sequence[Claim], total: int) -> list[int]:
    """Return how many of `total` blocks each text may use.

    A text with a request may use at least as many as it has at home. Idle texts give up the blocks that they do not
    have to keep, and texts with a request share these equally, none more than it wants. Idle texts keep what is left of
    the blocks that they hold. Where chunks that cannot leave take too much, texts with a request get less than at home.
    """
    kept = [claim.kept for claim in claims]
    home = [max(claim.kept, 0 if claim.wants is None else len(claim.home)) for claim in claims]
    most = [max(low, claim.wants or 0) for low, claim in zip(home, claims, strict=True)]
    found = _levelled(total, kept, home)
    if found == home:
        found = _levelled(total, home, most)
    left = total - sum(found)
    for i, claim in enumerate(claims):
        if claim.wants is None:
            more = min(left, len(claim.held) - found[i])
            found[i] += more
            left -= more
    return found


def _levelled(total: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return numbers between `least` and `most`, as equal and as large as a sum of at most `total` allows."""

    def at(level: int) -> list[int]:
        return [min(high, max(low, level)) for low, high in zip(least, most, strict=True)]

    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(at(middle)) <= total else (low, middle - 1)
    return at(low)


def dealt(claims: Sequence[Claim], sizes: Sequence[int], total: int) -> list[list[int]]:
    """Return the blocks of each text in the order to hand them out: home blocks first, then the nearest blocks.

    Each text keeps the blocks that it holds, which are no more than its size. Blocks that no text gets are left out.
    """
    mine = [{*claim.held} for claim in claims]
    taken = set[int]().union(*mine)
    for claim, blocks, size in zip(claims, mine, sizes, strict=True):
        blocks.update([block for block in claim.home if block not in taken][: max(0, size - len(blocks))])
    taken.update(*mine)
    found = []
    for claim, blocks, size in zip(claims, mine, sizes, strict=True):
        first, last = min(claim.home), max(claim.home)

        def distance(block: int, first: int = first, last: int = last) -> tuple[int, int]:
            return max(0, first - block, block - last), block

        if size > len(blocks):
            blocks.update(sorted(set(range(total)).difference(taken), key=distance)[: size - len(blocks)])
            taken.update(blocks)
        found.append(sorted(blocks, key=distance))
    return found
