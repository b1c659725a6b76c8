"""The arithmetic of acceptance beside the full cache. No model is run."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvflash_bench import main
from kvflash_bench.outcomes import Arm
from kvflash_bench.places import Pair, Walk, points, summary, total
from kvflash_ggml.speculation.draft import DraftStats, chain

ARM = Arm(policy="qk:exact", context=4096, pool=512, note="small")


def tally(*accepted, drafted=4):
    """Steps that draft so many tokens, and accept so many of them."""
    made = DraftStats()
    for count in accepted:
        made.verified(chain(range(drafted), "ngram"), range(count), 0.0)
    return made


def walk(*accepted, read=0, page_ins=0):
    nothing = [None] * len(accepted)
    return Walk(drafts=nothing, chosen=accepted, tally=tally(*accepted), read_page_ins=read, page_ins=page_ins)


def test_several_texts_are_one():
    whole = total([tally(4, 0), DraftStats(), tally(1)])
    assert (whole.steps, whole.drafted, whole.accepted) == (3, 12, 5)
    assert whole.per_position == tally(4, 0, 1).per_position == (2 / 3, 1 / 2, 1, 1)


def test_points_are_of_all_that_was_drafted():
    full, pool = [tally(4, 4), tally(0, 0)], [tally(4, 2), tally(1, 0)]
    more, error = points(full, pool)
    assert more == pytest.approx(100 * (7 / 16 - 8 / 16))
    # the texts lose two tokens of eight, and win one: -25 and 12.5 points
    assert error == pytest.approx((25 + 12.5) / 2)


def test_a_text_counts_by_what_was_drafted_in_it():
    full, pool = [tally(4), tally(*[2] * 9)], [tally(0), tally(*[2] * 9)]
    more, error = points(full, pool)
    assert more == pytest.approx(-10)
    # the first loses 4 tokens where so many as it drafts lose 0.4, beside the mean of 20 that are drafted
    assert error == pytest.approx(100 * (4 - 0.4) / 20)


def test_where_all_texts_lose_as_much_there_is_no_error():
    full = [tally(4), tally(3), tally(2)]
    assert points(full, [tally(3), tally(2), tally(1)]) == (pytest.approx(-25), pytest.approx(0))


@pytest.mark.parametrize("more", [[], [DraftStats()]])
def test_what_cannot_be_known_is_none(more):
    assert points([tally(1)], [tally(2)]) == (pytest.approx(25), None)
    assert points([DraftStats(), *more], [DraftStats(), *more]) == (None, None)


def test_a_row():
    pairs = [
        Pair(full=walk(4, 0), pool=walk(2, 0, page_ins=3), target=tally(3, 0), drafts=tally(4, 0)),
        Pair(full=walk(4), pool=walk(4, read=5), target=tally(4), drafts=tally(3)),
    ]
    row = summary(ARM, "ngram", "text", pairs)
    where = {"drafter": "ngram", "task": "text", "context": 4096, "policy": "qk:exact", "pool": 512, "note": "small"}
    assert row.items() >= where.items()
    assert (row["texts"], row["places"], row["read_page_ins"], row["page_ins"]) == (2, 3, 5, 3)
    assert (row["agree"], row["full"], row["share"]) == (2 / 3, 8 / 12, 6 / 12)
    assert (row["full_won"], row["won"]) == (1 + 8 / 3, 3)
    assert row["positions"] == (2 / 3, 1, 1 / 2, 1)
    assert [row["points"], row["target"], row["drafts"]] == [pytest.approx(x / 12) for x in (-200, -100, -100)]
    assert row["by_text"][0]["pool"] == {"steps": 2, "drafted": 8, "accepted": 2, "reached": [2, 1, 1],
                                         "agreed": [1, 1, 0]}  # fmt: skip


def test_where_the_pool_chooses_another_token():
    def chose(*chosen, drafts):
        made = [None if token is None else chain([token, 0], "ngram") for token in drafts]
        return Walk(drafts=made, chosen=chosen, tally=tally(1), read_page_ins=0, page_ins=0)

    pairs = [
        Pair(full=chose(5, 6, 7, drafts=[5, 5, None]), pool=chose(5, 6, 7, drafts=[4, 4, 7])),
        Pair(full=chose(8, 9, drafts=[8, 9]), pool=chose(1, 2, drafts=[8, 2])),
    ]
    row = summary(ARM, "ngram", "text", pairs)
    assert (row["agree"], row["first_same"], row["first_other"]) == (0.6, (0.5, 0), (1, 0.5))
    assert summary(ARM, "ngram", "text", pairs[:1])["first_other"] is None


def test_without_the_other_arms_drafts_nothing_is_said_of_them():
    row = summary(ARM, "ngram", "text", [Pair(full=walk(4), pool=walk(2))])
    assert (row["target"], row["target_error"], row["drafts"], row["error"]) == (None, None, None, None)
    assert [*row["by_text"][0]] == ["full", "pool"]


@pytest.mark.parametrize(
    "option", [("--drafts", "0"), ("--drafts", "32"), ("--trials", "0"), ("--window", "9"), ("--pools", "x")]
)
def test_what_is_typed_wrong_is_named(option, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    result = CliRunner().invoke(main, ["acceptance", str(model), *option])
    assert result.exit_code == 2
    assert option[0] in result.output
