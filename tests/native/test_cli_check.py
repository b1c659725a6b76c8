"""`kvflash-run check` on real models: the pool reads with the bits of the full cache, and answers with the rest."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvflash_ggml.cli import checking, main

pytestmark = pytest.mark.usefixtures("known_heads")

FIXED = {"n_batch": 128, "n_ubatch": 128, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_both_caches_are_asked_the_same(kind: str, model: Callable[[str], Path], loaded: None) -> None:
    from kvflash_ggml import KVFlashConfig, Llama

    arms = []
    for pool in (None, KVFlashConfig(pool=512, reading="exact", calibrate=False)):
        llm = Llama(str(model(kind)), n_ctx=1280, kvflash=pool, swa_full=False, **FIXED)
        text = checking.compose(llm, 1024)
        arms.append(checking.measure(llm, text, 1024, more=lambda done: done < 3, taken=lambda: 5))
        llm.close()
    full, pooled = arms
    assert [speed.depth for speed in full.speeds] == [speed.depth for speed in pooled.speeds]
    assert (full.pool, pooled.pool) == (None, 512)
    assert full.pages == 0 < pooled.pages
    assert len(full.right) == len(pooled.right) == 3
    assert all(np.array_equal(a, b) for a, b in zip(full.logits, pooled.logits, strict=True))


def test_a_check_from_end_to_end(
    models: dict[str, Path], loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash_ggml.runtime.hints.PATIENCE_S", 0.0)  # a slow machine
    report = tmp_path / "report.md"
    line: list[Any] = [
        "check",
        models["dense"],
        "--minutes",
        "0.1",
        "-t",
        "1",
        "-ngl",
        "0",
        "--json",
        "--report",
        report,
    ]
    done = CliRunner().invoke(main, [str(word) for word in line], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "reading a prompt" not in done.stderr, "a line for programs that make a Llama"
    data = json.loads(done.stdout)
    assert len(data["full"]["right"]) == len(data["pool"]["right"]) >= 4
    assert data["sentence"].startswith("This pool of 512 tokens answers as the full cache on ")
    text = report.read_text()
    assert data["sentence"] in text
    for word in (socket.gethostname(), str(models["dense"].parent), models["dense"].name):
        assert word not in text
