"""The loop between a text and its drafters: whatever these return, what is verified is sound, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvflash_ggml.errors import DecodeError, DraftError, NotFinite
from kvflash_ggml.speculation import guarded
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import Controller, Controls, Fixed
from kvflash_ggml.speculation.draft import Draft, chain
from kvflash_ggml.speculation.guarded import AGAIN, IDLE_STEPS, MAX_BAD, WARM, GuardedDrafter
from kvflash_ggml.speculation.loop import SpecStats, Speculator

N_VOCAB, END = 100, 99
ROOT = 5


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Text:
    tokens: np.ndarray = field(default_factory=lambda: np.arange(10, 20, dtype=np.int32))
    room_ahead: int = 32
    branch_room: int = 0


class Drafts:
    """A drafter that does as it is told, and keeps what it was told of the text."""

    wants = Features()

    def __init__(self, does: Callable[[int, int], Any], name: str = "made up") -> None:
        self.name = name
        self.does = does
        self.text: list[int] = []
        self.asked: list[int] = []
        self.closed = 0

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        self.text[start:] = tokens.tolist()

    def propose(self, root: int, most: int) -> Any:
        self.asked.append(most)
        return self.does(root, most)

    def truncate(self, length: int) -> None:
        del self.text[length:]

    def close(self) -> None:
        self.closed += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(*values: int) -> Callable[[int, int], Draft]:
    return lambda root, most: chain(list(values), "made up")


def raises(error: BaseException) -> Callable[[int, int], Any]:
    def propose(root: int, most: int) -> Any:
        raise error

    return propose


def make(*drafters: Any, controls: Controls | None = None, **settings: Any) -> Speculator:
    one = Speculator(drafters, controls or Fixed(4), n_vocab=N_VOCAB, ends=[END], **settings)
    one.begin(10)
    return one


def drafted(one: Speculator, text: Text | None = None) -> list[int] | None:
    draft = one.propose(text or Text(), ROOT)
    return None if draft is None else draft.tokens.tolist()


def test_a_draft_is_what_the_first_has_to_say() -> None:
    silent, first, second = Drafts(lambda *_: None, "silent"), Drafts(tokens(1, 2, 3), "a"), Drafts(tokens(7), "b")
    one = make(silent, first, second)
    assert one.types == ("silent", "a", "b")
    assert drafted(one) == [1, 2, 3]
    assert (silent.asked, first.asked, second.asked) == ([3], [3], [])
    assert first.text == [*range(10, 20)]
    one.verified([0, 1], 4)
    assert one.total.by_source.keys() == {"a"}, "whatever a drafter says it is"
    assert (one.last.drafted, one.last.accepted, one.last.reached, one.last.agreed) == (3, 2, [1, 1, 1], [1, 1, 0])


def test_it_is_told_each_token_once() -> None:
    drafter = Drafts(tokens(1))
    seen: list[tuple[int, list[int]]] = []
    drafter.observe = lambda start, told, rows: seen.append((start, told.tolist()))  # type: ignore[method-assign]
    one, text = make(drafter), Text()
    drafted(one, text)
    one.verified([0], 4)
    text.tokens = np.append(text.tokens, ids(5, 1))
    drafted(one, text)
    one.truncated(4)
    one.truncated(4)
    text.tokens = ids(10, 11, 12, 13, 50)
    drafted(one, text)
    assert seen == [(0, [*range(10, 20)]), (10, [5, 1]), (4, [50])]


def test_nobody_changes_the_text_that_he_is_told() -> None:
    drafter, text = Drafts(tokens(1)), Text()

    def spoil(start: int, told: Any, rows: Any) -> None:
        told[0] = 77

    drafter.observe = spoil  # type: ignore[method-assign]
    one = make(drafter)
    assert drafted(one, text) is None
    assert text.tokens.tolist() == [*range(10, 20)]
    assert "read-only" in str(one.off)


GOOD: dict[str, tuple[Any, list[int] | None]] = {
    "nothing": (None, None),
    "an empty one": (chain([], "x"), None),
    "too long": (chain(list(range(60)), "x"), [0, 1, 2]),
    "far too long": (chain(np.zeros(10**6, np.int32), "x"), [0, 0, 0]),
    "too long, and wrong behind": (chain([1, 2, 3] * 20 + [-1], "x"), [1, 2, 3]),
    "NaN": (chain([1, 2, 3], "x", np.full(3, np.nan, np.float32)), [1, 2, 3]),
    "infinity": (chain([1, 2, 3], "x", np.full(3, np.inf, np.float32)), [1, 2, 3]),
    "a list of logarithms": (chain([1, 2, 3], "x", [-0.1] * 3), [1, 2, 3]),  # type: ignore[arg-type]
    "words for logarithms": (chain([1, 2, 3], "x", np.array(["a"] * 3)), [1, 2, 3]),
    "too few logarithms": (chain([1, 2, 3], "x", np.zeros(2, np.float32)), [1, 2, 3]),
    "certain beyond doubt": (chain([1, 2, 3], "x", np.full(3, 1e30, np.float32)), [1, 2, 3]),
    "doubles": (chain([1, 2, 3], "x", np.full(3, -1.0)), [1, 2, 3]),
    "an end first": (chain([END, 1, 2], "x"), [END, ROOT, ROOT]),
    "an end behind": (chain([1, END, 2], "x"), [1, END, ROOT]),
    "another's name": (chain([1, 2, 3], ["no", "name"]), [1, 2, 3]),  # type: ignore[arg-type]
    "a tree": (Draft(ids(1, 2, 3, 4), ids(-1, -1, 1, 0), "x", np.log([0.1, 0.8, 0.9, 0.2]).astype("f")), [2, 3, ROOT]),
    "siblings": (Draft(ids(1, 2, 3), ids(-1, -1, -1), "x"), [1, ROOT, ROOT]),
}

BAD: dict[str, Any] = {
    "below 0": chain([1, -1], "x"),
    "beyond the vocabulary": chain([N_VOCAB], "x"),
    "the largest": chain([2**31 - 1], "x"),
    "floats": Draft(np.array([1.0, 2.0]), ids(-1, 0), "x"),  # type: ignore[arg-type]
    "long": Draft(np.array([1, 2]), ids(-1, 0), "x"),  # type: ignore[arg-type]
    "lists": Draft([1, 2], [-1, 0], "x"),  # type: ignore[arg-type]
    "words": Draft(np.array(["a"]), ids(-1), "x"),  # type: ignore[arg-type]
    "nobody": Draft(None, None, "x"),  # type: ignore[arg-type]
    "circles": Draft(ids(1, 2), ids(1, 0), "x"),
    "itself": Draft(ids(1), ids(0), "x"),
    "twins": Draft(ids(1, 1), ids(-1, -1), "x"),
    "too few parents": Draft(ids(1, 2), ids(-1), "x"),
    "a word": "tokens",
    "a number": 7,
    "an array": ids(1, 2),
    "refusal": DraftError("made up: no numbers"),
    "not finite": NotFinite("the logits of row 0 are not finite"),
}


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("what", GOOD)
def test_what_can_be_verified_of_it(what: str, fixed: bool) -> None:
    returned, wanted = GOOD[what]
    drafter = Drafts(lambda *_: returned)
    one = make(drafter, controls=Fixed(4) if fixed else Controller())
    if fixed:
        for _ in range(MAX_BAD + 2):
            assert drafted(one) == wanted
    else:
        timed(one)
        got = drafted(one)
        assert got is None if wanted is None else got is not None
    assert (one.off, one.total.bad_drafts, drafter.closed) == (None, 0, 0)


def test_a_tree_stays_one_where_it_can_be_verified() -> None:
    """A node takes a position of its own, wherever it branches off."""
    tree, _ = GOOD["a tree"]
    one = make(Drafts(lambda *_: tree))
    assert drafted(one, Text(branch_room=32)) == [1, 2, 3]
    one.verified([1, 2], 4)
    assert (one.last.drafted, one.last.accepted, one.last.reached) == (3, 2, [1, 1])
    assert drafted(one, Text(branch_room=1)) == [2, 3, ROOT], "the likeliest chain of it"


def timed(one: Speculator) -> None:
    """Plain steps are known, and take a second."""
    for _ in range(4):
        one.propose(Text(), ROOT)
        one.controls.record(1, 1.0)


@pytest.mark.parametrize("what", BAD)
def test_after_three_that_cannot_be_verified_it_is_not_asked(what: str, caplog: Any) -> None:
    bad = BAD[what]
    drafter = Drafts(raises(bad) if isinstance(bad, Exception) else lambda *_: bad)
    one = make(drafter)
    with caplog.at_level(logging.WARNING):
        for asked in range(1, MAX_BAD + 4):
            assert drafted(one) is None
            assert one.total.bad_drafts == min(asked, MAX_BAD)
            assert (one.off is None) == (asked < MAX_BAD)
            one.plain()
    assert len(drafter.asked) == MAX_BAD
    assert drafter.closed == 1
    assert one.types == ()
    assert [record.message for record in caplog.records if "made up" in record.message] == [
        f"made up does not draft any more: {one.off}"
    ]


def test_three_in_a_row_are_needed() -> None:
    answers = iter([BAD["twins"], BAD["twins"], chain([1, 2, 3], "x")] * 4)
    one = make(Drafts(lambda *_: next(answers)))
    assert [drafted(one) for _ in range(12)] == [None, None, [1, 2, 3]] * 4
    assert one.off is None


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), DecodeError("no"), StopIteration(), KeyError(3)])
@pytest.mark.parametrize("where", ["propose", "observe", "truncate"])
def test_one_that_fails_is_not_asked_again(where: str, error: Exception, caplog: Any) -> None:
    """And the next in line takes over."""
    drafter, other = Drafts(tokens(1, 2, 3)), Drafts(tokens(7, 8, 9), "other")
    one = make(drafter, other)
    if where == "truncate":
        drafted(one)
    setattr(drafter, where, lambda *_: raises(error)(0, 0))
    drafter.close = lambda: raises(OSError("it is on fire"))(0, 0)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        if where == "truncate":
            one.truncated(3)
            one.truncated(1)
        assert drafted(one) == [7, 8, 9]
        assert drafted(one) == [7, 8, 9]
    assert one.types == ("other",)
    assert one.off is None
    assert len(caplog.records) == 1


def test_an_interrupt_is_no_failure() -> None:
    drafter = Drafts(raises(KeyboardInterrupt()))
    one = make(drafter)
    with pytest.raises(KeyboardInterrupt):
        drafted(one)
    drafter.does = tokens(1, 2, 3)
    assert drafted(one) == [1, 2, 3]


def test_steps_that_fail_with_drafts_end_them(caplog: Any) -> None:
    drafter = Drafts(tokens(1, 2, 3))
    one = make(drafter)
    for failed in [1, 1, 0, 1, 1, 1]:
        assert drafted(one) == [1, 2, 3]
        if failed:
            one.refused(DecodeError("no room"))
            one.plain()
        else:
            one.verified([], 4)
    assert drafted(one) is None
    assert "no room" in str(one.off)
    assert drafter.closed == 1
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert one.total.plain_steps == 0, "what failed is no plain step's time"


@pytest.mark.parametrize("room", range(1, 6))
def test_no_more_is_drafted_than_a_step_can_verify(room: int) -> None:
    drafter = Drafts(lambda root, most: chain(list(range(most)), "x"))
    got = drafted(make(drafter), Text(room_ahead=room))
    assert got == ([*range(min(3, room - 1))] or None)
    assert drafter.asked == ([min(3, room - 1)] if room > 1 else [])


@pytest.mark.parametrize("left", range(1, 7))
def test_no_more_is_drafted_than_is_asked_for(left: int) -> None:
    """The root is told already: of so many tokens one less can be drafted, since one is chosen after them."""
    drafter = Drafts(lambda root, most: chain(list(range(most)), "x"))
    one = make(drafter)
    one.begin(10, 1 + left)
    draft = one.propose(Text(), ROOT)
    assert (0 if draft is None else len(draft)) == min(3, left - 1)


def test_time_is_told_apart() -> None:
    clock = Clock()

    def slow(root: int, most: int) -> Draft:
        clock.now += 5
        return chain([1, 2, 3], "x")

    told: list[tuple[int, float, Sequence[int], bool, int]] = []
    controls = Fixed(4)

    def tell(
        rows: int,
        seconds: float,
        draft: object = None,
        path: Sequence[int] = (),
        *,
        stopped: bool = False,
        beside: int = 0,
    ) -> None:
        told.append((rows, seconds, [*path], stopped, beside))

    controls.record = tell  # type: ignore[method-assign]
    drafter = Drafts(slow)
    one = make(drafter, controls=controls, clock=clock)
    drafted(one)
    clock.now += 2
    one.pause()
    clock.now += 100  # the reader's
    one.resume()
    clock.now += 1
    one.verified([0, 2], 4, stopped=True)
    drafter.does = lambda root, most: None
    drafted(one)
    clock.now += 4
    one.plain()
    one.plain()  # more of the same step
    drafted(one)
    one.pause()
    clock.now += 100  # a prompt of another text is read
    one.resume(2.0, 3)  # and then this step is computed with three rows of others
    clock.now += 1
    one.plain()
    assert told == [(4, 3.0, [0, 2], True, 0), (1, 4.0, [], False, 0), (1, 3.0, [], False, 3)]
    tally = one.last
    assert (tally.seconds_draft, tally.seconds_verify, tally.seconds_plain) == (5, 3, 7)
    assert (tally.steps, tally.plain_steps, tally.accepted) == (1, 2, 2)
    assert one.total == tally
    one.begin(0)
    assert one.last != one.total == tally


def test_rows_that_fill_a_step_are_no_drafts() -> None:
    one = make(Drafts(tokens(1)))
    assert drafted(one) == [1, ROOT, ROOT]
    one.verified([0, 1], 4)
    assert (one.last.drafted, one.last.accepted, one.last.lucky) == (1, 1, 1)
    assert one.last.mean_length == 3
    drafted(one)
    one.plain(4, 2)  # copies, for another text's draft
    assert (one.last.plain_steps, one.last.filled, one.total.filled, one.last.mean_length) == (1, 2, 2, 3)


def test_what_it_takes_to_decide_is_of_the_drafts_cost() -> None:
    clock = Clock()
    spent: list[float] = []

    class Deciding(Fixed):
        def proposed(self, source: str, draft: Draft | None, seconds: float) -> None:
            spent.append(seconds)

        def choose(self, draft: Draft, instead: Any = ()) -> int:
            clock.now += 3
            return 1

    one = make(Drafts(tokens(1)), controls=Deciding(4), clock=clock)
    for _ in range(3):
        assert drafted(one) is None
        clock.now += 1
        one.plain()
    assert spent == [0, 3, 3], "as it was the last time"
    assert one.last.seconds_plain == 3
    assert one.last.seconds_draft == 9


class Rows:
    """Features of the target, by position."""

    def __init__(self, newest: int | None = None) -> None:
        self.rows = np.empty((0, 2), np.float32)
        self.newest = newest

    def read(self, count: int) -> Any:
        return self.rows[:count]

    def of(self, wants: Features, rows: Any) -> Any:
        return rows


def test_one_that_looks_into_the_target_is_told_what_stays() -> None:
    drafter = Drafts(tokens(1))
    seen: list[tuple[int, list[int], list[float]]] = []
    drafter.wants = Features((1,))  # type: ignore[misc]
    drafter.observe = lambda start, told, rows: seen.append(  # type: ignore[method-assign]
        (start, told.tolist(), rows[:, 0].tolist())
    )
    features = Rows()
    one = make(drafter, features=features)
    features.rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    one.evaluated(0, ids(10, 11), ahead=False)
    one.evaluated(2, ids(5, 1, 2, 3), ahead=True)
    assert len(seen) == 1
    one.settled([0, 2])
    one.settled([0, 2])
    one.evaluated(4, ids(6, 7), ahead=True)
    one.truncated(4)
    one.settled([0])
    one.evaluated(4, ids(8, 9), ahead=True)
    one.settled([])
    assert seen == [(0, [10, 11], [0, 2]), (2, [5, 2], [0, 4])], "the path of a tree"
    drafter.observe = lambda *_: raises(ValueError("no"))(0, 0)  # type: ignore[method-assign]
    one.evaluated(4, ids(8), ahead=False)
    one.evaluated(5, ids(8), ahead=False)
    assert one.off is not None
    assert drafted(one) is None


def test_the_old_part_of_a_prompt_is_not_read_for_those_who_look_at_the_newest() -> None:
    drafter = Drafts(tokens(1))
    seen: list[int] = []
    drafter.wants = Features((1,), newest=6)  # type: ignore[misc]
    drafter.observe = lambda start, told, rows: seen.append(start)  # type: ignore[method-assign]
    features = Rows(newest=6)
    one = make(drafter, features=features)
    features.rows = np.zeros((4, 2), np.float32)
    one.begin(20)
    for start in range(0, 20, 4):
        one.evaluated(start, ids(1, 2, 3, 4), ahead=False)
    assert seen == [12, 16], "positions from 14 on are looked at"
    one.truncated(4)
    one.evaluated(4, ids(1, 2), ahead=False)
    assert seen == [12, 16, 4], "what comes after the prompt is no prompt"


def test_one_that_is_not_asked_is_not_given_what_it_looks_at() -> None:
    class Chosen(Fixed):
        wanted = False
        behind = 0

        def ask(self, source: str, behind: int = 0, instead: Any = ()) -> int:
            self.behind = behind
            return 3 if self.wanted else 0

    drafter, controls, text = Drafts(tokens(1)), Chosen(4), Text()
    seen: list[int] = []
    drafter.wants = Features((1,))  # type: ignore[misc]
    drafter.observe = lambda start, told, rows: seen.append(start)  # type: ignore[method-assign]
    features = Rows()
    one = make(drafter, controls=controls, features=features)
    features.rows = np.zeros((40, 2), np.float32)

    def step() -> None:
        at = len(text.tokens)
        drafted(one, text)
        one.evaluated(at, ids(3), ahead=False)
        text.tokens = np.append(text.tokens, ids(3))

    one.evaluated(0, text.tokens, ahead=False)
    for _ in range(200):
        step()
    assert seen == [0, *range(10, 10 + IDLE_STEPS)]
    assert controls.behind == WARM, "what was not given is not read"
    seen.clear()
    controls.wanted = True
    for _ in range(WARM):
        step()
        assert not drafter.asked, "it knows nothing that is new"
    assert seen == [*range(210, 210 + WARM)]
    assert drafted(one, text) == [1, ROOT, ROOT]
    one.verified([0], 4)
    controls.wanted = False
    for _ in range(IDLE_STEPS + 40):
        step()
    assert len(seen) == WARM + IDLE_STEPS
    seen.clear()
    at = len(text.tokens)
    one.evaluated(at, np.full(40, 3, np.int32), ahead=False)
    text.tokens = np.append(text.tokens, np.full(40, 3, np.int32))
    for _ in range(AGAIN):
        step()
    assert seen == [at, *range(at + 40, at + 40 + AGAIN)], "a prompt is read for all"
    controls.wanted = True
    assert drafted(one, text) is not None, "and might be what it drafts well for"
    assert controls.behind == 40 + AGAIN
    controls.wanted = False
    step()
    one.evaluated(len(text.tokens), ids(1, 2), ahead=True)
    assert len(seen) == AGAIN + 2, "rows ahead are no steps that go by without a draft"


def test_steps_that_nobody_is_asked_for_are_told_of_together() -> None:
    """And in the end all of them are counted, as long as those that were timed."""
    clock, text = Clock(), Text()
    drafter = Drafts(lambda *_: None)
    controls = Controller()
    one = make(drafter, controls=controls, clock=clock)

    def slow(root: int, most: int) -> None:
        clock.now += 0.05  # of a plain step: worth asking for now and then

    drafter.does = slow
    timed_steps = 0
    told = controls.record

    def counted(*args: Any, **settings: Any) -> None:
        nonlocal timed_steps
        timed_steps += 1
        told(*args, **settings)

    controls.record = counted  # type: ignore[method-assign]
    for steps in range(1, 201):
        assert one.propose(text, ROOT) is None
        clock.now += 1
        one.plain()
        if steps % 50 == 0:
            assert one.last.plain_steps == one.total.plain_steps == steps
            assert one.last.seconds_plain == pytest.approx(steps)
    assert timed_steps < 120
    assert 5 < len(drafter.asked) < 60
    assert one.last.seconds_draft <= 0.02 * 200
    drafter.does = lambda root, most: chain([1] * min(most, 8), "x")  # type: ignore[assignment,return-value]
    asked = len(drafter.asked)
    for _ in range(40):
        draft = one.propose(text, ROOT)
        clock.now += 1
        if draft is not None:
            break
        one.plain()
    assert len(drafter.asked) > asked, "it is not forgotten"


def test_a_lone_drafter_is_lent_from_text_to_text() -> None:
    """It forgets one before it is told of another. While it rests nothing of the target's compute is read for it."""
    seen: list[tuple[int, int]] = []
    drafter = Drafts(tokens(1, 2, 3), "lone")
    drafter.wants = Features((1,))  # type: ignore[misc]
    features = Rows()
    features.rows = np.zeros((40, 2), np.float32)
    lone, own = GuardedDrafter(drafter, lone=True), [Drafts(lambda *_: None, f"own {i}") for i in range(2)]
    texts = [make(own[i], lone, features=features) for i in range(2)]
    texts[1].lend("another text has it")
    drafter.observe = lambda start, told, rows: seen.append((start, len(told)))  # type: ignore[method-assign]
    drafter.truncate = lambda length: seen.append((-1, length))  # type: ignore[method-assign]

    def step(one: Speculator, at: int, count: int = 1) -> list[int] | None:
        text = Text(np.arange(at, dtype=np.int32))
        got = drafted(one, text)
        one.evaluated(at, np.full(count, 3, np.int32), ahead=False)
        return got

    assert step(texts[0], 10) == [1, 2, 3]
    assert step(texts[1], 50) is None
    assert seen == [(10, 1)]
    for one in texts:
        one.lend("2 texts are decoded together")
        one.truncated(5)
        assert SpecStats(one).off == "lone: 2 texts are decoded together"
        assert step(one, 11) is None
        assert one.state() == []
        one.settled([])
    assert seen == [(10, 1), (-1, 5)], "cuts of the text that it still has"
    seen.clear()
    texts[0].lend("drafting for another text")
    texts[1].lend(None)
    texts[1].lend(None)
    assert SpecStats(texts[1]).off is None
    assert texts[1].types == ("own 1", "lone")
    assert step(texts[1], 60, WARM) is None, "it knows nothing of this text"
    assert seen == [(-1, 0), (60, WARM)]
    assert step(texts[1], 60 + WARM) == [1, 2, 3]
    assert [len(one.asked) for one in own] == [2, 4], "they are asked in any case"
    drafter.does = raises(ValueError("it is broken"))
    assert step(texts[1], 70) is step(texts[1], 71) is None
    assert drafter.closed == 1
    texts[1].lend("drafting for another text")
    texts[0].lend(None)
    assert step(texts[0], 80) is None
    assert texts[0].types == ("own 0",)
    assert len(drafter.asked) == 3, "whoever it failed"


class Remembers(Drafts):
    """A drafter that is given rows, and whose state can be kept."""

    wants = Features((1,))

    def state(self) -> Any:
        text = self.text.copy()
        return SimpleNamespace(text=text, length=len(text), size=len(text), origin=SimpleNamespace(name=self.name))

    def load(self, saved: Any) -> None:
        assert self.text == []
        self.text = saved.text.copy()


def shared(count: int = 2) -> tuple[Remembers, list[Speculator], Callable[..., list[int] | None]]:
    """A lone drafter, texts that share it, and what takes a step of one at a position."""
    drafter, features = Remembers(tokens(1, 2, 3), "lone"), Rows()
    features.rows = np.zeros((40, 2), np.float32)
    lone = GuardedDrafter(drafter, lone=True)
    texts = [make(lone, features=features) for _ in range(count)]
    for text in texts[1:]:
        text.lend("drafting for another text")

    def step(at: int, count: int, one: int = 0) -> list[int] | None:
        got = drafted(texts[one], Text(np.arange(at, dtype=np.int32)))
        texts[one].evaluated(at, np.arange(at, at + count, dtype=np.int32), ahead=False)
        return got

    return drafter, texts, step


def lend(texts: list[Speculator], to: int) -> None:
    for text in texts:
        if text is not texts[to]:
            text.lend("drafting for another text")
    texts[to].lend(None)


@pytest.mark.parametrize("bound", ["own", "of the host's memory"])
def test_a_lone_drafter_keeps_a_bounded_amount_for_texts_that_it_has_left(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest states go first, whether they were left here or come with a text."""
    drafter, texts, step = shared(4)
    if bound == "own":
        monkeypatch.setattr(guarded, "MAX_KEPT", 70)
    else:
        monkeypatch.setattr(texts[0].active[0], "room", lambda: 70)
    for at in range(4):
        lend(texts, at)
        step(0, 30, at)
    assert [len(text.state()) for text in texts] == [0, 1, 1, 1], "two are kept, and one is at work"
    (saved,) = texts[1].state()
    texts[0].load([saved], ids(*range(30)))
    assert [len(text.state()) for text in texts] == [1, 0, 1, 1]
    lend(texts, 2)
    assert drafter.text == [*range(30)]
    assert [len(text.state()) for text in texts] == [1, 0, 1, 1]
    saved.size = 71
    texts[1].load([saved], ids(*range(30)))
    assert [len(text.state()) for text in texts] == [1, 0, 1, 1], "one that is too large displaces no other"


def test_a_lone_drafter_that_comes_back_goes_on() -> None:
    drafter, texts, step = shared()
    step(0, 40)
    lend(texts, 1)
    assert drafter.text == [], "it knows nothing of the other text"
    (kept,) = texts[0].state()
    assert kept.length == 40
    step(0, 30, 1)
    lend(texts, 0)
    assert drafter.text == [*range(40)]
    assert step(40, 1) == [1, 2, 3], "at once"
    lend(texts, 1)
    assert drafter.text == [*range(30)]
    lend(texts, 0)
    texts[1].truncated(20)
    texts[1].truncated(0)
    lend(texts, 1)
    assert drafter.text == [], "that text has gone"
    texts[0].load([], ids(1, 2, 3))
    lend(texts, 0)
    assert drafter.text == [], "and so has this one"


def test_a_lone_drafter_that_has_rested_goes_on() -> None:
    """It missed the rows of what was decoded beside others, and gets enough new ones first."""
    drafter, texts, step = shared()
    step(0, 40)
    texts[0].lend("2 texts are decoded together")
    step(40, 2)
    texts[0].truncated(41)
    texts[0].lend(None)
    assert len(drafter.text) == 40
    step(41, WARM - 1)
    assert step(72, 1) is None
    assert step(73, 1) == [1, 2, 3]
    texts[0].lend("2 texts are decoded together")
    texts[0].lend(None)
    assert step(74, 1) == [1, 2, 3], "it missed nothing"


def test_one_that_is_lent_is_asked_at_once() -> None:
    """Nobody was to be asked in the steps to come. It reads all of the text first, which is no drafting time."""
    drafter, controls = Drafts(tokens(1, 2, 3), "lone"), Fixed(4)
    controls.idle = lambda sources: 5 if not sources else 0  # type: ignore[method-assign]
    one = make(GuardedDrafter(drafter, lone=True), controls=controls)
    one.lend("2 texts are decoded together")
    assert drafted(one) is None
    one.plain()
    assert drafted(one) is None
    one.lend(None)
    controls.ask = Mock(return_value=3)  # type: ignore[method-assign]
    assert drafted(one) == [1, 2, 3]
    controls.ask.assert_called_once_with("lone", len(Text().tokens), ())
    assert one.last.plain_steps == 2
