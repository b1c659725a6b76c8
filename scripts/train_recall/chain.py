"""Drafters that draft one token after another, trained against a frozen target: MTP and EAGLE3.

Both put pairs through one layer: a token, and what the target knew just before it. The head of
qwen35 ("mtp") takes the target's last normed state; EAGLE3 takes three layer inputs, fused. From
the second token of a chain on, the layer's own output stands for the target's. So in training the
chain is drafted as it will be, except that its tokens are the text's: a step reads the pairs of
the target up to its anchor, and after them only the pairs of its own chain.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import CONFIGS, Config, Settings
from .dflash import PEAK_LR, pick_anchors
from .forward import forward, rope_tables
from .loader import Loader
from .params import Params, init_params, layer, out_weight, save
from .regions import attn_in, lin, mix_out, rms, rope
from .training import LOOKAHEAD, lr_at, make_optimizer, optimize, to_device

DECAY = 0.8  # loss weight of a step against the one before
Rope = tuple[Tensor, Tensor]
Mixed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # residual, query, key, value, gate


def layer_in(p: Params, cfg: Config, *, token: Tensor, state: Tensor, at: Rope, dt: torch.dtype) -> Mixed:
    """What attention needs of pairs: ``token`` embeddings [N, d] and the ``state`` before them."""
    b = layer(p, cfg.blocks[0])
    if cfg.arch == "mtp":
        pair = [rms(token, b["nextn.enorm.weight"], cfg.eps), rms(state, b["nextn.hnorm.weight"], cfg.eps)]
        x = lin(torch.cat(pair, 1), b["nextn.eh_proj.weight"], dt).float()
        matrices = [b[f"attn_{i}.weight"] for i in ("norm", "q", "k", "v", "q_norm", "k_norm")]
        return x, *attn_in(x, *matrices, *at, cfg.n_head, cfg.n_kv, True, cfg.eps, dt)
    pair = [rms(token, b["attn_norm.weight"], cfg.eps), rms(state, b["attn_norm_2.weight"], cfg.eps)]
    h = torch.cat(pair, 1)
    q, k, v = [lin(h, b[f"attn_{i}.weight"], dt).view(len(h), -1, cfg.d_head) for i in "qkv"]
    q, k = [rope(t.float(), *at).to(dt) for t in (q, k)]
    rep = cfg.n_head // cfg.n_kv
    return state, q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), None


def layer_out(
    p: Params, cfg: Config, *, x: Tensor, o: Tensor, gate: Tensor | None, dt: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The normed state [N, d] for the output head, and the state for the next step of the chain."""
    b = layer(p, cfg.blocks[0])
    norm = "post_attention_norm" if cfg.gated else "ffn_norm"
    matrices = [b[f"{i}.weight"] for i in (norm, "ffn_gate", "ffn_up", "ffn_down")]
    x = mix_out(x, o, gate, b["attn_output.weight"], *matrices, cfg.eps, dt)
    if cfg.arch == "mtp":
        hidden = rms(x, b["nextn.shared_head_norm.weight"], cfg.eps)
        return hidden, hidden
    return rms(x, p["output_norm.weight"], cfg.eps), x


def chain_forward(
    p: Params,
    cfg: Config,
    *,
    embed: Tensor,
    feats: Tensor,
    pos: Tensor,
    seq: int,
    anchors: Tensor,
    tok: Tensor,
    dt: torch.dtype,
) -> Tensor:
    """Hidden states [B * M, chain, d] that predict the tokens after ``anchors`` [B, M].

    feats: [B * seq, d], or [B * seq, 3 d] for EAGLE3. Pair i is token i and the features of i - 1.
    The first token has a pair with MTP only: zeros go before it. EAGLE3's pairs stand one position
    lower in llama.cpp, which a rotary distance does not show.
    """
    rows, m = anchors.shape
    dev = anchors.device
    state = lin(feats, p["fc.weight"], dt).float() if cfg.arch == "eagle3" else feats
    state = F.pad(state.view(rows, seq, -1)[:, :-1], (0, 0, 1, 0)).reshape(rows * seq, -1)
    token = F.embedding(tok, embed).float()
    x, q, k, v, gate = layer_in(p, cfg, token=token, state=state, at=rope_tables(cfg, pos), dt=dt)

    def split(t: Tensor) -> Tensor:
        return t.view(rows, -1, cfg.n_head, cfg.d_head).transpose(1, 2)

    index = torch.arange(seq, device=dev)
    start = (torch.arange(rows, device=dev)[:, None] * seq + anchors).view(-1)
    keys, values = split(k), split(v)
    see = (index <= anchors[:, :, None]) & (index >= (0 if cfg.arch == "mtp" else 1))
    own = torch.eye(m, device=dev, dtype=torch.bool).expand(rows, m, m)
    x, q, gate = x[start], q[start], None if gate is None else gate[start]
    out = []
    for step in range(cfg.chain):
        if step:
            at = rope_tables(cfg, pos[start] + step)
            x, q, k, v, gate = layer_in(p, cfg, token=token[start + step], state=state, at=at, dt=dt)
            keys, values = torch.cat([keys, split(k)], 2), torch.cat([values, split(v)], 2)
            see = torch.cat([see, own], 2)
        o = F.scaled_dot_product_attention(split(q), keys, values, attn_mask=see[:, None])
        o = o.transpose(1, 2).reshape(rows * m, -1)
        hidden, state = layer_out(p, cfg, x=x, o=o, gate=gate, dt=dt)
        out.append(hidden)
    return torch.stack(out, 1)


def features(p: Params, cfg: Config, *, x: Tensor, kept: list[Tensor]) -> Tensor:
    """What the drafter ``cfg`` reads of a target: its final state ``x``, or ``kept`` layer inputs."""
    return torch.cat(kept, 1) if kept else rms(x, p["output_norm.weight"], cfg.eps)


def train_chain(name: str, seconds: float, target: Params, *, tcfg: Config, loader: Loader, run: Settings) -> None:
    """Train drafter ``name`` for ``seconds`` to predict the target's distribution along a chain."""
    cfg = CONFIGS[name]
    p = init_params(cfg, run.device, seed=run.seed + 7)
    for v in target.values():
        v.requires_grad_(False)
    dt, m, n = torch.bfloat16, run.chain_anchors, cfg.chain
    opt = make_optimizer(p, PEAK_LR, wd=0.02)
    step_fn = torch.compile(chain_forward, dynamic=False) if run.compile else chain_forward
    embed, out_w = target["token_embd.weight"], out_weight(target)
    ahead = torch.arange(n, device=run.device)
    t0, step, stats = time.time(), 0, torch.zeros(2, n, device=run.device)
    loader.drain()
    while (frac := (time.time() - t0) / seconds) < 1:
        while loader.pending < LOOKAHEAD:
            loader.request(run.dflash_seq)
        seq, tok, _, wgt, pos = to_device(loader.get(), run.device)
        with torch.no_grad():
            x, kept = forward(target, tcfg, tok=tok, pos=pos, seq=seq, dt=dt, keep=cfg.target_layers)
            feats = features(target, tcfg, x=x, kept=kept)
            anchors = pick_anchors(wgt, seq, m=m, blk=n + 1)
            rows = anchors.shape[0]
            row = torch.arange(rows, device=run.device)[:, None]
            at = ((row * seq + anchors)[..., None] + ahead).view(-1)
            soft = lin(rms(x[at], target["output_norm.weight"], tcfg.eps), out_w, dt).float()
            weight = (wgt[at].clamp(0.3, 3.0).view(-1, n) * DECAY**ahead).view(-1)
        h = step_fn(p, cfg, embed=embed, feats=feats, pos=pos, seq=seq, anchors=anchors, tok=tok, dt=dt)
        logits = lin(h.view(-1, cfg.d), out_w, dt).float()
        loss = F.cross_entropy(logits, soft.softmax(-1), reduction="none")
        loss = (loss * weight).sum() / weight.sum()
        optimize(opt, p, loss=loss, lr=lr_at(frac, step, peak=PEAK_LR, warm=100))
        with torch.no_grad():
            same = (logits.argmax(-1) == soft.argmax(-1)).view(rows, m, n)
            agree = same.float().cumprod(-1)
            stats += torch.stack([agree[:, : m // 2].mean((0, 1)), agree[:, m // 2 :].mean((0, 1))])
        step += 1
        if step % 50 == 0:
            near, far = (" ".join(f"{100 * x:.0f}" for x in line) for line in (stats / 50).tolist())
            stats.zero_()
            print(
                f"[{name}] step {step} {time.time() - t0:.0f}s loss {loss.item():.3f} "
                f"percent accepted near answers {near}, elsewhere {far}",
                flush=True,
            )
    save(p, cfg, path=f"{run.out}/{name}.pt", info={"step": step, "seconds": seconds})
    print(f"[{name}] done: {step} steps", flush=True)
