"""From what there is and what is asked to a placement, or to an error that says what would fit. Pure.

Arithmetic proposes a placement, and a measure of exactly that decides (`fit`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..errors import DoesNotFit, Remedy
from ..native.sizes import Measure, Needs
from . import memory
from .devices import experts as experts_on
from .layout import Compute, DeviceLayout
from .search import SMALL, UBATCHES, Search, SearchResult, pool_range
from .sizes import Device, ModelSizes, Placement, PlacementRequest

# --- what would make a placement fit; each is tried before it is named


MIN_MARGIN = 256 * memory.MIB
"""With less left free a backend that grows its own buffers ends the process."""

Change = tuple[str, dict[str, Any], str]
"""Option, fields of the request, cost."""


def does_not_fit(search: Search) -> DoesNotFit:
    """Return the error for a search that has found nothing, with remedies that were tried."""
    layout = search.nearest()
    tight = min(layout.needs, key=lambda need: need.left)
    changes = list(_changes(search, tight))
    remedies = [remedy for change in changes if (remedy := _try(search, tight, change)) is not None]
    if not any(remedy.enough for remedy in remedies) and len(changes) > 1:
        everything: dict[str, Any] = {}
        for _, fields, _ in changes:
            everything |= fields
        together = " ".join(option for option, _, _ in changes), everything, "; ".join(cost for _, _, cost in changes)
        joint = _try(search, tight, together)
        remedies = [joint, *remedies] if joint is not None and joint.enough else remedies
    return DoesNotFit(
        tight.device,
        needed=tight.total,
        free=tight.free,
        needs=tight.itemised,
        remedies=sorted(remedies, key=lambda remedy: not remedy.enough),
    )


def _try(search: Search, tight: Needs, change: Change) -> Remedy | None:
    """Try a change of the request. None if it frees nothing of the tight device."""
    option, fields, cost = change
    other = _with(search, fields)
    found = other.run()
    layout = other.nearest() if found is None else found.layout
    frees = tight.total - _of(layout, tight.device).total
    if found is None and frees <= 0:
        return None
    return Remedy(option=option, frees=frees, cost=cost, enough=found is not None, changes=fields)


def _of(layout: DeviceLayout, device: str) -> Needs:
    return next(need for need in layout.needs if need.device == device)


def _with(search: Search, fields: dict[str, Any]) -> Search:
    layouts = search.layouts
    request = replace(search.request, **fields)
    return Search(search.sizes, (*layouts.devices, layouts.host), request, layouts.compute)


def _changes(search: Search, tight: Needs) -> Iterator[Change]:
    """Yield what the user could ask for instead, the cheapest first."""
    request = search.request
    if request.tensor_split is not None and len(search.layouts.taking_part) > 1:
        yield from _split(search)
    if request.n_ubatch is not None and request.n_ubatch > UBATCHES[-1]:
        yield f"-ub {UBATCHES[-1]}", {"n_ubatch": UBATCHES[-1]}, "prompts are read more slowly"
    floor, _ = pool_range(replace(request, pool="auto"))
    if pool_range(request)[0] > floor:
        cost = "a bounded cache" if request.pool is None else "fewer tokens are resident"
        yield f"--kvflash {floor}", {"pool": floor}, cost
    if request.stage:
        yield "--kvflash-reading pool", {"stage": 0}, "prompts are read with what is in the pool in view"
    if search.types[-1] != SMALL and search.sizes.quantizable:
        smaller = {"type_k": SMALL[0], "type_v": SMALL[1]}
        yield f"-ctk {SMALL[0]} -ctv {SMALL[1]}", smaller, "K and V are rounded"
    yield from _experts(search)
    yield from _layers(search)
    yield from _context(search)
    if tight.margin - MIN_MARGIN >= -tight.left > 0:
        yield from _margin(search, tight)


def _split(search: Search) -> Iterator[Change]:
    found = _with(search, {"tensor_split": None}).run()
    if found is not None and found.level != 4:
        bounds = found.layout.bounds
        shares = tuple(end - begin for begin, end in pairwise(bounds))
        yield f"-ts {','.join(map(str, shares))}", {"tensor_split": shares}, "layers lie otherwise"


def _experts(search: Search) -> Iterator[Change]:
    """Yield the fewest layers whose experts must lie on the host."""
    count = sum(layer.experts > 0 for layer in search.sizes.layers)
    least = search.request.n_cpu_moe or 0
    if search.request.n_cpu_moe is None or search.request.n_gpu_layers == 0 or least >= count:
        return
    n = bisect_left(range(count), True, lo=least + 1, key=lambda n: _with(search, {"n_cpu_moe": n}).run() is not None)
    yield f"-ncmoe {n}", {"n_cpu_moe": n}, "every token computes those experts on the host"


def _layers(search: Search) -> Iterator[Change]:
    """Yield as many layers on the devices as fit."""
    requested = search.request.n_gpu_layers
    if requested is None or requested == 0:
        return
    found = _with(search, {"n_gpu_layers": None}).run()
    if found is not None:
        n = _offloaded(search, found)
        yield f"-ngl {n}", {"n_gpu_layers": n}, "every token computes the other layers on the host"


def _offloaded(search: Search, found: SearchResult) -> int:
    return search.layouts.n_layers + 1 - found.layout.bounds[0]


def _context(search: Search) -> Iterator[Change]:
    """Yield the longest context that fits, of halves of the one that was asked for."""
    n_ctx = search.request.n_ctx // 2
    while n_ctx >= search.request.minimum_pool:
        if _with(search, {"n_ctx": n_ctx}).run() is not None:
            yield f"-c {n_ctx}", {"n_ctx": n_ctx}, "a shorter text"
            return
        n_ctx //= 2


def _margin(search: Search, tight: Needs) -> Iterator[Change]:
    other, option = with_margin(search, tight.device, more=tight.left)
    yield option, {"fit": other.request.fit}, "less room for what the backend takes by itself"


def with_margin(search: Search, name: str, *, more: int) -> tuple[Search, str]:
    """Return a search that keeps `more` bytes of a device free, or fewer; and the option that says so."""
    layouts, fit = search.layouts, search.request.fit
    margins = {device.name: memory.margin(device, fit) for device in (*layouts.devices, layouts.host)}
    mebibytes = (margins[name] + more) // memory.MIB
    fit = replace(fit, margin={**margins, name: mebibytes * memory.MIB})
    return _with(search, {"fit": fit}), f"-fitt {name}={mebibytes}"


# --- from what there is to a placement


ROUNDS = 3
"""Most placements that are measured."""


def plan(sizes: ModelSizes, devices: tuple[Device, ...], request: PlacementRequest, compute: Compute) -> Placement:
    """Return the best placement. devices: the host last. DoesNotFit if the request has none."""
    search = Search(sizes, devices, request, compute)
    found = search.run()
    if found is None:
        raise does_not_fit(search)
    redundant = _is_redundant(search, found)
    if redundant and request.pool == "auto" and request.fit.prefer == "exact":
        return plan(sizes, devices, replace(request, pool=None), compute)
    return _placement(search, found, redundant=redundant)


def _placement(search: Search, found: SearchResult, *, redundant: bool) -> Placement:
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


def _maps(search: Search, found: SearchResult) -> bool:
    """Report whether weights stay in the file's pages.

    Weights that a device reads from the host are copied faster from memory of their own. The file's pages are better
    where no device does so, and where page images of the whole text need that memory.
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


def _why(search: Search, found: SearchResult) -> str:
    """Return one line for a banner."""
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


def _is_redundant(search: Search, found: SearchResult) -> bool:
    """Report whether a full cache would fit too, with everything on the devices and every margin kept.

    A pool that keeps experts on the device is never redundant: this asks only once all experts are there.
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
    request: PlacementRequest,
    measures: Sequence[Measure],
    measure: Callable[[Placement], Measure],
) -> Placement:
    """Return the best placement that a measure of it confirms, with the measured bytes.

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
        tight.device, needed=tight.total, free=tight.free, needs=tight.itemised, remedies=remedies, why=why
    )


def _corrected(need: Needs, found: Needs) -> Needs:
    """Return needs with the measured bytes. A measure has one sum of caches: all but state and windows is K and V."""
    state = min(need.state, found.kv)
    return replace(need, weights=found.weights, kv=found.kv - state, state=state, compute=found.compute)
