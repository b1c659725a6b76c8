"""A token that is drawn from few candidates is the one that the whole vocabulary gives: same chain, seed and logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.harness import Bare, evaluate

from kvflash_ggml.sequence.prefill import extend

Made = list[Any]
"""The samplers of a chain, of which the last one draws."""

Chain = Callable[[Any, Bare], Made]
"""Makes them with llama_cpp."""

SEED, DRAWS = 7, 40


class Kept(ctypes.Structure):
    """The beginning of llama.cpp's `llama_sampler_chain`, which keeps its list of candidates."""

    _fields_ = (
        ("no_perf", ctypes.c_bool), ("is_init", ctypes.c_bool), ("n_nodes", ctypes.c_uint32),
        ("samplers", ctypes.c_void_p * 3), ("candidates", ctypes.c_void_p * 3),
    )  # fmt: skip


@pytest.fixture
def run(bare: Callable[..., Bare], tokens: Any) -> Bare:
    """Four tokens behind a text, the logits of all of them kept."""
    one = bare(pool=512, n_ctx=512, n_ubatch=96)
    extend(one.session, tokens[:50])
    places = range(50, 54)
    evaluate(one, tokens[50:54], places, places, [[*range(i)] for i in places])
    return one


@pytest.fixture
def logits(run: Bare) -> Any:
    """What the context holds, to be overwritten: [4, n_vocab]."""
    return np.ctypeslib.as_array(run._ctx.get_logits(), shape=(4, run.n_vocab))


@pytest.fixture
def chained() -> Iterator[Callable[[Made], Any]]:
    import llama_cpp as cpp

    with ExitStack() as stack:

        def make(samplers: Made) -> Any:
            chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
            stack.callback(cpp.llama_sampler_free, chain)
            for one in samplers:
                cpp.llama_sampler_chain_add(chain, one)
            return chain

        yield make


def of_all(chain: Any, logits: Any) -> int:
    """Draw a token as llama.cpp does: from a list of all tokens."""
    import llama_cpp as cpp

    data = np.zeros(len(logits), [("id", np.intc), ("logit", np.single), ("p", np.single)])
    data["id"], data["logit"] = np.arange(len(logits)), logits
    pointer = data.ctypes.data_as(ctypes.POINTER(cpp.llama_token_data))
    found = cpp.llama_token_data_array(pointer, len(data), -1, False)
    cpp.llama_sampler_apply(chain, ctypes.byref(found))
    token = int(found.data[found.selected].id)  # xtc moves the beginning of the list
    cpp.llama_sampler_accept(chain, token)
    return token


def candidates(chain: Any) -> int:
    """Return how many tokens the newest list of a chain had."""
    first, end, _ = Kept.from_address(chain.contents.ctx).candidates
    return (end - first) // 12


# --- chains

USUAL = (64, 1.2, 0.1, 0.4)


def usual(cpp: Any, k: int, temperature: float = 0.7) -> Made:
    return [
        cpp.llama_sampler_init_top_k(k), cpp.llama_sampler_init_typical(1.0, 1), cpp.llama_sampler_init_top_p(0.95, 1),
        cpp.llama_sampler_init_min_p(0.05, 1), cpp.llama_sampler_init_temp(temperature),
        cpp.llama_sampler_init_dist(SEED),
    ]  # fmt: skip


def penalties(cpp: Any, run: Bare, *settings: float) -> Any:
    return cpp.llama_sampler_init_penalties(run.n_vocab, *settings)


def off(cpp: Any, run: Bare) -> Made:
    return [penalties(cpp, run, 64, 1.0, 0.0, 0.0), cpp.llama_sampler_init_top_n_sigma(-1.0)]


FEW: dict[str, Chain] = {
    **{f"top {k}": (lambda cpp, run, k=k: usual(cpp, k)) for k in (1, 2, 20, 40, 127, 128)},
    "flat": lambda cpp, run: [cpp.llama_sampler_init_top_k(40), cpp.llama_sampler_init_dist(SEED)],
    "hot": lambda cpp, run: usual(cpp, 40, 9.0),
    "cold": lambda cpp, run: usual(cpp, 40, 0.0),
    "behind what is off": lambda cpp, run: [*off(cpp, run), *usual(cpp, 40)],
    "the best": lambda cpp, run: [*off(cpp, run), cpp.llama_sampler_init_greedy()],
    "the best of penalties": lambda cpp, run: [penalties(cpp, run, *USUAL), cpp.llama_sampler_init_greedy()],
    "penalties": lambda cpp, run: [penalties(cpp, run, *USUAL), *usual(cpp, 40, 2.0)],
    "penalties of few": lambda cpp, run: [penalties(cpp, run, 3, 2.0, 0.0, 0.0), *usual(cpp, 10, 2.0)],
    "rewards": lambda cpp, run: [penalties(cpp, run, 64, 0.5, -0.3, -1.0), *usual(cpp, 40, 2.0)],
    "typical": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(40), cpp.llama_sampler_init_typical(0.4, 1), *usual(cpp, 9)
    ],
    "xtc": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(40), cpp.llama_sampler_init_xtc(0.7, 0.02, 1, SEED), *usual(cpp, 9)
    ],
    "dynamic temperature": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(40), cpp.llama_sampler_init_temp_ext(1.5, 1.0, 2.0), *usual(cpp, 9)
    ],
    "sigma of the best": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(60), cpp.llama_sampler_init_top_n_sigma(1.0), *usual(cpp, 9)
    ],
    "adaptive": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(40), cpp.llama_sampler_init_adaptive_p(0.3, 0.5, SEED)
    ],
    "penalties of the best": lambda cpp, run: [
        cpp.llama_sampler_init_top_k(40), penalties(cpp, run, *USUAL), *usual(cpp, 9)
    ],
}  # fmt: skip

ALL: dict[str, Chain] = {
    **{f"top {k}": (lambda cpp, run, k=k: usual(cpp, k)) for k in (-1, 0, 129, 1000, 4096, 9999)},
    "no top k": lambda cpp, run: usual(cpp, 0)[1:],
    "warm": lambda cpp, run: [cpp.llama_sampler_init_temp(1.5), *usual(cpp, 40)],
    "sigma": lambda cpp, run: [cpp.llama_sampler_init_top_n_sigma(1.0), *usual(cpp, 40)],
    "min_p": lambda cpp, run: [cpp.llama_sampler_init_min_p(0.1, 1), *usual(cpp, 40)],
    "mirostat": lambda cpp, run: [cpp.llama_sampler_init_mirostat_v2(SEED, 5.0, 0.1)],
    "penalties, then all": lambda cpp, run: [penalties(cpp, run, *USUAL), *usual(cpp, 0)],
    "it draws alone": lambda cpp, run: [cpp.llama_sampler_init_dist(SEED)],
}

# --- rows

Draw = Callable[[Any, int], Any]

ROWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal(n) * 4,
    "of bfloat16": lambda rng, n: ((rng.standard_normal(n) * 4).astype("f4").view("u4") & 0xFFFF0000).view("f4"),
    "of few values": lambda rng, n: rng.integers(0, 3, n),
    "of some values": lambda rng, n: rng.integers(0, n // 20, n) / 50,
    "equal": lambda rng, n: np.full(n, rng.standard_normal()),
    "the first are best": lambda rng, n: np.where(np.arange(n) < 60, 9 + rng.integers(0, 3, n), rng.random(n)),
    "the last are best": lambda rng, n: np.where(np.arange(n) < n - 60, rng.random(n), 9 + rng.integers(0, 3, n)),
    "rising": lambda rng, n: np.linspace(-8, 8, n),
    "falling": lambda rng, n: np.linspace(8, -8, n) // 0.01 * 0.01,
    "far apart": lambda rng, n: rng.standard_normal(n) * 1e30,
    "mostly impossible": lambda rng, n: np.where(rng.random(n) < 0.999, -np.inf, rng.integers(0, 2, n)),
    "the first are impossible": lambda rng, n: np.where(np.arange(n) < 2050, -np.inf, rng.standard_normal(n)),
}

ODD: dict[str, Draw] = {
    "one is infinite": lambda rng, n: np.where(np.arange(n) == rng.integers(n), np.inf, rng.standard_normal(n)),
    "one is no number": lambda rng, n: np.where(np.arange(n) == rng.integers(n), np.nan, rng.standard_normal(n)),
    "all are impossible": lambda rng, n: np.full(n, -np.inf),
}


@pytest.fixture
def compare(run: Bare, logits: Any, chained: Callable[[Made], Any]) -> Callable[[Chain, dict[str, Draw]], set[int]]:
    """Draws tokens from many rows in both ways, one after the other. Returns how many candidates there were."""
    import llama_cpp as cpp

    def compared(chain: Chain, rows: dict[str, Draw]) -> set[int]:
        rng, counts = np.random.default_rng(SEED), set()
        ours, its = (chained(chain(cpp, run)) for _ in range(2))
        for made in (ours, its):
            for token in (*range(0, 60, 3), -7, run.n_vocab + 5):  # what penalties know
                cpp.llama_sampler_accept(made, token)
        for name, values in rows.items():
            for at in range(DRAWS):
                row = logits[at % len(logits)]
                row[:] = values(rng, run.n_vocab)
                assert cpp.llama_sampler_sample(ours, run._ctx.ctx, at % len(logits)) == of_all(its, row), name
                counts.add(candidates(ours))
        return counts

    return compared


@pytest.mark.parametrize("chain", FEW.values(), ids=FEW.keys())
def test_the_list_is_short(chain: Chain, compare: Any, run: Bare) -> None:
    rows = {name: values for name, values in ROWS.items() if name != "rising"}
    assert max(compare(chain, rows)) < run.n_vocab / 3


@pytest.mark.parametrize("chain", FEW.values(), ids=FEW.keys())
def test_rising_logits_are_all_candidates(chain: Chain, compare: Any, run: Bare) -> None:
    assert compare(chain, {"rising": ROWS["rising"]}) == {run.n_vocab}


@pytest.mark.parametrize("name", ["top 40", "the best"])
def test_rows_that_are_not_finite(name: str, compare: Any, run: Bare) -> None:
    assert compare(FEW[name], ODD) == {run.n_vocab}


@pytest.mark.parametrize("chain", ALL.values(), ids=ALL.keys())
def test_the_list_has_all_tokens_where_it_must(chain: Chain, compare: Any, run: Bare) -> None:
    assert compare(chain, ROWS) == {run.n_vocab}


def test_a_copy_of_a_chain_draws_the_same(run: Bare, logits: Any, chained: Callable[[Made], Any]) -> None:
    import llama_cpp as cpp

    ours = chained([penalties(cpp, run, *USUAL), *usual(cpp, 40, 2.0)])
    logits[:] = np.random.default_rng(SEED).integers(0, 9, logits.shape)
    for row in (0, 1, 2):
        cpp.llama_sampler_sample(ours, run._ctx.ctx, row)
    copy = cpp.llama_sampler_clone(ours)
    drawn = [cpp.llama_sampler_sample(ours, run._ctx.ctx, 3) for _ in range(DRAWS)]
    assert drawn == [of_all(copy, logits[3]) for _ in range(DRAWS)]
    cpp.llama_sampler_free(copy)


def test_a_processor_sees_all_tokens(run: Bare, logits: Any) -> None:
    import llama_cpp as cpp
    from llama_cpp._internals import LlamaSampler

    seen = []
    made = LlamaSampler()
    made.add_custom(lambda found: seen.append(found.contents.size))
    for one in usual(cpp, 40):
        cpp.llama_sampler_chain_add(made.sampler, one)
    made.sample(run._ctx, 0)
    assert seen == [run.n_vocab]
