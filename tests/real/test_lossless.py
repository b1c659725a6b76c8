"""Lossless answers of a real model: the full cache's text, out of a pool of an eighth of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from support.harness import TEXT
from support.replay import let_replay, noted

from kvflash_ggml.config import SpecConfig

PROMPT, COUNT, POOL = 1200, 40, 512
SIZE = {"n_ctx": 1536, "n_batch": 128, "n_ubatch": 128}  # steps of a prompt that a pool takes too


def test_the_text_is_the_full_caches(smol: Callable[..., Any], record_property: Any) -> None:
    """Token for token and bit for bit, greedy and sampled, where the full cache takes the same steps."""
    spec = SpecConfig(types=("ngram",), width=6)
    llm = smol(**SIZE, kvflash=POOL, kvflash_answer="lossless", kvflash_spec=spec)
    full = smol(**SIZE, kvflash=SIZE["n_ctx"], kvflash_spec=spec)
    prompt = llm.tokenize(TEXT.read_bytes()[:40_000])[:PROMPT]
    drafts = noted(llm)
    let_replay(full, drafts, 6)
    for temp in (0.0, 0.8):
        drafts.clear()
        for one in (llm, full):
            one.reset()  # what is kept of a prompt differs, and so do the steps of its rest
        answer, logits = _answer(llm, prompt, temp)
        counted, stats = llm.kvflash.spec.last, llm.kvflash
        pool = counted.by_source["pool"]
        record_property("lossless", f"temperature {temp}: {pool.accepted} of {pool.drafted} drafts of the pool stay")
        assert pool.accepted > 0
        assert stats.resident * 64 <= POOL < PROMPT
        assert stats.streamed_steps > counted.steps > 0
        assert stats.last.generated_whole == stats.last.generated > 0
        told, theirs = _answer(full, prompt, temp)
        assert full.kvflash.spec.last.steps == counted.steps
        assert told == answer
        assert all(np.array_equal(mine, its) for mine, its in zip(logits, theirs, strict=True))


def _answer(llm: Any, prompt: list[int], temp: float) -> tuple[list[int], list[Any]]:
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, temp=temp, top_k=40, top_p=0.95, min_p=0.05), COUNT):
        tokens.append(token)
        logits.append(llm.newest_logits())
    return tokens, logits
