"""Greedy answers to prompts that mean nothing, timed."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvflash_ggml.arrays import Int32s

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


def compute_for(seconds: float) -> None:
    """Take so long, as one who drafts: who sleeps wakes up late."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def random_prompt(llm: Llama, depth: int, seed: int) -> list[int]:
    """So many tokens that mean nothing."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(10, min(llm.n_vocab() - 10, 4000), depth)]


def generate(llm: Llama, prompt: list[int], count: int) -> tuple[Int32s, float]:
    """The greedy continuation, and tokens a second after the first."""
    tokens: list[int] = []
    generator = llm.generate(prompt, temp=0.0, top_k=1)
    began = time.perf_counter()
    for token in islice(generator, count):
        if not tokens:
            began = time.perf_counter()
        tokens.append(token)
    seconds = time.perf_counter() - began
    generator.close()
    return np.array(tokens, np.int32), (count - 1) / seconds
