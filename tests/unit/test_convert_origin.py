"""Which model a drafter was trained for: keys in its file, and what they are compared with."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from support.checkpoints import (
    older,
    rewritten,
    small_checkpoint,
    small_eagle3,
    small_target,
    target_fields,
    target_weights,
    tensor_bytes,
    write_gguf,
)

from kvflash_ggml.cli.convert import convert
from kvflash_ggml.convert import draft, migrate, quantize, writer
from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf import reader, verify
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.gguf.target import KEYS, SIGNATURE, distance, signature

MODELS = Path(__file__).parents[1] / "models"
BOUND = {
    "recall-dflash": "recall-qwen3-q8_0",
    "recall-eagle3-q8_0": "recall-qwen3-q8_0",
    "mtp-recall-qwen35-q8_0": "recall-qwen35-q8_0",
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "target.gguf", whole=True)


@pytest.fixture
def sister(tmp_path: Path) -> Path:
    """The same shape and vocabulary, trained another time."""
    return write_gguf(tmp_path / "sister.gguf", target_fields(), target_weights(seed=2))


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    draft.convert(small_checkpoint(tmp_path / "drafter"), tmp_path / "draft.gguf", model=target)
    return tmp_path / "draft.gguf"


def without_keys(source: Path, out: Path) -> Path:
    def forget(fields: dict[str, Field]) -> None:
        for key in KEYS:
            fields.pop(key)

    return rewritten(source, out, forget)


# --- the signature


def signed(path: Path, kind: str, seed: int = 0) -> str | None:
    """The signature of a random embedding in a type."""
    values = np.random.default_rng(seed).normal(0, 0.02, (1000, 256)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(values, number), raw_dtype=number)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return signature(reader.read(path))


def test_a_signature_survives_quantisation(tmp_path: Path) -> None:
    plain, other = (signed(tmp_path / "a.gguf", "F32", seed) for seed in (0, 1))
    assert plain is not None
    assert other is not None
    assert 90 < distance(plain, other) < 166
    for kind, most in (("F16", 1), ("BF16", 4), ("Q8_0", 8), ("Q5_1", 16), ("Q4_0", 26)):
        found = signed(tmp_path / "a.gguf", kind)
        assert found is not None
        assert distance(plain, found) <= most


def test_tokens_that_nobody_has_trained(tmp_path: Path) -> None:
    """Rows of zeros count as equal, and a vocabulary may be smaller than the rows that are looked at."""
    for count in (1, 7, 64):
        path = write_gguf(tmp_path / "a.gguf", [], {"token_embd.weight": np.zeros((count, 32), np.float32)})
        assert signature(reader.read(path)) == "0" * 64
    path = write_gguf(tmp_path / "a.gguf", [], {"token_embd.weight": np.zeros(64, np.float32)})
    assert signature(reader.read(path)) is None


def test_the_embedding_of_a_model_in_parts(tmp_path: Path, target: Path) -> None:
    arrays = target_weights()
    wanted = arrays.pop("token_embd.weight")
    write_gguf(tmp_path / "m-00001-of-00002.gguf", target_fields(), arrays)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", [], {"token_embd.weight": wanted})
    assert signature(reader.read(tmp_path / "m-00001-of-00002.gguf")) == signature(reader.read(target))


# --- the check


@pytest.mark.parametrize("name", BOUND)
def test_the_shipped_drafters_are_bound(name: str) -> None:
    words = verify.verify(MODELS / f"{name}.gguf", model=MODELS / f"{BOUND[name]}.gguf")
    assert f"it fits {BOUND[name]}.gguf, the model that it was trained for" in words


def test_a_drafter_of_a_sister_is_refused(drafter: Path, target: Path, sister: Path) -> None:
    assert "it fits target.gguf, the model that it was trained for" in verify.verify(drafter, model=target)
    with pytest.raises(ConversionError, match=r"trained for is another one: .* of 256 bits; wanted: sister\.gguf"):
        verify.verify(drafter, model=sister)


def test_a_drafter_of_another_architecture_is_refused(tmp_path: Path, drafter: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", target_fields("llama"), target_weights())
    with pytest.raises(ConversionError, match=r"kvflash\.target\.architecture is qwen3; wanted: llama, the target's"):
        verify.verify(drafter, model=other)


def test_a_quantised_target_is_the_same_one(tmp_path: Path, drafter: Path, target: Path) -> None:
    half = {name: x.astype(np.float16) if x.ndim > 1 else x for name, x in target_weights().items()}
    verify.verify(drafter, model=write_gguf(tmp_path / "half.gguf", target_fields(), half))


def test_a_file_that_does_not_say_cannot_be_checked(tmp_path: Path, drafter: Path, target: Path, sister: Path) -> None:
    silent = without_keys(drafter, tmp_path / "silent.gguf")
    for model in (target, sister):
        words = verify.verify(silent, model=model)
        assert f"its shape fits {model.name}, and whether it was trained for it cannot be checked" in words
    bare = small_target(tmp_path / "bare.gguf")  # a target without an embedding
    assert "cannot be checked" in verify.verify(drafter, model=bare)


@pytest.mark.parametrize("value", ["", "zz" * 32, "0" * 63, "0" * 65, 7, [1, 2], "F" * 64])
def test_a_damaged_key(tmp_path: Path, drafter: Path, target: Path, value: str) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[SIGNATURE] = Field.of(SIGNATURE, value)

    with pytest.raises(ConversionError, match=r"kvflash\.target\.embedding is .*; wanted: 64 hexadecimal digits"):
        verify.verify(rewritten(drafter, tmp_path / "odd.gguf", change), model=target)


# --- who writes the keys


def test_quantising_keeps_the_keys(tmp_path: Path, drafter: Path, sister: Path) -> None:
    quantize.quantize(drafter, tmp_path / "small.gguf", kind="q8_0")
    with pytest.raises(ConversionError, match="another one"):
        verify.verify(tmp_path / "small.gguf", model=sister)


def test_migrating_writes_them(tmp_path: Path, drafter: Path, target: Path, sister: Path) -> None:
    old = older(without_keys(drafter, tmp_path / "silent.gguf"), tmp_path / "old.gguf")
    migrate.migrate(old, tmp_path / "new.gguf", model=target)
    with pytest.raises(ConversionError, match="another one"):
        verify.verify(tmp_path / "new.gguf", model=sister)


def test_binding_writes_and_replaces_them(tmp_path: Path, drafter: Path, target: Path, sister: Path) -> None:
    out = tmp_path / "bound.gguf"
    done = CliRunner().invoke(convert, ["bind", str(drafter), str(out), "--target", str(sister)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "it fits sister.gguf" in done.stderr
    assert tensor_bytes(out) == tensor_bytes(drafter)
    with pytest.raises(ConversionError, match="another one"):
        verify.verify(out, model=target)
    writer.bind(out, tmp_path / "again.gguf", model=target)
    assert (tmp_path / "again.gguf").read_bytes() == drafter.read_bytes()
    writer.bind(small_eagle3(tmp_path / "eagle3.gguf"), out, model=target)
    with pytest.raises(ConversionError, match="another one"):
        verify.verify(out, model=sister)


def test_binding_refuses_another_shape(tmp_path: Path, drafter: Path) -> None:
    with pytest.raises(ConversionError, match="hidden size is 64"):
        writer.bind(drafter, tmp_path / "out.gguf", model=MODELS / "recall-qwen3-q8_0.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_head_alone_is_no_target() -> None:
    head = MODELS / "mtp-recall-qwen35-q8_0.gguf"
    with pytest.raises(ConversionError, match=r"the target is a head for further tokens .* wanted: a whole model"):
        verify.verify(head, model=head)
