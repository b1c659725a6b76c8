"""The reservation of another planner, as an oracle: its arithmetic places experts one by one, by bytes.

It reserves the whole context unless the experts would leave the device by that, and then the pool.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """tokens: that K and V are reserved for. budget: bytes for experts. reduced: the pool's tokens, not the context's.

    all_there: with the whole context reserved every expert would be on the device.
    """

    tokens: int
    budget: int
    reduced: bool
    all_there: bool


def reserve(*, slot: int, n_ctx: int, pool: int, total: int, core: int, experts: int, fixed: int) -> Reservation:
    """slot: bytes a token. pool: tokens, 0 for none. total: of the device. fixed: everything else."""
    full = max(0, total - core - fixed - slot * n_ctx)
    all_there = full >= experts
    reduced = 0 < pool < n_ctx and not all_there
    tokens = pool if reduced else n_ctx
    budget = max(0, total - core - fixed - slot * tokens)
    return Reservation(tokens=tokens, budget=budget, reduced=reduced, all_there=all_there)
