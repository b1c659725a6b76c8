"""Files of heads that are not the target's, or were not loaded: refused, since llama.cpp would abort."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import rewritten
from support.harness import MODELS

from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf.reader import Field

HEADS = MODELS / "mtp-recall-qwen35-q8_0.gguf"


@pytest.fixture
def mtp(stock: Any, model: Callable[[str], Path]) -> Callable[..., Any]:
    """Opens heads beside a target that was loaded without its own."""

    def make(path: Path | None, kind: str = "hybrid") -> Any:
        from kvflash_ggml.speculation.base import Target
        from kvflash_ggml.speculation.chained import Mtp

        llm = stock(kind)
        target = Target(
            path=model(kind),
            model=ctypes.cast(llm._model.model, ctypes.c_void_p).value or 0,
            context=ctypes.cast(llm._ctx.ctx, ctypes.c_void_p).value or 0,
            n_embd=256, n_vocab=4096, n_ctx=1024,
        )  # fmt: skip
        return Mtp(path, target)

    return make


def test_a_head_that_was_not_loaded(mtp: Any) -> None:
    with pytest.raises(ConversionError, match=r"headed\.gguf: the head for further tokens is not loaded"):
        mtp(None, "headed")


def test_a_model_without_a_head(mtp: Any) -> None:
    with pytest.raises(ConversionError, match="nextn_predict_layers is 0, or their tensors are missing"):
        mtp(None)
    with pytest.raises(ConversionError, match=r"general\.architecture is qwen3;"):
        mtp(None, "dense")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("qwen35.nextn_predict_layers", 2, "nextn_predict_layers is 0, or their tensors are missing"),
        ("qwen35.nextn_predict_layers", 0, "nextn_predict_layers is 0"),
        ("qwen35.block_count", 12, "nextn_predict_layers is 0"),
        ("qwen35.embedding_length", 128, r"qwen35\.embedding_length is 128; wanted: 256"),
        ("qwen35.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan; wanted: "),
        ("general.architecture", "llama", "general.architecture is llama"),
        ("qwen35.attention.head_count", 0, r"head_count is 0; wanted: 4"),
    ],
)
def test_heads_that_do_not_fit(mtp: Any, tmp_path: Path, key: str, value: Any, why: str) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[key] = Field.of(key, value)

    with pytest.raises(ConversionError, match=why):
        mtp(rewritten(HEADS, tmp_path / "mtp.gguf", change))


def test_heads_of_another_model(mtp: Any) -> None:
    with pytest.raises(ConversionError, match=r"general\.architecture is qwen35; wanted: qwen3"):
        mtp(HEADS, "dense")
