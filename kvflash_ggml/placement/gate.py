"""Is a pool redundant?"""

from __future__ import annotations

from dataclasses import replace

from .search import Found, Search


def is_redundant(search: Search, found: Found) -> bool:
    """A full cache would fit too, with everything on the devices and every margin kept.

    Only the full cache decides, and only after everything that can move an expert to the host has been counted: a pool
    that is what keeps the experts on the device is never redundant.
    """
    layouts, shape = search.layouts, found.layout.shape
    if found.level != 1 or shape.pool >= layouts.full or search.sizes.fixed.get(layouts.host.name):
        return False
    full = replace(shape, pool=layouts.full, n_ubatch=search.ubatches[-1])
    return layouts.find(full, 0, "device") is not None
