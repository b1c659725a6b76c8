"""Which passages a preview reads."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.llama.preview import FIRST, LAST, passages

WORDS = 500
FACT = np.arange(WORDS, WORDS + 12, dtype=np.int32)
"""Tokens that stand nowhere else."""


def text(at: int, size: int = 8000) -> np.ndarray:
    ids = np.random.default_rng(1).integers(0, WORDS, size).astype(np.int32)
    ids[at : at + len(FACT)] = FACT
    return np.concatenate([ids, FACT[3:6], np.arange(6, dtype=np.int32)])


@pytest.mark.parametrize("at", [0, 60, 64, 90, 1000, 4019, 7980, 7850])
def test_a_fact_that_is_asked_for_is_read_whole(at: int) -> None:
    ids = text(at)
    places = passages(ids, 400)
    assert set(range(at, min(at + len(FACT), 8000))) <= set(places.tolist())
    assert len(places) <= 400
    assert (np.diff(places) > 0).all()
    assert set(range(FIRST)) | set(range(len(ids) - LAST, len(ids))) <= set(places.tolist())


def test_a_rare_token_counts_more_than_frequent_ones() -> None:
    ids = np.tile(np.arange(50, dtype=np.int32), 200)
    ids[5000] = 99
    ids[-10] = 99
    assert 5000 in passages(ids, FIRST + LAST + 64)


def test_nothing_is_read_where_nothing_is_shared() -> None:
    ids = np.concatenate([np.zeros(5000, np.int32), np.arange(1, 300, dtype=np.int32)])
    assert len(passages(ids, 1000)) < FIRST + 2 * LAST + 300


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="preview"):
        KVFlashConfig(reading="preview", answer="exact")
    with pytest.raises(ConfigError, match="preview"):
        KVFlashConfig(reading="preview", parallel=2)
    with pytest.raises(ConfigError, match="preview_share"):
        KVFlashConfig(reading="preview", preview_share=0)
