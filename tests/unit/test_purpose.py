"""What is opened as a model: files that are a part of one are refused by their heads, before llama.cpp sees them."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import rewritten, small_eagle3, small_target, target_fields, write_gguf

from kvflash_ggml.convert import writer
from kvflash_ggml.convert.writer import Planned
from kvflash_ggml.errors import ConfigError, ConversionError
from kvflash_ggml.gguf import purpose, reader, types
from kvflash_ggml.gguf.reader import Field

MODELS = Path(__file__).parents[1] / "models"
WEIGHT = {"a.weight": np.ones((1, 32), np.float32)}


def made(path: Path, *, weights: bool = True, **fields: str | int) -> Path:
    """A file of a few keys; "__" stands for a dot."""
    values = [Field.of(name.replace("__", "."), value) for name, value in fields.items()]
    return write_gguf(path, values, WEIGHT if weights else {})


PARTS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "mtp": (lambda p: MODELS / "mtp-recall-qwen35-q8_0.gguf", "(MTP) of a qwen35 model", "-md FILE"),
    "dflash": (lambda p: MODELS / "recall-dflash.gguf", "a DFlash drafter", "the qwen3 model that it was trained"),
    "eagle3": (small_eagle3, "an EAGLE3 drafter", 'draft_model="FILE"'),
    "older": (lambda p: small_target(p, architecture="dflash-draft"), "older names", "kvflash-convert migrate"),
    "assistant": (lambda p: small_target(p, architecture="gemma4-assistant"), "memory of its target", "own programs"),
    "mmproj": (lambda p: made(p, general__architecture="clip"), "a projector", "--mmproj FILE"),
    "lora": (
        lambda p: made(p, general__architecture="llama", general__type="adapter"),
        "an adapter (LoRA) of a model of the architecture llama",
        'lora_path="FILE"',
    ),
    "control": (lambda p: made(p, general__architecture="controlvector"), "a control vector", "--control-vector"),
    "imatrix": (lambda p: made(p, general__type="imatrix"), "an importance matrix", "--imatrix"),
    "part": (
        lambda p: made(p.with_name("m-00002-of-00003.gguf"), split__no=1, split__count=3),
        "part 2 of 3",
        "first part: m-00001-of-00003.gguf",
    ),
    "renamed part": (lambda p: made(p, split__no=1, split__count=3), "part 2 of 3", "number is 00001"),
    "vocabulary": (lambda p: write_gguf(p, target_fields(), {}), "without weights", "vocab_only=True"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_model_says_what_it_is_and_how_to_use_it(tmp_path: Path, kind: str) -> None:
    make, what, use = PARTS[kind]
    path = make(tmp_path / "model.gguf")
    with pytest.raises(ConfigError) as refused:
        purpose.check_model(path)
    assert str(refused.value).startswith(str(path))
    assert what in str(refused.value)
    assert use in str(refused.value)
    assert not purpose.reads_alone(path)
    purpose.check_model(path, vocab_only=True)
    with pytest.raises((ConfigError, ConversionError), match=path.name):
        purpose.check_reader(path)


def test_a_model_is_one(tmp_path: Path) -> None:
    for path in (
        *(MODELS / f"{name}-q8_0.gguf" for name in ("recall-qwen3", "recall-qwen35", "scorer-qwen3")),
        small_target(tmp_path / "model.gguf", whole=True),
    ):
        purpose.check_model(path)
        purpose.check_reader(path)
        assert purpose.reads_alone(path)
    purpose.check_model(tmp_path / "missing.gguf")


def test_the_first_part_of_a_model_may_have_no_weights(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    own = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 2, "split.no": 0, "split.count": 2}
    write_gguf(first, [Field.of("general.architecture", "qwen35"), *(Field.of(*item) for item in own.items())], {})
    second = tmp_path / "m-00002-of-00002.gguf"
    head = {"blk.1.nextn.eh_proj.weight": np.ones((1, 32), np.float32)}
    write_gguf(second, [], {**head, "blk.0.attn_norm.weight": np.ones(32, np.float32)})
    purpose.check_model(first)
    write_gguf(second, [], head)
    with pytest.raises(ConfigError, match="a head for further tokens"):
        purpose.check_model(first)
    write_gguf(second, [], {**head, "blk.0.attn_norm.weight": np.ones(32, np.float16)})
    with pytest.raises(ConversionError, match=r"the type of blk\.0\.attn_norm\.weight is f16"):
        purpose.check_model(first)
    second.unlink()
    with pytest.raises(ConfigError, match=r"model from file: .*m-00002-of-00002\.gguf: the file is not there"):
        purpose.check_model(first)


def test_a_model_without_a_vocabulary_reads_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no vocabulary"):
        purpose.check_reader(made(tmp_path / "model.gguf", general__architecture="llama"))


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("-inf")])
def test_an_epsilon_that_ends_the_process_is_refused(tmp_path: Path, value: float) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[name] = Field.of(name, value)

    name = "qwen3.attention.layer_norm_rms_epsilon"
    path = rewritten(MODELS / "scorer-qwen3-q8_0.gguf", tmp_path / "model.gguf", change)
    for refuses in (purpose.check_model, purpose.check_reader):
        with pytest.raises(ConversionError, match=rf"model.gguf: {name} is .*wanted: 0 or more"):
            refuses(path)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("block_count", 0, "1 to 512"),
        ("nextn_predict_layers", 7, "0 to 3"),
        ("expert_count", 1025, "0 to 1024"),
        ("expert_used_count", 1, "0 to 0"),
        ("rope.scaling.type", "llama", "one of none, linear, yarn, longrope"),
        ("rope.freq_base", -1.0, "0 or more"),
        *(("rope.dimension_count", value, "64, the size of a head") for value in (0, 2, 32)),
        ("rope.scaling.factor", float("nan"), "a finite number"),
    ],
)
def test_what_llama_cpp_asserts_of_a_head(tmp_path: Path, key: str, value: float | str, wanted: str) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[name] = Field.of(name, value)

    name, sound = f"qwen3.{key}", MODELS / "scorer-qwen3-q8_0.gguf"
    with pytest.raises(ConversionError, match=rf"model\.gguf: {name} is .*wanted: {wanted}"):
        purpose.check_model(rewritten(sound, tmp_path / "model.gguf", change))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *(
            ("rope.dimension_count", value, "an even number from 2 to 64")
            for value in (0, 1, 15, 65, 66, (1 << 32) - 1)
        ),
        *(("rope.dimension_sections", value, "a sum from 1 to 64") for value in (0, 255, (1 << 32) - 1)),
        *(("rope.dimension_sections", [one] * 4, "a sum from 1 to 64") for one in (0, -1, 17, 1 << 20, (1 << 31) - 1)),
        ("rope.dimension_sections", [0, 0, 0, 8], "a sum from 1 to 64"),
        *(("ssm.inner_size", value, "1 to 2147483647") for value in (0, (1 << 32) - 1)),
        *(("ssm.inner_size", value, "256, the state's size times its heads") for value in (1, 255, 257, 512)),
        ("full_attention_interval", 0, "1 to 2147483647"),
        ("ssm.time_step_rank", 0, "1 to 2147483647"),
        ("attention.head_count_kv", [2, 4] * 4, "one number for all layers that have any"),
    ],
)
def test_what_llama_cpp_asserts_of_a_delta_net(tmp_path: Path, key: str, value: int | list[int], wanted: str) -> None:
    """It loads such heads, as the weights' shapes come from other keys, and its first step ends the process."""

    def change(fields: dict[str, Field]) -> None:
        fields[name] = Field.of(name, value)

    name, sound = f"qwen35.{key}", MODELS / "recall-qwen35-q8_0.gguf"
    with pytest.raises(ConversionError, match=rf"model\.gguf: {name} is .*wanted: .*{wanted}"):
        purpose.check_model(rewritten(sound, tmp_path / "model.gguf", change))


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen35", "rope.dimension_count", 64),
        ("deepseek4", "rope.dimension_count", 0),
        ("qwen35", "rope.dimension_sections", [24, 20, 20, 0]),
        ("qwen35", "attention.head_count_kv", [0, 0, 0, 2] * 2),
        ("glm4", "rope.dimension_sections", [0] * 4),
    ],
)
def test_odd_heads_that_llama_cpp_computes_with(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    def change(fields: dict[str, Field]) -> None:
        for name in tuple(fields):
            if name.startswith("qwen35."):
                fields[own] = fields.pop(name).renamed(own := name.replace("qwen35", architecture))
        fields["general.architecture"] = Field.of("general.architecture", architecture)
        fields[f"{architecture}.{key}"] = Field.of(f"{architecture}.{key}", value)

    purpose.check_model(rewritten(MODELS / "recall-qwen35-q8_0.gguf", tmp_path / "model.gguf", change))


@pytest.mark.parametrize("key", ["rope.dimension_count", "rope.dimension_count_swa"])
@pytest.mark.parametrize("architecture", ["gemma3", "phi2", "minimax-m2", "dflash", "eagle3"])
def test_rope_that_turns_nothing(tmp_path: Path, architecture: str, key: str) -> None:
    """A step of llama.cpp never ends then. Architectures without RoPE may say 0."""
    for name in (architecture, "bloom"):
        path = made(tmp_path / "m.gguf", general__architecture=name, **{f"{name}.{key}": 0, f"{name}.block_count": 1})
        wanted = rf"m\.gguf: {name}\.{key} is 0; wanted: an even number from 2"
        with pytest.raises(ConversionError, match=wanted) if name != "bloom" else nullcontext():
            purpose.check_head(reader.read(path))


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        *(("blk.0.ssm_a", kind, "f32") for kind in ("f16", "bf16", "i32")),
        *(("blk.0.ssm_dt.bias", kind, "f32") for kind in ("f16", "bf16")),
        *(("output_norm.weight", kind, "f32, or another type of weights") for kind in ("i8", "i32", "i64", "f64")),
        *(
            (name, kind, "f32")
            for name in (
                "blk.0.ssm_norm.weight",
                "output_norm.weight",
                "blk.0.attn_norm_2.weight",
                "v.blk.0.ln1.weight",
                "blk.0.attn_q.bias",
                "rope_freqs.weight",
            )
            for kind in ("f16", "bf16")
        ),
        ("blk.0.ffn_gate_inp_shexp.weight", "f16", ""),
        ("blk.0.ffn_gate_tid2eid", "i32", ""),
    ],
)
def test_types_that_llama_cpp_computes_with(tmp_path: Path, name: str, kind: str, wanted: str) -> None:
    fields = [Field.of("general.architecture", "qwen3"), Field.of("qwen3.block_count", 1)]
    shaped = types.BY_NAME[kind]
    tensor = Planned(
        name=name, kind=shaped, shape=(4,), pieces=lambda: iter([np.zeros((1, 4 * shaped.size), np.uint8)])
    )
    with (path := tmp_path / "model.gguf").open("wb") as made:
        writer.write(made, fields, [tensor], lambda done, total: None)
    with (
        pytest.raises(ConversionError, match=f"the type of {name} is {kind}; wanted: {wanted}")
        if wanted
        else nullcontext()
    ):
        purpose.check_model(path)


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "refused"),
    [
        ("gpt-oss", "blk.0.attn_q.scale", (1,), True),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", (4, 2), True),
        ("chameleon", "blk.0.attn_q_norm.weight", (4, 2), True),
        ("qwen4exp", "blk.0.ple_norm_key.weight", (4, 2), True),
        ("plamo2", "blk.0.post_attention_norm", (4,), True),
        ("nemotron_h", "blk.0.ssm_d", (1, 2), True),
        ("kimi-linear", "blk.0.ssm_conv1d_k.weight", (4, 1, 2), True),
        ("lfm2", "blk.0.shortconv.conv.weight", (3, 4), True),
        ("rwkv6", "blk.0.time_mix_lerp_fused.weight", (4, 1, 1, 5), True),
        ("mpt", "blk.0.ffn.act.scales", (4,), True),
        ("qwen3", "blk.0.attn_q.weight", (4, 2), False),
        ("qwen3", "blk.0.attn_q.input_scale", (1,), False),
        ("qwen35", "blk.0.ssm_beta.weight", (4,), False),
        ("clip", "v.class_embd", (4,), False),
        ("clip", "a.conv1d.1.weight", (3, 4), False),
    ],
)
def test_what_is_added_or_convolved_is_f32(
    tmp_path: Path, architecture: str, name: str, shape: tuple[int, ...], refused: bool
) -> None:
    """A step of llama.cpp ended the process with F16, on a thread that no exception leaves."""
    fields = [Field.of("general.architecture", architecture), Field.of(f"{architecture}.block_count", 1)]
    fields.append(Field.of(f"{architecture}.expert_feed_forward_length", 1))
    tensor = Planned(
        name=name,
        kind=types.BY_NAME["f16"],
        shape=shape,
        pieces=lambda: iter([np.zeros(2 * math.prod(shape), np.uint8)]),
    )
    with (path := tmp_path / "model.gguf").open("wb") as made:
        writer.write(made, fields, [tensor], lambda done, total: None)
    with pytest.raises(ConversionError, match=f"the type of {name} is f16; wanted: f32") if refused else nullcontext():
        purpose.check_numbers(reader.read(path))


@pytest.mark.parametrize("key", ["general.name", "general.description", "tokenizer.chat_template", "general.\udcff"])
def test_texts_that_are_no_utf_8(tmp_path: Path, key: str) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[key] = Field.of(key, "caf\udce9" if key.isascii() else "x")

    path = rewritten(MODELS / "scorer-qwen3-q8_0.gguf", tmp_path / "model.gguf", change)
    for only in (False, True):
        with pytest.raises(ConversionError, match="wanted: text in UTF-8") as refused:
            purpose.check_model(path, vocab_only=only)
        str(refused.value).encode()  # a terminal can print it


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("qwen3.attention.layer_norm_rms_epsilon", float("nan"), "a finite number"),
        ("qwen3.attention.layer_norm_rms_epsilon", 1e39, "a finite number"),
        ("qwen3.attention.layer_norm_rms_epsilon", 1, "the type of the file's value, which is float"),
        ("qwen3.context_length", -2, "-1 to 4294967295"),
        ("qwen3.rope.dimension_count", 32, "the file's own: the weights have that shape"),
        ("qwen3.block_count", 0, "the file's own: the weights have that shape"),
        ("qwen3.attention.head_count_kv", 1 << 31, "the file's own: the weights have that shape"),
        ("qwen3.ssm.inner_size", 0, "the file's own: the weights have that shape"),
        ("general.name", "x" * 128, "at most 127 bytes"),
        ("general.name", "\u00e9" * 64, "at most 127 bytes"),
        ("general.name", "caf\udce9", "at most 127 bytes of UTF-8"),
        ("tokenizer.ggml.model", "gpt2\0x", "at most 127 bytes of UTF-8, none of them zero"),
        ("general.architecture", "llama", "the file's own: the weights are of that architecture"),
        ("general.url", None, "a bool, int, float or str"),
    ],
)
def test_a_value_that_llama_cpp_would_misread(key: str, value: float | str | None, wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_overrides \(--override-kv\) {key} is .*; wanted: {wanted}"):
        purpose.check_model(MODELS / "scorer-qwen3-q8_0.gguf", overrides={key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("attention.layer_norm_rms_epsilon", -1.0), ("expert_used_count", 1), ("rope.scaling.type", "x")]
)
def test_a_value_that_ends_the_process_is_refused_in_place_of_a_sound_one(key: str, value: float | str) -> None:
    with pytest.raises(ConversionError, match=rf"kv_overrides \(--override-kv\): qwen3\.{key} is .*wanted: .*Leave it"):
        purpose.check_model(MODELS / "scorer-qwen3-q8_0.gguf", overrides={f"qwen3.{key}": value})


@pytest.mark.parametrize(
    ("architecture", "fields", "key", "wanted"),
    [
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 6}, "", ""),
        ("gemma3", {"attention.sliding_window_pattern": 1}, "", ""),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 1}, "pattern", "a pattern"),
        ("gemma4", {"attention.sliding_window": 512, "attention.sliding_window_pattern": [0, 0]}, "pattern", "a pat"),
        ("gemma4", {"attention.sliding_window": 512, "attention.sliding_window_pattern": [0, 1]}, "", ""),
        ("llama4", {"attention.sliding_window_pattern": 1}, "pattern", "a pattern with a layer"),
        ("llama4", {"attention.sliding_window": 0}, "sliding_window", "1 to "),
        ("afmoe", {"attention.sliding_window": 0}, "sliding_window", "1 to "),
        ("afmoe", {}, "sliding_window", "1 to "),
        ("afmoe", {"attention.sliding_window": 2048}, "", ""),
        ("rwkv6", {"wkv.head_size": 0}, "head_size", "1 to "),
        ("rwkv6", {"wkv.head_size": 64}, "", ""),
        ("deepseek2", {"expert_gating_func": 5}, "expert_gating_func", "0 to 4"),
        ("deepseek2", {"expert_gating_func": 0}, "", ""),
        ("dots1", {"expert_gating_func": 0}, "expert_gating_func", "1 to 4"),
        ("deepseek2", {"attention.key_length_mla": 192}, "key_length_mla", "0, or value_length_mla too"),
        ("deepseek2", {"attention.value_length_mla": 128}, "value_length_mla", "0, or key_length_mla too"),
        ("deepseek2", {"attention.key_length_mla": 192, "attention.value_length_mla": 128}, "", ""),
        ("mistral4", {"attention.temperature_scale": 0.1}, "temperature_length", "1 or more, where"),
        ("mistral4", {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192}, "", ""),
        ("olmo2", {"attention.sliding_window": (1 << 31) - 1}, "sliding_window", "0 to 16777216"),
        ("phi3", {"attention.sliding_window": 262144}, "", ""),
        ("qwen35moe", {"expert_count": 0}, "expert_count", "1 to 1024"),
        ("qwen35moe", {"expert_count": 0, "expert_feed_forward_length": 64}, "", ""),
        ("olmo2", {}, "attention.head_count", "1 or more in the first layer"),
        ("olmo2", {"attention.head_count": [0, 2]}, "attention.head_count", "1 or more in the first layer"),
        ("qwen", {"attention.head_count": 2, "attention.head_count_kv": 0}, "head_count_kv", "1 or more in the first"),
        ("qwen", {"attention.head_count": 2}, "", ""),
        ("jamba", {"attention.head_count": 2, "attention.head_count_kv": [0, 2]}, "", ""),
        ("paddleocr", {"rope.dimension_count": 64}, "rope.dimension_sections", "whole numbers from 0"),
        ("qwen3tts", {"block_count": 2, "n_deepstack_layers": 65536}, "n_deepstack_layers", "0 to 2"),
        ("qwen3vl", {"block_count": 36, "n_deepstack_layers": 3}, "", ""),
        ("t5", {"decoder_block_count": 513}, "decoder_block_count", "0 to 512"),
        ("deepseek4", {"attention.output_group_count": 0}, "output_group_count", "1 to "),
        ("deepseek4", {"hyper_connection.sinkhorn_iterations": (1 << 31) - 1}, "iterations", "0 to 1000"),
        *(("glm-dsa", {"attention.indexer.types": one}, "types", "a layer with") for one in (0, [0, 0], [False])),
        *(("glm-dsa", {"attention.indexer.types": one}, "", "") for one in (1, [1, 0], [True, False])),
    ],
)
def test_numbers_that_a_step_asserts(
    tmp_path: Path, architecture: str, fields: dict[str, Any], key: str, wanted: str
) -> None:
    """llama.cpp asserted them while it made the context or in the first step, divided by them, or had no end."""
    head = [Field.of("general.architecture", architecture)]
    head += [Field.of(f"{architecture}.{name}", value) for name, value in fields.items()]
    file = reader.read(write_gguf(tmp_path / "model.gguf", head, WEIGHT))
    with pytest.raises(ConversionError, match=f"{key} is .*; wanted: {wanted}") if wanted else nullcontext():
        purpose.check_head(file)


@pytest.mark.parametrize(
    ("architecture", "used", "wrong"),
    [
        ("llama", [2, 2, 2], False),
        ("llama", [2, 2, 0], False),
        ("llama", [2, 0, 2], True),
        ("llama", [0, 2, 2], True),
        ("nemotron_h_moe", [0, 2, 0], False),
        ("nemotron_h_moe", [2, 0, 2], True),
    ],
)
@pytest.mark.parametrize("size", [0, 64])
def test_a_layer_whose_tokens_take_no_expert(
    tmp_path: Path, architecture: str, used: list[int], wrong: bool, size: int
) -> None:
    """The first step divided by none, or read what was not there. Only the second layer has experts."""
    values = {"block_count": 3, "expert_count": 2, "expert_used_count": used, "expert_feed_forward_length": size}
    head = [Field.of("general.architecture", architecture)]
    head += [Field.of(f"{architecture}.{name}", value) for name, value in values.items()]
    (one,) = WEIGHT.values()
    weights = {"blk.0.ffn_down.weight": one, "blk.1.ffn_down_exps.weight": one, "blk.2.ffn_down.weight": one}
    wrong = wrong or (architecture != "llama" and not size)
    refusal = pytest.raises(ConversionError, match=r"used_count is .*; wanted: 1 or more in the first layer, and where")
    with refusal if wrong else nullcontext():
        purpose.check_model(write_gguf(tmp_path / "model.gguf", head, weights))


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_beside_which_another_is_read(tmp_path: Path, count: int) -> None:
    """llama.cpp read a norm that it had not loaded; with another count it asserts."""
    head = [Field.of("general.architecture", "rwkv6qwen2"), Field.of("rwkv6qwen2.token_shift_count", count)]
    (one,) = WEIGHT.values()
    file = write_gguf(tmp_path / "model.gguf", head, {"blk.0.time_mix_first.weight": one})
    refusal = pytest.raises(ConversionError, match=r"first\.weight is there; wanted: no such tensor")
    with refusal if count == 1 else nullcontext():
        purpose.check_model(file)


@pytest.mark.parametrize(
    "key", ["qwen3.block_count\0", "\0", "", "k" * 128, "\u00e9" * 64, "caf\udce9", 5, None, b"general.name"]
)
def test_a_key_that_llama_cpp_would_misread(tmp_path: Path, key: Any) -> None:
    """With a zero byte it replaced the field before that byte, which no check had seen."""
    for path in (MODELS / "scorer-qwen3-q8_0.gguf", tmp_path / "missing.gguf"):
        for only in (False, True):
            with pytest.raises(ConfigError, match=r"\(--override-kv\) has the key .*; wanted: 1 to 127 bytes of UTF-8"):
                purpose.check_model(path, vocab_only=only, overrides={"general.name": "x", key: 0})


def test_a_vocabulary_that_a_replaced_value_makes_unsound(tmp_path: Path) -> None:
    """Equal tokens are no harm in a file without a vocabulary, until its kind is replaced."""
    path = with_tokens(tmp_path / "model.gguf", "none", ["a", "b", "a"])
    purpose.check_model(path, vocab_only=True, overrides={"general.name": "x"})
    with pytest.raises(
        ConversionError, match=r"\(--override-kv\): .*tokens is 'a' as number 0 and as number 2;.*Leave it"
    ):
        purpose.check_model(path, vocab_only=True, overrides={"tokenizer.ggml.model": "gpt2"})


def test_values_that_a_user_replaces() -> None:
    for name, value in {"qwen3.context_length": 4096, "tokenizer.ggml.bos_token_id": -1, "general.name": "x"}.items():
        purpose.check_model(MODELS / "scorer-qwen3-q8_0.gguf", overrides={name: value})


def with_tokens(path: Path, kind: str, tokens: list[str]) -> Path:
    """A model whose vocabulary has these tokens."""
    texts = [token.encode() for token in tokens]
    raw = struct.pack("<IQ", 8, len(texts)) + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    head = Field.of("general.architecture", "llama"), Field.of("tokenizer.ggml.model", kind)
    return write_gguf(path, [*head, Field("tokenizer.ggml.tokens", 9, raw)], WEIGHT)


SPELLED = {
    "without a kind": ("no_vocab", lambda tokens: tokens, "vocabulary"),
    "without one": ("none", lambda tokens: tokens, "vocabulary"),
    "of words alone": ("llama", lambda tokens: ["<unk>", "the", "a"], "token for the byte 0 of a text"),
    "without a byte": ("llama", lambda tokens: tokens[:255], "token for the byte 255 of a text"),
    "of bytes": ("llama", lambda tokens: tokens, ""),
    "of bytes as they are": ("llama", lambda tokens: [chr(n) for n in range(128)] + tokens[128:], ""),
}


@pytest.mark.parametrize("what", SPELLED)
def test_a_vocabulary_spells_every_text(tmp_path: Path, what: str) -> None:
    """llama.cpp ends the process where it misses a token."""
    kind, choose, lack = SPELLED[what]
    path = with_tokens(tmp_path / "model.gguf", kind, choose([f"<0x{byte:02X}>" for byte in range(256)]))
    with pytest.raises(ConfigError, match=f"has no {lack};") if lack else nullcontext():
        purpose.check_reader(path)


EQUAL = {
    "twice": (["a", "b", "c", "b"], "'b' as number 1 and as number 3"),
    "up to a zero byte": (["a\0b", "c", "a\0d"], "'a' as number 0 and as number 2"),
    "with the name of an empty one": (["a", "", "[EMPTY_1]"], r"'\[EMPTY_1\]' as number 1 and as number 2"),
    "empty": (["", "", "\0"], ""),
    "once each": (["a", "b\0", "[EMPTY_0]"], ""),
}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "rwkv", "no_vocab", "none"])
@pytest.mark.parametrize("what", EQUAL)
def test_equal_tokens_are_refused(tmp_path: Path, what: str, kind: str) -> None:
    """llama.cpp ends the process for them in every vocabulary that it reads, of a model and of a drafter."""
    tokens, twice = EQUAL[what]
    path = with_tokens(tmp_path / "model.gguf", kind, tokens)
    refusal = pytest.raises(ConversionError, match=f"tokens is {twice}; wanted: each token once")
    with refusal if twice and kind not in ("no_vocab", "none") else nullcontext():
        purpose.check_model(path, vocab_only=True)
    for refuses in (purpose.check_reader, lambda path: purpose.check_head(reader.read(path))):
        with refusal if twice and kind not in ("no_vocab", "none") else suppress(ConfigError):
            refuses(path)


@pytest.mark.parametrize("kind", ["none", "no_vocab", "llama"])
def test_tokens_without_texts_are_counted(tmp_path: Path, kind: str) -> None:
    """A load took memory for each, until there was none."""
    path = made(
        tmp_path / "model.gguf", general__architecture="llama", tokenizer__ggml__model=kind, llama__vocab_size=1 << 23
    )
    refusal = pytest.raises(ConversionError, match=r"llama\.vocab_size is 8388608; wanted: at most 4194304")
    with refusal if kind != "llama" else nullcontext():
        purpose.check_model(path, vocab_only=True)


@pytest.mark.parametrize("value", [7, 1.5, True, [1, 2], ""])
@pytest.mark.parametrize("key", ["general.type", "general.architecture", "split.no", "split.count"])
def test_odd_values_are_left_to_llama_cpp(tmp_path: Path, key: str, value: int) -> None:
    def change(fields: dict[str, Field]) -> None:
        fields[key] = Field.of(key, value)

    for source in (MODELS / "recall-dflash.gguf", MODELS / "scorer-qwen3-q8_0.gguf"):
        with suppress(ConfigError):
            purpose.check_model(rewritten(source, tmp_path / source.name, change))


def test_a_head_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    data = (MODELS / "mtp-recall-qwen35-q8_0.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    big, first = data[:4] + data[4:8][::-1] + data[8:], data[:4] + b"\x01\0\0\0" + data[8:]
    for damaged in (b"GGUF", data[:20], data[:1000], data[:90000], big, first, data[:16] + b"\xff" * 8 + data[24:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"Failed to load model from file: .*model\.gguf: model\.gguf: "):
            purpose.check_model(path)
        assert purpose.reads_alone(path)
        with pytest.raises(ConversionError, match=r"model\.gguf"):
            purpose.check_reader(path)
    random = np.random.default_rng(0)
    for _ in range(200):
        changed = bytearray(data[:120000])
        for at in random.integers(24, 4000, 3):
            changed[at] = random.integers(256)
        path.write_bytes(bytes(changed))
        with suppress(ConfigError):
            purpose.check_model(path)


# --- adapters (LoRA)

PAIRS = {
    "blk.0.attn_q.weight.lora_a": (8, 4),
    "blk.0.attn_q.weight.lora_b": (4, 8),
    "token_embd.weight.lora_a": (4, 16),
    "token_embd.weight.lora_b": (4, 8),
    "blk.0.ffn_up_exps.weight.lora_a": (8, 4, 3),
    "blk.0.ffn_up_exps.weight.lora_b": (4, 8, 3),
    "output_norm.weight": (8,),
}
"""An adapter of rank 4, by shapes with the length of a row first."""

ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # fields, tensors by shape and perhaps type, and what is refused
    "sound": ({}, {}, ""),
    "of more than one dimension": ({}, {"blk.0.attn_q.weight.lora_a": (8, 4, 1, 1)}, ""),
    "of another model": ({}, {"blk.9.attn_q.weight.lora_a": (8, 4, 2)}, ""),
    "half a pair": ({}, {"blk.1.attn_q.weight.lora_a": (8, 4, 2)}, ""),
    "an alpha that is whole": ({"adapter.lora.alpha": 16}, {}, "adapter.lora.alpha is 16; wanted: a number"),
    "a type that is none": ({"general.type": 5}, {}, "general.type is 5; wanted: text"),
    "a kind that is none": ({"adapter.type": 0.5}, {}, "adapter.type is 0.5; wanted: text"),
    "an architecture that is none": ({"general.architecture": True}, {}, "general.architecture is True; wanted: text"),
    "integers": ({}, {"blk.0.attn_q.weight.lora_a": ((8, 4), "i32")}, "the type of .*attn_q.weight.lora_a is i32"),
    "doubles": ({}, {"blk.0.attn_q.weight.lora_b": ((4, 8), "f64")}, "the type of .*attn_q.weight.lora_b is f64"),
    "planes": ({}, {"blk.0.attn_q.weight.lora_a": (8, 4, 2)}, "the shape of .*attn_q.weight.lora_a is"),
    "no planes": ({}, {"blk.0.ffn_up_exps.weight.lora_b": (4, 8)}, "the shape of .*up_exps.weight.lora_b is"),
    **{
        f"an alpha of {alpha}": (
            {"adapter.lora.alpha": alpha},
            {},
            f"adapter.lora.alpha is {re.escape(str(alpha))}; wanted: a finite number above 0",
        )
        for alpha in (math.nan, math.inf, -math.inf, -8.0, 0.0)
    },
    "weights of NVFP4 with a scale": (
        {},
        {"blk.0.ffn_up.weight.lora_a": (64, 4), "blk.0.ffn_up.weight.lora_b": (4, 8)},
        "blk.0.ffn_up.weight is nvfp4 with a scale; wanted: weights of another type",
    ),
    "a name that is two": (
        {},
        {"blk.1.lora_a.attn_q.weight.lora_a": (8, 4)},
        "the name of a tensor is blk.1.lora_a.attn_q.weight.lora_a; wanted: .lora_a or .lora_b at its end alone",
    ),
    "invocation tokens": (
        {"adapter.alora.invocation_tokens": [1, 2]},
        {},
        "adapter.alora.invocation_tokens is .1, 2.; wanted: an adapter that counts for the whole text",
    ),
    "weights of NVFP4 without one": (
        {},
        {"blk.0.ffn_gate.weight.lora_a": (64, 4), "blk.0.ffn_gate.weight.lora_b": (4, 8)},
        "",
    ),
    "ranks": ({}, {"token_embd.weight.lora_b": (5, 8)}, "the shape of token_embd.weight.lora_b is .*rows of 4"),
}


def of_zeros(path: Path, values: dict[str, Any], shapes: dict[str, Any]) -> Path:
    """A file whose tensors are zeros, F32 where a shape stands without a type."""
    tensors = []
    for name, one in shapes.items():
        shape, kind = one if isinstance(one[0], tuple) else (one, "f32")
        zeros = np.zeros(types.nbytes(types.BY_NAME[kind], shape), np.uint8)
        tensors.append(
            Planned(name=name, kind=types.BY_NAME[kind], shape=shape, pieces=lambda zeros=zeros: iter([zeros]))
        )
    with path.open("wb") as file:
        writer.write(file, [Field.of(*item) for item in values.items()], tensors, lambda done, total: None)
    return path


@pytest.mark.parametrize("what", ADAPTERS)
def test_adapters_that_end_the_process_are_refused(tmp_path: Path, what: str) -> None:
    """llama.cpp asserts the types of their fields at the load, and the shapes of their pairs in the first step."""
    fields, tensors, refused = ADAPTERS[what]
    said: dict[str, Any] = {
        "general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 1.0
    }  # fmt: skip
    whole: dict[str, Any] = {
        "blk.0.attn_q.weight": (8, 8), "token_embd.weight": (8, 16), "blk.0.ffn_up_exps.weight": (8, 8, 3),
        "output.weight": (8, 16), "output_norm.weight": (8,), "blk.1.attn_q.weight": (8, 8), "blk.0.ffn_up.scale": (1,),
        "blk.0.ffn_up.weight": ((64, 8), "nvfp4"), "blk.0.ffn_gate.weight": ((64, 8), "nvfp4"),
    }  # fmt: skip
    model = of_zeros(tmp_path / "model.gguf", {"general.architecture": "llama"}, whole)
    adapter = of_zeros(tmp_path / "adapter.gguf", said | fields, {**PAIRS, **tensors})
    with pytest.raises(ConversionError, match=rf"adapter\.gguf: {refused}") if refused else nullcontext():
        purpose.check_adapter(reader.read(adapter), model)


def test_a_bias_beside_weights_of_nvfp4_with_a_scale_is_refused(tmp_path: Path) -> None:
    """llama.cpp asserts that there is none in a feed-forward net."""
    tensors: dict[str, Any] = {"blk.0.ffn_up.weight": ((64, 8), "nvfp4"), "blk.0.ffn_up.bias": (8,)}
    sound = of_zeros(tmp_path / "sound.gguf", {"general.architecture": "llama"}, tensors)
    purpose.check_head(reader.read(sound))
    ends = of_zeros(tmp_path / "ends.gguf", {"general.architecture": "llama"}, {**tensors, "blk.0.ffn_up.scale": (1,)})
    with pytest.raises(ConversionError, match=r"ffn_up.weight is nvfp4 with a scale; wanted: another type beside"):
        purpose.check_head(reader.read(ends))


def test_heads_of_adapters_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """llama.cpp would read some of them, and assert what nobody has looked at."""
    (path := tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConversionError, match=r"adapter\.gguf: a number"):
        purpose.check_adapter(reader.read(path), MODELS / "scorer-qwen3-q8_0.gguf")
    model = MODELS / "scorer-qwen3-q8_0.gguf"
    purpose.check_adapter(reader.read(model), model)  # llama.cpp refuses it


def test_an_adapter_of_embeddings_that_are_the_output_too_is_refused(tmp_path: Path) -> None:
    """llama.cpp multiplies by it there too, and its halves are the other way around: an assertion in the first step."""
    fields: dict[str, Any] = {"general.architecture": "llama"}
    model = of_zeros(tmp_path / "model.gguf", fields, {"token_embd.weight": (8, 16)})
    adapter = of_zeros(tmp_path / "adapter.gguf", fields, {name: PAIRS[name] for name in PAIRS if "token" in name})
    with pytest.raises(ConversionError, match=r"token_embd.weight is the output too; wanted: an output.weight"):
        purpose.check_adapter(reader.read(adapter), model)
    encoder = {"general.architecture": "bert", "bert.attention.causal": False}
    model = of_zeros(tmp_path / "bert.gguf", encoder, {"token_embd.weight": (8, 16)})
    purpose.check_adapter(reader.read(adapter), model)


@pytest.mark.parametrize("key", ["llama.attention.layer_norm_rms_epsilon\0", "x" * 70000])
def test_heads_that_llama_cpp_reads_otherwise_are_refused(tmp_path: Path, key: str) -> None:
    """It takes a key for what stands before a zero byte, and has no limit for its length."""
    path = of_zeros(tmp_path / "model.gguf", {"general.architecture": "llama", key: 1.0}, {"output_norm.weight": (8,)})
    with pytest.raises(ConfigError, match=r"(?:a key|the length of a key) is .*; wanted: "):
        purpose.check_model(path)


def test_texts_are_read_up_to_a_zero_byte(tmp_path: Path) -> None:
    fields = {"general.architecture": "llama\0?", "llama.block_count": 100000}
    with pytest.raises(ConversionError, match=r"llama\.block_count is 100000"):
        purpose.check_model(of_zeros(tmp_path / "model.gguf", fields, {"output_norm.weight": (8,)}))


# --- what is no file


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "model.gguf")
    for kind in (path, Path(os.devnull)):
        with pytest.raises(ConfigError, match=rf"{kind} is a pipe or a device: give the path of a \.gguf file"):
            reader.check(kind)
    with pytest.raises(ConversionError, match=r"model\.gguf is a pipe or a device"):
        purpose.check_reader(path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.touch()

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read \(Permission denied\): check its name"):
        reader.check(path)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(File name too long\)"):
        reader.check(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("vision.attention.layer_norm_epsilon", -1.0, "0 or more"),
        ("audio.attention.layer_norm_epsilon", math.nan, "0 or more"),
        ("vision.swiglu_clamp", math.inf, "a finite number"),
        ("vision.block_count", 20_000_000, "at most 512"),
        ("vision.preproc_max_tiles", 2**31 - 2, "at most 256"),
    ],
)
def test_numbers_of_a_projector_that_cannot_be(tmp_path: Path, key: str, value: float, wanted: str) -> None:
    fields = [Field.of("general.architecture", "clip"), Field.of(f"clip.{key}", value)]
    with pytest.raises(ConversionError, match=rf"clip\.{key} is {value}; wanted: {wanted}"):
        purpose.check_projector(write_gguf(tmp_path / "mmproj.gguf", fields, WEIGHT))
    purpose.check_projector(write_gguf(tmp_path / "whole.gguf", fields[:1], WEIGHT))
