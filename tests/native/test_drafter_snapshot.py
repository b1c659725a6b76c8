"""A drafter goes on reading where it was when its session was saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.drafter_models import with_other_tokens
from support.harness import MODELS, go_on
from support.inside import inside

SMALL = MODELS / "scorer-qwen3-q8_0.gguf"
POOLED = {"n_ctx": 5120, "n_ubatch": 128, "kvflash": 512, "kvflash_policy": "drafter", "kvflash_tau": 16}


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory, loaded: None) -> Path:
    return with_other_tokens(SMALL, tmp_path_factory.mktemp("drafter") / "other.gguf")


def window_of(llm: Any) -> Any:
    return inside(llm).drafter_reader.window


@pytest.mark.parametrize("bridged", [False, True])
def test_another_process_goes_on_bit_for_bit(
    bridged: bool, llama: Callable[..., Any], tokens: Any, other_tokens: Path, tmp_path: Path
) -> None:
    """A new Llama loads the drafter anew; only the new tokens go through it."""
    settings = POOLED | {"kvflash_scorer": other_tokens if bridged else SMALL}
    llm = llama(**settings)
    llm.eval(tokens[:3000].tolist())
    go_on(llm, 20)
    llm.save_snapshot(tmp_path / "session.kvs")
    before = window_of(llm).pushed
    want = go_on(llm)
    assert window_of(llm).pushed > before > 2900
    llm.close()

    other = llama(**settings)
    other.load_snapshot(tmp_path / "session.kvs")
    assert go_on(other) == want
    assert other.kvflash.page_ins > 0
    assert 0 < window_of(other).pushed < 200


def test_the_same_process_goes_on_bit_for_bit(llama: Callable[..., Any], tokens: Any) -> None:
    llm = llama(**POOLED, kvflash_scorer=SMALL)
    llm.eval(tokens[:2000].tolist())
    saved = inside(llm).saved(None)
    want = go_on(llm)
    inside(llm).go_on_from(saved)
    assert go_on(llm) == want


def test_another_drafter_reads_the_text_again(
    llama: Callable[..., Any], tokens: Any, other_tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llama(**POOLED, kvflash_scorer=SMALL)
    llm.eval(tokens[:2000].tolist())
    llm.save_snapshot(tmp_path / "session.kvs")
    llm.close()
    other = llama(**POOLED, kvflash_scorer=other_tokens)
    other.load_snapshot(tmp_path / "session.kvs")
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        go_on(other)
    assert window_of(other).pushed > 1900
    assert "the drafter reads the text again" in caplog.text
