"""An embedder that makes vectors of a text's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvflash_ggml.errors import ContextFull


@dataclass
class FakeEmbedder:
    """Of a text its first byte, its length and 0; a reranker scores by the length."""

    pooling: str = "mean"
    most: int = 16
    template: str | None = None
    marks: dict[str, list[int]] = field(default_factory=lambda: {"bos": [1], "eos": [2], "sep": [3]})
    seen: list[bytes] = field(default_factory=list)

    def check(self, count: int) -> None:
        if count > self.most:
            raise ContextFull(f"a text of {count} tokens, and {self.most} is the most: --embedding-tokens")

    def embed(self, tokens: Any) -> Any:
        self.check(len(tokens))
        self.seen.append(bytes(tokens.tolist()))
        values = [float(len(tokens))] if self.pooling == "rank" else [float(tokens[0]), float(len(tokens)), 0.0]
        return SimpleNamespace(values=np.array(values, np.float32), tokens=len(tokens))
