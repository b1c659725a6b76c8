"""Where a fact lies across two chunks, the second one has to come with the first.

The query that finds a fact attends to its beginning, so no score of the chunk with its end can be high yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Floats
from ..constants import CHUNK
from .base import Keys, ScoreRequest
from .combine import log_shares
from .heads import Heads, split

EDGE = 16
"""Tokens at the end of a chunk from which a short fact may run on."""

FOLLOWED = 8
"""Best chunks that are looked at: each costs reading the keys of a head."""

SUCCESSOR_MARGIN = 1e-3
"""By how much a follower ranks below the chunk it follows."""


def boost_successors(
    keys: Keys,
    request: ScoreRequest,
    heads: Heads,
    masses: Floats,
    chunks: Sequence[int],
    scores: Floats,
    penalty: Floats | float = 0.0,
) -> None:
    """Raise the scores of the chunks after those whose best column attends to their last EDGE keys.

    masses: logs of the attention on every chunk of the text, in the columns of `heads` and the rows of the request,
    [columns, n]. chunks: whose keys may be looked at. scores: one per chunk, changed in place. penalty: of each column,
    [columns, 1].
    """
    order = sorted(chunks, key=lambda c: (-scores[c], c))[:FOLLOWED]
    best = (log_shares(masses)[:, order] - penalty).argmax(axis=0)
    for chunk, column in zip(order, best.tolist(), strict=True):
        after = chunk + 1
        if after >= request.n_chunks or after in request.protected or scores[after] >= scores[chunk]:
            continue
        which, row = divmod(column, request.rows)
        layer, head = heads[which].tolist()
        if _attends_to_end(keys, request, layer, head, row, chunk):
            scores[after] = scores[chunk] - SUCCESSOR_MARGIN


def _attends_to_end(keys: Keys, request: ScoreRequest, layer: int, head: int, row: int, chunk: int) -> bool:
    """Does most of the attention that a query gives a chunk go to its last keys?"""
    shape, queries = keys.shapes[layer], split(request, keys.shapes)[layer]
    scores = shape.scale * (keys.read_head(chunk, layer, head // shape.group) @ queries[row, head])
    weights = np.exp(scores - scores.max())
    return bool(2 * weights[CHUNK - EDGE :].sum() > weights.sum())
