"""From a checkpoint to a file: bytes, keys, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import (
    HIDDEN,
    IDS,
    MASK,
    THETA,
    VOCAB,
    Arrays,
    config,
    small_checkpoint,
    small_target,
    tensor_bytes,
    weights,
    write_checkpoint,
)

from kvflash_ggml.convert import draft
from kvflash_ggml.errors import ConfigError, ConversionError
from kvflash_ggml.gguf import reader, verify
from kvflash_ggml.gguf.reader import Field

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "target.gguf")


def converted(folder: Path, target: Path, **options: Any) -> reader.GGUF:
    out = folder.parent / "draft.gguf"
    draft.convert(folder, out, model=target, **options)
    return reader.read(out)


# --- what comes of it


def test_a_drafter_goes_to_a_checkpoint_and_back_byte_for_byte(tmp_path: Path) -> None:
    source, model = MODELS / "recall-dflash.gguf", MODELS / "recall-qwen3-q8_0.gguf"
    folder = checkpoints.exported(reader.read(source), tmp_path / "checkpoint")
    out = tmp_path / "again.gguf"
    draft.convert(folder, out, model=model)
    assert tensor_bytes(out) == tensor_bytes(source)
    before, after = reader.read(source).fields, reader.read(out).fields
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


def test_bf16_goes_to_f32_exactly_and_to_f16_rounded(tmp_path: Path, target: Path) -> None:
    values = weights()
    tensors = {name: checkpoints.bf16(array) for name, array in values.items()}
    folder = write_checkpoint(tmp_path / "drafter", tensors, config())
    out = tmp_path / "draft.gguf"
    draft.convert(folder, out, model=target)
    exact = (tensors["fc.weight"].astype(np.uint32) << 16).view(np.float32)
    assert tensor_bytes(out)["fc.weight"][2] == exact.astype(np.float16).tobytes()
    assert tensor_bytes(out)["output_norm.weight"][0] == "f32"


def test_the_tokenizer_is_the_targets_and_the_mask_token_is_added(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter"), target)
    theirs = reader.read(target).fields
    assert {name: made.fields[name] for name in theirs if name.startswith("tokenizer.")} == {
        name: field for name, field in theirs.items() if name.startswith("tokenizer.")
    }
    assert made.get("tokenizer.ggml.mask_token_id") == MASK


def test_target_layers_are_inputs(tmp_path: Path, target: Path) -> None:
    assert converted(small_checkpoint(tmp_path / "drafter"), target).own("target_layers") == [x + 1 for x in IDS]


def test_the_depth_of_the_target_in_a_configuration_is_ignored(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter", num_target_layers=99), target)
    assert made.own("target_layers") == [x + 1 for x in IDS]


def test_a_length_is_told_and_sizes_nothing(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter", max_position_embeddings=1 << 30), target)
    assert made.own("context_length") == 1 << 30


def test_without_a_length_it_is_the_targets(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter", max_position_embeddings=None), target)
    assert made.own("context_length") == reader.read(target).own("context_length")


def test_a_nested_theta_goes_before_the_top_level(tmp_path: Path, target: Path) -> None:
    nested = {"rope_theta": THETA, "rope_type": "default"}
    made = converted(small_checkpoint(tmp_path / "drafter", rope_theta=5.0, rope_parameters=nested), target)
    assert made.own("rope.freq_base") == THETA


def test_another_theta_can_be_meant(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter", rope_theta=1e4), target, rope_differs=True)
    assert made.own("rope.freq_base") == 1e4


def test_sections_are_for_targets_that_have_them(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    sections = Field.of("qwen35.rope.dimension_sections", [3, 3, 2, 0])
    target = small_target(tmp_path / "target.gguf", sections, architecture="qwen35")
    assert converted(folder, target).own("rope.dimension_sections") == [8, 0, 0, 0]
    assert converted(folder, small_target(tmp_path / "plain.gguf")).own("rope.dimension_sections") is None


def test_layers_with_a_window_are_told(tmp_path: Path, target: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    folder = small_checkpoint(tmp_path / "drafter", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    made = converted(folder, target)
    assert made.own("attention.sliding_window") == 64
    assert made.own("attention.sliding_window_pattern") == [True, False]
    assert verify.describe(made).sliding == (True, False)


def test_a_head_of_its_own_is_kept_or_left_out_on_request(tmp_path: Path, target: Path) -> None:
    rng = np.random.default_rng(5)
    head = {name: checkpoints.random_weight(rng, (VOCAB, HIDDEN)) for name in ("embed_tokens.weight", "lm_head.weight")}
    folder = write_checkpoint(tmp_path / "drafter", {**weights(), **head}, config())
    with pytest.raises(ConversionError, match="--own-head"):
        converted(folder, target)
    assert "token_embd.weight" not in converted(folder, target, own_head=False).tensors
    made = converted(folder, target, own_head=True)
    assert made.tensors["output.weight"].shape == (HIDDEN, VOCAB)
    verify.verify(made.path, model=target)


def test_several_files_and_their_index(tmp_path: Path, target: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    whole = converted(folder, target)
    before = tensor_bytes(whole.path)
    (folder / "model.safetensors").unlink()
    names = sorted(weights())
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for name, own in parts.items():
        (folder / name).write_bytes(checkpoints.safetensors({key: weights()[key] for key in own}))
    index = {"weight_map": {key: name for name, own in parts.items() for key in own}}
    (folder / "model.safetensors.index.json").write_text(checkpoints.json.dumps(index))
    assert tensor_bytes(converted(folder, target).path) == before


def test_q8_0_is_made_without_the_library(tmp_path: Path, target: Path) -> None:
    made = converted(small_checkpoint(tmp_path / "drafter"), target, kind="q8_0")
    assert made.tensors["blk.0.attn_q.weight"].kind.name == "q8_0"
    assert made.tensors["blk.0.attn_norm.weight"].kind.name == "f32"
    verify.verify(made.path, model=target)


# --- what is refused


CONFIG: list[tuple[str, dict[str, Any], str]] = [
    ("no hidden size", {"hidden_size": None}, "hidden_size"),
    ("a hidden size in words", {"hidden_size": "64"}, "hidden_size"),
    ("a truth value as a size", {"hidden_size": True}, "hidden_size"),
    ("no width", {"hidden_size": 0}, "hidden size"),
    ("too wide", {"hidden_size": 1 << 20}, "hidden size"),
    ("too many layers", {"num_hidden_layers": 65}, "layers"),
    ("no layers", {"num_hidden_layers": None}, "num_hidden_layers"),
    ("layers that are none", {"num_hidden_layers": 0}, "layers"),
    ("too many heads", {"num_attention_heads": 1025}, "heads"),
    ("no heads", {"num_attention_heads": None}, "num_attention_heads"),
    ("heads that are none", {"num_attention_heads": 0}, "heads"),
    ("more KV heads than heads", {"num_key_value_heads": 5}, "KV heads"),
    ("KV heads that do not divide", {"num_key_value_heads": 3}, "KV heads"),
    ("no KV heads", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("KV heads that are none", {"num_key_value_heads": 0}, "KV heads"),
    ("no head dimension", {"head_dim": None}, "head_dim"),
    ("heads without a dimension", {"head_dim": 0}, "head dimension"),
    ("wide heads", {"head_dim": 2048}, "head dimension"),
    ("no feed-forward size", {"intermediate_size": None}, "intermediate_size"),
    ("an empty feed-forward layer", {"intermediate_size": 0}, "feed-forward size"),
    ("a wide feed-forward layer", {"intermediate_size": 1 << 21}, "feed-forward size"),
    ("no vocabulary", {"vocab_size": None}, "vocab_size"),
    ("an empty vocabulary", {"vocab_size": 0}, "vocabulary"),
    ("a vocabulary of millions", {"vocab_size": 1 << 23}, "vocabulary"),
    ("no epsilon", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("an epsilon of none", {"rms_norm_eps": 0}, "RMS norm epsilon"),
    ("other KV heads than k_proj has", {"num_key_value_heads": 4}, "the shape of blk.0.attn_k.weight"),
    ("other heads than q_proj has", {"num_attention_heads": 8}, "the shape of blk.0.attn_q.weight"),
    ("another feed-forward size", {"intermediate_size": 64}, "the shape of blk.0.ffn_gate.weight"),
    ("no rope theta", {"rope_theta": None}, "rope_theta"),
    ("another rope theta", {"rope_theta": 1e7}, "RoPE theta"),
    ("another nested theta", {"rope_parameters": {"rope_theta": 1e7}}, "RoPE theta"),
    ("an endless theta", {"rope_theta": float("inf")}, "RoPE theta"),
    ("a number larger than floats", {"rope_theta": 10**400}, "rope_theta"),
    ("RoPE that is scaled", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    ("RoPE that is interleaved", {"rope_is_neox_style": False}, "rope_is_neox_style"),
    ("no rotary dimensions", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
    ("no block size", {"block_size": None}, "block_size"),
    ("a block of one", {"block_size": 1}, "block size"),
    ("a block of 65", {"block_size": 65}, "block size"),
    ("a small window", {"use_sliding_window": True, "sliding_window": 63, "layer_types": ["sliding_attention"] * 2},
     "sliding window"),
    ("a window for other layers", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"]},
     "layer_types"),
    ("another vocabulary", {"vocab_size": VOCAB + 1}, "vocabulary"),
    ("another kind of drafter", {"architectures": ["DFlash2DraftModel"]}, "architectures"),
    ("no architecture", {"architectures": None}, "architectures"),
    ("biases", {"attention_bias": True}, "attention_bias"),
    ("another activation", {"hidden_act": "gelu"}, "hidden_act"),
    ("a length of none", {"max_position_embeddings": -1}, "context length"),
]  # fmt: skip

DFLASH: list[tuple[str, dict[str, Any], str]] = [
    ("no mask token", {"mask_token_id": None}, "mask_token_id"),
    ("a mask token outside", {"mask_token_id": VOCAB}, "mask token"),
    ("a mask token below", {"mask_token_id": -1}, "mask token"),
    ("no target layers", {"target_layer_ids": None}, "target_layer_ids"),
    ("none of them", {"target_layer_ids": []}, "target layers"),
    ("fractions", {"target_layer_ids": [0.5, 2]}, "target_layer_ids"),
    ("unsorted ones", {"target_layer_ids": [2, 0]}, "target layers"),
    ("the same twice", {"target_layer_ids": [1, 1]}, "target layers"),
    ("a negative one", {"target_layer_ids": [-1, 1]}, "target_layer_ids"),
    ("seventeen", {"target_layer_ids": list(range(17))}, "target layers"),
    ("one beyond the target", {"target_layer_ids": [0, 3]}, "target layers"),
    ("more than fc is wide", {"target_layer_ids": [0, 1, 2]}, "the shape of fc.weight"),
    ("fewer than fc is wide", {"target_layer_ids": [0]}, "the shape of fc.weight"),
    ("DFlash2", {"selector_rank": 4}, "selector_rank"),
]


@pytest.mark.parametrize(("changes", "what"), [x[1:] for x in CONFIG], ids=[x[0] for x in CONFIG])
def test_a_configuration_is_refused(tmp_path: Path, target: Path, changes: dict[str, Any], what: str) -> None:
    refused(small_checkpoint(tmp_path / "drafter", **changes), target, what)


@pytest.mark.parametrize(("changes", "what"), [x[1:] for x in DFLASH], ids=[x[0] for x in DFLASH])
def test_what_dflash_says_is_refused(tmp_path: Path, target: Path, changes: dict[str, Any], what: str) -> None:
    own = {"mask_token_id": MASK, "target_layer_ids": IDS, **changes}
    refused(small_checkpoint(tmp_path / "drafter", dflash_config=own), target, what)


def edited(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        arrays[name] = change(arrays[name].copy())

    return edit


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[3] = value
        return values

    return change


DOWN = "layers.1.mlp.down_proj.weight"
TENSORS: list[tuple[str, Callable[[Arrays], Any], str]] = [
    ("one that is missing", lambda a: a.pop("hidden_norm.weight"), "the tensor enc.output_norm.weight"),
    ("one that is unknown", lambda a: a.update({"layers.0.self_attn.q_proj.bias": a["norm.weight"]}),
     "the tensor layers.0.self_attn.q_proj.bias"),
    ("one of no layer", lambda a: a.update({"self_attn.q_proj.weight": a["norm.weight"]}),
     "the tensor self_attn.q_proj.weight"),
    ("one of a layer beyond", lambda a: a.update({"layers.2.input_layernorm.weight": a["norm.weight"]}),
     "the tensor blk.2.attn_norm.weight"),
    ("one of a layer written otherwise", lambda a: a.update({"layers.01.input_layernorm.weight": a["norm.weight"]}),
     "the tensor layers.01.input_layernorm.weight"),
    ("one that is there twice", lambda a: a.update({"model.fc.weight": a["fc.weight"]}), "the tensor model.fc.weight"),
    ("one that lies across", edited(DOWN, lambda x: x.T.copy()), "the shape of blk.1.ffn_down.weight"),
    ("values of fewer heads", edited("layers.0.self_attn.v_proj.weight", lambda x: x[:16]),
     "the shape of blk.0.attn_v.weight"),
    ("an output of fewer heads", edited("layers.0.self_attn.o_proj.weight", lambda x: x[:, :32]),
     "the shape of blk.0.attn_output.weight"),
    ("one of other numbers", edited(DOWN, lambda x: x.astype(np.int64)), "its dtype of " + DOWN),
    ("NaN", edited(DOWN, with_value(np.nan)), "a value of " + DOWN),
    ("infinity", edited("norm.weight", with_value(np.inf)), "a value of norm.weight"),
    ("more than f16 holds", edited(DOWN, with_value(1e6)), "a value of " + DOWN),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "what"), [x[1:] for x in TENSORS], ids=[x[0] for x in TENSORS])
def test_tensors_are_refused(tmp_path: Path, target: Path, edit: Callable[[Arrays], Any], what: str) -> None:
    arrays = weights()
    edit(arrays)
    refused(write_checkpoint(tmp_path / "drafter", arrays, config()), target, what)


def test_more_than_f16_holds_fits_bf16(tmp_path: Path, target: Path) -> None:
    arrays = weights()
    arrays[DOWN][0, 0] = 1e6
    converted(write_checkpoint(tmp_path / "drafter", arrays, config()), target, kind="bf16")


TARGETS: list[tuple[str, dict[str, Any], tuple[Field, ...], str]] = [
    ("another width", {"embedding_length": 128}, (), "hidden size"),
    ("another mask token", {}, (Field.of("tokenizer.ggml.mask_token_id", 7),), "mask token"),
    ("an architecture that gives no inputs", {"architecture": "gemma3"}, (), "architecture"),
    ("fewer layers", {"block_count": 2}, (), "target layers"),
    ("fewer layers without those for later tokens", {}, (Field.of("qwen3.nextn_predict_layers", 2),), "target layers"),
    ("no layers", {"block_count": None}, (), "qwen3.block_count"),
    ("no width", {"embedding_length": None}, (), "qwen3.embedding_length"),
    ("the usual theta", {"rope.freq_base": None}, (), "RoPE theta"),
]


@pytest.mark.parametrize(("changes", "extra", "what"), [x[1:] for x in TARGETS], ids=[x[0] for x in TARGETS])
def test_a_target_is_refused(tmp_path: Path, changes: dict[str, Any], extra: tuple[Field, ...], what: str) -> None:
    target = small_target(tmp_path / "target.gguf", *extra, **changes)
    refused(small_checkpoint(tmp_path / "drafter"), target, what)


def test_what_comes_out_of_the_last_layer_is_for_few_targets(tmp_path: Path) -> None:
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 3]}
    folder = small_checkpoint(tmp_path / "drafter", dflash_config=own)
    refused(folder, small_target(tmp_path / "target.gguf"), "target layers")
    made = converted(folder, small_target(tmp_path / "mimo.gguf", architecture="mimo2"))
    assert made.own("target_layers") == [1, 4]


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, target: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    (folder / "config.json").unlink()
    refused(folder, target, "config.json")


def test_a_mask_embedding_is_refused(tmp_path: Path, target: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    (folder / "mask_embedding.pt").touch()
    refused(folder, target, "mask_embedding.pt")


def test_a_folder_is_asked_for(tmp_path: Path, target: Path) -> None:
    refused(target, target, "the checkpoint")


def test_the_output_must_be_writable_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        draft.convert(tmp_path / "none", tmp_path / "no" / "draft.gguf", model=tmp_path / "none.gguf")


def refused(folder: Path, target: Path, what: str) -> None:
    """With what was found, wanted and helps; what was there stays, and nothing else is left."""
    out = folder.parent / "draft.gguf"
    out.write_bytes(b"before")
    before = {path.name for path in folder.parent.iterdir()}
    with pytest.raises(ConversionError) as caught:
        draft.convert(folder, out, model=target)
    assert caught.value.what == what, str(caught.value)
    assert str(caught.value.found)
    assert caught.value.wanted
    assert caught.value.remedy
    assert out.read_bytes() == b"before"
    assert {path.name for path in folder.parent.iterdir()} == before
