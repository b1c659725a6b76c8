"""Positions that are stretched for a context longer than the training."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pytest

from kvflash_ggml.cli.rope import RopeOptions


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Trained for 1,024 tokens."""
    return write(tmp_path / "m.gguf", 1024)


def write(path: Path, length: int, original: int | None = None) -> str:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(length)
    if original is not None:
        writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_yarn_stretches_by_what_is_needed(model: str) -> None:
    expected = {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 1024}
    assert RopeOptions(yarn=True).for_model(model, 4096) == expected


def test_a_model_that_brings_its_scaling_is_stretched_from_its_training(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", 4096, original=1024)
    assert RopeOptions(yarn=True).for_model(path, 8192)["rope_freq_scale"] == 1 / 8
    with pytest.raises(click.UsageError, match="trained for 1,024 tokens"):
        RopeOptions(yarn=True).for_model(path, 1024)


def test_yarn_beside_other_settings_is_refused(model: str) -> None:
    with pytest.raises(click.UsageError, match="leave out the others"):
        RopeOptions(yarn=True, rope_scale=2).for_model(model, 4096)


def test_a_context_beyond_the_training_brings_the_factor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert RopeOptions().for_model(model, 4096) == {}
    assert "-c 4096 exceeds the 1,024 tokens" in (said := capsys.readouterr().err)
    assert "--yarn stretches its positions 4 times" in said
    for n_ctx, options in ((1024, RopeOptions()), (0, RopeOptions()), (4096, RopeOptions(rope_freq_scale=0.25))):
        options.for_model(model, n_ctx)
    RopeOptions().for_model(model, 4096, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_read_is_told_when_it_is_loaded(tmp_path: Path) -> None:
    assert RopeOptions().for_model(str(tmp_path / "none.gguf"), 4096) == {}
