"""The target's own chats: many at once, token by token; what users say is forced upon it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .target import Target

WARM = 0.7  # temperature of the answers that are not greedy
TO_MODEL, TO_USER = 0, 1  # scripts: what stands between turns; those after them are follow-ups


@dataclass(slots=True)
class Prompts:
    """Of `prompts.main`: beginnings and scripts as padded rows with their lengths."""

    prompt: Tensor
    prompt_length: Tensor
    held_out: Tensor
    held_out_length: Tensor
    script: Tensor
    script_length: Tensor
    invents: Tensor

    @classmethod
    def load(cls, path: str, device: str) -> Prompts:
        data = np.load(path)
        return cls(**{name: torch.from_numpy(data[name]).to(device).long() for name in cls.__slots__})


@dataclass(slots=True)
class Store:
    """Chats, and what the target knew of each token.

    tokens [rows, n]; said [rows, n]: did the model choose it as an answer? greedy [rows]; taps [rows, n, width]: inputs
    of layers; states [rows, n, d]: normed, before the head. rows: how many of them are filled.
    """

    tokens: Tensor
    said: Tensor
    greedy: Tensor
    taps: Tensor
    states: Tensor
    rows: int = 0

    @classmethod
    def empty(cls, target: Target, *, rows: int, n: int, taps: int) -> Store:
        like: dict[str, Any] = {"device": target.embed.device}
        wide: dict[str, Any] = {**like, "dtype": target.embed.dtype}
        d = target.shape.d
        return cls(
            torch.zeros(rows, n, dtype=torch.int32, **like),
            torch.zeros(rows, n, dtype=torch.bool, **like),
            torch.zeros(rows, dtype=torch.bool, **like),
            torch.zeros(rows, n, taps * d, **wide),
            torch.zeros(rows, n, d, **wide),
        )


@torch.no_grad()
def chat(
    target: Target, prompts: Prompts, *, n: int, batch: int, held_out: bool, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """``batch`` chats of n tokens: tokens and which the model chose [batch, n], and which are greedy [batch].

    held_out: the first rows are those of the prompts that are held out, all of them greedy.
    """
    s, dev = target.shape, target.embed.device
    pick = torch.randperm(len(prompts.prompt), generator=rng, device=dev)
    pick = pick.repeat(-(-batch // len(pick)))[:batch]
    begin, length, invents = prompts.prompt[pick], prompts.prompt_length[pick], prompts.invents[pick].bool()
    greedy = torch.rand(batch, generator=rng, device=dev) < 0.5
    if held_out:
        k, width = prompts.held_out.shape
        begin[:k, :width], length[:k], invents[:k], greedy[:k] = prompts.held_out, prompts.held_out_length, False, True
    tokens = torch.zeros(batch, n, dtype=torch.long, device=dev)
    said = torch.zeros(batch, n, dtype=torch.bool, device=dev)
    tokens[:, 0] = begin[:, 0]
    keys = torch.zeros(s.layers, batch, s.kv, n, s.dim, dtype=target.embed.dtype, device=dev)
    values = torch.zeros_like(keys)
    script = torch.zeros(batch, dtype=torch.long, device=dev)
    place = prompts.script_length[script]  # in the script: at its end nothing is forced
    answers = ~invents
    for at in range(n - 1):
        logits = target.step(tokens[:, at], keys, values, at).float()
        heat = torch.where(answers, torch.where(greedy, 0.0, WARM), 1.0)[:, None]
        noise = torch.empty_like(logits).exponential_(generator=rng).clamp_(min=1e-20).log_()
        drawn = logits.sub_(noise.mul_(heat)).argmax(1)  # Gumbel's way to sample
        in_prompt, in_script = at + 1 < length, place < prompts.script_length[script]
        forced = prompts.script[script, place.clamp(max=prompts.script.shape[1] - 1)]
        if at + 1 < begin.shape[1]:
            forced = torch.where(in_prompt, begin[:, at + 1], forced)
        free = ~(in_prompt | in_script)
        tokens[:, at + 1] = torch.where(free, drawn, forced)
        said[:, at + 1] = free & answers
        place = place + in_script
        ends = free & (drawn == s.eot)
        follow = torch.randint(2, len(prompts.script), (batch,), generator=rng, device=dev)
        script = torch.where(ends, torch.where(answers, torch.where(invents, TO_USER, follow), TO_MODEL), script)
        place = torch.where(ends, 0, place)
        answers = torch.where(ends, ~(answers & invents), answers)
    return tokens, said, greedy


def room(target: Target, *, n: int, batch: int, taps: int) -> int:
    """Rounds of chats whose `Store` fits in the device's memory beside the chats' own KV and what training takes."""
    if target.embed.device.type != "cuda":
        return 1
    s, size = target.shape, target.embed.element_size()
    kept, memory = (taps + 1) * s.d * size + 5, 2 * s.layers * s.kv * s.dim * size
    free = torch.cuda.mem_get_info()[0] - 12 * 2**30
    return max(1, int((free / (batch * n) - memory) / kept))


@torch.no_grad()
def collect(
    target: Target,
    prompts: Prompts,
    *,
    taps: tuple[int, ...],
    n: int,
    batch: int,
    rounds: int,
    seconds: float,
    seed: int,
) -> Store:
    """As many rounds of chats as fit in ``seconds``, ``rounds`` at most; the first always."""
    dev = target.embed.device
    rng = torch.Generator(device=dev).manual_seed(seed)
    store = Store.empty(
        target, rows=min(rounds, room(target, n=n, batch=batch, taps=len(taps))) * batch, n=n, taps=len(taps)
    )
    start, took = time.time(), math.inf
    for i in range(len(store.tokens) // batch):
        begun = time.time()
        tokens, said, greedy = chat(target, prompts, n=n, batch=batch, held_out=i == 0, rng=rng)
        for lo in range(0, batch, 128):
            part = slice(store.rows + lo, store.rows + min(lo + 128, batch))
            store.states[part], store.taps[part] = target.read(tokens[lo : lo + 128], taps)
        part = slice(store.rows, store.rows + batch)
        store.tokens[part], store.said[part], store.greedy[part] = tokens.int(), said, greedy
        store.rows += batch
        share, seconds_taken = 100 * said.float().mean().item(), time.time() - begun
        took = min(took, seconds_taken)  # the first is slower: everything is made in it
        size = f"{batch * n / 1e6:.2f}M tokens in {seconds_taken:.1f}s"
        print(f"[chats] round {i}: {size}, {share:.0f} % of them answers", flush=True)
        if time.time() - start + took > seconds:
            break
    return store
