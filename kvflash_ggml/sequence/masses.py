"""Attention scores of a prompt's end, which the streamed step that reads it computes on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats
from ..errors import UnsupportedError
from ..native.streamed import NOBODY, Asked
from ..policy.base import Exact, Masses, Scorer
from .scores import check_wanted

if TYPE_CHECKING:
    from ..native.engine import Engine
    from .query_ring import QueryRing


class MassReader:
    """Fetches attention scores from the engine for a scorer, which may be anybody's.

    count: how often scores were fetched.
    """

    def __init__(self, engine: Engine, scorer: Scorer, ring: QueryRing) -> None:
        self.count = 0
        self._why = ""  # why the newest step has no scores
        self._engine = engine
        self._scorer = scorer
        self._ring = ring

    @property
    def told(self) -> tuple[str, str]:
        """How the end of the newest prompt was scored, and why not exactly: see `reading.ReadStats`."""
        if not isinstance(self._scorer, Exact):
            return "", ""
        return ("index", self._why) if self._why else ("exact", "")

    def ask(self, end: int, n_chunks: int, rows: int) -> Asked:
        """Return the request to a step that ends with the newest of `rows` queries, in a text of `end` tokens.

        ConfigError for a policy that requests heads or rows that do not exist.
        """
        if not isinstance(self._scorer, Exact):
            return NOBODY
        heads, count = self._scorer.masses_wanted(n_chunks, rows)
        if count <= 0 or len(heads) == 0:
            self._why = "the policy asks for none"
            return NOBODY
        return Asked(check_wanted(self._scorer, heads, count, rows), self._ring.rows_of(end, count))

    def read(self, asked: Asked, chunks: Sequence[int]) -> tuple[int, Masses | None]:
        """Return the transfer that fills the scores of these chunks, which the newest step has seen, and the scores; or
        none.
        """
        if asked is NOBODY:
            return 0, None
        if not chunks:
            self._why = "the last step of the prompt was not streamed"
            return 0, None
        columns = len(asked.heads) * len(asked.rows)
        values: Floats = np.empty((columns, len(chunks)), np.float32)
        try:
            ticket = self._engine.read_masses(values)
        except UnsupportedError as err:
            self._why = str(err)
            return 0, None
        self.count += 1
        self._why = ""
        return ticket, Masses(heads=asked.heads, rows=len(asked.rows), chunks=np.array(chunks, np.int64), values=values)

    def still_wanted(self, masses: Masses | None, n_chunks: int, rows: int) -> Masses | None:
        """Return the scores if the policy would still request the same heads; else None, and `told` says so."""
        if masses is None or not isinstance(self._scorer, Exact):
            return masses
        heads, _ = self._scorer.masses_wanted(n_chunks, rows)
        if np.array_equal(heads, masses.heads):
            return masses
        self._why = "other heads have begun to count since the prompt was read"
        return None
