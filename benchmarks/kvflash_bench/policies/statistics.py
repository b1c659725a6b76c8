"""Baselines from the literature: one statistic per chunk, combined as their authors do.

qk-mean: cosine with the mean post-RoPE key, max over heads, mean over layers. quest: min/max bounds of the whole chunk
(arXiv 2406.10774). meanstd: mean plus a multiple of the standard deviation along the query (arXiv 2605.27740).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from kvflash_ggml.arrays import Floats
from kvflash_ggml.policy.base import Keys, KeyShape, Rows, ScoreRequest, register
from kvflash_ggml.policy.heads import split
from kvflash_ggml.state.statistics import RowForm

MISSING = -2.0
"""Below any cosine: a chunk without a finite statistic must not outrank one with a negative correlation."""


class StatisticScorer(ABC):
    """Keeps float32 statistics per layer and chunk: [n_chunks, n_statistics, n_head_kv, head]."""

    name: str
    query_rows = 1
    n_statistics: int

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys
        self._index: list[Floats] = [
            np.empty((n_chunks, self.n_statistics, s.n_head_kv, s.head), np.float32) for s in keys.shapes
        ]

    def seal(self, chunk: int) -> None:
        for index, keys in zip(self._index, self._keys.read(chunk), strict=True):
            index[chunk] = self.statistics(keys)

    def truncate(self, n_chunks: int) -> None:  # noqa: B027 (rows of chunks that are gone are overwritten)
        ...

    @property
    def layout(self) -> RowForm:
        return RowForm(f"{self.name} float32", sum(index[:1].nbytes for index in self._index))

    def dump(self, n_chunks: int) -> Rows:
        return list(np.concatenate([_rows(index, n_chunks) for index in self._index], axis=1))

    def load(self, rows: Rows) -> None:
        at = 0
        for index in self._index:
            part = _rows(index, len(rows))
            for ours, theirs in zip(part, rows, strict=True):
                ours[:] = theirs[at : at + part.shape[1]]
            at += part.shape[1]

    def score(self, request: ScoreRequest) -> Floats | None:
        if request.n_chunks == 0:
            return None
        layers = [
            self._layer(index[: request.n_chunks], query, shape)
            for index, query, shape in zip(
                self._index, split(request, self._keys.shapes), self._keys.shapes, strict=True
            )
        ]
        scores = np.mean(layers, axis=0, dtype=np.float32)
        return np.where(np.isfinite(scores), scores, np.float32(MISSING))

    def _layer(self, index: Floats, query: Floats, shape: KeyShape) -> Floats:
        """Max over rows and heads of the column scores; [n_chunks]."""
        group = shape.n_head // shape.n_head_kv
        grouped = query.reshape(len(query), shape.n_head_kv, group, shape.head)
        best = np.full(len(index), -np.inf, np.float32)
        for h in range(shape.n_head_kv):
            columns = grouped[:, h].reshape(-1, shape.head)
            best = np.maximum(best, self.columns(index[:, :, h], columns).max(axis=0))
        return best

    @property
    def index_bytes(self) -> int:
        return sum(index.nbytes for index in self._index)

    def close(self) -> None:
        self._index.clear()

    @abstractmethod
    def statistics(self, keys: Floats) -> Floats:
        """Keys [CHUNK, n_head_kv, head] -> [n_statistics, n_head_kv, head]."""

    @abstractmethod
    def columns(self, index: Floats, queries: Floats) -> Floats:
        """Statistics [n, n_statistics, head] and queries [c, head] of one KV head -> scores [c, n]."""


def _rows(index: Floats, n_chunks: int) -> npt.NDArray[np.uint8]:
    """The first chunks of an index as bytes, a row each."""
    return index[:n_chunks].reshape(n_chunks, math.prod(index.shape[1:])).view(np.uint8)


@register("qk-mean")
class MeanScorer(StatisticScorer):
    name = "qk-mean"
    n_statistics = 1

    def statistics(self, keys: Floats) -> Floats:
        total = keys.sum(axis=0, dtype=np.float64)
        unit: Floats = (total / (np.sqrt((total**2).sum(axis=-1, keepdims=True)) + 1e-6)).astype(np.float32)
        return unit[None]

    def columns(self, index: Floats, queries: Floats) -> Floats:
        unit = queries / (np.linalg.norm(queries, axis=-1, keepdims=True) + 1e-6)
        scores: Floats = unit @ index[:, 0].T
        return scores


@register("quest")
class QuestScorer(StatisticScorer):
    name = "quest"
    n_statistics = 2

    def statistics(self, keys: Floats) -> Floats:
        return np.stack([keys.max(axis=0), keys.min(axis=0)])

    def columns(self, index: Floats, queries: Floats) -> Floats:
        most: Floats = np.maximum(queries, 0) @ index[:, 0].T + np.minimum(queries, 0) @ index[:, 1].T
        return most


@register("meanstd")
class MeanStdScorer(StatisticScorer):
    name = "meanstd"
    n_statistics = 2
    deviations = 1.0

    def statistics(self, keys: Floats) -> Floats:
        return np.stack([keys.mean(axis=0), keys.std(axis=0)])

    def columns(self, index: Floats, queries: Floats) -> Floats:
        scores: Floats = queries @ index[:, 0].T + self.deviations * np.abs(queries) @ index[:, 1].T
        return scores
