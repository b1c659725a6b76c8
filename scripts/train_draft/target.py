"""A plain Llama in torch, with the weights of its GGUF file: what a drafter learns from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Of attention over a memory that grows: not cuDNN, which plans anew for every shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """layers to eps: as llama.cpp's keys; theta: RoPE's base; context: tokens; eot: the token that ends a turn."""

    layers: int
    d: int
    heads: int
    kv: int
    dim: int
    ffn: int
    vocab: int
    theta: float
    eps: float
    context: int
    eot: int


@dataclass(slots=True)
class Layer:
    """One layer's matrices [out, in]; queries, keys and values in one, gate and up in one."""

    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class Target:
    """The model; all matrices in one type on one device. RoPE turns halves, as DFlash's does, not neighbours."""

    shape: Shape
    embed: Tensor
    norm: Tensor
    head: Tensor
    layers: list[Layer]
    cos: Tensor = field(init=False)
    sin: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cos, self.sin = rope_tables(self.shape, self.shape.context, like=self.embed)

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of tokens [rows, n]: normed final states [rows, n, d], and inputs of layers ``taps`` side by side."""
        s, (rows, n) = self.shape, tokens.shape
        x, kept = F.embedding(tokens, self.embed), []
        for i, layer in enumerate(self.layers):
            if i in taps:
                kept.append(x)
            qkv = F.linear(F.rms_norm(x, (s.d,), layer.attn_norm, s.eps), layer.qkv)
            qkv = qkv.view(rows, n, s.heads + 2 * s.kv, s.dim)
            qk = turn(qkv[:, :, : s.heads + s.kv], self.cos[:n, None], self.sin[:n, None])
            q, k, v = qk[:, :, : s.heads], qk[:, :, s.heads :], qkv[:, :, s.heads + s.kv :]
            k, v = (t.repeat_interleave(s.heads // s.kv, 2).transpose(1, 2) for t in (k, v))
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
            x = self._rest(layer, x, o.transpose(1, 2).reshape(rows, n, -1))
        return F.rms_norm(x, (s.d,), self.norm, s.eps), torch.cat(kept, -1)

    @torch.no_grad()
    def step(self, tokens: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
        """Logits [rows, vocab] after one token of each row at place ``at``; keys, values [layers, rows, kv, n, dim]."""
        s, rows = self.shape, len(tokens)
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[at], self.sin[at]
        for i, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, (s.d,), layer.attn_norm, s.eps), layer.qkv)
            qkv = qkv.view(rows, s.heads + 2 * s.kv, s.dim)
            qk = turn(qkv[:, : s.heads + s.kv], cos, sin)
            keys[i, :, :, at], values[i, :, :, at] = qk[:, s.heads :], qkv[:, s.heads + s.kv :]
            q = qk[:, : s.heads].reshape(rows, s.kv, -1, s.dim)  # the queries of one KV head are rows of it
            with sdpa_kernel(BACKENDS):
                o = F.scaled_dot_product_attention(q, keys[i, :, :, : at + 1], values[i, :, :, : at + 1])
            x = self._rest(layer, x, o.reshape(rows, -1))
        return F.linear(F.rms_norm(x, (s.d,), self.norm, s.eps), self.head)

    def _rest(self, layer: Layer, x: Tensor, o: Tensor) -> Tensor:
        s = self.shape
        x = x + F.linear(o, layer.out)
        gate, up = F.linear(F.rms_norm(x, (s.d,), layer.ffn_norm, s.eps), layer.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over halves; cos, sin broadcast over [..., dim]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rope_tables(s: Shape, n: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [n, dim] in the type and on the device of ``like``."""
    half = torch.arange(s.dim // 2, dtype=torch.float64) * 2 / s.dim
    angle = torch.arange(n, dtype=torch.float64)[:, None] * s.theta**-half
    angle = torch.cat([angle, angle], 1)
    return angle.cos().to(like), angle.sin().to(like)


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection whose rotary pairs lie side by side, for pairs half a head apart."""
    return x.reshape(heads, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def load(path: str, *, device: str, dtype: torch.dtype) -> Target:
    """From a GGUF file of the architecture llama, without biases."""
    reader = gguf.GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[name].contents()

    if key("general.architecture") != "llama":
        raise SystemExit(f"{path}: a {key('general.architecture')}; only llama is known here")
    heads, d = key("llama.attention.head_count"), key("llama.embedding_length")
    shape = Shape(
        layers=key("llama.block_count"),
        d=d,
        heads=heads,
        kv=key("llama.attention.head_count_kv"),
        dim=d // heads,
        ffn=key("llama.feed_forward_length"),
        vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        theta=key("llama.rope.freq_base"),
        eps=key("llama.attention.layer_norm_rms_epsilon"),
        context=key("llama.context_length"),
        eot=key("tokenizer.ggml.eos_token_id"),
    )
    raw = {t.name: t for t in reader.tensors}

    def get(name: str, turned: int = 0) -> Tensor:
        x = np.array(gguf.quants.dequantize(raw[name].data, raw[name].tensor_type), np.float32)
        return torch.from_numpy(halves(x, turned) if turned else x).to(device, dtype)

    def layer(i: int) -> Layer:
        b = f"blk.{i}."
        qkv = [get(b + "attn_q.weight", heads), get(b + "attn_k.weight", shape.kv), get(b + "attn_v.weight")]
        return Layer(
            attn_norm=get(b + "attn_norm.weight"),
            qkv=torch.cat(qkv),
            out=get(b + "attn_output.weight"),
            ffn_norm=get(b + "ffn_norm.weight"),
            gate_up=torch.cat([get(b + "ffn_gate.weight"), get(b + "ffn_up.weight")]),
            down=get(b + "ffn_down.weight"),
        )

    embed = get("token_embd.weight")
    head = get("output.weight") if "output.weight" in raw else embed
    return Target(shape, embed, get("output_norm.weight"), head, [layer(i) for i in range(shape.layers)])
