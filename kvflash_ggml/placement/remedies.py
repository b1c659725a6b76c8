"""What would make a placement fit. Each is tried before it is named."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..errors import DoesNotFit, Remedy
from ..native.sizes import Needs
from . import memory
from .layout import Layout
from .search import SMALL, UBATCHES, Found, Search, pool_range

MIN_MARGIN = 256 * memory.MIB
"""With less left free a backend that grows its own buffers ends the process."""

Change = tuple[str, dict[str, Any], str]
"""Option, fields of the request, cost."""


def does_not_fit(search: Search) -> DoesNotFit:
    """The error for a search that has found nothing."""
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
        needs=itemised(tight),
        remedies=sorted(remedies, key=lambda remedy: not remedy.enough),
    )


def itemised(need: Needs) -> dict[str, int]:
    """What a device is needed for, by the names that users see."""
    return {
        "weights": need.weights,
        "KV": need.kv,
        "state": need.state,
        "compute": need.compute,
        "staging": need.staging,
        "stages": need.stages,
        "exact scores": need.masses,
        "queries": need.queries,
        "drafter": need.extra,
        "margin": need.margin,
    }


def _try(search: Search, tight: Needs, change: Change) -> Remedy | None:
    """What a change brings, None if it frees nothing of the tight device."""
    option, fields, cost = change
    other = _with(search, fields)
    found = other.run()
    layout = other.nearest() if found is None else found.layout
    frees = tight.total - _of(layout, tight.device).total
    if found is None and frees <= 0:
        return None
    return Remedy(option=option, frees=frees, cost=cost, enough=found is not None, changes=fields)


def _of(layout: Layout, device: str) -> Needs:
    return next(need for need in layout.needs if need.device == device)


def _with(search: Search, fields: dict[str, Any]) -> Search:
    layouts = search.layouts
    request = replace(search.request, **fields)
    return Search(search.sizes, (*layouts.devices, layouts.host), request, layouts.compute)


def _changes(search: Search, tight: Needs) -> Iterator[Change]:
    """What the user could ask for instead, what costs least first."""
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
    """As few layers' experts on the host as will do, or all of them."""
    count = sum(layer.experts > 0 for layer in search.sizes.layers)
    asked = search.request.n_cpu_moe or 0
    if search.request.n_cpu_moe is None or search.request.n_gpu_layers == 0 or asked >= count:
        return
    n = bisect_left(range(count), True, lo=asked + 1, key=lambda n: _with(search, {"n_cpu_moe": n}).run() is not None)
    yield f"-ncmoe {n}", {"n_cpu_moe": n}, "every token computes those experts on the host"


def _layers(search: Search) -> Iterator[Change]:
    """As many layers on the devices as fit."""
    asked = search.request.n_gpu_layers
    if asked is None or asked == 0:
        return
    found = _with(search, {"n_gpu_layers": None}).run()
    if found is not None:
        n = _offloaded(search, found)
        yield f"-ngl {n}", {"n_gpu_layers": n}, "every token computes the other layers on the host"


def _offloaded(search: Search, found: Found) -> int:
    return search.layouts.n_layers + 1 - found.layout.bounds[0]


def _context(search: Search) -> Iterator[Change]:
    """The longest context, of halves, that fits."""
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
    """A search that keeps so many more bytes of a device free, or fewer; and the option that says so."""
    layouts, fit = search.layouts, search.request.fit
    margins = {device.name: memory.margin(device, fit) for device in (*layouts.devices, layouts.host)}
    mebibytes = (margins[name] + more) // memory.MIB
    fit = replace(fit, margin={**margins, name: mebibytes * memory.MIB})
    return _with(search, {"fit": fit}), f"-fitt {name}={mebibytes}"
