"""The default policy: the model's own queries against its own keys.

Two stages. Bounds of each chunk's keys (per group of rows the largest and smallest values: Quest, arXiv 2406.10774)
say how much attention any of its keys could draw, and give a shortlist. The real keys of the shortlist, which the host
holds anyway, then give the attention mass itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Floats, Keys, KeyShape, Look, register
from .combine import COMBINE
from .edges import follow
from .share import attention_shares, calibrated

LOWER = 1e4
"""Puts every chunk outside the shortlist below every chunk inside, in the order of their bounds."""

KEPT_KNOWN = 8
"""Of the chunks that stay anyway, so many of the first and the last are scored exactly too: see `_rivals`."""

LOOKS_KNOWN = 4
"""Looks whose estimated shares are at hand: more than can be under way at once."""


class QKScorer:
    """group: rows per bound. shortlist: share of the chunks that is scored exactly. combine: "softmax" or "z".

    query_rows: enough for a question and the marks of a chat template after it. age: by how much a query counts less
    for each token after it, in the units of the scores: the end of a question says best what is looked for. followers:
    recall the chunk after one whose end is attended to as well.
    """

    name = "qk"

    def __init__(
        self,
        *,
        group: int = 32,
        shortlist: float = 0.03,
        least: int = 32,
        combine: str = "softmax",
        query_rows: int = 32,
        age: float = 0.02,
        followers: bool = True,
    ) -> None:
        self.query_rows = query_rows
        self.group = group
        self._share = shortlist
        self._least = least
        self._combine = COMBINE[combine]
        self._age = age
        self._follow = followers
        self._bounds: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._shares: deque[tuple[Floats, Floats]] = deque(maxlen=LOOKS_KNOWN)

    def shortlisted(self, n_chunks: int) -> int:
        """How many chunks of a text are scored exactly."""
        return max(self._least, int(self._share * n_chunks))

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys
        # pages of this array are touched only as the text grows
        self._bounds = np.empty((n_chunks, keys.bounds_size(self.group)), np.uint8)

    def seal(self, chunk: int) -> None:
        self._keys.bounds(chunk, self.group, self._bounds[chunk])

    def cut(self, n_chunks: int) -> None:
        """Rows of chunks that are gone are overwritten when others take their place."""

    def dump(self, n_chunks: int) -> npt.NDArray[np.uint8]:
        rows: npt.NDArray[np.uint8] = self._bounds[:n_chunks].copy()
        return rows

    def load(self, rows: npt.NDArray[np.uint8]) -> None:
        self._bounds[: len(rows)] = rows

    def score(self, look: Look) -> Floats | None:
        if look.n_chunks == 0:
            return None
        bounds = self._keys.score_bounds(self.group, self._bounds[: look.n_chunks], look)
        ages = self._age * row_ages(look, self._keys.shapes)
        kept, rivals = self._rivals(look, len(bounds))
        coarse = self._combine(calibrated(bounds, kept, rivals), ages)
        free = np.array([c for c in range(look.n_chunks) if c not in look.kept], np.intp)
        count = min(len(free), self.shortlisted(look.n_chunks))
        if count == 0:
            return coarse
        chosen = free[np.argsort(-coarse[free], kind="stable")[:count]]
        scores = coarse - LOWER
        masses = np.concatenate([self._keys.score_keys(chosen.tolist(), look), rivals], axis=1)
        scores[chosen] = self._combine(masses, ages)[:count]
        if self._follow:
            follow(self._keys, look, masses, chosen.tolist(), scores, ages)
        self._shares.append((scores, attention_shares(bounds, np.concatenate([chosen, kept]), masses)))
        return scores

    def _rivals(self, look: Look, n_columns: int) -> tuple[npt.NDArray[np.intp], Floats]:
        """Some of the chunks that stay anyway, and their log masses.

        A head that has nothing to look for rests on the first tokens or the newest. Without them beside the others,
        whichever chunk it likes a little would seem to have all its attention.
        """
        kept = sorted(c for c in look.kept if c < look.n_chunks)
        kept = kept[:KEPT_KNOWN] + kept[KEPT_KNOWN:][-KEPT_KNOWN:]
        masses = self._keys.score_keys(kept, look) if kept else np.empty((n_columns, 0), np.float32)
        return np.array(kept, np.intp), masses

    def shares_of(self, scores: Floats) -> Floats | None:
        """Estimated share of the attention on each chunk at the look that gave these scores; None if long past."""
        return next((shares for known, shares in list(self._shares) if known is scores), None)

    @property
    def index_bytes(self) -> int:
        return self._bounds.nbytes

    def close(self) -> None:
        self._bounds = np.empty((0, 0), np.uint8)
        self._shares.clear()


def row_ages(look: Look, shapes: Sequence[KeyShape]) -> Floats:
    """How many queries are newer than that of each column; [columns, 1]."""
    ages = np.arange(look.rows - 1, -1, -1, dtype=np.float32)
    return np.concatenate([np.repeat(ages, shape.n_head) for shape in shapes])[:, None]


@register("qk")
def default() -> QKScorer:
    return QKScorer()
