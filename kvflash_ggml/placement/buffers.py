"""What a pool takes of a device beside its slots: pages on their way, layer buffers, and an index."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import KVFlashConfig
    from ..native.sizes import LayerSizes

INDEX_BLOCK, INDEX_BLOCK_BYTES = 32, 18
"""Values of a block of Q4_0, and its bytes."""

F16, F32 = 2, 4
"""Bytes of a float."""

MASK = 2
"""Bytes of one mask value: of a token of the text, and a row of a step."""

STAGED_PAGES = 8
"""Pages that the staging area of a device holds."""


def buffer_row(shapes: Collection[tuple[int, int]], n_ubatch: int, *, overlaps: bool) -> int:
    """Return the bytes of one token in the layer buffers of a device. shapes: of K and V rows of its layers.

    The buffers hold a layer of each shape, or two where the next one is copied meanwhile, and a column of the mask.
    """
    return (2 if overlaps else 1) * sum(map(sum, shapes)) + MASK * n_ubatch


def scores_by_index(name: str) -> bool:
    """Report whether the device of this name has the kernel that scores chunks by an index."""
    return name.startswith("CUDA")


def index_bytes(layers: Iterable[LayerSizes], work: int, tokens: int, config: KVFlashConfig, name: str) -> int:
    """Return the bytes that the index of each sequence takes of the device of this name, which holds all layers, at
    most. work: multiplications of a token. tokens: of a context.
    """
    if not scores_by_index(name):
        return 0
    token = sum(
        layer.heads_kv * -(-layer.query // (F32 * layer.heads) // INDEX_BLOCK) * INDEX_BLOCK_BYTES
        for layer in layers
        if layer.heads
    )
    return min(config.index_limit(work), tokens * token)
