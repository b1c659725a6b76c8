"""Each sampler draws what llama.cpp's own chain draws, which is built here by hand: same seed, logits and tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
from support.served import answer

from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Sampling
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.runtime.bias import with_bias
from kvflash_ggml.sampling import Samplers

COUNT, SEED, CONTEXT = 24, 11, 1024
HOT = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KEEP = 1
STRICT = {"n_ctx": CONTEXT, "n_batch": 256, "n_ubatch": 1, "flash_attn": True}
"""Rows are computed one at a time, so that a pool and a full cache have the same logits bit for bit."""

By = Callable[[Any, Any], list[Any]]
"""The samplers of a chain, but the last one: of llama_cpp and a Llama."""


def dry(cpp: Any, llm: Any, *, last: int = 64, base: float = 1.75, allowed: int = 2, breakers: Any = None) -> Any:
    words = [b"\n", b":", b'"', b"*"] if breakers is None else breakers
    array = (ctypes.c_char_p * len(words))(*words)
    return cpp.llama_sampler_init_dry(llm._model.vocab, 4.0, base, allowed, last, array, len(words))


def hot(cpp: Any, _llm: Any) -> list[Any]:
    return [cpp.llama_sampler_init_temp(1.5)]


CASES: dict[str, tuple[dict[str, Any], By]] = {
    "none of them": (HOT, hot),
    "top_k": (HOT | {"top_k": 5}, lambda cpp, llm: [cpp.llama_sampler_init_top_k(5), *hot(cpp, llm)]),
    "top_p": (HOT | {"top_p": 0.5}, lambda cpp, llm: [cpp.llama_sampler_init_top_p(0.5, KEEP), *hot(cpp, llm)]),
    "min_p": (HOT | {"min_p": 0.2}, lambda cpp, llm: [cpp.llama_sampler_init_min_p(0.2, KEEP), *hot(cpp, llm)]),
    "typical_p": (
        HOT | {"typical_p": 0.3},
        lambda cpp, llm: [cpp.llama_sampler_init_typical(0.3, KEEP), *hot(cpp, llm)],
    ),
    "top_n_sigma": (
        HOT | {"top_n_sigma": 1.0},
        lambda cpp, llm: [cpp.llama_sampler_init_top_n_sigma(1.0), *hot(cpp, llm)],
    ),
    "dynamic temperature": (
        HOT | {"dynatemp_range": 1.0, "dynatemp_exponent": 2.0},
        lambda cpp, llm: [cpp.llama_sampler_init_temp_ext(1.5, 1.0, 2.0)],
    ),
    "xtc": (
        HOT | {"xtc_probability": 0.7, "xtc_threshold": 0.05},
        lambda cpp, llm: [cpp.llama_sampler_init_xtc(0.7, 0.05, KEEP, SEED), *hot(cpp, llm)],
    ),
    "penalties": (
        HOT | {"repeat_penalty": 1.9, "frequency_penalty": 0.7, "presence_penalty": 0.9},
        lambda cpp, llm: [cpp.llama_sampler_init_penalties(llm.n_vocab(), 64, 1.9, 0.7, 0.9), *hot(cpp, llm)],
    ),
    "penalties of the last 8": (
        HOT | {"repeat_penalty": 1.9, "repeat_last_n": 8},
        lambda cpp, llm: [cpp.llama_sampler_init_penalties(llm.n_vocab(), 8, 1.9, 0, 0), *hot(cpp, llm)],
    ),
    "penalties of the whole context": (
        HOT | {"repeat_penalty": 1.9, "repeat_last_n": -1},
        lambda cpp, llm: [cpp.llama_sampler_init_penalties(llm.n_vocab(), CONTEXT, 1.9, 0, 0), *hot(cpp, llm)],
    ),
    "dry": ({"temperature": 0.0, "dry_multiplier": 4.0}, lambda cpp, llm: [dry(cpp, llm)]),
    "dry of the whole context": (
        {"temperature": 0.0, "dry_multiplier": 4.0, "dry_penalty_last_n": -1},
        lambda cpp, llm: [dry(cpp, llm, last=CONTEXT)],
    ),
    "dry of other numbers": (
        {"temperature": 0.0, "dry_multiplier": 4.0, "dry_base": 3.0, "dry_allowed_length": 1},
        lambda cpp, llm: [dry(cpp, llm, base=3.0, allowed=1)],
    ),
    "dry without breakers": (
        {"temperature": 0.0, "dry_multiplier": 4.0, "dry_sequence_breakers": ("none",), "dry_penalty_last_n": -1},
        lambda cpp, llm: [dry(cpp, llm, last=CONTEXT, breakers=[])],
    ),
    "dry with a breaker of its own": (
        {"temperature": 0.0, "dry_multiplier": 4.0, "dry_sequence_breakers": (" the",), "dry_penalty_last_n": -1},
        lambda cpp, llm: [dry(cpp, llm, last=CONTEXT, breakers=[b" the"])],
    ),
    "an order of its own": (
        HOT | {"top_k": 5, "min_p": 0.3, "samplers": ("temperature", "min_p", "top_k")},
        lambda cpp, llm: [*hot(cpp, llm), cpp.llama_sampler_init_min_p(0.3, KEEP), cpp.llama_sampler_init_top_k(5)],
    ),
    "infill": (
        HOT | {"top_k": 9, "samplers": ("top_k", "infill", "temperature")},
        lambda cpp, llm: [
            cpp.llama_sampler_init_top_k(9),
            cpp.llama_sampler_init_infill(llm._model.vocab),
            *hot(cpp, llm),
        ],
    ),
    "no sampler": ({"temperature": 0.0, "samplers": ()}, lambda cpp, llm: []),
}

MIROSTAT: dict[int, By] = {
    1: lambda cpp, llm: [*hot(cpp, llm), cpp.llama_sampler_init_mirostat(llm.n_vocab(), SEED, 3.0, 0.3, 100)],
    2: lambda cpp, llm: [*hot(cpp, llm), cpp.llama_sampler_init_mirostat_v2(SEED, 3.0, 0.3)],
}


def by_hand(llm: Any, prompt: list[int], samplers: By, *, last: bool = True, count: int = COUNT) -> list[int]:
    """What the chain draws from the logits of a full cache; the penalties have seen the prompt."""
    import llama_cpp as cpp

    made = samplers(cpp, llm)
    chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
    for one in made:
        if cpp.llama_sampler_name(one) in (b"penalties", b"dry"):
            for token in prompt:
                cpp.llama_sampler_accept(one, token)
        cpp.llama_sampler_chain_add(chain, one)
    if last:
        temperature_is_zero = all(cpp.llama_sampler_name(one) in (b"dry", b"?dry") for one in made) and made
        drawing = cpp.llama_sampler_init_greedy() if temperature_is_zero else cpp.llama_sampler_init_dist(SEED)
        cpp.llama_sampler_chain_add(chain, drawing)
    drawn = []
    llm.reset()
    llm.eval(prompt)
    for _ in range(count):
        drawn.append(cpp.llama_sampler_sample(chain, llm._ctx.ctx, -1))
        llm.eval(drawn[-1:])
    cpp.llama_sampler_free(chain)
    return drawn


def drawn(llm: Any, prompt: list[int], samplers: Samplers, **more: Any) -> list[int]:
    llm.kvflash_samplers = samplers
    llm.set_seed(SEED)
    if more.get("reset", True):
        llm.reset()  # a prompt that is known would be read in other steps
    with closing(llm.generate(prompt, **more)) as stream:
        return list(islice(stream, COUNT))


@pytest.fixture
def pair(llama: Any) -> tuple[Any, Any]:
    """A pool that holds all, and a full cache."""
    return llama(**STRICT, kvflash=CONTEXT), llama(**STRICT)


@pytest.fixture
def prompt(tokens: Any) -> list[int]:
    return list(map(int, tokens[:60])) * 2


@pytest.mark.parametrize("case", CASES)
def test_it_draws_what_the_chain_draws(case: str, pair: Any, prompt: list[int]) -> None:
    pooled, full = pair
    settings, samplers = CASES[case]
    expected = by_hand(full, prompt, samplers)
    assert drawn(pooled, prompt, Samplers(**settings)) == expected
    assert drawn(full, prompt, Samplers(**settings)) == expected
    plain = {"temperature": 0.0} if settings["temperature"] == 0 else HOT
    if case not in ("none of them",):
        assert expected != drawn(full, prompt, Samplers(**plain)), "it changes something"


@pytest.mark.parametrize("version", MIROSTAT)
def test_mirostat(version: int, pair: Any, prompt: list[int]) -> None:
    pooled, full = pair
    expected = by_hand(full, prompt, MIROSTAT[version], last=False)
    settings = HOT | {"mirostat": version, "mirostat_tau": 3.0, "mirostat_eta": 0.3}
    assert drawn(pooled, prompt, Samplers(**settings)) == expected
    assert drawn(full, prompt, Samplers(**settings | {"top_k": 1})) == expected, "the others are not used with it"
    assert expected != drawn(full, prompt, Samplers(**settings | {"mirostat_tau": 9.0}))


def test_adaptive_p(pair: Any, prompt: list[int]) -> None:
    pooled, full = pair
    expected = by_hand(
        full,
        prompt,
        lambda cpp, llm: [
            cpp.llama_sampler_init_min_p(0.01, KEEP),
            *hot(cpp, llm),
            cpp.llama_sampler_init_adaptive_p(0.3, 0.5, SEED),
        ],
        last=False,
    )
    order = ("adaptive_p", "min_p", "temperature")  # which is the last wherever it is named
    settings = HOT | {"min_p": 0.01, "adaptive_target": 0.3, "adaptive_decay": 0.5, "samplers": order}
    assert drawn(pooled, prompt, Samplers(**settings)) == expected
    assert drawn(full, prompt, Samplers(**settings)) == expected
    assert expected != drawn(full, prompt, Samplers(**settings | {"adaptive_decay": 0.9}))
    assert expected != drawn(full, prompt, Samplers(**settings | {"samplers": order[1:]}))


def test_the_default_is_upstreams_chain(pair: Any, prompt: list[int]) -> None:
    pooled, full = pair
    expected = drawn(full, prompt, Samplers())
    full.kvflash_samplers = None
    full.set_seed(SEED)
    full.reset()
    assert list(islice(full.generate(prompt), COUNT)) == expected
    assert drawn(pooled, prompt, Samplers(temperature=0.0)) == drawn(full, prompt, Samplers(temperature=0.0))


def test_the_penalties_go_on_with_a_text(pair: Any, prompt: list[int]) -> None:
    """`generate(reset=False)` evaluates a part of the text only, and the penalties know all of it."""
    full = pair[1]
    samplers = Samplers(**HOT | {"repeat_penalty": 1.9})
    expected = drawn(full, prompt, samplers)
    full.reset()
    full.eval(prompt[:-3])
    assert drawn(full, prompt[-3:], samplers, reset=False) == expected


def test_an_answer_does_not_end_before_so_many_tokens(pair: Any, prompt: list[int]) -> None:
    for llm in pair:
        end, bias = llm.token_eos(), with_bias(None, {llm.token_eos(): 100.0}, llm.n_vocab())
        for least in (0, 1, 7):
            found = drawn(llm, prompt, Samplers(temperature=0.0, min_tokens=least), logits_processor=bias)
            assert found.index(end) == least
        llm.kvflash_samplers = Samplers(temperature=0.0, min_tokens=3)
        made = llm.create_completion(prompt, max_tokens=20, logit_bias={end: 100.0})
        assert made["usage"]["completion_tokens"] == 3


def test_beside_a_grammar(pair: Any, prompt: list[int]) -> None:
    import llama_cpp

    for llm in pair:
        llm.kvflash_samplers = Samplers(
            **HOT | {"dry_multiplier": 1.0, "samplers": ("top_k", "temperature"), "top_k": 3}
        )
        grammar = llama_cpp.LlamaGrammar.from_string("root ::= [0-9]{12}", verbose=False)
        text = llm.create_completion(prompt, max_tokens=30, grammar=grammar)["choices"][0]["text"]
        assert len(text) == 12
        assert text.isdecimal()


def test_drafts_change_nothing(llama: Any, prompt: list[int]) -> None:
    asked = Samplers(temperature=0.6, dry_multiplier=0.5, xtc_probability=0.2, repeat_penalty=1.1, min_tokens=20)
    plain = drawn(llama(**STRICT, kvflash=CONTEXT), prompt, asked)
    drafting = llama(**STRICT, kvflash=CONTEXT, kvflash_spec="ngram")
    assert drawn(drafting, prompt, asked) == plain


def test_a_server_draws_it_too(llama: Any, prompt: list[int]) -> None:
    llm = llama(**STRICT, kvflash=CONTEXT)
    settings, samplers = CASES["xtc"]
    expected = by_hand(llama(**STRICT), prompt, samplers, count=8)
    scheduler = Scheduler(LlamaModel(llm))
    scheduler.start()
    try:
        asked = Sampling(**settings, seed=SEED)
        assert list(answer(scheduler, prompt, 8, sampling=asked, ignore_eos=True).tokens) == expected
    finally:
        scheduler.close()
    assert llm.kvflash_samplers is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"typical_p": 1.5}, "typical_p is a number of at least 0 and at most 1, not 1.5"),
        ({"repeat_penalty": 0}, "repeat_penalty is a number above 0 and at most 10, not 0"),
        ({"temperature": float("nan")}, "temperature is a number of at least 0 and at most 10, not nan"),
        ({"mirostat": 3}, "mirostat is a whole number of at least 0 and at most 2, not 3"),
        ({"samplers": ("tfs_z",)}, "'tfs_z' is no sampler"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "has 41 bytes: give 1 to 40 bytes"),
        ({"dry_sequence_breakers": ("x",) * 33}, "there are 33 sequence breakers, and 32 is the most"),
    ],
)
def test_values_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        Samplers(**settings)
