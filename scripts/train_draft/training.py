"""The training loop, boxed by time, and what a drafter would win on chats that it was not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .answers import Store
from .drafter import Params, Plan, draft
from .loss import Distance
from .target import Target

DECAY = 0.8  # loss weight of a place in a block against the one before
WARM_UP = 60  # steps
BEGINNING = 160  # tokens of answers, as `measure` takes them: later on greedy text goes round in circles


@dataclass(frozen=True, slots=True)
class Settings:
    """held_out: rows at the store's beginning that are only measured. anchors: blocks of a row in one step. lr: of the
    matrices, in AdamW's measure; vectors get as much."""

    seconds: float
    rows: int = 64
    anchors: int = 64
    held_out: int = 64
    lr: float = 2e-3
    save_every: float = 20.0
    seed: int = 1


def vocabulary(store: Store, size: int, target: Target) -> Tensor:
    """The ``size`` tokens that answers have most of, ascending; all for 0."""
    if not size:
        return torch.arange(target.shape.vocab, device=store.tokens.device)
    used = store.tokens[: store.rows][store.said[: store.rows]].long()
    count = torch.bincount(used, minlength=target.shape.vocab)
    count[target.shape.eot] += 1
    ids = count.argsort(descending=True, stable=True)[:size]
    print(f"[train] {size} tokens are {100 * (count[ids].sum() / count.sum()).item():.2f} % of the answers", flush=True)
    return ids.sort().values


def train(
    target: Target,
    plan: Plan,
    store: Store,
    p: Params,
    *,
    ids: Tensor,
    run: Settings,
    save: Callable[[Params], None] | None,
) -> float:
    """Train ``p`` for ``run.seconds``; returns the loss of the last fifth of them.

    ``save`` gets it, every ``run.save_every`` seconds and at the end, if none before won more on what is held out. None
    for a trial, which tells nothing either.
    """
    dev, blk = store.tokens.device, plan.block
    head = target.head[ids].contiguous()
    matrices = [v for v in p.values() if v.dim() == 2]
    opts = [
        torch.optim.Muon(matrices, lr=run.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([v for v in p.values() if v.dim() == 1], lr=run.lr, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    rng = torch.Generator(device=dev).manual_seed(run.seed)
    ahead = torch.arange(1, blk, device=dev)
    order = torch.empty(0, dtype=torch.long, device=dev)
    start = saved = time.time()
    best, step, losses = 0.0, 0, list[tuple[float, Tensor]]()
    while (frac := (time.time() - start) / run.seconds) < 1:
        if len(order) < run.rows:
            order = run.held_out + torch.randperm(store.rows - run.held_out, generator=rng, device=dev)
        rows, order = order[: run.rows], order[run.rows :]
        tokens, said = store.tokens[rows].long(), store.said[rows]
        chance = said[:, 1 : 1 - blk].float() + 1e-6  # the place before a token of an answer
        anchors = torch.multinomial(chance, run.anchors, replacement=True, generator=rng)
        states = draft(p, target, plan, tokens=tokens, taps=store.taps[rows], anchors=anchors)
        at = anchors[:, :, None] + ahead
        every = torch.arange(len(rows), device=dev)[:, None, None]
        weight = said[every, at].float().cumprod(-1) * DECAY ** (ahead - 1)
        weight = (weight / weight.sum().clamp(min=1)).view(-1)
        wanted = store.states[rows][every, at - 1].view(-1, target.shape.d)
        loss = Distance.apply(states.reshape(-1, target.shape.d), wanted, head, weight)
        rate = run.lr * min(1.0, (step + 1) / WARM_UP) * min(1.0, (1 - frac) / 0.6)
        for opt in opts:
            opt.param_groups[0]["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        losses.append((frac, loss.detach()))
        if save and step % 100 == 0:
            mean = torch.stack([x for _, x in losses[-100:]]).mean().item()
            print(f"[train] step {step} {time.time() - start:.0f}s loss {mean:.3f}", flush=True)
        if save and time.time() - saved > run.save_every:
            saved = time.time()
            won = report(target, plan, store, p, ids=ids, run=run, when=f"{saved - start:.0f}s")
            if won > best:
                best = won
                save(p)
    if save and report(target, plan, store, p, ids=ids, run=run, when=f"end, {step} steps") > best:
        save(p)
    return torch.stack([x for frac, x in losses if frac > 0.8] or [losses[-1][1]]).mean().item()


@torch.no_grad()
def report(target: Target, plan: Plan, store: Store, p: Params, *, ids: Tensor, run: Settings, when: str) -> float:
    """Print what steps would win on the greedy chats that are held out: of prompts written by hand, and of others.

    Returns the sum of both, on their beginnings.
    """
    rows = torch.arange(run.held_out, device=store.tokens.device)
    right = agreement(target, plan, store, p, ids=ids, rows=rows, at_once=run.anchors)
    share = right.float().cumprod(-1)
    greedy, every = store.greedy[: run.held_out], store.said[: run.held_out, 1 : right.shape[1] + 1]
    begins = every & (every.cumsum(-1) <= BEGINNING)
    text, total = [], 0.0
    for name, chosen in (("by hand", greedy & (rows < 16)), ("others", greedy & (rows >= 16))):
        places = share[chosen][begins[chosen]].mean(0).tolist()
        won, whole = (simulated(right[chosen].cpu(), said[chosen].cpu()) for said in (begins, every))
        total += won
        shares = " ".join(f"{100 * x:.0f}" for x in places)
        text.append(f"{name} {won:.2f} a step, of each place {shares} % (whole chats {whole:.2f})")
    print(f"[held out, {when}] {'; '.join(text)}", flush=True)
    return total


@torch.no_grad()
def agreement(
    target: Target, plan: Plan, store: Store, p: Params, *, ids: Tensor, rows: Tensor, at_once: int
) -> Tensor:
    """[rows, anchors, block - 1]: is what is drafted after each place what the answer went on with?"""
    dev, n, blk = store.tokens.device, store.tokens.shape[1], plan.block
    head, found = target.head[ids], []
    for lo in range(0, n - blk, at_once):
        places = torch.arange(lo, min(lo + at_once, n - blk), device=dev)
        anchors = places.expand(len(rows), -1)
        tokens = store.tokens[rows].long()
        states = draft(p, target, plan, tokens=tokens, taps=store.taps[rows], anchors=anchors)
        at = places[:, None] + torch.arange(1, blk, device=dev)
        drafted = torch.cat([ids[(part @ head.T).argmax(-1)] for part in states.split(4)])
        found.append((drafted == tokens[:, at]) & store.said[rows][:, at])
    return torch.cat(found, 1)


def simulated(right: Tensor, said: Tensor) -> float:
    """Tokens a step wins if each draft begins where the step before left off."""
    accepted = right.float().cumprod(-1).sum(-1).long()
    tokens = steps = 0
    for row, answers in zip(accepted.tolist(), said.tolist(), strict=True):
        at = 0
        while at < len(row):
            if not answers[at]:
                at += 1
                continue
            steps, tokens, at = steps + 1, tokens + row[at] + 1, at + row[at] + 1
    return tokens / max(1, steps)
