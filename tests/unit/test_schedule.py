"""Who has the next step: each rule of docs/server.md, without a thread, a clock or a model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.batching.schedule import SHARE, Want, groups, passes, schedule

DECODES = Want()
SHARES = Want(shares=True)
ROWS = 512


def reads(left: int, done: int = 0, **more: int) -> Want:
    return Want(reads=True, left=left, done=done, **more)


def test_all_that_wait_for_a_token_have_theirs_in_one_step() -> None:
    assert schedule([DECODES, DECODES, DECODES], rows=ROWS, owed=False) == [0, 1, 2]


def test_a_prompt_is_read_alone_and_first_where_nothing_is_owed() -> None:
    assert schedule([DECODES, reads(900)], rows=ROWS, owed=False) == [1]
    assert schedule([reads(900)], rows=ROWS, owed=True) == [0]


def test_between_two_steps_of_a_prompt_the_others_have_theirs() -> None:
    assert schedule([DECODES, reads(900, 512), DECODES], rows=ROWS, owed=True) == [0, 2]


def test_prompts_that_share_a_step_do_not_wait_for_one_of_several_steps() -> None:
    assert schedule([reads(9000, 512), SHARES, SHARES], rows=ROWS, owed=False) == [1, 2]


def test_the_older_prompt_is_read_first() -> None:
    assert schedule([reads(900), reads(800)], rows=ROWS, owed=False) == [0]


def test_a_shorter_prompt_passes_once_the_older_one_has_read_twice_as_much() -> None:
    for done in (0, 512, 1024):
        assert schedule([reads(9000, done), reads(300)], rows=ROWS, owed=False) == [int(done >= 600)]


def test_newer_prompts_together_have_their_share() -> None:
    assert schedule([reads(9000, 1000, let=300), reads(200)], rows=ROWS, owed=False) == [1]
    assert schedule([reads(9000, 1000, let=301), reads(200)], rows=ROWS, owed=False) == [0]


def test_the_shortest_of_those_that_pass_comes_first() -> None:
    assert schedule([reads(9000, 4000), reads(400), reads(90), reads(200)], rows=ROWS, owed=False) == [2]


def test_a_long_prompt_goes_on_between_the_steps_of_a_longer_one() -> None:
    """In steps: what it reads counts, and not how long it is."""
    assert schedule([reads(90_000, 2048), reads(20_000)], rows=ROWS, owed=False) == [1]
    assert schedule([reads(90_000, 2048, let=1024), reads(19_000, 1024)], rows=ROWS, owed=False) == [0]


def test_a_prompt_that_is_longer_than_what_is_left_waits() -> None:
    """It would end later in any case, and delay the other one."""
    assert schedule([reads(900, 8000), reads(1000)], rows=ROWS, owed=False) == [0]


def test_a_higher_priority_is_read_first() -> None:
    assert schedule([reads(900, 100), reads(5000, priority=1)], rows=ROWS, owed=False) == [1]
    assert schedule([reads(900, 8000), reads(9000, 100, priority=1), reads(50)], rows=ROWS, owed=False) == [1]


WANTS = st.lists(
    st.builds(
        Want, reads=st.booleans(), left=st.integers(1, 9999), done=st.integers(0, 9999), let=st.integers(0, 5000),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
)  # fmt: skip


@given(WANTS, st.booleans())
def test_somebody_has_the_step_and_prompts_are_read_one_at_a_time(wants: list[Want], owed: bool) -> None:
    chosen = schedule(wants, rows=ROWS, owed=owed)
    assert chosen
    assert len(chosen) == 1 or not any(wants[at].reads for at in chosen)
    if not any(want.reads for want in wants):
        assert chosen == list(range(len(wants)))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=8), st.integers(1, 20_000))
def test_an_older_prompt_comes_to_its_end(newer: list[int], length: int) -> None:
    """However many others begin behind it: these have no more than their share before that."""
    older, others = reads(length), [reads(left) for left in newer]
    for _ in range(100_000):
        at = schedule([older, *others], rows=ROWS, owed=False)[0]
        one = older if at == 0 else others[at - 1]
        rows = min(ROWS, one.left)
        after = replace(one, left=one.left - rows, done=one.done + rows)
        if at == 0 and not after.left:
            break
        older = after if at == 0 else replace(older, let=older.let + rows)
        if at:
            others[at - 1] = after if after.left else reads(newer[at - 1])  # another one comes
    else:
        raise AssertionError("it starves")
    assert older.let <= SHARE * older.done


def test_who_passes() -> None:
    assert passes(reads(100), reads(500, 200), rows=ROWS)
    assert not passes(reads(100), reads(100, 200), rows=ROWS)
    assert passes(reads(900, priority=1), reads(100), rows=ROWS)
    assert not passes(reads(10), reads(900, 800, priority=1), rows=ROWS)


def test_groups_are_full_but_no_fuller() -> None:
    assert list(groups([("a", 10), ("b", 20), ("c", 30), ("d", 5)], 32)) == [["a", "b"], ["c"], ["d"]]
    assert list(groups([("a", 99), ("b", 1)], 32)) == [["a"], ["b"]]
    assert list(groups([], 32)) == []
