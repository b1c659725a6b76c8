"""Fresh parameters, checkpoints, and the GGUF names both are keyed by."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import TARGETS, Config

Params = dict[str, Tensor]


def init_params(cfg: Config, device: str, *, seed: int = 0) -> Params:
    """Parameters keyed by GGUF tensor name (matrices are [out, in])."""
    g = torch.Generator().manual_seed(seed)
    p: Params = {}

    def mat(name: str, rows: int, cols: int, std: float | None = None) -> None:
        std = std if std is not None else 0.6 / math.sqrt(cols)
        p[name] = torch.randn(rows, cols, generator=g) * std

    def ones(name: str, n: int, value: float = 1.0) -> None:
        p[name] = torch.full((n,), value)

    d, q_dim, kv_dim = cfg.d, cfg.n_head * cfg.d_head, cfg.n_kv * cfg.d_head
    res = 0.6 / math.sqrt(2 * cfg.n_layer)
    if cfg.target_layers:
        mat("fc.weight", d, len(cfg.target_layers) * d)
    if cfg.arch == "dflash":
        ones("enc.output_norm.weight", d)
    elif cfg.arch not in TARGETS:
        mat("token_embd.weight", cfg.vocab, d, 0.02 if cfg.tied else 0.05)
        if not cfg.tied:
            mat("output.weight", cfg.vocab, d, 0.02)
    if cfg.arch != "mtp":
        ones("output_norm.weight", d)
    for i in cfg.blocks:
        b = f"blk.{i}."
        ones(b + "attn_norm.weight", d)
        if cfg.is_attn(i):
            wide = 2 * d if cfg.arch == "eagle3" else d
            mat(b + "attn_q.weight", q_dim * (2 if cfg.gated else 1), wide)
            mat(b + "attn_k.weight", kv_dim, wide)
            mat(b + "attn_v.weight", kv_dim, wide)
            mat(b + "attn_output.weight", d, q_dim, res / math.sqrt(q_dim))
            if cfg.arch == "eagle3":
                ones(b + "attn_norm_2.weight", d)
            else:
                ones(b + "attn_q_norm.weight", cfg.d_head, 1.2)
                ones(b + "attn_k_norm.weight", cfg.d_head, 1.2)
        else:
            inner = cfg.lin_heads * cfg.lin_dim
            mat(b + "attn_qkv.weight", 3 * inner, d)
            mat(b + "attn_gate.weight", inner, d)
            mat(b + "ssm_conv1d.weight", 3 * inner, cfg.conv, 0.3)
            p[b + "ssm_conv1d.weight"][:, -1] += 0.6
            mat(b + "ssm_beta.weight", cfg.lin_heads, d)
            mat(b + "ssm_alpha.weight", cfg.lin_heads, d, 0.02)
            p[b + "A_log"] = torch.log(torch.empty(cfg.lin_heads).uniform_(1, 16, generator=g))
            dt = torch.exp(torch.empty(cfg.lin_heads).uniform_(math.log(1e-3), math.log(1e-1), generator=g))
            p[b + "ssm_dt.bias"] = dt + torch.log(-torch.expm1(-dt))
            ones(b + "ssm_norm.weight", cfg.lin_dim)
            mat(b + "ssm_out.weight", d, inner, res / math.sqrt(inner))
        ones(b + ("post_attention_norm.weight" if cfg.gated else "ffn_norm.weight"), d)
        mat(b + "ffn_gate.weight", cfg.ffn, d)
        mat(b + "ffn_up.weight", cfg.ffn, d)
        mat(b + "ffn_down.weight", d, cfg.ffn, res / math.sqrt(cfg.ffn))
        if cfg.arch == "mtp":
            mat(b + "nextn.eh_proj.weight", d, 2 * d)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                ones(f"{b}nextn.{name}.weight", d)
    return {k: v.to(device).requires_grad_(True) for k, v in p.items()}


def save(p: Params, cfg: Config, *, path: str, info: dict[str, Any]) -> None:
    """Matrices in float16 (what the GGUF will hold), vectors in float32."""
    state = {
        k: (v.detach().half() if v.dim() == 2 and "conv1d" not in k else v.detach().float()).cpu() for k, v in p.items()
    }
    torch.save({"config": asdict(cfg), "state": state, "info": info}, path + ".tmp")
    Path(path + ".tmp").replace(path)


def layer(p: Params, i: int) -> Params:
    """The parameters of layer ``i``, without their prefix."""
    return {k.split(".", 2)[2]: t for k, t in p.items() if k.startswith(f"blk.{i}.")}


def load(path: str, device: str = "cpu") -> tuple[Config, Params, dict[str, Any]]:
    """The shape, trainable float32 parameters and training record of a checkpoint."""
    ck = torch.load(path, map_location="cpu", weights_only=True)
    cfg = Config(**{**ck["config"], "target_layers": tuple(ck["config"]["target_layers"])})
    return (
        cfg,
        {k: v.float().to(device).requires_grad_(True) for k, v in ck["state"].items()},
        ck["info"],
    )


def out_weight(p: Params) -> Tensor:
    """The output head, which tied models share with the embeddings."""
    return p["output.weight"] if "output.weight" in p else p["token_embd.weight"]
