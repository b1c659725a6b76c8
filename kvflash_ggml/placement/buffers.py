"""What a pool takes of a device beside its slots: pages on their way, and layer buffers."""

from __future__ import annotations

from collections.abc import Collection

MASK = 2
"""Bytes of one mask value: of a token of the text, and a row of a step."""

STAGED_PAGES = 8
"""Pages that the staging area of a device holds."""


def buffer_row(shapes: Collection[tuple[int, int]], n_ubatch: int, *, overlaps: bool) -> int:
    """Return the bytes of one token in the layer buffers of a device. shapes: of K and V rows of its layers.

    The buffers hold a layer of each shape, or two where the next one is copied meanwhile, and a column of the mask.
    """
    return (2 if overlaps else 1) * sum(map(sum, shapes)) + MASK * n_ubatch
