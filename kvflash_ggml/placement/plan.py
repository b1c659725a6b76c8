"""From what there is and what is asked to a placement, or to an error that says what would fit. Pure.

Arithmetic proposes a placement, and a measure of exactly that decides (`fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import DoesNotFit, Remedy
from ..native.sizes import Measure, Needs
from . import memory
from .compute import Compute
from .devices import experts as experts_on
from .remedies import does_not_fit, itemised, with_margin
from .search import Found, Search
from .sizes import Device, ModelSizes, Placement, Request

ROUNDS = 3
"""Placements that are measured at most."""


def plan(sizes: ModelSizes, devices: tuple[Device, ...], request: Request, compute: Compute) -> Placement:
    """The best placement. devices: the host last. DoesNotFit if what is asked has none."""
    search = Search(sizes, devices, request, compute)
    found = search.run()
    if found is None:
        raise does_not_fit(search)
    redundant = _is_redundant(search, found)
    if redundant and request.pool == "auto" and request.fit.prefer == "exact":
        return plan(sizes, devices, replace(request, pool=None), compute)
    return _placement(search, found, redundant=redundant)


def _placement(search: Search, found: Found, *, redundant: bool) -> Placement:
    request, layouts, layout = search.request, search.layouts, found.layout
    shape, host = layout.shape, layout.needs[-1]
    split = request.tensor_split
    if split is None and len(layouts.devices) > 1 and found.level != 4:
        split = tuple(end - begin for begin, end in pairwise(layout.bounds))
    ours = experts_on(host.experts, host.device)
    used = [
        device for device, need in zip(layouts.devices, layout.needs, strict=False) if need.layers[0] < need.layers[1]
    ]
    return Placement(
        n_ctx=layouts.full,
        n_gpu_layers=layouts.n_layers + 1 - layout.bounds[0] if request.n_gpu_layers is None else request.n_gpu_layers,
        tensor_split=split,
        overrides=(*request.overrides, *ours),
        pool=shape.pool,
        n_ubatch=shape.n_ubatch,
        type_k=shape.type_k,
        type_v=shape.type_v,
        use_mmap=_maps(search, found),
        pipeline=found.level == 1
        and len(used) > 1
        and not request.overrides
        and request.offload_kqv
        and all(device.overlaps for device in layouts.devices),
        level=found.level,
        needs=layout.needs,
        redundant=redundant,
        why=_why(search, found),
    )


def _maps(search: Search, found: Found) -> bool:
    """Weights that a device reads in the host's memory are copied faster from memory of their own.

    The file's pages are better where nothing is read so, and where page images of the whole text need that memory.
    """
    if search.request.use_mmap is not None:
        return search.request.use_mmap
    if found.level in (1, 4) and not search.sizes.fixed.get(search.layouts.host.name):
        return True
    shape, host = found.layout.shape, found.layout.needs[-1]
    images = 0
    if shape.pool < search.layouts.full:
        images = search.layouts.full * sum(
            x.slot(shape.type_k, shape.type_v) for x in search.sizes.layers if not x.window
        )
    return host.left + host.staging < images


def _why(search: Search, found: Found) -> str:
    """One line for a banner."""
    layers, experts = found.layout.on_host
    shape, n = found.layout.shape, search.layouts.n_layers
    match found.level:
        case 1:
            where = "all layers on the devices"
        case 2:
            where = f"all layers on the devices, experts of {experts} on the host"
        case 3:
            where = f"{n - layers} of {n} layers on the devices" + f", experts of {experts} of them on the host" * (
                experts > 0
            )
        case 4:
            where = "all layers on the host"
    pool = "a full cache" if shape.pool >= search.layouts.full else f"a pool of {shape.pool:,}"
    return f"{where}; {pool} of {shape.type_k}, steps of {shape.n_ubatch:,}"


def _is_redundant(search: Search, found: Found) -> bool:
    """A full cache would fit too, with everything on the devices and every margin kept.

    Only the full cache decides, and only after everything that can move an expert to the host has been counted: a pool
    that is what keeps the experts on the device is never redundant.
    """
    layouts, shape = search.layouts, found.layout.shape
    if found.level != 1 or shape.pool >= layouts.full or search.sizes.fixed.get(layouts.host.name):
        return False
    full = replace(shape, pool=layouts.full, n_ubatch=search.ubatches[-1])
    return layouts.find(full, 0, "device") is not None


# --- proposed by arithmetic, decided by a measure


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
    """Return the error after ROUNDS placements that took more than computed. A larger margin may help, if one fits."""
    if search.run() is None:
        remedies = does_not_fit(search).remedies
    else:
        other, option = with_margin(search, tight.device, more=memory.MIB - tight.left)
        changes = {"fit": other.request.fit}
        cost = "less is placed there"
        remedies = (Remedy(option=option, frees=-tight.left, cost=cost, enough=False, changes=changes),)
    why = f"Of {ROUNDS} placements each took more than was thought."
    return DoesNotFit(
        tight.device, needed=tight.total, free=tight.free, needs=itemised(tight), remedies=remedies, why=why
    )


def _corrected(need: Needs, found: Needs) -> Needs:
    """With what was measured. Caches are measured as one: what is not recurrent state or windows is K and V."""
    state = min(need.state, found.kv)
    return replace(need, weights=found.weights, kv=found.kv - state, state=state, compute=found.compute)
