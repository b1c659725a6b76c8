"""One answer that turns from fact to fact: its documents and words, and what a rule by attention would find in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvflash_bench import faults
from kvflash_bench.asks import Setting
from kvflash_bench.filler import read_text
from kvflash_bench.outcomes import Outcome
from kvflash_bench.plans_texts import Faults
from kvflash_bench.tasks_kinds import make
from kvflash_bench.tasks_turning import GOODS, TURNS
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError

TEXT = read_text(sorted((Path(__file__).parents[1] / "text").glob("*.txt")))


def setting(fact_set="choose"):
    return Setting(TEXT, lambda text: text.split(" "), 3000, (), fact_set=fact_set)


@pytest.mark.parametrize("fact_set", ["choose", "confirm"])
@pytest.mark.parametrize("kind", ["turning", "listing"])
def test_one_prompt_and_the_answer_turns(kind, fact_set):
    (case,) = make(kind, setting(fact_set), seed=3)
    assert len(case.asks) == TURNS
    assert [ask.goes_on for ask in case.asks] == [False] + [True] * (TURNS - 1)
    assert case.asks[0].tail
    assert not any(ask.tail for ask in case.asks[1:])
    assert len(setting().tokenize(case.document)) == 3000
    words = case.document.split(" ")
    for ask in case.asks:
        (lo, hi), *others = ask.gold
        assert not others
        assert ask.answer in " ".join(words[lo:hi])
        assert ask.answer not in ask.said + case.asks[0].tail
        assert ask.said.split(":")[-2].split(" ")[-1] not in case.asks[0].tail, "the prompt names no fact"
        assert ask.is_correct(f" {ask.answer}.")
    assert len({ask.answer for ask in case.asks}) == TURNS
    assert case == make(kind, setting(fact_set), seed=3)[0] != make(kind, setting(fact_set), seed=4)[0]


def test_the_lists_of_the_sets_share_nothing():
    (first, _, some), (second, _, others) = GOODS.values()
    assert first != second
    assert not set(some) & set(others)


# --- faults

HEADS, CHUNKS = 2, 40


def shares(**asked):
    """Shares in two heads that ask for nothing. t12=3: at token 12 of the answer the second one asks for chunk 3."""
    out = {}
    for token in range(30):
        out[CHUNKS * CHUNK + token] = np.full((HEADS, CHUNKS), 0.01, np.float32)
    for token, chunk in asked.items():
        out[CHUNKS * CHUNK + int(token[1:])][1, chunk] = 0.9
    return out


def value(token, chunk, *, correct=True):
    return Outcome(
        task="", label="", seed=0, correct=correct, answer="", reply="", resident=None, page_ins=0, looks=0,
        look_seconds=0.0, decode_tokens=0, decode_seconds=0.0, began=CHUNKS * CHUNK + token, gold=(chunk,),
    )  # fmt: skip


def answer(*values, **asked):
    return faults.Answer(task="", seed=0, shares=shares(**asked), values=values)


def test_the_token_that_asks_is_told_from_others():
    found = [faults.told([answer(value(12, 3), t12=3), answer()], lag) for lag in range(2)]
    assert [row["AUC"] for row in found] == [1, 0.5]
    assert found[0]["share"] == pytest.approx(0.9)
    assert found[0]["first"] == 1
    assert found[0]["plain tokens"] == 30
    assert faults.told([answer(value(12, 3, correct=False), value(20, 5), t12=3), answer()], 0)["values"] == 1


def test_a_share_is_counted_of_chunks_that_can_be_evicted():
    most = answer(t1=0, t2=CHUNKS - 1)
    assert most.at(CHUNKS * CHUNK + 1).max() == pytest.approx(0.01)
    assert most.at(CHUNKS * CHUNK + 2).max() == pytest.approx(0.01)


def test_a_fault_of_the_token_itself_comes_in_time_only_where_it_is_computed_again():
    late = faults.simulated(answer(value(12, 3), t12=3), 512, 0.5)
    assert (late.values, late.before, late.again, late.faults) == (1, 0, 1, 1)
    early = faults.simulated(answer(value(12, 3), t11=3, t12=3), 512, 0.5)
    assert (early.before, early.again, early.faults) == (1, 1, 1)
    none = faults.simulated(answer(value(12, 3), t11=3), 512, 0.95)
    assert (none.before, none.again, none.faults) == (0, 0, 0)


def test_of_many_places_the_one_asked_for_longest_ago_leaves():
    asked = {f"t{i}": i + 1 for i in range(6)}
    small = faults.simulated(answer(value(8, 1), **asked), 512, 0.5)
    large = faults.simulated(answer(value(8, 1), **asked), 1024, 0.5)
    assert (small.before, large.before) == (0, 1)
    assert small.faults == large.faults == 6


def test_the_rule_says_what_it_costs():
    row = faults.rule([answer(value(12, 3), t11=3), answer(t4=7, t9=7)], 0.5, (512,))
    assert (row["asked"], row["asked before"]) == (0, 1)
    assert row["plain"] == pytest.approx(2 / 30)
    assert row["512 plain"] == pytest.approx(100 / 30)
    assert row["512 in time"] == row["512 again"] == 1


def test_a_text_that_fits_the_pool_is_refused():
    """Nothing of it is scored, so nothing could be noted."""
    with pytest.raises(ConfigError, match=r"--contexts 512: .* pool of 512"):
        faults.run("not opened.gguf", Faults(contexts=(4096, 512)), {})
