"""What is counted of drafts."""

from __future__ import annotations

import numpy as np

from kvflash_ggml.speculation.draft import Draft, DraftStats, chain


def test_nothing_is_known_of_nothing() -> None:
    tally = DraftStats()
    assert (tally.rate, tally.mean_length, tally.per_position) == (None, None, ())
    tally.plain(0.5)
    assert (tally.rate, tally.mean_length) == (None, None)


def test_steps_and_what_they_won() -> None:
    tally = DraftStats()
    four = chain([1, 2, 3, 4], "a")
    tally.verified(four, [0, 1], 2.0, 0.5)
    tally.verified(four, [], 2.0, 0.5)
    tally.verified(four, [0, 1, 2, 3], 2.0)
    tally.verified(chain([5], "b"), [0], 1.0)
    tally.plain(1.0, 0.25)
    assert (tally.steps, tally.plain_steps, tally.drafted, tally.accepted) == (4, 1, 13, 7)
    assert tally.rate == 7 / 13
    assert tally.mean_length == 1 + 7 / 4
    assert (tally.reached, tally.agreed) == ([4, 2, 2, 1], [3, 2, 1, 1])
    assert tally.per_position == (3 / 4, 1, 1 / 2, 1)
    assert (tally.seconds_draft, tally.seconds_verify, tally.seconds_plain) == (1.25, 7, 1)
    assert {name: (of.steps, of.drafted, of.accepted) for name, of in tally.by_source.items()} == {
        "a": (3, 12, 6),
        "b": (1, 1, 1),
    }
    tally.lucky = 4
    assert tally.mean_length == 1 + 11 / 4


def test_what_the_end_of_an_answer_has_hidden_is_not_counted() -> None:
    tally = DraftStats()
    tally.verified(chain([1, 2, 3], "a"), [0], 1.0, stopped=True)
    tally.verified(chain([1, 2, 3], "a"), [], 1.0, stopped=True)
    assert (tally.reached, tally.agreed, tally.accepted, tally.steps) == ([1], [1], 1, 2)


def test_in_a_tree_depth_is_what_counts() -> None:
    tally = DraftStats()
    tree = Draft(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 1, 0], np.int32), "a")
    tally.verified(tree, [1, 2], 1.0)
    assert (tally.drafted, tally.accepted, tally.reached, tally.agreed) == (4, 2, [1, 1], [1, 1])
    tally.verified(tree, [], 1.0)
    assert (tally.reached, tally.agreed) == ([2, 1], [1, 1])
