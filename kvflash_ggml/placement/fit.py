"""Arithmetic proposes a placement, a measure of exactly that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import DoesNotFit, Remedy
from . import budget
from .compute import Compute
from .plan import plan
from .remedies import does_not_fit, itemised, with_margin
from .search import Search
from .sizes import Device, DeviceBytes, Measure, ModelSizes, Needs, Placement, Request

ROUNDS = 3
"""Placements that are measured at most."""


def fit(
    sizes: ModelSizes,
    devices: tuple[Device, ...],
    request: Request,
    measures: Sequence[Measure],
    measure: Callable[[Placement], Measure],
) -> Placement:
    """The best placement that a measure of it confirms, with the bytes that were measured.

    measures: for `Compute`. measure: of one placement, with its exact parameters. What a placement takes beyond what it
    was thought to is kept free in the next. DoesNotFit if nothing fits.
    """
    compute = Compute(measures)
    for _ in range(ROUNDS):
        placement = plan(sizes, devices, request, compute)
        found = {device.device: device for device in measure(placement).devices}
        measured = replace(placement, needs=tuple(_corrected(need, found[need.device]) for need in placement.needs))
        if all(need.left >= 0 for need in measured.needs):
            return measured
        compute = compute.beyond(
            {
                after.device: max(0, after.total - before.total)
                for before, after in zip(placement.needs, measured.needs, strict=True)
            }
        )
    raise _unsettled(Search(sizes, devices, request, compute), min(measured.needs, key=lambda need: need.left))


def _unsettled(search: Search, tight: Needs) -> DoesNotFit:
    """Every placement took more than was thought: to keep that much free may help, if what is known now allows any."""
    if search.run() is None:
        remedies = does_not_fit(search).remedies
    else:
        other, option = with_margin(search, tight.device, more=budget.MIB - tight.left)
        changes = {"fit": other.request.fit}
        cost = "less is placed there"
        remedies = (Remedy(option=option, frees=-tight.left, cost=cost, enough=False, changes=changes),)
    why = f"Of {ROUNDS} placements each took more than was thought."
    return DoesNotFit(
        tight.device, needed=tight.total, free=tight.free, needs=itemised(tight), remedies=remedies, why=why
    )


def _corrected(need: Needs, found: DeviceBytes) -> Needs:
    """With what was measured. Caches are measured as one: what is not recurrent state or windows is K and V."""
    state = min(need.state, found.context)
    return replace(need, weights=found.model, kv=found.context - state, state=state, compute=found.compute)
