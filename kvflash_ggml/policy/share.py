"""How much of the attention each chunk gets: what is lost when a chunk is not resident."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats
from .combine import BLOCK

MAX_COLUMNS = 1024
"""A mean over more columns (heads x query rows) is not worth its time: a sample of them is taken."""


def attention_shares(masses: Floats) -> Floats:
    """The share of the attention that each of n chunks gets; [n], summing to 1. masses: their logs, [columns, n].

    A column counts by the largest share one chunk has in it. Where nothing stands out, a head averages over the text,
    and loses as little as it would by reading a sample; where the attention is on one chunk, its absence is felt.
    """
    masses = masses[:: len(masses) // MAX_COLUMNS | 1]  # an odd step, so that every row comes up
    total, weight = np.zeros(masses.shape[1], np.float32), np.float32(0)
    for first in range(0, len(masses), BLOCK):
        part = masses[first : first + BLOCK]
        shares = np.exp(part - part.max(axis=1, keepdims=True))
        whole = shares.sum(axis=1, keepdims=True)
        focus = 1 / whole  # the largest share, as the largest of `shares` is 1
        # no matrix product: the threads of BLAS would spin for a while after it and take the cores from others
        shares *= focus / whole
        total += shares.sum(axis=0)
        weight += focus.sum()
    mean: Floats = total / weight
    return mean
