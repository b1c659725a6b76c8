"""From what there is and what is asked to a placement, or to an error that says what would fit. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from . import overrides
from .compute import Compute
from .gate import is_redundant
from .remedies import does_not_fit
from .search import Found, Search
from .sizes import Device, ModelSizes, Placement, Request


def plan(sizes: ModelSizes, devices: tuple[Device, ...], request: Request, compute: Compute) -> Placement:
    """The best placement. devices: the host last. DoesNotFit if what is asked has none."""
    search = Search(sizes, devices, request, compute)
    found = search.run()
    if found is None:
        raise does_not_fit(search)
    redundant = is_redundant(search, found)
    if redundant and request.pool == "auto" and request.fit.prefer == "exact":
        return plan(sizes, devices, replace(request, pool=None), compute)
    return _placement(search, found, redundant=redundant)


def _placement(search: Search, found: Found, *, redundant: bool) -> Placement:
    request, layouts, layout = search.request, search.layouts, found.layout
    shape, host = layout.shape, layout.needs[-1]
    split = request.tensor_split
    if split is None and len(layouts.devices) > 1 and found.level != 4:
        split = tuple(end - begin for begin, end in pairwise(layout.bounds))
    ours = overrides.experts(host.experts, host.device)
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
