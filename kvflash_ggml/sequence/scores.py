"""What comes back from a policy, which may be anybody's, before anything is decided by it."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats
from ..errors import ConfigError, NotFinite
from ..policy.base import Pairs, Scorer


def check_scores(scorer: Scorer, scores: object, n_chunks: int, queries: Floats | None = None) -> Floats | None:
    """The scores as they are. ConfigError that names the policy unless they are what `Scorer.score` has to return;
    NotFinite if it cannot be blamed, for the `queries` that it was given are no numbers.
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
    """The heads as the engine reads them. ConfigError that names the policy unless they are what `Exact.masses_wanted`
    has to return, and `count` no more than the `rows` there are. Which heads there are is for the engine to check.
    """
    pairs = np.asarray(heads)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu" or count > rows:
        raise ConfigError(
            f"policy '{scorer.name}' wants masses of heads of shape {pairs.shape} ({pairs.dtype}) for {count} of "
            f"{rows} queries: masses_wanted() must return pairs of integers, and no more queries than there are"
        )
    return np.ascontiguousarray(pairs, np.int32)
