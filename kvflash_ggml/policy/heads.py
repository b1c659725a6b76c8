"""The attention heads that a policy uses, and the way from their scores to one score per chunk.

One or two heads of one or two layers do the retrieval. So each column is normalised over the chunks by itself, and the
best column decides; an average over layers would bury it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Int64s
from ..constants import CHUNK
from .base import Keys, KeyShape, Pairs, ScoreRequest


def as_heads(pairs: Iterable[tuple[int, int]]) -> Pairs:
    """Return the pairs sorted, each once."""
    return np.array(sorted(set(pairs)), np.int32).reshape(-1, 2)


def every_head(shapes: Sequence[KeyShape]) -> Pairs:
    return as_heads((layer, head) for layer, shape in enumerate(shapes) for head in range(shape.n_head))


def units_of(heads: Pairs, shapes: Sequence[KeyShape]) -> Pairs:
    """Return the KV heads that these query heads read."""
    return as_heads((layer, head // shapes[layer].group) for layer, head in heads.tolist())


def split(request: ScoreRequest, shapes: Sequence[KeyShape]) -> list[Floats]:
    """Return the flat queries of a request as one array [rows, n_head, head] per layer."""
    sizes = [request.rows * s.n_head * s.head for s in shapes]
    parts = np.split(request.queries, np.cumsum(sizes)[:-1])
    return [part.reshape(request.rows, s.n_head, s.head) for part, s in zip(parts, shapes, strict=True)]


def queries_of(heads: Pairs, request: ScoreRequest, shapes: Sequence[KeyShape]) -> Floats:
    """Return the queries of some heads, flat: per head [rows, head]."""
    ends = list(accumulate((request.rows * s.n_head * s.head for s in shapes), initial=0))
    parts = []
    for layer, head in heads.tolist():  # not `split`: every token of an answer comes here, and most layers have no head
        shape = shapes[layer]
        rows = request.queries[ends[layer] : ends[layer + 1]].reshape(request.rows, shape.n_head, shape.head)
        parts.append(rows[:, head].reshape(-1))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def newest(request: ScoreRequest, rows: int, shapes: Sequence[KeyShape]) -> ScoreRequest:
    """Return the request with its newest rows only."""
    if rows >= request.rows:
        return request
    queries = np.concatenate([part[-rows:].reshape(-1) for part in split(request, shapes)])
    return ScoreRequest(
        tokens=request.tokens, n_chunks=request.n_chunks, rows=rows, queries=queries, protected=request.protected
    )


# --- scores per layer, head and query row


BLOCK = 64
"""Columns that are processed at once: a megabyte at 256K tokens, which stays in the cache."""

MAX_COLUMNS = 1024
"""A mean over more columns (heads x query rows) is not worth its time: a sample of them is taken."""


def log_shares(columns: Floats) -> Floats:
    """Return the log of each chunk's share of attention in each column; [columns, n]."""
    most = columns.max(axis=1, keepdims=True)
    shares: Floats = columns - (most + np.log(np.exp(columns - most).sum(axis=1, keepdims=True)))
    return shares


class Columns(NamedTuple):
    """What one pass over the logs of attention finds, [columns, n].

    best: [n], the log of a chunk's largest share in any column, less the column's penalty. wholes: [columns, 1], the
    log of each column's sum. shares: [n], the share of the attention that each chunk gets, summing to 1.
    """

    best: Floats
    wholes: Floats
    shares: Floats


def over_chunks(columns: Floats, penalty: Floats | float = 0.0) -> Columns:
    """Return what is found in the logs of attention masses, [columns, n]. penalty: of each column, [columns, 1].

    In `shares` a column counts by the largest share of one chunk in it. A head without a peak averages over the text,
    and would lose little by reading a sample. Where the attention is on one chunk, its absence is felt.
    """
    n = columns.shape[1]
    best, total, weight = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.float32(0)
    wholes = np.empty((len(columns), 1), np.float32)
    penalties = np.broadcast_to(np.asarray(penalty, np.float32), (len(columns), 1))
    step = len(columns) // MAX_COLUMNS | 1  # odd, so that every row is sampled
    work = np.empty((min(BLOCK, len(columns)), n), np.float32)
    for first in range(0, len(columns), BLOCK):
        part, whole = columns[first : first + BLOCK], wholes[first : first + BLOCK]
        shares = work[: len(part)]
        most = part.max(axis=1, keepdims=True)
        np.exp(np.subtract(part, most, out=shares), out=shares)
        sums = shares.sum(axis=1, keepdims=True)
        np.add(most, np.log(sums), out=whole)
        sampled = slice(-first % step, None, step)
        focus = 1 / sums[sampled]  # the largest share, as the largest of `shares` is 1
        # no matrix product: the threads of BLAS would spin for a while after it and take the cores from others
        total += np.multiply(shares[sampled], focus / sums[sampled], out=shares[sampled]).sum(axis=0)
        weight += focus.sum()
        penalised = whole + penalties[first : first + BLOCK]
        np.maximum(best, np.subtract(part, penalised, out=shares).max(axis=0), out=best)
    return Columns(best, wholes, total / weight)


def deciding(
    columns: Floats, wholes: Floats, chunks: Sequence[int] | Int64s, penalty: Floats | float = 0.0
) -> tuple[Int64s, Floats]:
    """Return for some chunks the column that decided `Columns.best`, and the log of their share in it."""
    shares = columns[:, chunks] - wholes
    which = (shares - penalty).argmax(axis=0)
    return which, np.take_along_axis(shares, which[None], axis=0)[0]


# --- a fact across two chunks: the query attends only to its beginning


EDGE = 16
"""Tokens at the end of a chunk from which a short fact may run on."""

FOLLOWED = 8
"""Best chunks that are checked: each costs reading the keys of a head."""

SUCCESSOR_MARGIN = 1e-3
"""How much a follower ranks below the chunk it follows."""


def boost_successors(
    keys: Keys,
    request: ScoreRequest,
    heads: Pairs,
    masses: Floats,
    wholes: Floats,
    chunks: Sequence[int],
    scores: Floats,
    penalty: Floats | float = 0.0,
) -> None:
    """Raise the score of each chunk that follows a chunk whose best column attends to its last EDGE keys.

    masses: logs of the attention on every chunk of the text, in the columns of `heads` and the rows of the request,
    [columns, n]. wholes: of these, see `Columns`. chunks: whose keys may be read. scores: one per chunk, changed in
    place. penalty: of each column, [columns, 1].
    """
    ordered = np.sort(np.asarray(chunks, np.int64))
    order = ordered[np.argsort(-scores[ordered], kind="stable")[:FOLLOWED]].tolist()
    best, _ = deciding(masses, wholes, order, penalty)
    own = scores[order].tolist()  # a chunk that only follows another one brings none itself
    for chunk, column, score in zip(order, best.tolist(), own, strict=True):
        after = chunk + 1
        if after >= request.n_chunks or after in request.protected or scores[after] >= score:
            continue
        which, row = divmod(column, request.rows)
        layer, head = heads[which].tolist()
        if _attends_to_end(keys, request, layer, head, row, chunk):
            scores[after] = score - SUCCESSOR_MARGIN


def _attends_to_end(keys: Keys, request: ScoreRequest, layer: int, head: int, row: int, chunk: int) -> bool:
    """Return whether most of the attention that a query pays to a chunk goes to its last keys."""
    shape = keys.shapes[layer]
    queries = queries_of(as_heads([(layer, head)]), request, keys.shapes).reshape(request.rows, shape.head)
    scores = shape.scale * (keys.read_head(chunk, layer, head // shape.group) @ queries[row])
    weights = np.exp(scores - scores.max())
    return bool(2 * weights[CHUNK - EDGE :].sum() > weights.sum())
