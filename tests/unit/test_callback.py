"""Drafters of llama-cpp-python's kind: what they are given, and whatever they return is a draft or a DraftError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvflash_ggml.errors import DraftError
from kvflash_ggml.speculation.base import Callback, Drafter
from kvflash_ggml.speculation.draft import Draft, checked

TEXT = np.arange(10, 20, dtype=np.int32)


def drafter(model: Callable[[Any], Any]) -> Drafter:
    made = Callback(model)
    made.observe(0, TEXT, None)
    return made


def draft_of(returned: Any) -> Draft | None:
    """What is verified of what it returns, as the loop would."""
    draft = drafter(lambda ids: returned).propose(5, 3)
    return None if draft is None else checked(draft, n_vocab=100, max_tokens=3, ends={7})


def test_it_is_given_the_text_and_the_root() -> None:
    seen = []

    def model(ids: Any) -> Any:
        seen.append(ids.copy())
        ids[:] = 0  # its own
        return np.array([1, 2, 3], np.intc)

    one = drafter(model)
    draft = one.propose(5, 8)
    assert draft is not None
    assert draft.tokens.tolist() == [1, 2, 3]
    assert draft.is_chain
    assert draft.logp is None
    assert (draft.source, seen[0].dtype, seen[0].tolist()) == ("draft_model", np.intc, [*range(10, 20), 5])
    assert TEXT.tolist() == list(range(10, 20))
    one.truncate(3)
    one.observe(3, np.array([50], np.int32), None)
    one.propose(6, 8)
    assert seen[1].tolist() == [10, 11, 12, 50, 6]
    one.close()
    one.close()


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (np.array([1, 2, 3, 4, 5], np.intc), [1, 2, 3]),
        ([1, 2], [1, 2]),
        (np.array([1, 7, 2], np.int64), [1, 7]),
        (np.array([3], np.uint8), [3]),
        (np.array([1, 1, 1, 500]), [1, 1, 1]),
        ([1.0, 2.0], [1, 2]),
    ],
)
def test_a_draft_is_cut_to_what_can_be_verified(returned: Any, wanted: list[int]) -> None:
    draft = draft_of(returned)
    assert draft is not None
    assert draft.tokens.tolist() == wanted


@pytest.mark.parametrize("returned", [np.empty(0, np.intc), [], np.empty((0, 3))])
def test_nothing(returned: Any) -> None:
    assert draft_of(returned) is None


@pytest.mark.parametrize(
    "returned",
    [
        None, "abc", 3.5, 3, {"a": 1}, object(), [1.5, 2.0], [[1, 2]], [None], [True], ["1"], np.array([1, -1]),
        np.array([100]), np.array([2**31 - 1]), np.array([2**31]), np.array([2**40, 1]),
        np.array([2**64 - 1], np.uint64),
        np.array([-(2**63)]), np.array([np.nan]), np.array([np.inf]), np.array([1], object),
    ],
)  # fmt: skip
def test_what_is_no_draft(returned: Any) -> None:
    with pytest.raises(DraftError):
        draft_of(returned)
