"""The DFlash block-diffusion draft, trained against a frozen target."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import CONFIGS, MASK, Config, Settings
from .forward import forward, rope_tables
from .loader import Loader
from .params import Params, init_params, layer, out_weight, save
from .regions import lin, mix_out, rms, rope
from .training import LOOKAHEAD, lr_at, make_optimizer, optimize, to_device

PEAK_LR = 2e-3


def dflash_forward(
    p: Params,
    cfg: Config,
    *,
    embed: Tensor,
    feats: list[Tensor],
    pos: Tensor,
    seq: int,
    anchors: Tensor,
    tok: Tensor,
    dt: torch.dtype,
) -> Tensor:
    """Predict blocks after ``anchors`` [B, M] from target features.

    feats: list of [B * seq, d] target layer inputs; the block is the anchor token followed by
    cfg.block - 1 mask tokens, sees the features of earlier positions and all of itself.
    Returns hidden states [B * M * block, d].
    """
    rows, m, blk = anchors.shape[0], anchors.shape[1], cfg.block
    dev = anchors.device
    ctx = rms(lin(torch.cat(feats, 1), p["fc.weight"], dt), p["enc.output_norm.weight"], cfg.eps)
    ids = torch.full((rows, m, blk), MASK, device=dev)
    ids[:, :, 0] = tok.view(rows, seq).gather(1, anchors)
    x = F.embedding(ids.view(-1), embed).float()
    bpos = pos.view(rows, seq).gather(1, anchors)[:, :, None] + torch.arange(blk, device=dev)
    ccos, csin = rope_tables(cfg, pos)
    bcos, bsin = rope_tables(cfg, bpos.reshape(-1))
    see_ctx = (torch.arange(seq, device=dev)[None, None] < anchors[:, :, None]).repeat_interleave(blk, 1)
    own = torch.eye(m, device=dev, dtype=torch.bool).repeat_interleave(blk, 0).repeat_interleave(blk, 1)
    mask = torch.cat([see_ctx, own[None].expand(rows, -1, -1)], 2)[:, None]
    rep = cfg.n_head // cfg.n_kv

    def kv(h: Tensor, b: Params, cos: Tensor, sin: Tensor) -> list[Tensor]:
        k = rope(
            rms(
                lin(h, b["attn_k.weight"], dt).view(-1, cfg.n_kv, cfg.d_head),
                b["attn_k_norm.weight"],
                cfg.eps,
            ),
            cos,
            sin,
        )
        v = lin(h, b["attn_v.weight"], dt).view(-1, cfg.n_kv, cfg.d_head)
        return [t.to(dt).view(rows, -1, cfg.n_kv, cfg.d_head).transpose(1, 2).repeat_interleave(rep, 1) for t in (k, v)]

    for i in range(cfg.n_layer):
        b = layer(p, i)
        h = rms(x, b["attn_norm.weight"], cfg.eps)
        q = (
            rope(
                rms(
                    lin(h, b["attn_q.weight"], dt).view(-1, cfg.n_head, cfg.d_head),
                    b["attn_q_norm.weight"],
                    cfg.eps,
                ),
                bcos,
                bsin,
            )
            .to(dt)
            .view(rows, m * blk, cfg.n_head, cfg.d_head)
            .transpose(1, 2)
        )
        (k1, v1), (k2, v2) = kv(ctx, b, ccos, csin), kv(h, b, bcos, bsin)
        o = F.scaled_dot_product_attention(q, torch.cat([k1, k2], 2), torch.cat([v1, v2], 2), attn_mask=mask)
        o = o.transpose(1, 2).reshape(rows * m * blk, -1)
        x = mix_out(
            x,
            o,
            None,
            b["attn_output.weight"],
            b["ffn_norm.weight"],
            b["ffn_gate.weight"],
            b["ffn_up.weight"],
            b["ffn_down.weight"],
            cfg.eps,
            dt,
        )
    return x


def pick_anchors(wgt: Tensor, seq: int, *, m: int, blk: int) -> Tensor:
    """Block starts [sequences, m]: half just before weighted answers, half uniform."""
    rows = wgt.numel() // seq
    w = wgt.view(rows, seq)[:, : seq - blk].clone()
    w[:, :16] = 0
    near = torch.multinomial((w > 5).float() + 1e-4, m // 2, replacement=True)
    near = (near - torch.randint(-1, 3, near.shape, device=w.device)).clamp(16, seq - blk - 1)
    free = torch.randint(16, seq - blk, (rows, m - m // 2), device=w.device)
    return torch.cat([near, free], 1)


def train_dflash(seconds: float, target: Params, *, tcfg: Config, loader: Loader, run: Settings) -> None:
    """Train the draft for ``seconds``: half on the text, half on the target's distribution."""
    cfg = CONFIGS["dflash"]
    p = init_params(cfg, run.device, seed=run.seed + 7)
    for v in target.values():
        v.requires_grad_(False)
    dt, blk, m = torch.bfloat16, cfg.block, run.dflash_anchors
    opt = make_optimizer(p, PEAK_LR, wd=0.02)
    step_fn = torch.compile(dflash_forward, dynamic=False) if run.compile else dflash_forward
    embed, out_w = target["token_embd.weight"], out_weight(target)
    ahead = torch.arange(blk - 1, device=run.device)
    pos_w = torch.exp(-ahead / 6.0)
    t0, step, stats = time.time(), 0, torch.zeros(2, device=run.device)
    loader.drain()
    while (frac := (time.time() - t0) / seconds) < 1:
        while loader.pending < LOOKAHEAD:
            loader.request(run.dflash_seq)
        seq, tok, tgt, wgt, pos = to_device(loader.get(), run.device)
        with torch.no_grad():
            x, feats = forward(target, tcfg, tok=tok, pos=pos, seq=seq, dt=dt, keep=cfg.target_layers)
            anchors = pick_anchors(wgt, seq, m=m, blk=blk)
            rows = anchors.shape[0]
            row = torch.arange(rows, device=run.device)[:, None]
            at = (row * seq + anchors)[..., None] + ahead
            hidden = rms(x[at.view(-1)], target["output_norm.weight"], tcfg.eps)
            soft = lin(hidden, out_w, dt).float()
            hard = tgt[at.view(-1)]
            weight = (wgt[at].clamp(0.3, 3.0) * pos_w).view(-1)
        h = step_fn(p, cfg, embed=embed, feats=feats, pos=pos, seq=seq, anchors=anchors, tok=tok, dt=dt)
        h = h.view(rows, m, blk, -1)[:, :, 1:].reshape(-1, cfg.d)
        logits = lin(rms(h, p["output_norm.weight"], cfg.eps), out_w, dt).float()
        to_text = F.cross_entropy(logits, hard, reduction="none")
        to_target = F.cross_entropy(logits, soft.softmax(-1), reduction="none")
        loss = ((0.5 * to_text + 0.5 * to_target) * weight).sum() / weight.sum()
        optimize(opt, p, loss=loss, lr=lr_at(frac, step, peak=PEAK_LR, warm=100))
        with torch.no_grad():
            same = (logits.argmax(-1) == soft.argmax(-1)).view(rows, m, blk - 1)
            agree = same.float().cumprod(-1).sum(-1)
            stats += torch.stack([agree[:, : m // 2].mean(), agree[:, m // 2 :].mean()])
        step += 1
        if step % 50 == 0:
            near, far = (stats / 50).tolist()
            stats.zero_()
            print(
                f"[dflash] step {step} {time.time() - t0:.0f}s loss {loss.item():.3f} "
                f"accepted near answers {near:.2f}, elsewhere {far:.2f} of {blk - 1}",
                flush=True,
            )
    save(p, cfg, path=f"{run.out}/dflash.pt", info={"step": step, "seconds": seconds})
    print(f"[dflash] done: {step} steps", flush=True)
