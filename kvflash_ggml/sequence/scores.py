"""Checks the results of a policy, which may be anybody's, before they are used."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats
from ..errors import ConfigError, NotFinite
from ..policy.base import Pairs, Scorer


def check_scores(scorer: Scorer, scores: object, n_chunks: int, queries: Floats | None = None) -> Floats | None:
    """Return the scores. ConfigError that names the policy if they break the contract of `Scorer.score`; NotFinite if
    the `queries` that the policy got are not finite, so that it is not to blame.
    """
    if scores is None:
        return None
    if not isinstance(scores, np.ndarray) or scores.shape != (n_chunks,) or scores.dtype.kind != "f":
        what = f"{scores.dtype} of shape {scores.shape}" if isinstance(scores, np.ndarray) else type(scores).__name__
        raise ConfigError(
            f"policy '{scorer.name}' returned {what} for {n_chunks} chunks: score() must return an array of floats, "
            f"one for each chunk, or None"
        )
    if np.isnan(scores).any():
        if queries is not None and not np.isfinite(queries).all():
            raise NotFinite(
                "the queries of the newest tokens are not finite, nor are scores: reset, and read the text again"
            )
        raise ConfigError(f"policy '{scorer.name}' returned NaN: a score must be a number, or infinite to be the first")
    return scores


def check_wanted(scorer: Scorer, heads: object, count: int, rows: int) -> Pairs:
    """Return the heads as the engine reads them.

    ConfigError that names the policy if they break the contract of `Exact.masses_wanted`, or `count` exceeds the
    available `rows`. The engine checks which heads exist.
    """
    pairs = np.asarray(heads)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu" or count > rows:
        raise ConfigError(
            f"policy '{scorer.name}' wants masses of heads of shape {pairs.shape} ({pairs.dtype}) for {count} of "
            f"{rows} queries: masses_wanted() must return pairs of integers, and no more queries than there are"
        )
    return np.ascontiguousarray(pairs, np.int32)
