"""The drafter that knows what comes, and how often it is told to be right."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_bench.oracle import Oracle, rates_of
from kvflash_ggml.speculation.base import Drafter

N_VOCAB = 50
TEXT = np.random.default_rng(0).integers(0, N_VOCAB, 5000).astype(np.int32)


def accepted(oracle: Oracle, at: int, most: int) -> int:
    oracle.observe(0, TEXT[:at], None)
    draft = oracle.propose(int(TEXT[at]), most)
    assert draft is not None
    assert draft.tokens.min() >= 0
    assert draft.tokens.max() < N_VOCAB
    right = draft.tokens == TEXT[at + 1 : at + 1 + most]
    return len(right) if right.all() else int(right.argmin())


def test_is_right_as_often_as_it_is_told() -> None:
    rates = [0.9, 0.5, 0.8]
    oracle: Drafter = Oracle(TEXT, rates, n_vocab=N_VOCAB)
    won = np.array([accepted(oracle, at, 6) for at in range(4900)])  # type: ignore[arg-type]
    for position, rate in enumerate([*rates, 0.8]):
        assert np.mean(won[won >= position] > position) == pytest.approx(rate, abs=0.04)


@pytest.mark.parametrize(("tokens", "most"), [(1.0, 4), (2.5, 4), (5.0, 7), (8.0, 7), (5.46, 15)])
def test_a_rate_for_so_many_tokens_a_step(tokens: float, most: int) -> None:
    rate = rates_of(tokens, most)
    assert sum(rate**i for i in range(most + 1)) == pytest.approx(tokens, rel=1e-6)
    oracle = Oracle(TEXT, [rate], n_vocab=N_VOCAB, seed=3)
    assert 1 + np.mean([accepted(oracle, at, most) for at in range(4900)]) == pytest.approx(tokens, rel=0.05)


def test_the_same_place_is_drafted_the_same_way() -> None:
    def drafts(seed: int) -> list[list[int]]:
        oracle = Oracle(TEXT, [0.5], n_vocab=N_VOCAB, seed=seed)
        out = []
        for at in (10, 20, 10):
            oracle.truncate(at)
            oracle.observe(at - 5, TEXT[at - 5 : at], None)
            draft = oracle.propose(int(TEXT[at]), 8)
            assert draft is not None
            out.append(draft.tokens.tolist())
        return out

    first = drafts(1)
    assert first[0] == first[2] != first[1]
    assert first == drafts(1) != drafts(2)


def test_has_nothing_beside_or_behind_the_text() -> None:
    oracle = Oracle(TEXT[:20], [1.0], n_vocab=N_VOCAB)
    oracle.observe(0, TEXT[:10], None)
    assert oracle.propose((int(TEXT[10]) + 1) % N_VOCAB, 4) is None
    assert oracle.propose(int(TEXT[10]), 0) is None
    oracle.observe(10, TEXT[10:17], None)
    draft = oracle.propose(int(TEXT[17]), 4)
    assert draft is not None
    assert draft.tokens.tolist() == TEXT[18:20].tolist()
    for length in (19, 20, 30):
        oracle.observe(0, TEXT[:length], None)
        assert oracle.propose(int(TEXT[length]), 4) is None


@pytest.mark.parametrize(("serial", "slept"), [(False, 0.5), (True, 2.0)])
def test_takes_its_time(serial: bool, slept: float) -> None:
    naps: list[float] = []
    oracle = Oracle(TEXT, [1.0], n_vocab=N_VOCAB, seconds=0.5, serial=serial, sleep=naps.append)
    oracle.propose(int(TEXT[0]), 4)
    assert naps == [slept]
