"""Drafts out of the text, against a plain search of it."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from support.interrupter import Interrupter

from kvflash_ggml.arrays import Int32s
from kvflash_ggml.speculation import ngram
from kvflash_ggml.speculation.base import Drafter
from kvflash_ggml.speculation.ngram import CANDIDATES, ORDERS, REACH, Chains, NGram, hashes_of

ROOM = 1000

texts = st.lists(st.integers(0, 3), max_size=80)


def following(text: list[int], most: int) -> list[int] | None:
    """What NGram says of a text, the root its last token, found by looking everywhere."""
    end = len(text) - 1

    def match(at: int) -> int:
        same = 0
        while same < min(REACH, at + 1) and text[at - same] == text[end - same]:
            same += 1
        return same

    for order in reversed(ORDERS):
        found = [at for at in range(end - 1, -1, -1) if match(at) >= order][:CANDIDATES]
        if found:
            best = max(found, key=match)
            after = text[best + 1 :]
            while len(after) < most:
                after = after + after
            return after[: min(most, 4 + 2 * match(best))]
    return None


def proposal(drafter: NGram, root: int, most: int = ROOM) -> list[int] | None:
    draft = drafter.propose(root, most)
    if draft is None:
        return None
    assert draft.is_chain
    assert draft.source == drafter.name
    assert draft.tokens.dtype == np.int32
    assert draft.logp is not None
    assert draft.logp.shape == draft.tokens.shape
    assert np.all(draft.logp < 0)
    return [int(token) for token in draft.tokens]


def ids(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def test_it_is_a_drafter_that_wants_nothing() -> None:
    drafter: Drafter = NGram()
    assert drafter.name == "ngram"
    assert not drafter.wants


@given(text=texts, root=st.integers(0, 3), most=st.integers(1, 30))
def test_proposes_what_a_search_finds(text: list[int], root: int, most: int) -> None:
    drafter = NGram()
    drafter.observe(0, ids(*text), None)
    assert proposal(drafter, root, most) == following([*text, root], most)


def test_the_longest_match_wins_and_of_equals_the_newest() -> None:
    drafter = NGram()
    drafter.observe(0, ids(9, 1, 2, 3, 50, 51, 8, 1, 2, 3, 60, 61, 7, 1, 2, 3, 70, 71, 9, 1, 2), None)
    assert (proposal(drafter, 3) or [])[:2] == [50, 51]
    drafter.observe(18, ids(5, 1, 2), None)
    assert (proposal(drafter, 3) or [])[:2] == [70, 71]


def test_length_follows_the_match() -> None:
    once = list(range(100))
    for match in (3, 10, 30, REACH, 90):
        drafter = NGram()
        drafter.observe(0, ids(*once, *range(500, 800), *once[: match - 1]), None)
        assert len(proposal(drafter, match - 1) or []) == 4 + 2 * min(match, REACH)
        assert len(proposal(drafter, match - 1, 5) or []) == 5
    assert proposal(drafter, match - 1, 0) is None


def test_a_repetition_goes_on() -> None:
    drafter = NGram()
    drafter.observe(0, ids(*[5, 6, 7] * 10, 5, 6), None)
    assert (proposal(drafter, 7, 8) or []) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_rows_of_images_are_found_and_not_drafted() -> None:
    drafter = NGram()
    drafter.observe(0, ids(1, 2, 3, 4, -7, -8, 5, 1, 2), None)
    assert proposal(drafter, 3) == [4]
    drafter.observe(9, ids(3, 4, -7), None)
    assert proposal(drafter, -8) == [5, 1, 2, 3, 4]
    drafter.truncate(10)
    assert proposal(drafter, 4) is None


def test_a_match_ends_where_the_text_begins() -> None:
    drafter = NGram()
    drafter.observe(0, ids(1, 2, 3, *range(10, 1027), 3, 1, 2), None)
    assert len(drafter._text) == 1024, "the root is the last of the room, next to the first if indices wrap"
    assert len(proposal(drafter, 3) or []) == 4 + 2 * 3


def test_a_gap_voids_what_was_before() -> None:
    drafter = NGram()
    drafter.observe(0, ids(1, 2, 3, 4, 5), None)
    drafter.observe(100, ids(1, 2), None)
    assert proposal(drafter, 3) is None
    drafter.observe(102, ids(3, 8, 1, 2), None)
    assert (proposal(drafter, 3) or [])[:1] == [8]
    drafter.observe(40, ids(1, 2, 3, 9, 1, 2), None)
    assert (proposal(drafter, 3) or [])[:1] == [9]


def test_no_hash_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(tokens: Int32s, lengths: tuple[int, ...]) -> list[np.ndarray]:
        return [np.zeros(max(0, len(tokens) - length + 1), np.uint32) for length in lengths]

    monkeypatch.setattr(ngram, "hashes_of", alike)
    drafter = NGram()
    drafter.observe(0, ids(1, 2, 3, 4, 5, 6, 7, 8), None)
    assert proposal(drafter, 9) is None
    drafter.observe(8, ids(1, 2), None)
    assert (proposal(drafter, 3) or [])[:2] == [4, 5]


def test_closing_forgets() -> None:
    drafter = NGram()
    drafter.observe(0, ids(*[1, 2, 3] * 5), None)
    drafter.close()
    drafter.close()
    assert proposal(drafter, 1) is None


class Reader(RuleBasedStateMachine):
    """A drafter that is cut and told again knows what one knows that has only seen the text as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = NGram()
        self.text: list[int] = []

    @rule(tokens=texts)
    def observe(self, tokens: list[int]) -> None:
        self.drafter.observe(len(self.text), ids(*tokens), None)
        self.text += tokens

    @precondition(lambda self: self.text)
    @rule(data=st.data(), tokens=texts)
    def observe_again(self, data: st.DataObject, tokens: list[int]) -> None:
        start = data.draw(st.integers(0, len(self.text)))
        self.drafter.observe(start, ids(*tokens), None)
        self.text[start:] = tokens

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.text) + 3))
        self.drafter.truncate(length)
        del self.text[length:]

    @rule(root=st.integers(0, 3))
    def look(self, root: int) -> None:
        assert proposal(self.drafter, root, 40) == following([*self.text, root], 40)


TestReader = Reader.TestCase


def test_chains_forget_what_is_cut() -> None:
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 40, 5000).astype(np.uint32) << np.uint32(20)
    chains = Chains()
    chains.add(hashes)
    chains.truncate(700)
    chains.add(hashes[700:800])
    for value in np.unique(hashes):
        there = np.flatnonzero(hashes[:800] == value)[::-1]
        assert chains.newest(value, 8) == there[:8].tolist()


def test_hashes_tell_runs_apart() -> None:
    tokens = np.random.default_rng(2).integers(0, 250_000, 20_000).astype(np.int32)
    for length, hashes in zip(ORDERS, hashes_of(tokens, ORDERS), strict=True):
        assert len(hashes) == len(tokens) - length + 1
        assert len(np.unique(hashes)) > 0.999 * len(hashes)
        again = hashes_of(tokens[777 : 777 + length], ORDERS)[ORDERS.index(length)]
        assert again.tolist() == [hashes[777]]


@pytest.mark.slow
def test_a_long_prompt_is_read_quickly() -> None:
    rng = np.random.default_rng(3)
    for kind, text in (
        ("random", rng.integers(0, 150_000, 131_072)),
        ("common words", rng.zipf(1.2, 131_072) % 5_000),
        ("one token", np.full(131_072, 7)),
    ):
        drafter = NGram()
        begun = time.process_time()
        drafter.observe(0, text.astype(np.int32), None)
        filled = time.process_time() - begun
        took = []
        for step in range(300):
            begun = time.process_time()
            drafter.propose(int(text[step]), 32)
            took.append(time.process_time() - begun)
            drafter.observe(131_072 + step, text[step : step + 1].astype(np.int32), None)
        lookup = float(np.median(took))
        print(f"{kind}: filled in {filled:.3f} s, looked up in {lookup * 1e6:.0f} us")
        assert filled < 1
        assert lookup < 1e-3


def test_an_interrupt_at_any_line_leaves_it_right() -> None:
    """What it is told next counts, and it finds what a search finds."""
    rng = np.random.default_rng(0)
    for line in range(1, 400):
        drafter, text = NGram(), rng.integers(0, 3, 900).tolist()
        drafter.observe(0, ids(*text[:500]), None)

        def work(drafter: NGram = drafter, text: list[int] = text) -> None:
            drafter.observe(450, ids(*text[450:470]), None)
            drafter.observe(470, ids(*text[470:900]), None)
            drafter.truncate(600)
            drafter.propose(1, ROOM)

        Interrupter(line, ("speculation/ngram.py",)).run(work, partial(drafter.propose, 1, ROOM))
        text[440:] = rng.integers(0, 3, 260).tolist()
        drafter.observe(440, ids(*text[440:]), None)
        assert proposal(drafter, 1) == following([*text, 1], ROOM), f"line {line}"
        drafter.truncate(300)
        assert proposal(drafter, 2) == following([*text[:300], 2], ROOM), f"line {line}"
