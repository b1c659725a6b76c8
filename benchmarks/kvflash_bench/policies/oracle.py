"""The attention mass itself, from every key: what the best policy would know. Too slow for anything but comparisons."""

from __future__ import annotations

from kvflash_ggml.arrays import Floats
from kvflash_ggml.policy.base import Keys, ScoreRequest, register
from kvflash_ggml.policy.heads import over_chunks


@register("oracle")
class OracleScorer:
    """Scores are logs of the largest share of attention in any layer, head and row."""

    name = "oracle"
    query_rows = 8
    index_bytes = 0

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys

    def seal(self, chunk: int) -> None: ...

    def truncate(self, n_chunks: int) -> None: ...

    def score(self, request: ScoreRequest) -> Floats | None:
        if request.n_chunks == 0:
            return None
        return over_chunks(self._keys.score_keys(range(request.n_chunks), request)).best

    def close(self) -> None: ...
