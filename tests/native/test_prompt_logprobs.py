"""Log probabilities of a prompt's tokens: each comes from the logits of the token before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.served import ask, served

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching.messages import Failed, Finished, Logprob, Piece

STEPS = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 128}


def rows_of(llm: Any, tokens: list[int]) -> np.ndarray:
    """The log probabilities [n, n_vocab] after each token, by the logits that are kept of all."""
    llm.reset()
    llm.eval(tokens)
    rows = llm.scores[: len(tokens)].astype(np.float64)
    return rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)


def told(scheduler: Any, prompt: list[int], most: int = 1, **more: Any) -> list[Logprob]:
    asked = ask(scheduler, prompt, most, prompt_logprobs=True, logprobs=2, reuse=False, **more)
    assert isinstance(asked.wait(), Finished), asked.events[-1]
    return [one for event in asked.events if isinstance(event, Piece) for one in event.logprobs]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("length", [1, 2, 40, 700])
def test_a_pool_tells_what_the_full_cache_tells(kind: str, length: int, llama: Any, stock: Any, tokens: Any) -> None:
    """Of a text that the pool holds, and of one that is larger than it."""
    prompt = tokens[:length].tolist()
    rows = rows_of(stock(kind, flash_attn=True, logits_all=True, **STEPS), prompt)
    with served(llama(kind, kvflash=512, kvflash_reading="exact", **STEPS)) as scheduler:
        found = told(scheduler, prompt, reading="exact")
        told(scheduler, prompt)
        assert told(scheduler, prompt, reading="exact") == found, "however often, and whatever is kept"
    assert [one.token for one in found[:length]] == prompt
    assert (found[0].logprob, found[0].top, len(found)) == (None, (), length + 1)
    for row, one in zip(rows, found[1:], strict=True):
        best = np.argsort(-row, kind="stable")[:2]
        assert one.logprob == pytest.approx(row[one.token], abs=1e-4)
        assert [value for _, _, value in one.top] == pytest.approx(row[best], abs=1e-4)
        assert (one.logprob == one.top[0][2]) == (one.token == one.top[0][0])


def test_prompts_beside_each_other_are_told_their_own(llama: Any, tokens: Any) -> None:
    prompts = [tokens[at : at + 60].tolist() for at in (0, 100, 200, 300)]
    with served(llama(kvflash=KVFlashConfig(pool=2048, parallel=4), **STEPS)) as scheduler:
        alone = [told(scheduler, prompt) for prompt in prompts]
        several = [ask(scheduler, one, 8, prompt_logprobs=True, logprobs=2, reuse=False) for one in prompts]
        for mine, asked in zip(alone, several, strict=True):
            assert isinstance(asked.wait(), Finished)
            found = [one for event in asked.events if isinstance(event, Piece) for one in event.logprobs]
            values = [one.logprob for one in found[1:60]]
            assert [one.token for one in found[:60]] == [one.token for one in mine[:60]]
            assert values == pytest.approx([one.logprob for one in mine[1:60]], abs=0.05)


def test_layer_buffers_that_are_too_small_are_said(llama: Any, tokens: Any) -> None:
    prompt = tokens[:1500].tolist()
    llm = llama(kvflash=512, kvflash_reading="auto", kvflash_stage=1024, **STEPS)
    with served(llm) as scheduler:
        asked = ask(scheduler, prompt, 1, prompt_logprobs=True, logprobs=0, reuse=False, reading="exact")
        end = asked.wait()
        assert isinstance(end, Failed)
        assert "did not see all before them" in end.message
        assert "--kvflash-stage" in end.message
        assert len(told(scheduler, prompt, reading="pool")) == 1501
        assert len(told(scheduler, tokens[:900].tolist(), reading="exact")) == 901


@pytest.mark.parametrize("pool", [None, 128, 512])
@pytest.mark.parametrize("marked", [True, False])
def test_an_echoed_prompt_of_the_class(pool: int | None, marked: bool, llama: Any, tokens: Any) -> None:
    """Upstream takes the row after BOS for the first token, and the same row where there is no BOS."""
    overrides = {"tokenizer.ggml.add_bos_token": marked}
    llm = llama("dense", kvflash=pool, logits_all=True, n_ctx=512, kv_overrides=overrides)
    text = llm.detokenize(tokens[:50].tolist()).decode("utf-8", "ignore")
    prompt = llm.tokenize(text.encode())
    assert (prompt[0] == llm.token_bos()) == marked
    rows = rows_of(llm, prompt)
    llm.reset()
    settings = {"max_tokens": 3, "logprobs": 2, "temperature": 0}
    known = prompt[marked:]
    for _ in range(2):  # all of the prompt is known the second time
        (choice,) = llm.create_completion(text, echo=True, **settings)["choices"]
        values, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(values) == len(known) + 3
        assert (values[0], best[0]) == (None, None)
        right = [rows[at - 1][token] for at, token in enumerate(prompt)][marked:]
        assert values[1 : len(known)] == pytest.approx(right[1:], abs=1e-3)
        assert values[-3:] == [max(one.values()) for one in best[-3:]], "the answer is greedy"
    (plain,) = llm.create_completion(text, **settings)["choices"]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(values[-3:], abs=1e-3)
    *pieces, _ = llm.create_completion(text, echo=True, stream=True, **settings)
    streamed = [value for one in pieces for value in one["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(values[-3:], abs=1e-3)
