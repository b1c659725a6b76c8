"""The two sequential pieces of the chunked delta net, each with its own backward pass.

``TriInv`` inverts a unit lower triangular matrix per chunk; ``ChunkScan`` carries the state over
chunks, ``S' = M S + N``. Both run as Triton kernels on a GPU and as plain torch elsewhere.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only checks
    triton = None


if triton is not None:

    @triton.jit
    def _tri_inv_kernel(a_ptr, x_ptr, C: tl.constexpr):
        """x = inverse(I + a), a strictly lower triangular, by forward substitution."""
        base = tl.program_id(0).to(tl.int64) * C * C
        r = tl.arange(0, C)
        ptrs = base + r[:, None] * C + r[None, :]
        x = -tl.load(a_ptr + ptrs)
        for i in range(1, C):
            row = -tl.load(a_ptr + base + i * C + r)
            row += tl.sum(row[:, None] * x, 0)
            x = tl.where(r[:, None] == i, row[None, :], x)
        x = tl.where(r[:, None] == r[None, :], 1.0, x)
        tl.store(x_ptr + ptrs, x)

    @triton.jit
    def _scan_kernel(m_ptr, n_ptr, s_ptr, n_chunk, H, D: tl.constexpr, BV: tl.constexpr, BACK: tl.constexpr):
        """s[c] = state before chunk c of S' = M S + N (BACK: reversed order, M transposed)."""
        bh = tl.program_id(0)
        b = bh // H
        h = bh % H
        r = tl.arange(0, D)
        v = tl.program_id(1) * BV + tl.arange(0, BV)
        s = tl.zeros((D, BV), tl.float32)
        for i in range(0, n_chunk):
            c = n_chunk - 1 - i if BACK else i
            base = ((b * n_chunk + c) * H + h).to(tl.int64) * D * D
            tile = base + r[:, None] * D + v[None, :]
            tl.store(s_ptr + tile, s)
            if BACK:
                m = tl.load(m_ptr + base + r[None, :] * D + r[:, None])
            else:
                m = tl.load(m_ptr + base + r[:, None] * D + r[None, :])
            s = tl.dot(m, s, input_precision="tf32x3") + tl.load(n_ptr + tile)


def _use_triton(t: Tensor) -> bool:
    return triton is not None and (t.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def _tri_inv(a: Tensor) -> Tensor:
    if not _use_triton(a):
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        return torch.linalg.solve_triangular(eye + a, eye, upper=False, unitriangular=True)
    a = a.contiguous()
    x = torch.empty_like(a)
    _tri_inv_kernel[(a.numel() // (a.shape[-1] ** 2),)](a, x, C=a.shape[-1], num_warps=4)
    return x


def _scan(m: Tensor, n: Tensor, *, n_chunk: int, back: bool = False) -> Tensor:
    """m, n: [B * n_chunk, H, D, D] -> states of the same shape."""
    heads, dim = m.shape[1], m.shape[-1]
    m, n = m.contiguous(), n.contiguous()
    s = torch.empty_like(n)
    if _use_triton(m):
        bv = 16
        grid = (m.shape[0] // n_chunk * heads, dim // bv)
        _scan_kernel[grid](m, n, s, n_chunk, heads, D=dim, BV=bv, BACK=back, num_warps=4)
        return s
    mm, nn_, ss = (t.view(-1, n_chunk, heads, dim, dim) for t in (m, n, s))
    state = torch.zeros_like(nn_[:, 0])
    for c in range(n_chunk - 1, -1, -1) if back else range(n_chunk):
        ss[:, c] = state
        mc = mm[:, c].transpose(-1, -2) if back else mm[:, c]
        state = mc @ state + nn_[:, c]
    return s


class TriInv(torch.autograd.Function):
    """inverse(I + a) of strictly lower triangular ``a`` [..., C, C]."""

    @staticmethod
    def forward(ctx, a):
        x = _tri_inv(a)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gx):
        (x,) = ctx.saved_tensors
        xt = x.transpose(-1, -2)
        return -(xt @ gx @ xt).tril(-1)


class ChunkScan(torch.autograd.Function):
    """The state before every chunk of S' = M S + N, from zero."""

    @staticmethod
    def forward(ctx, m, n, n_chunk):
        s = _scan(m, n, n_chunk=n_chunk)
        ctx.save_for_backward(m, s)
        ctx.n_chunk = n_chunk
        return s

    @staticmethod
    def backward(ctx, gs):
        m, s = ctx.saved_tensors
        r = _scan(m, gs, n_chunk=ctx.n_chunk, back=True)
        return r @ s.transpose(-1, -2), r, None
