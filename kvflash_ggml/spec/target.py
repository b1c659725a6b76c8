"""The model that decides, as its drafters see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a drafter has to know of its target.

    path: its file, the first one if it is split. model, context: addresses of the llama_model and the llama_context;
    both outlive the drafter. n_embd, n_vocab: values a layer's input has, and tokens. n_ctx: how long a text can be.
    ends: the tokens that end one. threads, batch_threads: for one token, and for several. offload: use a device.
    repack: pack weights for the CPU's kernels.
    """

    path: Path
    model: int
    context: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    ends: frozenset[int] = frozenset()
    threads: int = 1
    batch_threads: int = 1
    offload: bool = False
    repack: bool = True
