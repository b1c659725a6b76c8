"""Where answers stand, and whether a pool had their chunks when the reply needed them."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_bench.explain import Moment, Watch, needle, places, rows
from kvflash_ggml.trace.events import Change


def words(text: str) -> int:
    return len(text.split())


def watch(*moments: tuple[int, tuple[int, ...], dict[int, float] | None]) -> Watch:
    """Of (length, resident, shares of attention by chunk) in six chunks."""
    made = Watch()
    for length, resident, shares in moments:
        scores = None if shares is None else np.log(np.array([shares.get(chunk, 0.01) for chunk in range(6)]))
        made.changed(
            Change(
                length=length, resident=resident, recalled=(), scores=scores, evicted_mass=None, generating=length > 400
            )
        )
    return made


def test_a_value_is_needed_where_the_full_cache_begins_it() -> None:
    found = needle("b is 22.", "22", (3,), full="they are 11 and 22", pool="they are 11 and 22", count=words)
    assert (found.needed, found.full, found.pool) == (4, True, True)


def test_replies_that_part_sooner_part_there() -> None:
    found = needle("b is 22.", "22", (3,), full="they are 11 and 22", pool="they are 33 and 44", count=words)
    assert (found.needed, found.full, found.pool) == (2, True, False)


def test_a_value_that_the_full_cache_does_not_name_is_never_needed() -> None:
    found = needle("b is 22.", "22", (3,), full="they are 11", pool="they are 22", count=words)
    assert (found.needed, found.full, found.pool) == (None, False, True)
    (row,) = rows([found], watch((401, (0, 5), {3: 0.2})), prompt=400)
    assert (row["token"], row["then rank"], row["then resident"]) == (None, None, None)


def test_a_row_has_the_pool_at_the_prompts_end_and_at_the_token() -> None:
    seen = watch(
        (400, (0, 1, 5), None),
        (401, (0, 2, 5), {2: 0.6, 3: 0.3, 4: 0.1}),
        (402, (0, 4, 5), None),
        (403, (0, 3, 5), {3: 0.9}),
        (404, (0, 2, 5), {2: 0.9}),
    )
    found = needle("b is 22.", "22", (3, 2), full="11 or 9 22", pool="11 or 9 22", count=words)
    one, two = rows([found], seen, prompt=400)
    assert (one["end rank"], one["end share"], one["end resident"]) == (2, pytest.approx(0.3), False)
    assert (one["token"], one["then rank"], one["then share"], one["then resident"]) == (3, 1, pytest.approx(0.9), True)
    assert (two["end rank"], two["end resident"], two["then resident"]) == (1, True, False)


def test_the_first_token_has_the_pool_of_the_second() -> None:
    seen = watch((400, (0, 1, 5), None), (401, (0, 3, 5), {3: 0.3}))
    found = needle("a is 11.", "11", (3,), full="11", pool="12", count=words)
    (row,) = rows([found], seen, prompt=400)
    assert (row["token"], row["then resident"]) == (0, True)


def test_places_are_what_was_there_and_what_was_asked_for() -> None:
    scores = np.log(np.array([0.3, 0.2, 0.1, 0.4]))
    told = places(Moment(length=9, resident=frozenset((0, 1, 4)), scores=scores), [3], "chunk {}".format)
    assert [(row["chunk"], row["rank"], row["resident"], row["answer"]) for row in told] == [
        (3, 1, False, True), (0, 2, True, False), (1, 3, True, False), (4, None, True, False),
    ]  # fmt: skip
    assert told[0]["begins"] == "chunk 3"
    assert told[-1]["share"] is None, "a chunk that is newer than the scores"
