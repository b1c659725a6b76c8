"""The training loop of the target models, boxed by wall-clock time instead of step count."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor

from .config import CONFIGS, STAGES, Config, Settings
from .forward import forward
from .loader import Loader
from .params import Params, init_params, out_weight, save
from .regions import REGIONS
from .synth import Batch

LOOKAHEAD = 24  # batches asked for ahead of the device


def to_device(batch: Batch, device: str) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """(length, tokens, targets, weights, positions), the last four flat."""
    seq, *arrays = batch
    host = [torch.from_numpy(a) for a in arrays]
    if device == "cuda":
        host = [t.pin_memory() for t in host]
    tok, wgt, pos = (t.to(device, non_blocking=True) for t in host)
    tok, wgt = tok.long(), wgt.float()
    return seq, tok[:, :-1].reshape(-1), tok[:, 1:].reshape(-1), wgt.reshape(-1), pos.reshape(-1)


def make_optimizer(p: Params, lr: float, *, wd: float) -> torch.optim.Optimizer:
    """AdamW; only matrices that multiply activations decay."""

    def decays(name: str, value: Tensor) -> bool:
        return value.dim() == 2 and "conv1d" not in name and "token_embd" not in name

    return torch.optim.AdamW(
        [
            {"params": [v for k, v in p.items() if decays(k, v)], "weight_decay": wd},
            {"params": [v for k, v in p.items() if not decays(k, v)], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=next(iter(p.values())).is_cuda,
    )


def lr_at(frac: float, step: int, *, peak: float, warm: int, hold: float = 0.55) -> float:
    """Warm-up over ``warm`` steps, constant until ``hold`` of the time, then linear to 3 %."""
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (1.0 if frac < hold else 0.03 + 0.97 * (1 - frac) / (1 - hold))


def optimize(opt: torch.optim.Optimizer, p: Params, *, loss: Tensor, lr: float) -> Tensor:
    """One clipped step; returns the gradient norm before clipping."""
    for group in opt.param_groups:
        group["lr"] = lr
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0, foreach=True)
    opt.step()
    opt.zero_grad(set_to_none=True)
    return norm


def train(
    name: str, seconds: float, *, loader: Loader, run: Settings, init: Params | None = None
) -> tuple[Config, Params, dict[str, Any]]:
    """Train one model for ``seconds`` (without the first, compiling step); saves every minute."""
    cfg = CONFIGS[name]
    p = init_params(cfg, run.device, seed=run.seed) if init is None else init
    dt = torch.bfloat16
    opt = make_optimizer(p, run.lr, wd=0.05)
    stages = run.stages or STAGES[name]
    rng = random.Random(run.seed)
    path = f"{run.out}/{name}.pt"
    t0 = time.time()
    paused, step, tokens, saved = 0.0, 0, 0, t0
    sums = torch.zeros(3, device=run.device)
    while (frac := (time.time() - t0 - paused) / seconds) < 1:
        lens = next(s for until, s in stages if frac < until)
        while loader.pending < LOOKAHEAD:
            loader.request(rng.choice(lens))
        seq, tok, tgt, wgt, pos = to_device(loader.get(), run.device)
        lr = lr_at(frac, step, peak=run.lr, warm=run.warm, hold=run.hold)
        x, _ = forward(p, cfg, tok=tok, pos=pos, seq=seq, dt=dt)
        loss, ce, good = REGIONS["head"](x, p["output_norm.weight"], out_weight(p), tgt, wgt, cfg.eps, dt)
        norm = optimize(opt, p, loss=loss, lr=lr)
        ans, txt = (wgt > 5).float(), (wgt == 1).float()
        text_loss = (ce * txt).sum() / txt.sum().clamp(min=1)
        answer_acc = (good * ans).sum() / ans.sum().clamp(min=1)
        sums += torch.stack([text_loss, answer_acc, norm])
        step += 1
        tokens += tok.numel()
        if step == 1:  # compilation does not count
            if run.device == "cuda":
                torch.cuda.synchronize()
            paused = time.time() - t0
            n_par = sum(v.numel() for v in p.values())
            print(f"[{name}] {n_par / 1e6:.2f}M params, first step {paused:.1f}s", flush=True)
        if step % 50 == 0:
            text, answer, gnorm = (sums / 50).tolist()
            sums.zero_()
            print(
                f"[{name}] step {step} T={seq} {tokens / 1e6:.0f}M tok "
                f"{time.time() - t0 - paused:.0f}s text {text:.3f} answer-acc {answer:.3f} "
                f"gnorm {gnorm:.2f} lr {lr:.1e}",
                flush=True,
            )
        if time.time() - saved > 60:
            saved = time.time()
            save(p, cfg, path=path, info={"step": step, "tokens": tokens})
    info = {"step": step, "tokens": tokens, "seconds": seconds}
    save(p, cfg, path=path, info=info)
    print(
        f"[{name}] done: {step} steps, {tokens / 1e6:.0f}M tokens, {tokens / seconds / 1e6:.2f}M tok/s",
        flush=True,
    )
    return cfg, p, info
