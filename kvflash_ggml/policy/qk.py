"""The default policy: the model's own queries against its own keys.

Two stages. Bounds of each chunk's keys (per group of rows the largest and smallest values: Quest, arXiv 2406.10774)
say how much attention any of its keys could draw, and give a shortlist. The real keys of the shortlist, which the host
holds anyway, then give the attention mass itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base import Floats, Keys, Look, register
from .combine import COMBINE
from .edges import follow

LOWER = 1e4
"""Puts every chunk outside the shortlist below every chunk inside, in the order of their bounds."""


class QKScorer:
    """group: rows per bound. shortlist: share of the chunks that is scored exactly. combine: "softmax" or "z".

    followers: recall the chunk after one whose end is attended to as well.
    """

    name = "qk"

    def __init__(
        self,
        *,
        group: int = 32,
        shortlist: float = 0.05,
        least: int = 32,
        combine: str = "softmax",
        query_rows: int = 8,
        followers: bool = True,
    ) -> None:
        self.query_rows = query_rows
        self._group = group
        self._share = shortlist
        self._least = least
        self._combine = COMBINE[combine]
        self._follow = followers

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys
        # pages of this array are touched only as the text grows
        self._bounds: npt.NDArray[np.uint8] = np.empty((n_chunks, keys.bounds_size(self._group)), np.uint8)

    def seal(self, chunk: int) -> None:
        self._keys.bounds(chunk, self._group, self._bounds[chunk])

    def cut(self, n_chunks: int) -> None:
        """Rows of chunks that are gone are overwritten when others take their place."""

    def score(self, look: Look) -> Floats | None:
        if look.n_chunks == 0:
            return None
        coarse = self._combine(self._keys.score_bounds(self._group, self._bounds[: look.n_chunks], look))
        free = np.array([c for c in range(look.n_chunks) if c not in look.kept], np.intp)
        count = min(len(free), max(self._least, int(self._share * look.n_chunks)))
        if count == 0:
            return coarse
        chosen = free[np.argsort(-coarse[free], kind="stable")[:count]]
        scores = coarse - LOWER
        masses = self._keys.score_keys(chosen.tolist(), look)
        scores[chosen] = self._combine(masses)
        if self._follow:
            follow(self._keys, look, masses, chosen.tolist(), scores)
        return scores

    @property
    def index_bytes(self) -> int:
        return self._bounds.nbytes

    def close(self) -> None:
        del self._bounds


@register("qk")
def default() -> QKScorer:
    return QKScorer()
