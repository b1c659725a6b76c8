"""Lossless answers of a real model: the full cache's text, out of a pool of an eighth of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from support.harness import TEXT

from kvflash_ggml.config import SpecConfig

PROMPT, COUNT, POOL = 1200, 40, 512
SIZE = {"n_ctx": 1536, "n_batch": 128, "n_ubatch": 128}  # steps of a prompt that a pool takes too


def test_the_text_is_the_full_caches(smol: Callable[..., Any], capsys: Any) -> None:
    """Token for token, greedy and with the same random numbers, but where two are as good as equally likely."""
    full = smol(**SIZE)
    llm = smol(**SIZE, kvflash=POOL, kvflash_answer="lossless", kvflash_spec=SpecConfig(types=("ngram",), width=6))
    prompt = full.tokenize(TEXT.read_bytes()[:40_000])[:PROMPT]
    for temp in (0.0, 0.8):
        told, logits = _answer(full, prompt, temp)
        answer, theirs = _answer(llm, prompt, temp)
        counted, stats = llm.kvflash.spec.last, llm.kvflash
        pool = counted.by_source["pool"]
        with capsys.disabled():
            print(f"\nlossless at temperature {temp}: {pool.accepted} of {pool.drafted} drafts of the pool stay")
        assert pool.accepted > 0
        assert stats.resident * 64 <= POOL < PROMPT
        assert stats.streamed_steps > counted.steps > 0
        assert stats.last.generated_whole == stats.last.generated > 0
        for at, (one, other) in enumerate(zip(told, answer, strict=True)):
            near = 0.05 * float(np.abs(logits[at]).max())  # rows of a wider step round otherwise
            assert np.abs(logits[at] - theirs[at]).max() <= near
            if one != other:
                assert abs(logits[at][one] - logits[at][other]) <= near or temp > 0
                break
        if temp == 0:
            assert told[:20] == answer[:20]


def _answer(llm: Any, prompt: list[int], temp: float) -> tuple[list[int], list[Any]]:
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, temp=temp, top_k=40, top_p=0.95, min_p=0.05), COUNT):
        tokens.append(token)
        logits.append(llm.newest_logits() if llm.kvflash is not None else llm._logits_row(llm.n_tokens - 1).copy())
    return tokens, logits
