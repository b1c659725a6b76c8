"""What a streamed step attends to, as a value. Nothing native is loaded by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class MassRequest(NamedTuple):
    """Which attention masses a streamed step computes on the way.

    heads: query heads, (pooled layer, head) [n, 2], ascending. rows: of `PagedEngine.read_queries`, whose queries
    ask. Both are contiguous.
    """

    heads: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]


NO_MASSES = MassRequest(np.empty((0, 2), np.int32), np.empty(0, np.int32))


class Streamed(NamedTuple):
    """In place of the pool, and before its own tokens.

    images: addresses of whole chunks, at least one. rows: so many of block `block` follow them. mask: [count, n] in
    half precision, for the rows of the stage from `first` on, and at least up to its rows rounded up to 256.
    wanted: what `PagedEngine.read_masses` gives then.
    """

    images: Sequence[int] | npt.NDArray[np.uint64]
    rows: int
    block: int
    mask: npt.NDArray[np.float16]
    first: int
    wanted: MassRequest = NO_MASSES
