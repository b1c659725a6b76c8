"""The forward pass over flat tokens: only attention and the scan see the sequence length."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import CHUNK, Config
from .kernels import ChunkScan, TriInv
from .params import Params, layer, out_weight
from .regions import PLAIN_REGIONS, REGIONS, rms


def rope_tables(cfg: Config, pos: Tensor) -> tuple[Tensor, Tensor]:
    """cos/sin [N, n_rot / 2] for integer positions."""
    half = cfg.n_rot // 2
    freq = cfg.rope_theta ** (-torch.arange(half, device=pos.device, dtype=torch.float64) / half)
    ang = pos.double()[:, None] * freq
    return ang.cos().float(), ang.sin().float()


def conv_masks(cfg: Config, n: int, *, seq: int, device: torch.device) -> Tensor:
    """[n, conv - 1]: 1 where the token s+1 steps back belongs to the same sequence."""
    i = torch.arange(n, device=device) % seq
    return torch.stack([(i >= s).float() for s in range(1, cfg.conv)], 1)


def fast_sdpa() -> contextlib.AbstractContextManager[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, seq: int) -> Tensor:
    """Causal attention in each sequence; q, k, v [tokens, heads, dim] -> [tokens, heads * dim]."""

    def split(t: Tensor) -> Tensor:
        return t.view(-1, seq, t.shape[1], t.shape[2]).transpose(1, 2)

    with fast_sdpa() if q.is_cuda else contextlib.nullcontext():
        o = F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)
    return o.transpose(1, 2).reshape(q.shape[0], -1)


def forward(
    p: Params,
    cfg: Config,
    *,
    tok: Tensor,
    pos: Tensor,
    seq: int,
    dt: torch.dtype,
    keep: tuple[int, ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """tok, pos: flat [N]; the last hidden state [N, d] and the inputs of the layers in ``keep``."""
    R = REGIONS
    x = F.embedding(tok, p["token_embd.weight"]).float()
    cos, sin = rope_tables(cfg, pos)
    first = conv_masks(cfg, tok.shape[0], seq=seq, device=tok.device)
    kept = []
    for i in range(cfg.n_layer):
        if i in keep:
            kept.append(x)
        b = layer(p, i)
        ffn_norm = b["post_attention_norm.weight" if cfg.gated else "ffn_norm.weight"]
        ffn = (
            ffn_norm,
            b["ffn_gate.weight"],
            b["ffn_up.weight"],
            b["ffn_down.weight"],
            cfg.eps,
            dt,
        )
        if cfg.is_attn(i):
            q, k, v, gate = R["attn_in"](
                x,
                b["attn_norm.weight"],
                b["attn_q.weight"],
                b["attn_k.weight"],
                b["attn_v.weight"],
                b["attn_q_norm.weight"],
                b["attn_k_norm.weight"],
                cos,
                sin,
                cfg.n_head,
                cfg.n_kv,
                cfg.gated,
                cfg.eps,
                dt,
            )
            x = R["mix_out"](x, sdpa(q, k, v, seq=seq), gate, b["attn_output.weight"], *ffn)
        else:
            a, att, kbg, vb, qg, kg, g_last, z = R["gdn_in"](
                x,
                b["attn_norm.weight"],
                b["attn_qkv.weight"],
                b["attn_gate.weight"],
                b["ssm_conv1d.weight"],
                b["ssm_beta.weight"],
                b["ssm_alpha.weight"],
                b["A_log"],
                b["ssm_dt.bias"],
                first,
                cfg.eps,
                dt,
            )
            m, n, q_eff, o_in = R["gdn_mid"](TriInv.apply(a), att, kbg, vb, qg, kg, g_last)
            s = ChunkScan.apply(m, n, seq // CHUNK)
            x = R["gdn_out"](x, q_eff, o_in, s, z, b["ssm_norm.weight"], b["ssm_out.weight"], *ffn)
    return x, kept


def logits_cpu(p: Params, cfg: Config, tokens: Sequence[int]) -> Tensor:
    """Plain float32 logits for a short prompt (padded to a chunk multiple); used for checks."""
    n = len(tokens)
    pad = -n % CHUNK
    tok = torch.tensor(list(tokens) + [0] * pad)
    REGIONS.update(PLAIN_REGIONS)
    with torch.no_grad():
        x, _ = forward(p, cfg, tok=tok, pos=torch.arange(n + pad), seq=n + pad, dt=torch.float32)
        return F.linear(rms(x, p["output_norm.weight"], cfg.eps), out_weight(p))[:n]
