"""From scores per layer, head and query row to one score per chunk.

Retrieval lives in one or two heads of one or two layers. So each column is normalised over the chunks by itself, and
the best column decides; averaging over layers would bury it.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Floats, Int64s

BLOCK = 64
"""Columns that are worked on at once: at 256K tokens a megabyte, which stays in the cache."""

MAX_COLUMNS = 1024
"""A mean over more columns (heads x query rows) is not worth its time: a sample of them is taken."""


def log_shares(columns: Floats) -> Floats:
    """Log of the share of attention that each chunk gets in each column; [columns, n]."""
    most = columns.max(axis=1, keepdims=True)
    shares: Floats = columns - (most + np.log(np.exp(columns - most).sum(axis=1, keepdims=True)))
    return shares


def softmax_max(columns: Floats, penalty: Floats | float = 0.0) -> Floats:
    """Log of the largest share of attention a chunk gets in any column, less its penalty; [columns, n] -> [n]."""
    best = np.full(columns.shape[1], -np.inf, np.float32)
    penalties = np.broadcast_to(np.asarray(penalty, np.float32), (len(columns), 1))
    work = np.empty((min(BLOCK, len(columns)), columns.shape[1]), np.float32)
    for first in range(0, len(columns), BLOCK):
        part = columns[first : first + BLOCK]
        shares = work[: len(part)]
        most = part.max(axis=1, keepdims=True)
        np.exp(np.subtract(part, most, out=shares), out=shares)
        whole = most + np.log(shares.sum(axis=1, keepdims=True)) + penalties[first : first + BLOCK]
        np.maximum(best, np.subtract(part, whole, out=shares).max(axis=0), out=best)
    return best


def deciding(columns: Floats, chunks: Int64s, penalty: Floats | float = 0.0) -> tuple[Int64s, Floats]:
    """Of some chunks the column that `softmax_max` has gone by, and the log of the share they get in it."""
    which = np.zeros(len(chunks), np.int64)
    best = np.full(len(chunks), -np.inf, np.float32)
    share = np.full(len(chunks), -np.inf, np.float32)
    penalties = np.broadcast_to(np.asarray(penalty, np.float32), (len(columns), 1))
    for first in range(0, len(columns), BLOCK):
        shares = log_shares(columns[first : first + BLOCK])[:, chunks]
        scores = shares - penalties[first : first + BLOCK]
        at = scores.argmax(axis=0)
        found = np.take_along_axis(scores, at[None], axis=0)[0]
        better = found > best
        best[better], which[better] = found[better], first + at[better]
        share[better] = np.take_along_axis(shares, at[None], axis=0)[0][better]
    return which, share


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
