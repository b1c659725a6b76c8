"""From a checkpoint to a file: bytes, keys, and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import MASK, VOCAB, config, small_checkpoint, small_target, tensor_bytes, weights

from kvflash_ggml.convert import draft, gguf_read, verify
from kvflash_ggml.convert.gguf_read import Field
from kvflash_ggml.errors import ConversionError

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "target.gguf")


# --- what comes of it


def test_a_drafter_goes_to_a_checkpoint_and_back_byte_for_byte(tmp_path: Path) -> None:
    source, model = MODELS / "recall-dflash.gguf", MODELS / "recall-qwen3-q8_0.gguf"
    folder = checkpoints.exported(gguf_read.read(source), tmp_path / "checkpoint")
    out = tmp_path / "again.gguf"
    draft.convert(folder, out, model=model)
    assert tensor_bytes(out) == tensor_bytes(source)
    before, after = gguf_read.read(source).fields, gguf_read.read(out).fields
    own = {name for name in before if name.startswith(("dflash.", "tokenizer."))}
    assert own == {name for name in after if name.startswith(("dflash.", "tokenizer."))}
    assert {name for name in own if before[name] != after[name]} == set()
    verify.verify(out, model=model)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_values_are_those_of_the_checkpoint(tmp_path: Path, target: Path, kind: str) -> None:
    small_checkpoint(tmp_path / "drafter")
    out = tmp_path / "draft.gguf"
    draft.convert(tmp_path / "drafter", out, model=target, kind=kind)
    found = tensor_bytes(out)
    assert {name for name, (type_, shape, _) in found.items() if len(shape) == 1 and type_ != "f32"} == set()
    type_, shape, raw = found["blk.1.ffn_down.weight"]
    values = weights()["layers.1.mlp.down_proj.weight"]
    wanted = {"f32": values, "f16": values.astype(np.float16), "bf16": checkpoints.bf16(values)}[kind]
    assert (type_, shape, raw) == (kind, values.shape[::-1], wanted.tobytes())
    verify.verify(out, model=target)
