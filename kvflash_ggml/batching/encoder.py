"""An encoder in the place of a scheduler's model: embeddings are computed between its steps, and it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SnapshotError
from ..store.swapped import SwappedText
from .model import Residency

if TYPE_CHECKING:
    from ..llama.llama import Llama

_COUNTERS = (
    "pool", "share", "length", "chunks", "resident", "page_ins", "page_outs", "page_bytes", "host_bytes",
    "spilled_bytes", "device_bytes", "drafted", "accepted", "replaced", "drafted_total", "accepted_total",
    "replaced_total",
)  # fmt: skip


class EmbeddingModel:
    """What a scheduler asks of a `ServedText` on which no request begins: the server refuses those that ask for text.

    llm: a Llama without a pool. n_ctx: tokens of a text that is embedded, at most.
    """

    step_rows = prompt_rows = 1
    readings: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    stateful = False
    beside: tuple[()] = ()
    fingerprint = made = "encoder"
    tokens = np.empty(0, np.int32)

    def __init__(self, llm: Llama, n_ctx: int) -> None:
        self._llm = llm
        self.n_ctx = n_ctx

    def when_full(self, give_way: Callable[[], bool]) -> None:
        """Do nothing: there are no texts to swap out."""

    def explain(self, wanted: bool) -> None:
        """Do nothing: no chunk comes."""

    def reset(self) -> None:
        """Do nothing: there is no text."""

    def write(self, swapped: SwappedText, path: Path, *, sync: bool) -> None:
        """Do nothing: there are no texts to write."""

    def read(self, path: Path) -> SwappedText:
        raise SnapshotError(f"{path} has a conversation, and an encoder has none")

    def residency(self) -> Residency:
        return Residency()

    def counters(self) -> Mapping[str, Any]:
        return {**dict.fromkeys(_COUNTERS, 0), "evicted_mass": None, "policy": None}

    def close(self) -> None:
        self._llm.close()
