"""docs/memory.md is what scripts/memory_table.py computes, and that agrees with what was measured."""

from __future__ import annotations

import memory_table
import pytest

from kvflash_ggml.placement.sizes import ModelSizes

MIB = 1 << 20


def sizes(name: str) -> ModelSizes:
    return memory_table.sizes(model(name))


def model(name: str) -> memory_table.Model:
    return next(model for model in memory_table.MODELS if model.name.startswith(name))


def test_the_page_is_current() -> None:
    found = memory_table.PAGE.read_text(encoding="utf-8")
    assert found == memory_table.render(), "run python scripts/memory_table.py"


def test_the_hybrid_takes_what_was_measured_on_a_device() -> None:
    """docs/benchmarks.md: 34 KiB of q8_0 a token and 150 MiB of state; 4,386 MiB of KV for 132,096 tokens."""
    hybrid = model("Qwen3.5-27B")
    need = memory_table.needs(hybrid, 132_096, 132_096, kv="q8_0")
    assert need.kv == 132_096 * (34 << 10) == 4_386 * MIB
    assert round(need.state / MIB) == 150


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama", 8.0), ("Qwen3.5-27B", 26.9), ("Qwen3-32B", 32.8), ("Qwen3-30B", 30.5)]
)
def test_weights_are_as_many_as_the_models_have(name: str, billions: float) -> None:
    found = sizes(name)
    q4_k, q6_k = 144 / 256, 210 / 256
    values = sum(x.dense + x.experts for x in found.layers) / q4_k + found.embedding / q4_k + found.output / q6_k
    assert values / 1e9 == pytest.approx(billions, abs=0.06)


def test_a_window_does_not_grow_with_the_context() -> None:
    gemma = model("Gemma")
    short, long = (memory_table.needs(gemma, n_ctx, n_ctx) for n_ctx in (32_768, 131_072))
    assert sum(1 for x in sizes("Gemma").layers if not x.window) == 10
    assert long.state == short.state > 0
    assert long.kv == 4 * short.kv
