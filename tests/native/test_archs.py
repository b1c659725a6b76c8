"""Every architecture of the pinned llama.cpp either runs in a pool bit for bit, or is refused with a reason."""

from __future__ import annotations

import sys

import arch_table
import pytest
from support import archs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="links internal symbols of libllama"),
]

# Families people use, each of another kind: a pool must never be lost for one of them without notice.
EXPECTED = {
    "llama": "plain",
    "qwen3": "plain",
    "plm": "plain",
    "mpt": "plain, ALiBi",
    "gemma3": "sliding window",
    "gemma4": "sliding window",
    "gpt-oss": "sliding window",
    "qwen35": "hybrid",
    "granitehybrid": "hybrid",
    "lfm2": "hybrid",
    "deepseek2": "plain, latent (MLA)",
    "kimi-linear": "hybrid, latent (MLA)",
}


@pytest.fixture(scope="module")
def results() -> list[archs.Result]:
    return archs.survey()


def test_no_architecture_fails(results: list[archs.Result]) -> None:
    failed = [f"{r.file}: {r.reason}" for r in results if r.status == "failed"]
    assert not failed, "\n".join(failed)


def test_every_architecture_was_tried(results: list[archs.Result]) -> None:
    tried = {r.arch for r in results}
    assert len(tried) > 130
    assert not tried & archs.NO_MODEL.keys()


def test_kinds_of_memory(results: list[archs.Result]) -> None:
    pooled = {r.arch: r.memory for r in results if r.status == "pooled"}
    assert {arch: pooled.get(arch) for arch in EXPECTED} == EXPECTED


def test_layers_with_attention_are_found_in_the_file(results: list[archs.Result]) -> None:
    """As many as a pool has; layers that slide are no part of it."""
    pooled = [r for r in results if r.status == "pooled" and "sliding" not in r.memory]
    assert len(pooled) > 80
    differ = {r.arch for r in pooled if r.attention != int(r.layers.split()[0])}
    assert differ == {"hrm_text"}  # which goes through its layers several times


def test_table_is_current(results: list[archs.Result]) -> None:
    assert arch_table.TABLE.read_text(encoding="utf-8") == arch_table.render(results)
