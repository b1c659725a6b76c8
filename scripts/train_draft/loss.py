"""How far a drafter's distribution is from the target's, over the tokens that it can draft, without keeping logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 8192  # rows whose logits are in memory at a time
SHARP = 1 / 0.7  # the target's logits are taken times this: a draft is its likeliest token


class Distance(torch.autograd.Function):
    """Weighted cross entropy of rows: ``states`` [N, d] against ``wanted`` [N, d], both before ``head`` [vocab, d].

    weights [N], whose sum is one. Only ``states`` get a gradient, made on the way, as logits are too many to keep.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, wanted: Tensor, head: Tensor, weights: Tensor) -> Tensor:
        gradient, total = torch.empty_like(states), torch.zeros((), device=states.device)
        for lo in range(0, len(states), CHUNK):
            part = slice(lo, lo + CHUNK)
            logits, w = states[part] @ head.T, weights[part, None]
            aim = torch.softmax((wanted[part] @ head.T).mul_(SHARP), -1)
            logp = torch.log_softmax(logits, -1)
            total -= ((aim * logp).sum(-1, dtype=torch.float32) * w[:, 0]).sum()
            gradient[part] = ((logp.exp_() - aim) * w.to(logits)) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.saved_tensors[0] * upstream[0].to(ctx.saved_tensors[0]), None, None, None
