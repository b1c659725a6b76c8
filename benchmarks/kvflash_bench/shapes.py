"""Random-weight GGUF files with the shape of real models: enough to measure speed, no good for anything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from kvflash_ggml.calibration.choice import MAX_HEADS
from kvflash_ggml.calibration.known import Calibration, HeadScore, save
from kvflash_ggml.snapshot.fingerprint import ModelFile

from . import vocabulary

Q4_K = gguf.GGMLQuantizationType.Q4_K
F32 = gguf.GGMLQuantizationType.F32
BLOCK_VALUES, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q4_K]

COUNT = 65_521
"""Different blocks of weights; prime, so that as many rows of a matrix differ."""

EMBEDDING = 2.0**18
"""Times the other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape:
    """A qwen35-style hybrid: gated delta nets, with full attention in every `interval`-th layer.

    ffn: width of the feed-forward net; with `experts` of each of them and of the shared one. used: experts of a token.
    """

    layers: int
    interval: int
    width: int
    ffn: int
    vocab: int
    heads: int
    heads_kv: int
    head: int
    rotary: tuple[int, int, int, int]
    linear_k_heads: int
    linear_v_heads: int
    linear_head: int
    context: int = 262_144
    experts: int = 0
    used: int = 0

    @property
    def arch(self) -> str:
        """llama.cpp's name of it."""
        return "qwen35moe" if self.experts else "qwen35"


SHAPES = {
    "27b": HybridShape(
        layers=64, interval=4, width=5120, ffn=17408, vocab=248_320, heads=24, heads_kv=4, head=256,
        rotary=(11, 11, 10, 0), linear_k_heads=16, linear_v_heads=48, linear_head=128,
    ),
    # the attention of the above on a narrow body: what scoring costs does not depend on the rest
    "27b-attention": HybridShape(
        layers=64,
        interval=4,
        width=256,
        ffn=256,
        vocab=4096,
        heads=24,
        heads_kv=4,
        head=256,
        rotary=(11, 11, 10, 0),
        linear_k_heads=4,
        linear_v_heads=4,
        linear_head=64,
    ),
    "tiny": HybridShape(
        layers=8, interval=4, width=512, ffn=1024, vocab=4096, heads=8, heads_kv=2, head=128,
        rotary=(11, 11, 10, 0), linear_k_heads=4, linear_v_heads=8, linear_head=64,
    ),
    "35b-a3b": HybridShape(
        layers=40, interval=4, width=2048, ffn=512, vocab=248_320, heads=16, heads_kv=2, head=256,
        rotary=(11, 11, 10, 0), linear_k_heads=16, linear_v_heads=32, linear_head=128, experts=256, used=8,
    ),
    "tiny-moe": HybridShape(
        layers=8, interval=4, width=256, ffn=256, vocab=4096, heads=4, heads_kv=2, head=64,
        rotary=(11, 11, 10, 0), linear_k_heads=4, linear_v_heads=4, linear_head=64, experts=8, used=2,
    ),
}  # fmt: skip


def write(path: Path, shape: HybridShape, seed: int = 0, *, words: bool = False) -> None:
    """Write the file. Weights are Q4_K with mean 0; norms are 1. With `words` it has a made-up vocabulary.

    Greedy decoding counts on from a token, by so wide a margin that no rounding changes it: the embedding outweighs
    what the layers add, and the head knows each token's by the id after it.
    """
    writer = gguf.GGUFWriter(path, shape.arch)
    _add_metadata(writer, shape)
    if words:
        vocabulary.add(writer, shape.vocab)
    else:
        writer.add_tokenizer_model("no_vocab")
    tensors = list(_tensors(shape))
    for name, dims, kind in tensors:
        size = _bytes(dims, kind)
        writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tile = _random_blocks(np.random.default_rng(seed))
    for name, dims, kind in tensors:
        writer.write_tensor_data(_matrix(name, dims, tile) if kind == Q4_K else _vector(name, dims))
    writer.close()


def write_heads(path: Path, model: Path, shape: HybridShape, count: int = MAX_HEADS) -> None:
    """A calibration of a model that `write` has written, naming heads of `count` KV heads, spread over the layers."""
    layers = range(shape.interval - 1, shape.layers, shape.interval)
    group = shape.heads // shape.heads_kv
    units = [(layer, head * group) for layer in layers for head in range(shape.heads_kv)]
    count = min(count, len(units))
    picked = [units[i * len(units) // count] for i in range(count)]
    heads = (HeadScore(layer=i, head=h, found=1.0, control=0.0, first=1.0, chosen=True) for i, h in picked)
    save(Calibration(model=ModelFile(model).identity(), questions=0, tokens=0, heads=tuple(heads)), path)


def _add_metadata(writer: gguf.GGUFWriter, s: HybridShape) -> None:
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.width)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    if s.experts:
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.used)
        writer.add_expert_feed_forward_length(s.ffn)
        writer.add_expert_shared_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.heads_kv)
    writer.add_key_length(s.head)
    writer.add_value_length(s.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(2 * sum(s.rotary))
    writer.add_rope_dimension_sections(list(s.rotary))
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(s.linear_head)
    writer.add_ssm_group_count(s.linear_k_heads)
    writer.add_ssm_time_step_rank(s.linear_v_heads)
    writer.add_ssm_inner_size(s.linear_v_heads * s.linear_head)
    writer.add_uint32(f"{s.arch}.full_attention_interval", s.interval)
    writer.add_vocab_size(s.vocab)


def _tensors(s: HybridShape) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """(name, dims with the input width first, type)."""
    k, v = s.linear_k_heads * s.linear_head, s.linear_v_heads * s.linear_head
    yield "token_embd.weight", (s.width, s.vocab), Q4_K
    yield "output_norm.weight", (s.width,), F32
    yield "output.weight", (s.width, s.vocab), Q4_K
    for i in range(s.layers):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (s.width,), F32
        yield b + "post_attention_norm.weight", (s.width,), F32
        if (i + 1) % s.interval == 0:
            yield b + "attn_q.weight", (s.width, 2 * s.heads * s.head), Q4_K
            yield b + "attn_k.weight", (s.width, s.heads_kv * s.head), Q4_K
            yield b + "attn_v.weight", (s.width, s.heads_kv * s.head), Q4_K
            yield b + "attn_output.weight", (s.heads * s.head, s.width), Q4_K
            yield b + "attn_q_norm.weight", (s.head,), F32
            yield b + "attn_k_norm.weight", (s.head,), F32
        else:
            yield b + "attn_qkv.weight", (s.width, 2 * k + v), Q4_K
            yield b + "attn_gate.weight", (s.width, v), Q4_K
            yield b + "ssm_conv1d.weight", (4, 2 * k + v), F32
            yield b + "ssm_beta.weight", (s.width, s.linear_v_heads), Q4_K
            yield b + "ssm_alpha.weight", (s.width, s.linear_v_heads), Q4_K
            yield b + "ssm_a", (s.linear_v_heads,), F32
            yield b + "ssm_dt.bias", (s.linear_v_heads,), F32
            yield b + "ssm_norm.weight", (s.linear_head,), F32
            yield b + "ssm_out.weight", (v, s.width), Q4_K
        if s.experts:
            yield b + "ffn_gate_inp.weight", (s.width, s.experts), Q4_K
            yield b + "ffn_gate_inp_shexp.weight", (s.width,), F32
            yield b + "ffn_gate_exps.weight", (s.width, s.ffn, s.experts), Q4_K
            yield b + "ffn_up_exps.weight", (s.width, s.ffn, s.experts), Q4_K
            yield b + "ffn_down_exps.weight", (s.ffn, s.width, s.experts), Q4_K
        shared = "_shexp" if s.experts else ""
        yield b + f"ffn_gate{shared}.weight", (s.width, s.ffn), Q4_K
        yield b + f"ffn_up{shared}.weight", (s.width, s.ffn), Q4_K
        yield b + f"ffn_down{shared}.weight", (s.ffn, s.width), Q4_K


def _bytes(dims: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    values = int(np.prod(dims))
    return values * 4 if kind == F32 else values // BLOCK_VALUES * BLOCK_BYTES


def _random_blocks(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Q4_K blocks of mean 0 and a standard deviation near 0.02."""
    blocks = rng.integers(0, 256, (COUNT, BLOCK_BYTES), np.uint8)
    scale = np.float16(1e-4)
    blocks[:, 0:2] = np.frombuffer(scale.tobytes(), np.uint8)
    blocks[:, 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    return blocks.reshape(-1)


def _matrix(name: str, dims: tuple[int, ...], tile: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    data = np.resize(tile, _bytes(dims, Q4_K))
    if name == "token_embd.weight":
        _scale(data, EMBEDDING)
    elif name == "output.weight":
        rows = data.reshape(dims[1], -1)
        rows[:] = np.roll(rows, 1, axis=0)
        _scale(rows[COUNT:].reshape(-1), 0.5)  # there the rows are those from the beginning again
    return data


def _scale(data: npt.NDArray[np.uint8], factor: float) -> None:
    """Multiply the values of blocks."""
    blocks = data.reshape(-1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float16)
    blocks[:, :4] = (scales * np.float32(factor)).astype(np.float16).view(np.uint8)


def _vector(name: str, dims: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if name.endswith("ssm_a"):
        return np.full(dims, -1.0, np.float32)
    if name.endswith(("ssm_conv1d.weight", "ssm_dt.bias")):
        return np.full(dims[::-1], 0.25, np.float32)
    return np.ones(dims, np.float32)
