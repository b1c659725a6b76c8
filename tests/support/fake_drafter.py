"""A drafter without a model: it remembers its text, and its scores are what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvflash_ggml.constants import CHUNK


class FakeDrafter:
    """score: of tokens, by their numbers; a chunk has the best of its tokens. grain: it can cut to multiples of it."""

    def __init__(self, n_ctx: int = 1 << 16, *, grain: int = 1, score: Callable[[Any], Any] | None = None) -> None:
        self.n_ctx = n_ctx
        self.text: list[int] = []
        self.pushes: list[int] = []
        self.closed = 0
        self.fail: BaseException | None = None
        self.fail_truncate: BaseException | None = None
        self._grain = grain
        self._score = score or (lambda token: -token.astype(np.float32))

    @property
    def length(self) -> int:
        return len(self.text)

    def push(self, tokens: Any) -> None:
        if self.fail is not None:
            raise self.fail
        assert len(tokens) > 0
        self.text += tokens.tolist()
        assert len(self.text) <= self.n_ctx
        self.pushes.append(len(tokens))

    def truncate(self, length: int) -> int:
        if self.fail_truncate is not None:
            raise self.fail_truncate
        assert 0 <= length <= len(self.text)
        del self.text[length // self._grain * self._grain :]
        return len(self.text)

    def score_tokens(self) -> Any:
        sealed = len(self.text) // CHUNK * CHUNK
        return np.asarray(self._score(np.array(self.text[:sealed], np.int32)), np.float32).reshape(-1)

    def score_chunks(self) -> Any:
        return self.score_tokens().reshape(-1, CHUNK).max(axis=1)

    def close(self) -> None:
        self.closed += 1
