"""Needle evaluation in torch, teacher forced: all digits right means that greedy is exact."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from .config import Config, Settings
from .forward import forward
from .params import Params, out_weight
from .regions import REGIONS
from .synth import Synth

DEPTHS = (0.1, 0.5, 0.9)


def hits(p: Params, cfg: Config, synth: Synth, *, seq: int, depth: float, rows: int, device: str) -> torch.Tensor:
    """Whether each of ``rows`` haystacks is answered with all seven digits right: bool [rows]."""
    ids, digits = synth.haystacks(seq, depth=depth, rows=rows)
    tok = torch.from_numpy(ids).to(device)
    pos = torch.arange(seq, device=device, dtype=torch.int32).repeat(rows)
    x, _ = forward(p, cfg, tok=tok[:, :-1].reshape(-1), pos=pos, seq=seq, dt=torch.bfloat16)
    one = torch.ones(rows * seq, device=device)
    # autograd stays on: that reuses the compiled training graphs
    _, _, good = REGIONS["head"](
        x,
        p["output_norm.weight"],
        out_weight(p),
        tok[:, 1:].reshape(-1),
        one,
        cfg.eps,
        torch.bfloat16,
    )
    right: torch.Tensor = good.view(rows, seq) | ~torch.from_numpy(digits).to(device)
    return right.all(1)


def evaluate(
    name: str, cfg: Config, p: Params, *, synth: Synth, lengths: Sequence[int], run: Settings
) -> dict[str, str]:
    """Print and return ``{"length@depth": "right/trials"}``."""
    t0 = time.time()
    table = {}
    for seq in lengths:
        for depth in DEPTHS:
            ok, done = 0, 0
            while done < run.trials:
                rows = run.tokens // seq
                good = hits(p, cfg, synth, seq=seq, depth=depth, rows=rows, device=run.device)
                take = min(rows, run.trials - done)
                ok += int(good[:take].sum())
                done += take
            table[f"{seq}@{depth}"] = f"{ok}/{run.trials}"
    print(f"[{name}] NIAH (torch) {json.dumps(table)} {time.time() - t0:.1f}s", flush=True)
    return table
