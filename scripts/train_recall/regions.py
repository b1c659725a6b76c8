"""The layers, cut into regions of flat [tokens, ...] tensors, compiled once for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import CHUNK


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMS norm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def lin(x: Tensor, w: Tensor, dt: torch.dtype) -> Tensor:
    """``x @ w.T`` in ``dt``."""
    return F.linear(x.to(dt), w.to(dt))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D]; rotates the first 2 * cos.shape[-1] dims, halves paired."""
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * c - b * s, a * s + b * c, x[..., 2 * half :]], -1)


def attn_in(
    x: Tensor,
    nw: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    qn: Tensor,
    kn: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_head: int,
    n_kv: int,
    gated: bool,
    eps: float,
    dt: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Norm, project and rotate; keys and values repeated to one per query head."""
    n, dh = x.shape[0], qn.shape[0]
    h = rms(x, nw, eps)
    q = lin(h, wq, dt)
    gate = None
    if gated:
        q = q.view(n, n_head, 2, dh)
        gate = q[:, :, 1].reshape(n, n_head * dh)
        q = q[:, :, 0]
    q = rope(rms(q.reshape(n, n_head, dh), qn, eps), cos, sin).to(dt)
    k = rope(rms(lin(h, wk, dt).view(n, n_kv, dh), kn, eps), cos, sin).to(dt)
    v = lin(h, wv, dt).view(n, n_kv, dh)
    if n_kv != n_head:
        k = k.repeat_interleave(n_head // n_kv, 1)
        v = v.repeat_interleave(n_head // n_kv, 1)
    return q, k, v, gate


def mix_out(
    x: Tensor,
    o: Tensor,
    gate: Tensor | None,
    wo: Tensor,
    nw: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd: Tensor,
    eps: float,
    dt: torch.dtype,
) -> Tensor:
    """Output projection (optionally gated) + residual + SwiGLU block."""
    if gate is not None:
        o = o.float() * torch.sigmoid(gate.float())
    x = x + lin(o, wo, dt).float()
    h = rms(x, nw, eps)
    u = F.silu(lin(h, wg, dt)) * lin(h, wu, dt)
    return x + lin(u, wd, dt).float()


def gdn_in(
    x: Tensor,
    nw: Tensor,
    wqkv: Tensor,
    wz: Tensor,
    conv: Tensor,
    wb: Tensor,
    wa: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    first: Tensor,
    eps: float,
    dt: torch.dtype,
) -> tuple[Tensor, ...]:
    """Norm, project, convolve and cut into chunks, with the decays of every chunk.

    first [N, K-1]: 1 where the token s+1 steps back belongs to the same sequence.
    """
    n, heads, taps = x.shape[0], wb.shape[0], conv.shape[1]
    h = rms(x, nw, eps)
    qkv = lin(h, wqkv, dt).float()
    y = qkv * conv[:, taps - 1]
    for s in range(1, taps):
        back = F.pad(qkv[:-s], (0, 0, s, 0)) * first[:, s - 1 : s]
        y = y + back * conv[:, taps - 1 - s]
    y = F.silu(y)
    z = lin(h, wz, dt)
    dim = z.shape[1] // heads
    beta = torch.sigmoid(lin(h, wb, dt).float())
    g = -torch.exp(a_log) * F.softplus(lin(h, wa, dt).float() + dt_bias)

    def chunks(t: Tensor) -> Tensor:
        return t.reshape(n // CHUNK, CHUNK, heads, -1).transpose(1, 2)

    q, k, v = (chunks(t) for t in y.split(heads * dim, 1))
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + eps) * dim**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + eps)
    beta = chunks(beta)  # [n, H, C, 1]
    gc = chunks(g).squeeze(-1).cumsum(-1)  # [n, H, C]
    ones = torch.ones(CHUNK, CHUNK, device=x.device, dtype=torch.bool)
    diff = gc[..., :, None] - gc[..., None, :]
    decay = torch.exp(diff.masked_fill(~ones.tril(), -1e4))
    kb = k * beta
    a = (kb @ k.transpose(-1, -2)) * decay * ones.tril(-1)
    att = (q @ k.transpose(-1, -2)) * decay
    eg = torch.exp(gc)[..., None]
    last = gc[..., -1:]
    return (
        a,
        att,
        kb * eg,
        v * beta,
        q * eg,
        k * torch.exp(last - gc)[..., None],
        torch.exp(last)[..., None],
        z,
    )


def gdn_mid(
    t: Tensor, att: Tensor, kbg: Tensor, vb: Tensor, qg: Tensor, kg: Tensor, g_last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunk transition (m, n), state-to-output map and state-free output."""
    w, u = t @ kbg, t @ vb
    kgt = kg.transpose(-1, -2)
    eye = torch.eye(kg.shape[-1], device=kg.device)
    return g_last * eye - kgt @ w, kgt @ u, qg - att @ w, att @ u


def gdn_out(
    x: Tensor,
    q_eff: Tensor,
    o_in: Tensor,
    s: Tensor,
    z: Tensor,
    norm: Tensor,
    wo: Tensor,
    nw: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd: Tensor,
    eps: float,
    dt: torch.dtype,
) -> Tensor:
    """Delta-net output: norm, gate, project, then the SwiGLU block."""
    n = x.shape[0]
    o = (q_eff @ s + o_in).transpose(1, 2).reshape(n, -1, norm.shape[0])
    o = rms(o, norm, eps) * F.silu(z.float().view(n, -1, norm.shape[0]))
    return mix_out(x, o.reshape(n, -1), None, wo, nw, wg, wu, wd, eps, dt)


def head(
    x: Tensor, nw: Tensor, w: Tensor, target: Tensor, weight: Tensor, eps: float, dt: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean cross-entropy, its terms, and where the argmax is the target."""
    logits = lin(rms(x, nw, eps), w, dt).float()
    ce = F.cross_entropy(logits, target, reduction="none")
    return (ce * weight).sum() / weight.sum(), ce.detach(), logits.argmax(-1) == target


PLAIN_REGIONS = dict(attn_in=attn_in, mix_out=mix_out, gdn_in=gdn_in, gdn_mid=gdn_mid, gdn_out=gdn_out, head=head)
REGIONS: dict[str, Callable[..., Any]] = dict(PLAIN_REGIONS)


def compile_regions() -> None:
    """Replace the regions by compiled ones, for the whole process."""
    torch._dynamo.config.cache_size_limit = 64
    for k, f in list(REGIONS.items()):
        REGIONS[k] = torch.compile(f, dynamic=False, fullgraph=True)
