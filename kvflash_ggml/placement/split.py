"""Which layers go to which device: contiguous ranges, in the devices' order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
"""[a, b]: of the range a..b-1, infinite where it does not fit. (n + 1, n + 1); a device may get nothing, [a, a]."""


def partition(costs: Sequence[Costs], loads: Sequence[Costs]) -> tuple[int, ...] | None:
    """The bounds of ranges that cover everything, one range a device, or None where none fits.

    Of all such splits one with the least sum of costs, and of these the one whose highest load is the least.
    """
    n = len(costs[0]) - 1
    cost = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    load = np.zeros(n + 1)
    begins = []
    for more, heavy in zip(costs, loads, strict=True):
        sums = cost[:, None] + more
        highest = np.where(sums == sums.min(axis=0), np.maximum(load[:, None], heavy), np.inf)
        begin = highest.argmin(axis=0)
        ends = np.arange(n + 1)
        cost, load = sums[begin, ends], highest[begin, ends]
        begins.append(begin)
    if not np.isfinite(cost[n]):
        return None
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(int(begin[bounds[-1]]))
    return tuple(reversed(bounds))


def bounds_of(shares: Sequence[float], n: int) -> tuple[int, ...]:
    """The bounds that llama.cpp makes of a `tensor_split` for n layers, the output counted as one.

    Whole numbers of layers come out as they are.
    """
    given = np.asarray(shares, np.float32)
    given = given if given.any() else np.ones_like(given)
    edges = np.cumsum(given, dtype=np.float32)
    edges /= edges[-1]
    where = np.searchsorted(edges, np.arange(n, dtype=np.float32) / np.float32(n), side="right")
    return (*(int(np.searchsorted(where, device)) for device in range(len(given))), n)
