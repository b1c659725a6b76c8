"""Two levels of drafts: what drafters are told of rows that come and go, and who is asked at which level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvflash_ggml.cli.report import drafts as closing
from kvflash_ggml.cli.report import spec_counters
from kvflash_ggml.errors import DecodeError
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import Controller, Fixed
from kvflash_ggml.speculation.draft import Draft, chain
from kvflash_ggml.speculation.loop import SpecStats, Speculator


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


NOTHING = Features()


class Text:
    room_ahead, branch_room = 32, 0

    def __init__(self, *tokens: int) -> None:
        self.tokens = ids(*tokens)


class Rows:
    """What a step has computed of each token: ten times the token, and what the step is called."""

    newest = None
    step = 0.0

    def __init__(self) -> None:
        self.tokens = ids()

    def read(self, count: int) -> Any:
        return np.stack([self.tokens[:count] * 10.0, np.full(count, self.step)], axis=1)

    def of(self, wants: Features, rows: Any) -> Any:
        return rows


class Drafter:
    """Knows what it was told, a token and its row at each position."""

    def __init__(self, name: str, wants: Features = NOTHING) -> None:
        self.name, self.wants = name, wants
        self.text: list[tuple[int, float]] = []
        self.proposes: list[int] | BaseException = [1, 2]
        self.closed = 0

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        assert start <= len(self.text), "a gap"
        steps = [0.0] * len(tokens) if rows is None else rows[:, 1].tolist()
        self.text[start:] = zip(tokens.tolist(), steps, strict=True)

    def propose(self, root: int, most: int) -> Draft | None:
        if isinstance(self.proposes, BaseException):
            raise self.proposes
        return chain(self.proposes, self.name)

    def truncate(self, length: int) -> None:
        del self.text[length:]

    def close(self) -> None:
        self.closed += 1


class Pool(Drafter):
    able = True


def make(*sources: Any, controls: Any = None) -> tuple[Speculator, Speculator, Pool, Rows]:
    """The outer level, the nested one, the pool between them, and what steps compute."""
    settings: dict[str, Any] = {"n_vocab": 100, "ends": [99]}
    nested, pool, rows = Speculator(sources, Fixed(3), **settings), Pool("pool"), Rows()
    outer = Speculator(
        [*nested.active, pool] if controls else [pool, *nested.active], controls or Fixed(4), features=rows,  # type: ignore[arg-type]
        nested=nested, **settings,
    )  # fmt: skip
    outer.begin(4)
    return outer, nested, pool, rows


def test_what_was_sketched_is_known_while_it_lasts_and_then_the_truth() -> None:
    seeing, reading = Drafter("head", Features(nextn=True)), Drafter("ngram")
    outer, nested, _, rows = make(seeing, reading)

    def evaluated(start: int, *tokens: int, step: float, ahead: bool = True) -> None:
        rows.tokens, rows.step = ids(*tokens), step
        outer.evaluated(start, rows.tokens, ahead=ahead)

    evaluated(0, 10, 11, 12, 13, step=1, ahead=False)
    assert outer.propose(Text(10, 11, 12, 13), 20) is not None
    evaluated(4, 20, 1, 2, step=2)  # a step of the pool, of which two rows are right
    outer.retained(6)
    assert [token for token, _ in seeing.text] == [10, 11, 12, 13, 20, 1]
    nested.propose(Text(10, 11, 12, 13, 20, 1), 7)
    assert [token for token, _ in seeing.text[4:]] == [20, 1], "in time for the next draft"
    evaluated(6, 7, 8, step=3)
    outer.retained(8)
    outer.retained(8)
    seeing.proposes = []
    nested.propose(Text(10, 11, 12, 13, 20, 1, 7, 8), 30)
    assert seeing.text[4:] == [(20, 2.0), (1, 2.0), (7, 3.0), (8, 3.0)]
    assert len(reading.text) == 8
    outer.settled([])
    outer.settled([])
    assert len(seeing.text) == len(reading.text) == 4, "none of it has been"
    evaluated(4, 20, 1, 9, step=4)
    outer.settled([0, 1])
    assert seeing.text[4:] == [(20, 4.0), (1, 4.0)], "as all of the text computes it"


def test_a_sketch_that_is_cut_off_is_forgotten() -> None:
    seeing = Drafter("head", Features(nextn=True))
    outer, _, _, rows = make(seeing)
    for start, tokens, ahead in ((0, (10, 11, 12, 13), False), (4, (20, 1), True)):
        rows.tokens = ids(*tokens)
        outer.evaluated(start, rows.tokens, ahead=ahead)
    outer.retained(6)
    outer.truncated(4)
    assert len(seeing.text) == 4
    outer.settled([])
    assert len(seeing.text) == 4


def test_one_that_fails_on_the_pool_is_asked_nowhere() -> None:
    bad = Drafter("bad")
    bad.proposes = ZeroDivisionError("its own business")
    outer, nested, pool, _ = make(bad)
    assert nested.propose(Text(1, 2, 3, 4), 5) is None
    nested.plain()
    assert outer.propose(Text(1, 2, 3, 4), 5) is not None
    outer.verified([0], 4)
    assert outer.types == ("pool",)
    assert outer.off is None, "the pool still drafts"
    assert "business" in str(nested.off)
    assert bad.closed
    nested.propose(Text(1, 2, 3, 4), 5)
    assert nested.drafters == ()
    assert pool.closed == 0


def test_where_the_pool_has_nothing_to_say_others_are_asked_and_compared_with_nobody() -> None:
    source = Drafter("ngram")
    outer, _, pool, _ = make(source, controls=Controller())
    pool.able = False
    for _ in range(4):
        outer.propose(Text(1, 2, 3, 4), 5)
        outer.controls.record(1, 1.0)
    draft = outer.propose(Text(1, 2, 3, 4), 5)
    assert draft is not None
    assert draft.source == "ngram"


def test_who_drafts_dearly_is_not_asked_where_another_promises_more() -> None:
    controls = Controller(serial=("head", "pool"))
    for _ in range(3):
        controls.record(1, 1.0)
    for name, seconds in (("head", 0.3), ("pool", 0.05)):
        controls.proposed(name, chain([1], name), seconds)
        controls.record(1, 1.0)
    assert controls.ask("head") > 0
    assert controls.ask("head", 0, ("pool",)) == 0
    assert "another" in str(controls.off)
    assert controls.ask("pool", 0, ("head",)) > 0


@pytest.mark.parametrize(("seconds", "behind"), [(1.2, 0), (0.05, 100_000)])
def test_who_would_not_be_asked_is_not_waited_for(seconds: float, behind: int) -> None:
    """A drafter that costs more than it wins, or has a prompt to read that is too long for the budget."""
    controls = Controller(serial=("head", "pool"))
    for _ in range(3):
        controls.record(1, 1.0)
    for name, took, to_read in (("head", 0.1, 0), ("pool", seconds, 0), ("pool", 1.0, behind // 10)):
        controls.ask(name, to_read)
        controls.proposed(name, chain([1], name), took)
        controls.record(1, 1.0)
    plain = 0
    for _ in range(500):
        wanted = controls.ask("head", 0, ("pool",))
        other = 0 if wanted else controls.ask("pool", behind)
        if not wanted and not other:
            plain += 1
            controls.record(1, 1.0)
            continue
        name = "head" if wanted else "pool"
        draft = chain([1] * (wanted or other), name)
        controls.proposed(name, draft, 0.0)
        controls.record(len(draft) + 1, 1.1, draft, range(min(2, len(draft))))
    assert plain < 15


def test_steps_that_follow_others_are_timed_apart() -> None:
    controls = Controller()
    for rows in (1, 1, 1):
        controls.record(rows, 1.0)
    for _ in range(8):
        for _ in range(2):
            controls.apart()
            controls.record(1, 5.0)
        controls.record(1, 1.0)
    controls.begin(0)
    assert controls.passed(1) == 1.0, "what came first in its place took longer"


def test_where_all_of_the_text_verifies_no_drafts_none_are_made_for_the_pool() -> None:
    outer, nested, _, _ = make(Drafter("ngram"))
    for _ in range(3):
        assert outer.propose(Text(1, 2, 3, 4), 5) is not None
        outer.refused(DecodeError("no luck"))
    assert outer.propose(Text(1, 2, 3, 4), 5) is None
    assert nested.drafters == ()
    assert str(outer.off) == str(nested.off) == "DecodeError: no luck"


def test_both_levels_are_told() -> None:
    outer, nested, _, _ = make(Drafter("ngram"))
    nested.propose(Text(1, 2, 3, 4), 5)
    nested.verified([0], 3)
    outer.propose(Text(1, 2, 3, 4), 5)
    outer.verified([0, 1], 4)
    stats = SpecStats(outer)
    told = spec_counters(stats)
    assert told is not None
    assert (told["accepted"], told["on_pool"]["accepted"]) == (2, 1)
    assert told["on_pool"]["types"] == ("ngram",)
    assert "on_pool" not in told["on_pool"]
    (line,) = closing(stats)
    assert line == (
        "drafts by pool: 3.0 tokens a step (100 % accepted), of ngram on the pool: 2.0 tokens a step (50 % accepted)"
    )
    outer.begin(4)
    assert nested.last.steps == 0
    assert nested.total.steps == 1
