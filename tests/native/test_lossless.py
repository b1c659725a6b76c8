"""Lossless answers: what is resident drafts, all of the text verifies."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from support.harness import assert_alike, drawn
from support.inside import inside
from support.integrity import check_table
from support.replay import let_replay, noted
from support.rounding import LOGITS, ON_GPU, near, without_fusion

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError

SIZE = {"n_ctx": 1280, "n_batch": 128, "n_ubatch": 128}
LOSSLESS = {"kvflash": 512, "kvflash_reading": "exact", "kvflash_answer": "lossless", "kvflash_policy": "qk"}


@pytest.mark.parametrize("width", [2, 5, 9])
@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa", "latent heads"])
def test_the_text_is_that_of_the_full_cache(kind: str, temp: float, width: int, llama: Any, tokens: Any) -> None:
    """Tokens and logits, which the CPU computes alike in steps of any width but for rounding."""
    if ON_GPU and kind == "latent heads":
        pytest.skip("kernels for steps of other widths round otherwise, which its random weights make much of")
    prompt = tokens[:1100].tolist()
    full, theirs = drawn(llama(kind, **SIZE, kvflash=1280), prompt, 50, temp=temp)
    llm = llama(kind, **SIZE, **LOSSLESS, kvflash_spec=SpecConfig(width=width, types=("ngram",)))
    tokens_out, logits = drawn(llm, prompt, 50, temp=temp)
    same = next((i for i, (a, b) in enumerate(zip(full, tokens_out, strict=True)) if a != b), len(full))
    for a, b in zip(theirs[: same + 1], logits[: same + 1], strict=True):
        assert near(b, a, LOGITS)
    assert same >= 40 or temp > 0 or ON_GPU
    if temp == 0:
        assert_alike((full, theirs), (tokens_out, logits))
    counted, stats = llm.kvflash.spec.last, llm.kvflash
    assert counted.by_source["pool"].steps > 0
    assert stats.streamed_steps > 0
    assert stats.page_outs > 0
    assert stats.last.generated_whole == stats.last.generated > 0


@without_fusion
@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa", "latent heads"])
def test_every_bit_is_that_of_a_full_cache_with_the_same_steps(kind: str, temp: float, llama: Any, tokens: Any) -> None:
    """The same rows in the same steps: what differs is only where the text's keys and values are."""
    prompt = tokens[:1100].tolist()
    llm = llama(kind, **SIZE, **LOSSLESS, kvflash_spec=SpecConfig(width=5, types=("ngram",)))
    drafts = noted(llm)
    answer = drawn(llm, prompt, 50, temp=temp)
    assert sum(draft is not None for draft in drafts.values()) >= 10
    assert llm.kvflash.spec.last.by_source["pool"].accepted > 0
    full = llama(kind, **SIZE, kvflash=1280, kvflash_spec=SpecConfig(width=5, types=("ngram",)))
    let_replay(full, drafts, 5)
    tokens_out, logits = drawn(full, prompt, 50, temp=temp)
    assert tokens_out == answer[0]
    for mine, its in zip(answer[1], logits, strict=True):
        assert np.array_equal(mine, its)


def test_an_answer_that_is_closed_goes_on(llama: Any, tokens: Any) -> None:
    """What the pool has drafted is never of the text."""
    prompt = tokens[:1100].tolist()
    full, logits = drawn(llama(**SIZE, kvflash=1280), prompt, 40, temp=0.0)
    for stop in (1, 2, 5, 8):
        llm = llama(**SIZE, **LOSSLESS, kvflash_spec=SpecConfig(width=5))
        stream = llm.generate(prompt, temp=0.0)
        assert [*islice(stream, stop)] == full[:stop]
        stream.close()
        assert inside(llm).session.tokens.tolist() == [*prompt, *full[: stop - 1]]
        going_on = drawn(llm, [*prompt, *full[:stop]], 16, temp=0.0)
        assert_alike((full[stop : stop + 16], logits[stop : stop + 16]), going_on)
        check_table(inside(llm).session.table)


def test_it_needs_exact_reading(llama: Any) -> None:
    with pytest.raises(ConfigError, match="reading='pool'"):
        llama(**SIZE, kvflash=512, kvflash_answer="lossless", kvflash_reading="pool")


def test_a_sampler_that_calls_python_is_drafted_for_too(llama: Any, tokens: Any) -> None:
    import llama_cpp

    def higher(ids: Any, scores: Any) -> Any:
        scores[5] += 1
        return scores

    prompt = tokens[:1100].tolist()
    settings = {"temp": 0.0, "logits_processor": llama_cpp.LogitsProcessorList([higher])}
    full = drawn(llama(**SIZE, kvflash=1280), prompt, 30, **settings)
    llm = llama(**SIZE, **LOSSLESS, kvflash_spec=SpecConfig(width=5))
    assert_alike(full, drawn(llm, prompt, 30, **settings))
    assert llm.kvflash.spec.last.accepted > 0
