"""What is learned of a drafter from what becomes of its drafts."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_ggml.speculation.costs import HOPE, Acceptance, expected
from kvflash_ggml.speculation.draft import Draft, chain


def test_nothing_known_is_hoped_for() -> None:
    survival = Acceptance()
    assert survival.of(chain([1, 2], "made up")) == pytest.approx([HOPE, HOPE])
    assert survival.by_position(40) == pytest.approx([HOPE] * 40)


def test_each_position_is_learned_from_those_that_reached_it() -> None:
    rng = np.random.default_rng(1)
    survival, rates = Acceptance(), [0.9, 0.3, 0.8]
    draft = chain([1, 2, 3], "made up")
    for _ in range(1000):
        count = 0
        while count < 3 and rng.random() < rates[count]:
            count += 1
        survival.record(draft, range(count))
    assert survival.of(draft) == pytest.approx(rates, abs=0.15)
    assert survival.by_position(3) == pytest.approx(survival.of(draft), abs=0.05)


def test_what_is_cut_or_not_tested_is_no_failure() -> None:
    survival = Acceptance()
    for _ in range(200):
        survival.record(chain([1, 2, 3], "made up"), [0, 1], stopped=True)
        survival.record(chain([1], "made up"), [0])
        survival.record(chain([1], "made up"), [], stopped=True)
        survival.record(chain([], "made up"), [])
    assert min(survival.of(chain([1, 2, 3], "made up"))) > 0.9


def test_siblings_count_where_their_parent_was_reached() -> None:
    draft = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 0, 1], np.int32), "made up")
    survival = Acceptance()
    for _ in range(300):
        survival.record(draft, [1, 3])
    first, second, below, deep = survival.of(draft)
    assert (first, second) == (pytest.approx(0.5, abs=0.1), first)
    assert below == deep > 0.9


def test_tokens_that_a_step_wins() -> None:
    draft = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 0, 2], np.int32), "made up")
    assert expected(draft, np.array([0.5, 0.25, 0.5, 0.5])) == pytest.approx([1, 1.5, 1.75, 2, 2.125])


def test_a_few_misses_are_a_change_where_they_were_not_expected() -> None:
    survival, draft = Acceptance(), chain([1, 2, 3], "made up")
    for _ in range(200):
        survival.record(draft, [0, 1, 2])
    for _ in range(3):
        survival.record(draft, [])
    assert survival.of(draft)[0] < 0.5
    for _ in range(5):
        survival.record(draft, [0, 1, 2])
    assert survival.of(draft)[0] > 0.6


def test_hope_comes_back_with_time() -> None:
    survival, draft = Acceptance(), chain([1], "made up")
    for _ in range(100):
        survival.record(draft, [])
    bad = survival.of(draft)[0]
    for _ in range(400):
        survival.rest()
    assert bad < 0.1
    assert survival.of(draft)[0] > 0.7


def test_odd_probabilities_fit_in_a_bin() -> None:
    draft = chain([1, 2, 3], "made up", np.array([0.0, 5.0, -1e9], np.float32))
    survival = Acceptance()
    survival.record(draft, [0])
    assert np.all(np.isfinite(survival.of(draft)))


def test_what_was_tried_again_for_nothing_is_forgotten_later() -> None:
    survival, draft = Acceptance(), chain([1], "made up")

    def gained(steps: int) -> float:
        before = survival.by_position(1)[0]
        survival.rest(steps)
        return float(survival.by_position(1)[0] - before)

    survival.record(draft, [])
    once = gained(40)
    survival.record(draft, [])
    assert 0 < gained(40) < once
    survival.record(draft, [0])
    survival.record(draft, [])
    assert gained(40) > once / 2, "it is worth it again"
