"""How much of the attention each chunk gets, estimated from a look: what is lost when a chunk is not resident.

Bounds alone say nothing: on the recall models they put 100 % of the attention on paged-out text where the truth is
40 %. But the distance between a chunk's bound and its mass varies little within a column, so the chunks that were
scored exactly calibrate the bounds of the others: then the estimate is within 4 points of the truth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .combine import BLOCK

Floats = npt.NDArray[np.float32]

MOST_COLUMNS = 1024
"""A mean over more columns (layers x query rows x heads) is not worth its time: a sample of them is taken."""


def calibrated(bounds: Floats, known: npt.NDArray[np.intp], masses: Floats) -> Floats:
    """Estimated log masses of n chunks, [columns, n]: exact for those that are known, for the others from their bounds.

    bounds: largest score any key of a chunk can reach, [columns, n]. known: chunks whose log masses `masses`
    [columns, len(known)] are exact. Without any, the bounds themselves.
    """
    if not len(known):
        return bounds
    logs: Floats = bounds + (masses - bounds[:, known]).mean(axis=1, keepdims=True)
    logs[:, known] = masses
    return logs


def attention_shares(bounds: Floats, known: npt.NDArray[np.intp], masses: Floats) -> Floats:
    """Estimated share of the attention that each of n chunks gets; [n], summing to 1. Arguments as of `calibrated`.

    A column counts by the largest share one chunk has in it. Where nothing stands out, a head averages over the text,
    and loses as little as it would by reading a sample; where the attention is on one chunk, its absence is felt.
    """
    stride = len(bounds) // MOST_COLUMNS | 1  # odd, so that every head comes up
    bounds, masses = bounds[::stride], masses[::stride]
    total, weight = np.zeros(bounds.shape[1], np.float32), np.float32(0)
    for first in range(0, len(bounds), BLOCK):
        part, exact = bounds[first : first + BLOCK], masses[first : first + BLOCK]
        logs = calibrated(part, known, exact)
        logs -= logs.max(axis=1, keepdims=True)
        shares = np.exp(logs, out=logs)
        whole = shares.sum(axis=1, keepdims=True)
        focus = 1 / whole  # the largest share, as the largest of `shares` is 1
        # no matrix product: the threads of BLAS would spin for a while after it and take the cores from others
        shares *= focus / whole
        total += shares.sum(axis=0)
        weight += focus.sum()
    mean: Floats = total / weight
    return mean
