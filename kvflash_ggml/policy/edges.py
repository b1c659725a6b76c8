"""Where a fact lies across two chunks, the second one has to come with the first.

The query that finds a fact attends to its beginning, so no score of the chunk with its end can be high yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import CHUNK
from .base import Floats, Keys, Look
from .combine import log_shares
from .statistics import split

EDGE = 16
"""Tokens at the end of a chunk from which a short fact may run on."""

FOLLOWED = 8
"""Best chunks that are looked at: each costs reading the keys of a layer."""

BEHIND = 1e-3
"""By how much a follower ranks below the chunk it follows."""


def follow(
    keys: Keys, look: Look, columns: Floats, chunks: Sequence[int], scores: Floats, penalty: Floats | float = 0.0
) -> None:
    """Raise the scores of the chunks after those whose best column attends to their last EDGE keys.

    columns: attention masses of `chunks`, and after them of others that share the attention, [columns, n or more].
    scores: one per chunk of the text, changed in place. penalty: of each column, [columns, 1].
    """
    best = (log_shares(columns) - penalty).argmax(axis=0)
    order = sorted(range(len(chunks)), key=lambda i: (-scores[chunks[i]], chunks[i]))
    for i in order[:FOLLOWED]:
        chunk = chunks[i]
        after = chunk + 1
        if after >= look.n_chunks or after in look.kept or scores[after] >= scores[chunk]:
            continue
        if _attends_to_end(keys, look, int(best[i]), chunk):
            scores[after] = scores[chunk] - BEHIND


def _attends_to_end(keys: Keys, look: Look, column: int, chunk: int) -> bool:
    """Does most of the attention that a column gives a chunk go to its last keys?"""
    for layer, (shape, queries) in enumerate(zip(keys.shapes, split(look, keys.shapes), strict=True)):
        count = look.rows * shape.n_head
        if column < count:
            row, head = divmod(column, shape.n_head)
            kv_head = head // (shape.n_head // shape.n_head_kv)
            scores = shape.scale * (keys.read_layer(chunk, layer)[:, kv_head] @ queries[row, head])
            weights = np.exp(scores - scores.max())
            return bool(2 * weights[CHUNK - EDGE :].sum() > weights.sum())
        column -= count
    raise AssertionError("a column beyond the last layer")
