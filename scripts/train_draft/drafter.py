"""DFlash in torch, as llama.cpp's graph runs it: a block of masks after a token, over features of the text before it.

A row of a block sees those before it and not those behind (``attention.causal``): so a block that is cut short, as a
draft of few tokens is, is what it was in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import Target, turn

Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """layers: of the target, whose weights each layer begins with. taps: inputs of the target's layers that are read.
    block: tokens of a block, the one that is known with them. mask: the token that stands for one to draft."""

    layers: tuple[int, ...]
    taps: tuple[int, ...]
    block: int
    mask: int


def fresh(p: Params) -> Params:
    """Parameters of the same shapes that are nobody's; of the last norm a part stays, as the head behind it does."""
    found = Params()
    for name, value in p.items():
        new = torch.randn_like(value) * 0.02 if value.dim() == 2 else torch.ones_like(value)
        found[name] = (value.detach() * 0.2 if name == "output_norm.weight" else new).requires_grad_()
    return found


def begin(target: Target, plan: Plan, sample: Tensor) -> Params:
    """Parameters by GGUF's names: layers of the target, the deepest tap passed through.

    sample: tokens [rows, n], for the size of queries and keys, which here are normed.
    """
    s, p = target.shape, Params()
    width = len(plan.taps) * s.d
    fc = torch.randn(s.d, width) * 0.1 / width**0.5
    fc[:, -s.d :] += torch.eye(s.d)
    p["fc.weight"] = fc
    p["enc.output_norm.weight"] = target.layers[plan.layers[-1]].attn_norm
    p["output_norm.weight"] = target.norm
    _, taps = target.read(sample, tuple(sorted(set(plan.layers))))
    inputs = dict(zip(sorted(set(plan.layers)), taps.split(s.d, -1), strict=True))
    q, kv = s.heads * s.dim, s.kv * s.dim
    for i, source in enumerate(plan.layers):
        layer, b = target.layers[source], f"blk.{i}."
        h = F.linear(F.rms_norm(inputs[source], (s.d,), layer.attn_norm, s.eps), layer.qkv).float()
        for name, part in (("attn_q", h[..., :q]), ("attn_k", h[..., q : q + kv])):
            p[f"{b}{name}_norm.weight"] = part.square().mean().sqrt().expand(s.dim)
        p[b + "attn_norm.weight"] = layer.attn_norm
        p[b + "attn_q.weight"], p[b + "attn_k.weight"], p[b + "attn_v.weight"] = layer.qkv.split([q, kv, kv])
        p[b + "attn_output.weight"], p[b + "ffn_norm.weight"] = layer.out, layer.ffn_norm
        p[b + "ffn_gate.weight"], p[b + "ffn_up.weight"] = layer.gate_up.chunk(2)
        p[b + "ffn_down.weight"] = layer.down
    dev = target.embed.device
    return {k: v.to(dev, torch.float32, copy=True).contiguous().requires_grad_() for k, v in p.items()}


def draft(p: Params, target: Target, plan: Plan, *, tokens: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
    """Normed states [rows, m, block - 1, d] that predict what follows the tokens at ``anchors`` [rows, m].

    tokens [rows, n]; taps [rows, n, width].
    """
    s, blk, dt = target.shape, plan.block, taps.dtype
    (rows, n), m = tokens.shape, anchors.shape[1]
    rep, dev = s.heads // s.kv, tokens.device

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], p[name], s.eps).to(dt)

    def lin(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[name].to(dt))

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(rows, -1, count, s.dim)

    context = norm(lin(taps, "fc.weight"), "enc.output_norm.weight")
    ids = torch.full((rows, m, blk), plan.mask, device=dev)
    ids[:, :, 0] = tokens.gather(1, anchors)
    x = F.embedding(ids.view(rows, m * blk), target.embed)
    at = (anchors[:, :, None] + torch.arange(blk, device=dev)).view(rows, m * blk)
    here, there = ((c[at][:, :, None], c[:n, None]) for c in (target.cos, target.sin))
    (cos, cos_n), (sin, sin_n) = here, there
    mask = seen(anchors, n=n, block=blk).repeat(1, 1, rep, 1)
    for i in range(len(plan.layers)):
        b = f"blk.{i}."
        h = norm(x, b + "attn_norm.weight")
        q = turn(norm(heads(lin(h, b + "attn_q.weight"), s.heads), b + "attn_q_norm.weight"), cos, sin)
        k = turn(norm(heads(lin(h, b + "attn_k.weight"), s.kv), b + "attn_k_norm.weight"), cos, sin)
        k_n = turn(norm(heads(lin(context, b + "attn_k.weight"), s.kv), b + "attn_k_norm.weight"), cos_n, sin_n)
        v, v_n = (heads(lin(y, b + "attn_v.weight"), s.kv) for y in (h, context))
        keys, values = (torch.cat(t, 1).transpose(1, 2) for t in ((k_n, k), (v_n, v)))
        q = q.view(rows, m * blk, s.kv, rep, s.dim).permute(0, 2, 3, 1, 4).reshape(rows, s.kv, -1, s.dim)
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        o = o.view(rows, s.kv, rep, m * blk, s.dim).permute(0, 3, 1, 2, 4).reshape(rows, m * blk, -1)
        x = x + lin(o, b + "attn_output.weight")
        h = norm(x, b + "ffn_norm.weight")
        h = F.silu(lin(h, b + "ffn_gate.weight")) * lin(h, b + "ffn_up.weight")
        x = x + lin(h, b + "ffn_down.weight")
    x = x.view(rows, m, blk, s.d)[:, :, 1:]
    return norm(x, "output_norm.weight")


def seen(anchors: Tensor, *, n: int, block: int) -> Tensor:
    """[rows, 1, m * block, n + m * block]: the text before a block's anchor, and of its block what is not behind."""
    rows, m = anchors.shape
    dev = anchors.device
    text = torch.arange(n, device=dev) < anchors[:, :, None]
    row = torch.arange(m * block, device=dev)
    own = (row[:, None] // block == row // block) & (row <= row[:, None])
    return torch.cat([text.repeat_interleave(block, 1), own.expand(rows, -1, -1)], 2)[:, None]
