"""Finished files: verified, migrated, quantised and described."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import (
    HIDDEN,
    IDS,
    LAYERS,
    MASK,
    OLD,
    THETA,
    VOCAB,
    array,
    older,
    rewritten,
    small_checkpoint,
    small_eagle3,
    small_target,
    tensor_bytes,
    write_gguf,
)

from kvflash_ggml.calibration.known import Calibration, HeadScore, heads_file, save
from kvflash_ggml.convert import draft, migrate, quantize
from kvflash_ggml.convert.describe import describe
from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf import encoding, reader, types, verify
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.snapshot.fingerprint import ModelFile

REPO = Path(__file__).parents[2]
MODELS = REPO / "tests/models"
Fields = dict[str, Field]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "target.gguf")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    out = tmp_path / "draft.gguf"
    draft.convert(small_checkpoint(tmp_path / "drafter"), out, model=target)
    return out


def put(key: str, value: Any) -> Callable[[Fields], None]:
    """Set a field; None takes it out."""

    def change(fields: Fields) -> None:
        if value is None:
            del fields[key]
        else:
            fields[key] = value if isinstance(value, Field) else Field.of(key, value)

    return change


# --- verify

KEYS: list[tuple[str, Any, str]] = [
    ("general.architecture", "qwen3", "general.architecture"),
    ("general.architecture", None, "general.architecture"),
    ("general.architecture", 5, "general.architecture"),
    ("dflash.embedding_length", None, "dflash.embedding_length"),
    ("dflash.embedding_length", 128, "hidden size"),
    ("dflash.block_count", 65, "layers"),
    ("dflash.attention.head_count", 8, "the shape of blk.0.attn_q.weight"),
    ("dflash.attention.head_count_kv", 1, "the shape of blk.0.attn_k.weight"),
    ("dflash.attention.head_count_kv", 3, "KV heads"),
    ("dflash.attention.value_length", 8, "value length"),
    ("dflash.feed_forward_length", 64, "the shape of blk.0.ffn_gate.weight"),
    ("dflash.attention.layer_norm_rms_epsilon", None, "dflash.attention.layer_norm_rms_epsilon"),
    ("dflash.attention.layer_norm_rms_epsilon", float("nan"), "dflash.attention.layer_norm_rms_epsilon"),
    ("dflash.rope.freq_base", None, "dflash.rope.freq_base"),
    ("dflash.rope.freq_base", 1e4, "RoPE theta"),
    ("dflash.rope.dimension_count", 15, "dflash.rope.dimension_count"),
    ("dflash.rope.dimension_count", 0, "dflash.rope.dimension_count"),
    ("dflash.context_length", None, "dflash.context_length"),
    ("dflash.block_size", None, "dflash.block_size"),
    ("dflash.block_size", 65, "block size"),
    ("dflash.target_layers", None, "dflash.target_layers"),
    ("dflash.target_layers", "1, 3", "dflash.target_layers"),
    ("dflash.target_layers", [3, 1], "target layers"),
    ("dflash.target_layers", [1, 4], "target layers"),
    ("dflash.target_layers", [1, 2, 3], "the shape of fc.weight"),
    ("dflash.attention.sliding_window", 32, "sliding window"),
    ("dflash.attention.sliding_window", 64, "layers that slide"),
    ("dflash.hyper_connection.count", 4, "hyper_connection.count"),
    ("tokenizer.ggml.mask_token_id", None, "tokenizer.ggml.mask_token_id"),
    ("tokenizer.ggml.mask_token_id", VOCAB, "mask token"),
    ("tokenizer.ggml.tokens", None, "vocabulary"),
    ("tokenizer.ggml.tokens", array("tokenizer.ggml.tokens", 8, [checkpoints.text("x")] * VOCAB),
     "tokenizer.ggml.tokens"),
    ("tokenizer.ggml.tokens", array("tokenizer.ggml.tokens", 8, [checkpoints.text(f"x{n}") for n in range(VOCAB)]),
     "the hash of the tokens"),
    ("tokenizer.ggml.tokens", array("tokenizer.ggml.tokens", 8, [checkpoints.text(f"x{n}") for n in range(VOCAB + 1)]),
     "vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "what"), KEYS, ids=[f"{x[0]}-{i}" for i, x in enumerate(KEYS)])
def test_a_file_is_refused(tmp_path: Path, drafter: Path, target: Path, key: str, value: Any, what: str) -> None:
    broken = rewritten(drafter, tmp_path / "broken.gguf", put(key, value))
    with pytest.raises(ConversionError) as caught:
        verify.verify(broken, model=target)
    assert caught.value.what == what, str(caught.value)
    assert caught.value.remedy


def with_tensors(source: Path, out: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    file = reader.read(source)
    arrays = {
        name: np.frombuffer(raw, np.float32 if kind == "f32" else np.float16).reshape(shape[::-1]).copy()
        for name, (kind, shape, raw) in tensor_bytes(source).items()
    }
    change(arrays)
    return write_gguf(out, list(file.fields.values()), arrays)


def test_a_norm_that_is_not_f32_is_refused(tmp_path: Path, drafter: Path) -> None:
    def half(arrays: dict[str, np.ndarray]) -> None:
        arrays["output_norm.weight"] = arrays["output_norm.weight"].astype(np.float16)

    with pytest.raises(ConversionError, match=r"output_norm\.weight is f16; wanted: f32"):
        verify.verify(with_tensors(drafter, tmp_path / "half.gguf", half), model=None)


def test_values_that_are_none_are_refused(tmp_path: Path, drafter: Path) -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays["blk.1.ffn_up.weight"][2, 2] = np.nan

    with pytest.raises(ConversionError, match=r"blk\.1\.ffn_up\.weight is NaN or infinite"):
        verify.verify(with_tensors(drafter, tmp_path / "nan.gguf", spoil), model=None)


def test_quantised_values_that_are_none_are_refused() -> None:
    block = np.zeros((1, 34), np.uint8)
    assert encoding.all_finite(block, types.BY_NAME["q8_0"])
    block[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert not encoding.all_finite(block, types.BY_NAME["q8_0"])


@pytest.mark.parametrize("name", ["enc.output_norm.weight", "blk.1.ffn_gate.weight"])
def test_a_missing_tensor_is_refused(tmp_path: Path, drafter: Path, name: str) -> None:
    with pytest.raises(ConversionError, match=f"the tensor {name} is missing"):
        verify.verify(with_tensors(drafter, tmp_path / "less.gguf", lambda arrays: arrays.pop(name)), model=None)


def test_an_unknown_tensor_is_refused(tmp_path: Path, drafter: Path) -> None:
    more = {"blk.0.attn_q.bias": np.zeros(4, np.float32)}
    with pytest.raises(ConversionError, match=r"the tensor blk\.0\.attn_q\.bias is \[4\]"):
        verify.verify(with_tensors(drafter, tmp_path / "more.gguf", lambda arrays: arrays.update(more)), model=None)


def test_keys_can_serve_as_values_and_heads_can_have_sinks(tmp_path: Path, drafter: Path, target: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        for layer in range(LAYERS):
            del arrays[f"blk.{layer}.attn_v.weight"]
            arrays[f"blk.{layer}.attn_sinks.weight"] = np.zeros(4, np.float32)

    verify.verify(with_tensors(drafter, tmp_path / "other.gguf", change), model=target)


def test_another_theta_can_be_meant(tmp_path: Path, drafter: Path, target: Path) -> None:
    other = rewritten(drafter, tmp_path / "other.gguf", put("dflash.rope.freq_base", 1e4))
    verify.verify(other, model=target, rope_differs=True)


def test_an_eagle3_drafter_is_checked_beside_its_target(tmp_path: Path, target: Path) -> None:
    assert "EAGLE3" in verify.verify(small_eagle3(tmp_path / "a.gguf", layers=[1, 2, 4]), model=target)
    for broken, what in (
        (small_eagle3(tmp_path / "b.gguf", layers=[1, 2]), "target layers"),
        (small_eagle3(tmp_path / "c.gguf", layers=[1, 2, 5]), "target layers"),
        (small_eagle3(tmp_path / "d.gguf", hidden=32), "the shape of fc.weight"),
    ):
        with pytest.raises(ConversionError) as caught:
            verify.verify(broken, model=target)
        assert caught.value.what == what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda arrays: arrays.pop("blk.0.attn_norm_2.weight"), "the tensor blk.0.attn_norm_2.weight"),
        (lambda arrays: arrays.update({"blk.1.attn_norm.weight": np.zeros(4, np.float32)}),
         "the tensor blk.1.attn_norm.weight"),
        (lambda arrays: arrays.update({"blk.0.attn_q.weight": np.zeros((32, HIDDEN), np.float32)}),
         "the shape of blk.0.attn_q.weight"),
        (lambda arrays: arrays.update({"output.weight": np.zeros((8, HIDDEN), np.float32)}),
         "the shape of output.weight"),
    ],
    ids=["missing", "unknown", "not as wide", "a head of fewer tokens without their numbers"],
)  # fmt: skip
def test_tensors_of_an_eagle3_drafter_are_checked(
    tmp_path: Path, target: Path, change: Callable[[dict[str, np.ndarray]], Any], what: str
) -> None:
    broken = with_tensors(small_eagle3(tmp_path / "sound.gguf"), tmp_path / "broken.gguf", change)
    with pytest.raises(ConversionError) as caught:
        verify.verify(broken, model=target)
    assert caught.value.what == what


def test_a_map_of_an_eagle3_drafter_without_a_head_is_as_long_as_the_target_s(tmp_path: Path, target: Path) -> None:
    """llama.cpp asserts it in the first step: the head is the target's then."""
    arrays = {"d2t": np.arange(100, dtype=np.float32)}
    broken = with_tensors(
        small_eagle3(tmp_path / "sound.gguf"), tmp_path / "broken.gguf", lambda all: all.update(arrays)
    )
    with pytest.raises(ConversionError, match=r"d2t is 100 tokens, and no output\.weight"):
        verify.verify(broken, model=target)


# --- migrate


@pytest.mark.parametrize("tokens", [True, False])
def test_an_older_file_becomes_the_same_as_a_converted_one(
    tmp_path: Path, drafter: Path, target: Path, tokens: bool
) -> None:
    out = tmp_path / "new.gguf"
    migrate.migrate(older(drafter, tmp_path / "old.gguf", tokens=tokens), out, model=target)
    assert tensor_bytes(out) == tensor_bytes(drafter)
    wanted, found = reader.read(drafter).fields, reader.read(out).fields
    left = {name for name in wanted if wanted[name] != found.get(name)}
    assert left <= {"general.name", "general.file_type", "general.quantization_version"}


OLDER: list[tuple[str, Callable[[Fields], None], str]] = [
    ("no layers, as a quantiser left it", put(f"{OLD}.dflash.target_layer_ids", None), "dflash.target_layer_ids"),
    ("layers in words", put(f"{OLD}.dflash.target_layer_ids", "0, 2"), "dflash.target_layer_ids"),
    ("a negative layer", put(f"{OLD}.dflash.target_layer_ids", [-1, 2]), "dflash.target_layer_ids"),
    ("another number of them", put(f"{OLD}.dflash.n_target_layers", 3), "dflash.n_target_layers"),
    ("no mask token", put(f"{OLD}.dflash.mask_token_id", None), "dflash.mask_token_id"),
    ("no block size", put(f"{OLD}.dflash.block_size", None), "dflash.block_size"),
    ("a theta that is not the target's", put(f"{OLD}.rope.freq_base", 1e7), "RoPE theta"),
    ("new names", put("general.architecture", "dflash"), "general.architecture"),
]


@pytest.mark.parametrize(("change", "what"), [x[1:] for x in OLDER], ids=[x[0] for x in OLDER])
def test_an_older_file_is_refused(
    tmp_path: Path, drafter: Path, target: Path, change: Callable[[Fields], None], what: str
) -> None:
    old = rewritten(older(drafter, tmp_path / "old.gguf"), tmp_path / "broken.gguf", change)
    with pytest.raises(ConversionError) as caught:
        migrate.migrate(old, tmp_path / "new.gguf", model=target)
    assert caught.value.what == what, str(caught.value)
    assert not (tmp_path / "new.gguf").exists()


def test_an_older_file_without_a_tokenizer_needs_its_target(tmp_path: Path, drafter: Path) -> None:
    old = older(drafter, tmp_path / "old.gguf", tokens=False)
    with pytest.raises(ConversionError, match="--target"):
        migrate.migrate(old, tmp_path / "new.gguf", model=None)


# --- quantize


def test_every_key_stays(tmp_path: Path, drafter: Path, target: Path) -> None:
    out = tmp_path / "small.gguf"
    quantize.quantize(drafter, out, kind="q8_0")
    before, after = reader.read(drafter), reader.read(out)
    changed = {name for name in before.fields if before.fields[name] != after.fields[name]}
    assert changed == {"general.file_type"}
    assert before.fields.keys() == after.fields.keys()
    assert after.tensors["blk.0.attn_norm.weight"].kind.name == "f32"
    assert after.tensors["fc.weight"].kind.name == "q8_0"
    verify.verify(out, model=target)


def test_what_steers_a_drafter_keeps_eight_bits(tmp_path: Path, drafter: Path) -> None:
    out = tmp_path / "small.gguf"
    quantize.quantize(drafter, out, kind="q4_0")
    kinds = {name: tensor.kind.name for name, tensor in reader.read(out).tensors.items()}
    assert (kinds["fc.weight"], kinds["blk.0.attn_q.weight"]) == ("q8_0", "q4_0")


def test_a_head_for_further_tokens_is_quantised_too(tmp_path: Path) -> None:
    """recall-qwen35's, from its file of eight bits made large again."""
    head, large, small = MODELS / "mtp-recall-qwen35-q8_0.gguf", tmp_path / "large.gguf", tmp_path / "small.gguf"
    enlarged(head, large)
    with pytest.raises(ConversionError, match="lost for good"):
        quantize.quantize(head, small, kind="q4_0")
    quantize.quantize(large, small, kind="q4_0")
    before, after = reader.read(large), reader.read(small)
    assert before.fields.keys() == after.fields.keys()
    kinds = {name.removeprefix("blk.8."): tensor.kind.name for name, tensor in after.tensors.items()}
    steering = ("nextn.eh_proj.weight", "token_embd.weight")
    assert [kinds[name] for name in steering] == ["q8_0"] * 2
    assert [kinds[f"{name}.weight"] for name in ("attn_q", "ffn_down", "nextn.enorm")] == ["q4_0", "q4_0", "f32"]
    verify.verify(small, model=MODELS / "recall-qwen35-q8_0.gguf")


def enlarged(source: Path, out: Path) -> None:
    """The file with F16 matrices in place of Q8_0 ones."""
    import gguf

    file, arrays = reader.read(source), {}
    for name, (kind, shape, raw) in tensor_bytes(source).items():
        values = np.frombuffer(raw, np.float32 if kind == "f32" else np.uint8)
        if kind == "q8_0":
            values = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0).astype(np.float16)
        arrays[name] = values.reshape(shape[::-1])
    write_gguf(out, list(file.fields.values()), arrays)


def test_experts_shrink_and_what_chooses_them_does_not() -> None:
    kinds = {
        name: quantize.chosen(reader.Tensor(f"blk.3.{name}.weight", types.BY_NAME["bf16"], shape, 0), "q4_k_m").name
        for name, shape in {
            "ffn_gate_exps": (256, 8, 4), "ffn_down_exps": (256, 8, 4), "ffn_up_shexp": (256, 8),
            "ffn_gate_inp": (256, 4),
        }.items()
    }  # fmt: skip
    assert kinds == {"ffn_gate_exps": "q4_k", "ffn_down_exps": "q6_k", "ffn_up_shexp": "q4_k", "ffn_gate_inp": "bf16"}


def test_rows_that_are_no_whole_blocks_stay_larger(tmp_path: Path) -> None:
    kinds = {}
    for width in (256, 64, 48):
        tensor = reader.Tensor("blk.0.ffn_up.weight", types.BY_NAME["f16"], (width, 8), 0)
        kinds[width] = quantize.chosen(tensor, "q4_k_m").name
    assert kinds == {256: "q4_k", 64: "q8_0", 48: "f16"}


@pytest.mark.parametrize("key", ["dflash.target_layers"])
def test_a_file_without_its_layers_is_not_quantised(tmp_path: Path, drafter: Path, key: str) -> None:
    broken = rewritten(drafter, tmp_path / "broken.gguf", put(key, None))
    with pytest.raises(ConversionError, match=key):
        quantize.quantize(broken, tmp_path / "small.gguf", kind="f16")


def test_a_key_that_changes_is_noticed(tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize.fields

    def forgetful(file: reader.GGUF, kind: str) -> list[Field]:
        return [field for field in whole(file, kind) if field.name != "dflash.target_layers"]

    monkeypatch.setattr(quantize, "fields", forgetful)
    with pytest.raises(ConversionError, match=r"dflash\.target_layers is missing"):
        quantize.quantize(drafter, tmp_path / "small.gguf", kind="f16")
    assert not (tmp_path / "small.gguf").exists()


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path, drafter: Path) -> None:
    quantize.quantize(drafter, tmp_path / "small.gguf", kind="q8_0")
    with pytest.raises(ConversionError, match="lost for good"):
        quantize.quantize(tmp_path / "small.gguf", tmp_path / "smaller.gguf", kind="q4_0")


def test_a_whole_model_is_not_quantised(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConversionError, match="llama-quantize"):
        quantize.quantize(target, tmp_path / "small.gguf", kind="f16")


@pytest.mark.parametrize("work", [migrate.migrate, quantize.quantize])
def test_a_file_is_not_written_over_its_source(drafter: Path, work: Callable[..., None]) -> None:
    before = drafter.read_bytes()
    options: dict[str, Any] = {"model": None} if work is migrate.migrate else {"kind": "f16"}
    with pytest.raises(ConversionError, match="another file"):
        work(drafter, drafter, **options)
    assert drafter.read_bytes() == before


# --- describe


def test_a_plain_model(tmp_path: Path) -> None:
    found = describe(small_target(tmp_path / "a.gguf", whole=True))
    assert (found.architecture, found.context, found.layers, found.attention, found.pooled) == ("qwen3", 4096, 4, 4, 4)
    assert found.token_bytes == 4 * 2 * (16 + 16) * 2
    assert (found.vocab, found.template, found.heads, found.drafter) == (VOCAB, False, None, None)


def test_a_model_whose_layers_slide(tmp_path: Path) -> None:
    pattern = Field.of("qwen3.attention.sliding_window_pattern", [True, True, True, False])
    window = Field.of("qwen3.attention.sliding_window", 128)
    known = describe(small_target(tmp_path / "a.gguf", window, pattern, whole=True))
    unknown = describe(small_target(tmp_path / "b.gguf", window, whole=True))
    assert (known.attention, known.pooled, known.token_bytes) == (4, 1, 128)
    assert (unknown.attention, unknown.pooled, unknown.token_bytes) == (4, None, None)


def test_a_hybrid_model_from_its_file() -> None:
    found = describe(MODELS / "recall-qwen35-q8_0.gguf")
    assert (found.layers, found.attention, found.pooled, found.token_bytes) == (8, 2, 2, 1024)
    assert found.template


def test_a_drafter_says_what_it_reads(drafter: Path) -> None:
    found = describe(drafter).drafter
    assert found == {"block_size": 8, "target_layers": [x + 1 for x in IDS], "mask_token_id": MASK}
    assert describe(MODELS / "mtp-recall-qwen35-q8_0.gguf").drafter == {"nextn_predict_layers": 1}


def test_heads_that_a_calibration_found(tmp_path: Path) -> None:
    path = small_target(tmp_path / "a.gguf")
    identity = ModelFile(path).identity()
    heads = tuple(
        HeadScore(layer=layer, head=1, found=0.5, control=0.1, first=0.9, chosen=layer == 2) for layer in (2, 3)
    )
    known = Calibration(model=identity, questions=1, tokens=1, heads=heads)
    save(known, heads_file(identity))
    assert describe(path).heads == [(2, 1)]


def test_a_model_in_several_files(tmp_path: Path) -> None:
    whole = small_target(tmp_path / "whole.gguf", whole=True)
    arrays = {
        name: np.frombuffer(raw, np.float32).reshape(shape[::-1])
        for name, (_, shape, raw) in tensor_bytes(whole).items()
    }
    names = sorted(arrays)
    for part, own in ((1, names[:20]), (2, names[20:])):
        fields = list(reader.read(whole).fields.values()) if part == 1 else []
        write_gguf(tmp_path / f"m-0000{part}-of-00002.gguf", fields, {name: arrays[name] for name in own})
    found = describe(tmp_path / "m-00001-of-00002.gguf")
    assert (found.attention, found.parameters) == (4, describe(whole).parameters)


# --- without what is built


@pytest.mark.parametrize("script", ["convert_dflash_to_gguf.py", "quantize_draft.py"])
def test_scripts_run_from_a_checkout_that_is_not_built(
    tmp_path: Path, drafter: Path, target: Path, script: str
) -> None:
    arguments = [str(tmp_path / "drafter"), "--target", str(target), "-o", str(tmp_path / "made.gguf")]
    if script == "quantize_draft.py":
        arguments = [str(drafter), str(tmp_path / "made.gguf"), "--type", "f16"]
    code = (
        "import sys, runpy; sys.modules.update(dict.fromkeys(('llama_cpp', 'kvflash_ggml.native._kvf', 'torch')));"
        f"sys.argv[1:] = {arguments!r}; runpy.run_path({str(REPO / 'scripts' / script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verify.verify(tmp_path / "made.gguf", model=target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_checkpoint_itself_is_not_written(tmp_path: Path, target: Path, name: str) -> None:
    folder = small_checkpoint(tmp_path / "checkpoint")
    before = (folder / name).read_bytes()
    with pytest.raises(ConversionError, match=rf"{name}: the output is an input; wanted: another file"):
        draft.convert(folder, folder / name, model=target)
    assert (folder / name).read_bytes() == before
    for _ in range(2):
        draft.convert(folder, folder / "made.gguf", model=target)


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again.gguf"
    shutil.copy(drafter, out)
    before, names = out.read_bytes(), {path.name for path in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvflash_ggml.files.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/again\.gguf'"):
        draft.convert(tmp_path / "drafter", out, model=target)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_theta_is_compared_as_it_is_stored(tmp_path: Path) -> None:
    """A base that is no 32-bit float, in both files."""
    folder = small_checkpoint(tmp_path / "drafter", rope_theta=THETA + 0.03)
    target = small_target(tmp_path / "target.gguf", **{"rope.freq_base": THETA + 0.03})
    draft.convert(folder, tmp_path / "draft.gguf", model=target)
