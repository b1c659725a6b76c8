"""Scores before they are used: attention scores that a streamed step computes, and checks of a policy's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats
from ..errors import ConfigError, NotFinite, UnsupportedError
from ..native.streamed import NO_MASSES, MassRequest
from ..policy.base import Exact, Masses, Pairs, Scorer

if TYPE_CHECKING:
    from ..native.engine import PagedEngine
    from .query_ring import QueryRing


class AttentionScores:
    """Fetches attention scores from the engine for a scorer, which may be anybody's.

    room: returns room for so many floats, valid until the next call. count: how often scores were fetched.
    """

    def __init__(self, engine: PagedEngine, scorer: Scorer, ring: QueryRing, room: Callable[[int], Floats]) -> None:
        self.count = 0
        self._room = room
        self._why = ""  # why the newest step has no scores
        self._engine = engine
        self._scorer = scorer
        self._ring = ring

    @property
    def ranked(self) -> tuple[str, str]:
        """How the end of the newest prompt was scored, and why not exactly: see `reading.ReadStats`."""
        if not isinstance(self._scorer, Exact):
            return "", ""
        return ("index", self._why) if self._why else ("exact", "")

    def ask(self, end: int, n_chunks: int, rows: int) -> MassRequest:
        """Return the request to a step that ends with the newest of `rows` queries, in a text of `end` tokens.

        ConfigError for a policy that requests heads or rows that do not exist.
        """
        if not isinstance(self._scorer, Exact):
            return NO_MASSES
        heads, count = self._scorer.masses_wanted(n_chunks, rows)
        if count <= 0 or len(heads) == 0:
            self._why = "the policy asks for none"
            return NO_MASSES
        return MassRequest(check_wanted(self._scorer, heads, count, rows), self._ring.rows_of(end, count))

    def read(self, wanted: MassRequest, chunks: Sequence[int]) -> tuple[int, Masses | None]:
        """Return the transfer that fills the scores of these chunks, which the newest step has seen, and the scores; or
        none.
        """
        if wanted is NO_MASSES:
            return 0, None
        if not chunks:
            self._why = "the last step of the prompt was not streamed"
            return 0, None
        columns = len(wanted.heads) * len(wanted.rows)
        values = self._room(columns * len(chunks)).reshape(columns, len(chunks))
        try:
            ticket = self._engine.read_masses(values)
        except UnsupportedError as err:
            self._why = str(err)
            return 0, None
        self.count += 1
        self._why = ""
        return ticket, Masses(
            heads=wanted.heads, rows=len(wanted.rows), chunks=np.array(chunks, np.int64), values=values
        )

    def still_wanted(self, masses: Masses | None, n_chunks: int, rows: int) -> Masses | None:
        """Return the scores if the policy would still request the same heads; else None, and `ranked` says so."""
        if masses is None or not isinstance(self._scorer, Exact):
            return masses
        heads, _ = self._scorer.masses_wanted(n_chunks, rows)
        if np.array_equal(heads, masses.heads):
            return masses
        self._why = "other heads have begun to count since the prompt was read"
        return None


# --- checks of a policy, which may be anybody's


def check_scores(
    scorer: Scorer, scores: object, n_chunks: int, queries: Floats | None = None, masses: Masses | None = None
) -> Floats | None:
    """Return the scores. ConfigError that names the policy if they break the contract of `Scorer.score`; NotFinite if
    the `queries` or `masses` that the policy got are no numbers, so that it is not to blame.
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
        sound = queries is None or np.isfinite(queries).all()
        if not sound or (masses is not None and np.isnan(masses.values).any()):
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
