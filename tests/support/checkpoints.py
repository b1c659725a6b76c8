"""Small DFlash checkpoints and targets made of nothing, and real ones taken back to Hugging Face's form."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.convert import checkpoint, writer
from kvflash_ggml.convert.writer import Planned
from kvflash_ggml.gguf import encoding, reader, types
from kvflash_ggml.gguf.reader import GGUF, Field

VOCAB = 288
HIDDEN, HEADS, HEADS_KV, HEAD_DIM, FF = 64, 4, 2, 16, 128
LAYERS, TARGET_LAYERS = 2, 4
THETA, EPSILON = 1e6, 1e-6
MASK = 287
IDS = [0, 2]
OLD = "qwen35-dflash-draft"

Arrays = dict[str, np.ndarray]


# --- Hugging Face's side


def config(**changes: Any) -> dict[str, Any]:
    """The configuration of the small drafter; None takes a key out."""
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS_KV,
        "head_dim": HEAD_DIM,
        "intermediate_size": FF,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
        "block_size": 8,
        "num_target_layers": TARGET_LAYERS,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": None,
        "use_sliding_window": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS},
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def weights(seed: int = 0) -> Arrays:
    """Random F32 weights under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(IDS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
            "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,), "mlp.gate_proj": (FF, HIDDEN),
            "mlp.up_proj": (FF, HIDDEN), "mlp.down_proj": (HIDDEN, FF),
        }  # fmt: skip
        shapes.update({f"layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    return {name: random_weight(rng, shape) for name, shape in shapes.items()}


def random_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape) / math.sqrt(shape[-1]) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
    return values.astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """As numpy has no such type: 16-bit patterns."""
    return encoding.encode(np.ascontiguousarray(values), types.BY_NAME["bf16"]).view(np.uint16)


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A file's bytes; 16-bit patterns are BF16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    return assembled(header, data)


def assembled(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(folder: Path, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def small_checkpoint(folder: Path, **changes: Any) -> Path:
    return write_checkpoint(folder, weights(), config(**changes))


def exported(file: GGUF, folder: Path) -> Path:
    """A DFlash file as the checkpoint that it could have been made of."""
    names = {theirs: ours for ours, theirs in checkpoint.NAMES.items()}
    tensors = {}
    for name, tensor in file.tensors.items():
        words = name.removesuffix(".weight").split(".")
        prefix = f"layers.{words[1]}." if words[0] == "blk" else ""
        raw = np.concatenate(list(file.pieces(tensor))).reshape(-1)
        values = raw.view(np.float32 if tensor.kind.name == "f32" else np.float16)
        tensors[f"{prefix}{names[words[-1] if prefix else '.'.join(words)]}.weight"] = values.reshape(
            tensor.shape[::-1]
        )
    settings = config(
        hidden_size=file.own("embedding_length"), num_hidden_layers=file.own("block_count"),
        num_attention_heads=file.own("attention.head_count"), num_key_value_heads=file.own("attention.head_count_kv"),
        head_dim=file.own("attention.key_length"), intermediate_size=file.own("feed_forward_length"),
        vocab_size=file.fields["tokenizer.ggml.tokens"].count, rope_theta=file.own("rope.freq_base"),
        rms_norm_eps=file.own("attention.layer_norm_rms_epsilon"), block_size=file.own("block_size"),
        max_position_embeddings=file.own("context_length"),
        dflash_config={
            "mask_token_id": file.get("tokenizer.ggml.mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in file.own("target_layers")],
        },
    )  # fmt: skip
    return write_checkpoint(folder, tensors, settings)


# --- GGUF's side


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def array(name: str, kind: int, values: Sequence[bytes]) -> Field:
    return Field(name, 9, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def tokenizer() -> list[Field]:
    """A vocabulary of bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    pieces += [f"<{n}>" for n in range(VOCAB - len(pieces))]
    kinds += [1] * (VOCAB - len(kinds))
    return [
        Field.of("tokenizer.ggml.model", "llama"),
        array("tokenizer.ggml.tokens", 8, [text(piece) for piece in pieces]),
        array("tokenizer.ggml.scores", 6, [struct.pack("<f", 0.0)] * VOCAB),
        array("tokenizer.ggml.token_type", 5, [struct.pack("<i", kind) for kind in kinds]),
    ]


def target_weights(seed: int = 1) -> Arrays:
    """Random F32 weights of the small target under llama.cpp's names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(TARGET_LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, q), "attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,), "ffn_norm": (HIDDEN,),
            "ffn_gate": (FF, HIDDEN), "ffn_up": (FF, HIDDEN), "ffn_down": (HIDDEN, FF),
        }  # fmt: skip
        shapes.update({f"blk.{layer}.{name}.weight": shape for name, shape in block.items()})
    return {name: random_weight(rng, shape) for name, shape in shapes.items()}


def target_fields(architecture: str = "qwen3", **changes: Any) -> list[Field]:
    """What the small target says of itself; None takes a key out."""
    own: dict[str, Any] = {
        "context_length": 4096, "embedding_length": HIDDEN, "block_count": TARGET_LAYERS, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": HEADS_KV, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": EPSILON, "rope.freq_base": THETA,
        **changes,
    }  # fmt: skip
    named = [Field.of(f"{architecture}.{key}", value) for key, value in own.items() if value is not None]
    return [Field.of("general.architecture", architecture), *named, *tokenizer()]


def small_target(path: Path, *extra: Field, architecture: str = "qwen3", whole: bool = False, **changes: Any) -> Path:
    """The small target. whole: with its weights, so that it can be loaded."""
    arrays = target_weights() if whole else {"output_norm.weight": np.ones(HIDDEN, np.float32)}
    return write_gguf(path, [*target_fields(architecture, **changes), *extra], arrays)


def small_eagle3(path: Path, *, layers: list[int] | None = None, hidden: int = HIDDEN) -> Path:
    """An EAGLE3 drafter of zeros for the small target."""
    fields = [
        Field.of("general.architecture", "eagle3"),
        Field.of("eagle3.embedding_length", HIDDEN),
        Field.of("eagle3.block_count", 1),
        Field.of("eagle3.attention.head_count", 2),
        Field.of("eagle3.attention.head_count_kv", 2),
        Field.of("eagle3.attention.key_length", 16),
        Field.of("eagle3.attention.value_length", 16),
        Field.of("eagle3.attention.layer_norm_rms_epsilon", 1e-6),
        Field.of("eagle3.feed_forward_length", 48),
        Field.of("eagle3.target_hidden_size", hidden),
        Field.of("eagle3.target_layers", layers or [1, 2, 3]),
        *tokenizer(),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (HIDDEN, 3 * HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_norm_2": (HIDDEN,), "blk.0.attn_q": (32, 2 * HIDDEN), "blk.0.attn_k": (32, 2 * HIDDEN),
        "blk.0.attn_v": (32, 2 * HIDDEN), "blk.0.attn_output": (HIDDEN, 32), "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (48, HIDDEN), "blk.0.ffn_up": (48, HIDDEN), "blk.0.ffn_down": (HIDDEN, 48),
    }  # fmt: skip
    return write_gguf(path, fields, {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()})


def write_gguf(path: Path, fields: Sequence[Field], arrays: Mapping[str, np.ndarray]) -> Path:
    """A file of F32 and F16 arrays."""
    planned = [
        Planned(
            name=name,
            kind=types.BY_NAME["f16" if values.dtype == np.float16 else "f32"],
            shape=values.shape[::-1],
            pieces=lambda values=values: [np.ascontiguousarray(values).view(np.uint8)],
        )
        for name, values in arrays.items()
    ]
    with path.open("wb") as file:
        writer.write(file, fields, planned, lambda done, total: None)
    return path


def tensor_bytes(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor's type, shape and bytes."""
    file = reader.read(path)
    return {
        name: (tensor.kind.name, tensor.shape, b"".join(piece.tobytes() for piece in file.pieces(tensor)))
        for name, tensor in file.tensors.items()
    }


def rewritten(source: Path, out: Path, change: Any) -> Path:
    """The file with its fields, by name, changed by a function that is given them."""
    file = reader.read(source)
    fields = dict(file.fields)
    change(fields)
    planned = [
        Planned(
            name=tensor.name, kind=tensor.kind, shape=tensor.shape, pieces=lambda tensor=tensor: file.pieces(tensor)
        )
        for tensor in file.tensors.values()
    ]
    with out.open("wb") as made:
        writer.write(made, list(fields.values()), planned, lambda done, total: None)
    return out


def older(drafter: Path, out: Path, *, tokens: bool = True) -> Path:
    """The file with the older names."""
    file = reader.read(drafter)
    own = {"dflash.block_size": 8, "dflash.mask_token_id": MASK, "dflash.target_layer_ids": IDS,
           "dflash.n_target_layers": len(IDS), "vocab_size": VOCAB}  # fmt: skip
    fields = [Field.of("general.architecture", OLD)]
    for field in file.fields.values():
        name = field.name.removeprefix("dflash.")
        if name != field.name and name not in ("block_size", "target_layers", "rope.dimension_count"):
            fields.append(field.renamed(f"{OLD}.{name}"))
        elif name.startswith("tokenizer.") and tokens and name != "tokenizer.ggml.mask_token_id":
            fields.append(field)
    fields += [Field.of(f"{OLD}.{key}", value) for key, value in own.items()]
    names = {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}
    arrays = {
        names.get(name, name): np.frombuffer(raw, np.float32 if kind == "f32" else np.float16).reshape(shape[::-1])
        for name, (kind, shape, raw) in tensor_bytes(drafter).items()
    }
    return write_gguf(out, fields, arrays)
