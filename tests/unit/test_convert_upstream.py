"""Beside llama.cpp's own converter, where torch is: the same drafter, and a whole model that is taken as a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import FF, HEAD_DIM, HEADS, HEADS_KV, HIDDEN, MASK, TARGET_LAYERS, THETA, VOCAB

from kvflash_ggml.convert import checkpoint, draft, upstream
from kvflash_ggml.errors import LibraryError
from kvflash_ggml.gguf import reader, verify

for package in ("torch", "transformers"):
    pytest.importorskip(package)
sentencepiece = pytest.importorskip("sentencepiece")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HF_NAMES = {ours: theirs for theirs, ours in checkpoint.NAMES.items()}


@pytest.fixture(scope="module")
def source() -> None:
    try:
        with upstream.converter():
            pass
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture
def model(tmp_path: Path, source: None) -> Path:
    """The small target as a checkpoint of Llama's kind."""
    folder = tmp_path / "model"
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FF,
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS_KV,
        "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": THETA,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    arrays = {}
    for name, values in checkpoints.target_weights().items():
        words = name.removesuffix(".weight").split(".")
        if words[-1] in ("attn_q_norm", "attn_k_norm"):
            continue
        own = f"layers.{words[1]}.{HF_NAMES[words[2]]}" if words[0] == "blk" else HF_NAMES[name.removesuffix(".weight")]
        arrays[f"{'' if own == 'lm_head' else 'model.'}{own}.weight"] = values
    checkpoints.write_checkpoint(folder, arrays, settings)
    text = tmp_path / "text.txt"
    text.write_text("\n".join("".join(chr(97 + (i * j) % 26) for j in range(1, 9)) for i in range(1, 200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=VOCAB, byte_fallback=True,
        model_type="bpe", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return folder


def test_both_converters_make_the_same_drafter(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "target.gguf"
    upstream.convert_model(model, target, kind="f16")
    vocab = reader.read(target).fields["tokenizer.ggml.tokens"].count
    folder = checkpoints.small_checkpoint(tmp_path / "drafter", vocab_size=vocab, dflash_config={
        "mask_token_id": min(MASK, vocab - 1), "target_layer_ids": checkpoints.IDS,
    })  # fmt: skip
    for kind in ("f16", "bf16", "f32"):
        ours, theirs = tmp_path / f"ours-{kind}.gguf", tmp_path / f"theirs-{kind}.gguf"
        draft.convert(folder, ours, model=target, kind=kind)
        upstream.convert_draft(folder, theirs, model=target, target_folder=model, kind=kind, rope_differs=False)
        verify.verify(theirs, model=target)
        assert checkpoints.tensor_bytes(ours) == checkpoints.tensor_bytes(theirs)
        found, wanted = reader.read(ours), reader.read(theirs)
        names = {name for name in {*found.fields, *wanted.fields} if not name.startswith("general.")}
        differ = {name for name in names if found.fields.get(name) != wanted.fields.get(name)}
        assert differ == {"dflash.rope.dimension_count"}  # which they write only where it is not the head's dimension
        assert found.own("rope.dimension_count") == HEAD_DIM


def test_an_eagle3_drafter_of_fewer_tokens(tmp_path: Path, model: Path) -> None:
    target, made = tmp_path / "target.gguf", tmp_path / "made.gguf"
    upstream.convert_model(model, target, kind="f16")
    vocab = reader.read(target).fields["tokenizer.ggml.tokens"].count
    rng, names = np.random.default_rng(5), {"attn_norm_2": "hidden_norm", **HF_NAMES}
    own = np.arange(3, vocab - 5, 2)
    wanted = {"output.weight": checkpoints.random_weight(rng, (len(own), HIDDEN))}
    zeros = checkpoints.tensor_bytes(checkpoints.small_eagle3(tmp_path / "zeros.gguf"))
    wanted |= {name: checkpoints.random_weight(rng, shape[::-1]) for name, (_, shape, _) in zeros.items()}
    arrays = {"d2t": own - np.arange(len(own))}
    for name, values in wanted.items():
        words = name.removesuffix(".weight").split(".")
        heads = 2 if words[-1] in ("attn_q", "attn_k") else 0  # pairs that turn lie beside each other afterwards
        turned = (
            values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape) if heads else values
        )
        arrays[f"{'midlayer.' if words[0] == 'blk' else ''}{names[words[-1]].removeprefix('model.')}.weight"] = turned
    folder = checkpoints.write_checkpoint(tmp_path / "drafter", arrays, {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": vocab, "draft_vocab_size": len(own), "rms_norm_eps": 1e-6, "rope_theta": THETA,
        "max_position_embeddings": 4096, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "torch_dtype": "float32",
    })  # fmt: skip
    words = upstream.convert_draft(folder, made, model=target, target_folder=model, kind="f32", rope_differs=False)
    assert words == "an EAGLE3 drafter that reads the inputs of layers 1, 2, 4"
    found = {name: raw for name, (_, _, raw) in checkpoints.tensor_bytes(made).items()}
    assert found.pop("d2t") == own.tobytes()
    assert found == {name: values.tobytes() for name, values in wanted.items()}
