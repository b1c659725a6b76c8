"""What a drafter may return, and what becomes of what it may not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.errors import DraftError
from kvflash_ggml.speculation.draft import ROOT, Draft, chain, checked

N_VOCAB = 100


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def check(draft: Draft, most: int = 16, ends: tuple[int, ...] = ()) -> Draft:
    return checked(draft, n_vocab=N_VOCAB, max_tokens=most, ends=ends)


def test_a_good_draft_stays() -> None:
    draft = Draft(ids(1, 2, 3), ids(-1, -1, 0), "made up", np.zeros(3, np.float32))
    same = check(draft)
    assert same.tokens.tolist() == [1, 2, 3]
    assert same.parent.tolist() == [-1, -1, 0]
    assert same.logp is not None
    assert same.source == "made up"
    assert not same.is_chain
    assert same.depths().tolist() == [1, 1, 2]
    assert (same.child(ROOT, 2), same.child(0, 3), same.child(0, 2), same.child(2, 1)) == (1, 2, None, None)


def test_an_empty_draft_is_one() -> None:
    draft = check(chain([], "made up"))
    assert len(draft) == 0
    assert draft.is_chain
    assert draft.child(ROOT, 1) is None


def test_a_draft_that_is_too_long_is_cut() -> None:
    draft = check(chain(list(range(50)), "made up", np.zeros(50, np.float32)), most=7)
    assert draft.tokens.tolist() == list(range(7))
    assert draft.logp is not None
    assert len(draft.logp) == 7
    assert len(check(chain([1, 2], "made up"), most=0)) == 0


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31 - 1, -(2**31)])
def test_ids_out_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(DraftError, match=r"made up.*100"):
        check(chain([1, token], "made up"))


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1.0, 2.0]),
        np.array([1, 2], np.int64),
        np.array([[1, 2]], np.int32),
        np.array(3, np.int32),
        np.array([True, False]),
        np.array(["1", "2"]),
        [1, 2],
        None,
    ],
)
def test_tokens_of_another_kind_are_refused(tokens: object) -> None:
    with pytest.raises(DraftError, match="tokens must be"):
        check(Draft(tokens, ids(-1, 0), "made up"))  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="parents must be"):
        check(Draft(ids(1, 2), tokens, "made up"))  # type: ignore[arg-type]


@pytest.mark.parametrize("parent", [(1, 0), (0, -1), (-1, 1), (-1, -2), (-1, 2**31 - 1)])
def test_circles_and_parents_that_come_later_are_refused(parent: tuple[int, int]) -> None:
    with pytest.raises(DraftError, match="follows"):
        check(Draft(ids(1, 2), ids(*parent), "made up"))


def test_equal_siblings_are_refused_and_equal_cousins_are_not() -> None:
    with pytest.raises(DraftError, match="twice"):
        check(Draft(ids(1, 2, 1), ids(-1, -1, -1), "made up"))
    assert len(check(Draft(ids(1, 2, 5, 5), ids(-1, -1, 0, 1), "made up"))) == 4


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DraftError, match="2 tokens and 1 parents"):
        check(Draft(ids(1, 2), ids(-1), "made up"))


@pytest.mark.parametrize(
    "logp",
    [np.array([np.nan, 0]), np.array([0, -np.inf]), np.zeros(3), np.zeros((2, 1)), np.float32(0)],
)
def test_log_probabilities_that_are_none_are_dropped(logp: np.ndarray) -> None:
    draft = check(chain([1, 2], "made up", logp))
    assert draft.logp is None
    assert draft.tokens.tolist() == [1, 2]


def test_nothing_follows_an_end() -> None:
    assert check(chain([9, 1, 2], "made up"), ends=(9,)).tokens.tolist() == [9]
    draft = Draft(ids(1, 9, 2, 3, 4, 9), ids(-1, -1, 1, 0, 2, 3), "made up", np.arange(6, dtype=np.float32))
    left = check(draft, ends=(9, 10))
    assert left.tokens.tolist() == [1, 9, 3, 9]
    assert left.parent.tolist() == [-1, -1, 0, 2]
    assert left.logp is not None
    assert left.logp.tolist() == [0, 1, 3, 5]


@given(data=st.data(), n=st.integers(0, 20), most=st.integers(0, 24))
def test_what_is_checked_is_what_was_drafted_before_an_end(data: st.DataObject, n: int, most: int) -> None:
    tokens = ids(*data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n, unique=True)))
    parent = ids(*[data.draw(st.integers(-1, node - 1)) for node in range(n)])
    ends = data.draw(st.sets(st.integers(0, 30), max_size=4))
    draft = check(Draft(tokens, parent, "made up"), most, tuple(ends))

    def path(draft: Draft, node: int) -> tuple[int, ...]:
        before = path(draft, int(draft.parent[node])) if draft.parent[node] != ROOT else ()
        return (*before, int(draft.tokens[node]))

    whole = Draft(tokens, parent, "made up")
    wanted = [path(whole, node) for node in range(n)]
    wanted = [there for there in wanted if not ends.intersection(there[:-1])]
    assert [path(draft, node) for node in range(len(draft))] == wanted[:most]


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
    parent=st.lists(st.integers(-3, 8), max_size=6),
    logp=st.none() | st.lists(st.floats(width=32), max_size=6),
)
def test_whatever_comes_is_refused_or_can_be_verified(
    tokens: list[int], parent: list[int], logp: list[float] | None
) -> None:
    chances = None if logp is None else np.array(logp, np.float32)
    try:
        draft = check(Draft(ids(*tokens), ids(*parent), "made up", chances), 4, (7,))
    except DraftError:
        return
    assert len(draft) <= 4
    assert np.all(draft.parent < np.arange(len(draft)))
    assert np.all((draft.tokens >= 0) & (draft.tokens < N_VOCAB))
    assert draft.logp is None or np.all(np.isfinite(draft.logp))
    assert draft.depths().tolist() == sorted(draft.depths().tolist()) or not draft.is_chain
