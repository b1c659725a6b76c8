"""A trained drafter as a GGUF file, with its target's tokenizer byte for byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from kvflash_ggml.convert import draft, writer
from kvflash_ggml.convert.writer import Planned
from kvflash_ggml.files import replacing
from kvflash_ggml.gguf import encoding, reader, types
from kvflash_ggml.gguf.drafter import DrafterFile
from kvflash_ggml.gguf.target import describe

from .drafter import Params, Plan
from .target import Target


def write(
    out: Path, model: Path, target: Target, plan: Plan, p: Params, *, ids: Tensor | None, kind: str = "q8_0"
) -> None:
    """Write ``out``, for the target file ``model``. ids: tokens of a head of its own; None leaves it to the target."""
    s = target.shape
    it = DrafterFile(
        where=out.stem, hidden=s.d, layers=len(plan.layers), heads=s.heads, heads_kv=s.kv, head_dim=s.dim, ff=s.ffn,
        vocab=s.vocab, epsilon=s.eps, theta=s.theta, rotary=s.dim, block=plan.block, mask=plan.mask,
        target_layers=plan.taps, context=s.context, causal=True,
    )  # fmt: skip
    found = {name: value.detach().float().cpu().numpy() for name, value in p.items()}
    tensors = [_planned(name, value, kind) for name, value in found.items()]
    if ids is not None:
        tensors.append(_planned("output.weight", target.head[ids].float().cpu().numpy(), kind))
        rows = ids.cpu().numpy().astype(np.int64).view(np.uint8)
        tensors.append(Planned(name="d2t", kind=types.BY_NAME["i64"], shape=(len(ids),), pieces=lambda: [rows]))
    fields = draft.fields(it, describe(reader.read(model)), kind=kind)
    with replacing(out) as file:
        writer.write(file, fields, tensors, lambda done, total: None)


def _planned(name: str, value: np.ndarray, kind: str) -> Planned:
    chosen = types.BY_NAME[kind if value.ndim > 1 else "f32"]
    return Planned(name=name, kind=chosen, shape=tuple(reversed(value.shape)), pieces=partial(_encoded, value, chosen))


def _encoded(value: np.ndarray, kind: types.TensorType) -> list[types.Bytes]:
    if not np.isfinite(value).all():
        raise SystemExit("the training failed: a weight is no number")
    rows = np.ascontiguousarray(value, np.float32)
    return [encoding.encode(rows, kind)]
