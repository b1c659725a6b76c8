"""Small snapshot files, made without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.snapshot.container import Writer
from kvflash_ggml.snapshot.format import LEDGER

PAGE = 256
FACTS: dict[str, Any] = {
    "length": 150,
    "checkpoints": [64],
    "policy": {"name": "qk"},
    "fingerprint": {"architecture": "qwen3", "model": "abc123", "llama.cpp": "0c1e"},
    "settings": {"pool": 1024, "n_ctx": 4096, "policy": "lru"},
}

EXTREMES = [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -1]
NONSENSE = [1.5, "7", None, True, [], {}, float("nan"), float("inf"), [[0]]]
"""Values that a field of a directory should not have."""


def write(
    path: Path, *, blocks: Sequence[int] = (0, -1, 1), compress: bool = False, facts: dict[str, Any] | None = None
) -> Path:
    """A snapshot of a chunk per block; those with a block of -1 are not resident."""
    ledger = np.zeros(len(blocks), LEDGER)
    ledger["block"] = blocks
    with path.open("wb") as file:
        writer = Writer(file, compress=compress)
        writer.section("tokens", np.arange(150, dtype="<i4"))
        writer.section("ledger", ledger)
        writer.section("statistics", bytes(100))
        writer.pages("pages", [bytes([number]) * PAGE for number in range(len(blocks))])
        writer.close("snapshot", FACTS if facts is None else facts)
    return path


def damage(path: Path, at: int) -> None:
    """Turn one byte around."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
