"""Lossless answers: what is resident drafts, all of the text verifies."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar
from support.harness import assert_alike, drawn
from support.inside import inside
from support.integrity import check_table
from support.replay import let_replay, noted
from support.rounding import LOGITS, ON_GPU, near, without_fusion

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.runtime import task
from kvflash_ggml.runtime.task import STANDS

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


AUTO = LOSSLESS | {"kvflash_answer": "auto"}


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_what_the_pool_drafts_stays_if_the_whole_text_finds_it_likely(
    kind: str, temp: float, llama: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing stays (a lossless answer) to everything does (what the pool draws by itself)."""
    prompt, spec = tokens[:1100].tolist(), SpecConfig(width=5)
    lossless = llama(kind, **SIZE, **LOSSLESS, kvflash_spec=spec)
    strict, _ = drawn(lossless, prompt, 40, temp=temp)
    assert lossless.kvflash.spec.last.replaced == 0, "it is no auto answer"
    llm = llama(kind, **SIZE, **AUTO, kvflash_spec=spec)
    found = {}
    for share in (0.0, STANDS, 2.0):
        monkeypatch.setattr(task, "STANDS", share or 1e-30)
        llm.reset()
        answer, logits = drawn(llm, prompt, 40, temp=temp)
        stats = llm.kvflash
        assert stats.spec.last.by_source["pool"].drafted > 0
        assert stats.streamed_steps > 0
        assert stats.last.generated_whole == stats.last.generated > 0
        found[share] = answer, stats.spec.last.replaced, stats.spec.last.accepted
        if temp == 0:
            gaps = [float(row.max() - row[token]) for token, row in zip(answer, logits, strict=True)]
            assert max(gaps) <= max(0.0, -np.log(share or 1e-30)) + 1e-6
    assert found[0.0][1] == 0, "everything stays"
    assert found[0.0][2] >= found[STANDS][2] >= found[2.0][2] > 0
    assert found[0.0][0] != strict, "or the pool drafts what the whole text draws, and nothing was tried"
    if temp == 0:
        assert found[2.0][0] == strict
        assert found[2.0][1] > 0
    assert drawn(llama(kind, **SIZE, **AUTO, kvflash_spec=spec), prompt, 40, temp=temp)[0] == found[2.0][0]


@pytest.mark.parametrize(
    "more",
    [
        {"mirostat_mode": 2},
        {"logits_processor": [lambda ids, scores: scores]},
        {"grammar": LlamaGrammar.from_string("root ::= [^\\x00]*", verbose=False)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_sampler_that_needs_all_logits_draws_every_token(
    more: dict[str, Any], llama: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "STANDS", 1e-30)
    prompt = tokens[:1100].tolist()
    both = [llama(**SIZE, **settings, kvflash_spec=SpecConfig(width=5)) for settings in (LOSSLESS, AUTO)]
    first, second = [drawn(llm, prompt, 20, temp=0.9, **more)[0] for llm in both]
    assert first == second
    assert both[1].kvflash.spec.last.replaced == 0


def test_a_chain_that_takes_a_token_goes_on_as_if_it_had_drawn_it() -> None:
    """Its penalties have seen the token, and its random numbers are those of the next draw."""
    import llama_cpp
    from llama_cpp._internals import LlamaSampler

    from kvflash_ggml.runtime import samplers

    def chain(*more: Any) -> Any:
        made = LlamaSampler()
        made.add_penalties(32, 32, 2.0, 0.5, 0.5)
        for one in more:
            llama_cpp.llama_sampler_chain_add(made.sampler, one)
        made.add_top_k(20)
        made.add_temp(0.9)
        made.add_dist(7)
        return made

    def draw(sampler: Any, logits: Any) -> int:
        items = (llama_cpp.llama_token_data * len(logits))(
            *(llama_cpp.llama_token_data(token, value, 0) for token, value in enumerate(logits))
        )
        choice = llama_cpp.llama_token_data_array(items, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(sampler.sampler, choice)
        token = int(choice.data[choice.selected].id)
        sampler.accept(token)
        return token

    one, other = chain(), chain()
    random = np.random.default_rng(3)
    only = np.full(32, -1e9, np.float32)
    only[11] = 0
    assert samplers.can_take(one)
    assert samplers.can_take(chain(llama_cpp.llama_sampler_init_xtc(0, 0.1, 1, 7))), "it is off"
    assert not samplers.can_take(chain(llama_cpp.llama_sampler_init_xtc(0.5, 0.1, 1, 7)))
    assert draw(one, only) == 11
    samplers.take(other, 11)
    rows = [random.normal(size=32).astype(np.float32) for _ in range(30)]
    assert [draw(one, row) for row in rows] == [draw(other, row) for row in rows]


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
