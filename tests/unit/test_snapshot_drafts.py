"""What drafters know of a text is saved with it, and comes back only to those that it is of."""

from __future__ import annotations

import json
import logging
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import plain_reader
from support.saving import dump, load, make, snapshot_store, text
from support.snapshot_files import EXTREMES, NONSENSE

from kvflash_ggml.arrays import Int32s
from kvflash_ggml.errors import DecodeError, SnapshotError
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.state.blob import Bytes
from kvflash_ggml.state.session import Origin, SavedDraft, SessionState

LENGTH = 300
KNOWN = SavedDraft(
    origin=Origin("eagle3", "0123456789abcdef", 4096, (1, 1)),
    length=LENGTH,
    first=20,
    end=LENGTH - 1,
    context=Bytes(bytes(range(200))),
    rows=Bytes(np.arange(12, dtype="<f4").tobytes()),
)


class Following:
    """Knows something of a text, and notes what it is told."""

    def __init__(self, known: abc.Sequence[SavedDraft] = ()) -> None:
        self.known = known
        self.adopted: list[tuple[list[SavedDraft], list[int]]] = []
        self.lengths: list[int] = []
        self.interrupt = False

    def evaluated(self, start: int, tokens: Int32s, *, ahead: bool) -> None: ...

    def settled(self, length: int) -> None: ...

    def truncated(self, length: int) -> None:
        self.lengths.append(length)

    def state(self) -> abc.Sequence[SavedDraft]:
        return self.known

    def load(self, saved: abc.Sequence[SavedDraft], tokens: Int32s) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        self.adopted.append(([*saved], tokens.tolist()))


@pytest.fixture
def world() -> Iterator[Callable[..., Sequence]]:
    made: list[Sequence] = []

    def build(*known: SavedDraft) -> Sequence:
        made.append(make())
        made[-1].follower = Following(known)
        return made[-1]

    yield build
    for session in made:
        session.close()
        assert not session.engine.slabs  # type: ignore[attr-defined]


@pytest.fixture
def saved(world: Any) -> bytes:
    session = world(KNOWN, replace(KNOWN, origin=replace(KNOWN.origin, name="mtp"), rows=Bytes(b"")))
    extend(session, text(LENGTH))
    return dump(session)


def contents(one: SavedDraft) -> tuple[Any, ...]:
    return one.origin, one.length, one.first, one.end, bytes(one.context.read()), bytes(one.rows.read())


def test_it_comes_back(world: Any, saved: bytes) -> None:
    session = world()
    extend(session, text(50, 7))
    load(session, saved)
    ((drafts, tokens),) = session.follower.adopted
    assert [contents(one) for one in drafts] == [
        contents(KNOWN),
        (Origin("mtp", "0123456789abcdef", 4096, (1, 1)), LENGTH, 20, LENGTH - 1, bytes(range(200)), b""),
    ]
    assert tokens == text(LENGTH).tolist()
    assert session.follower.lengths[-1] == 0  # it was cut to nothing before


def test_it_lies_where_the_format_says(saved: bytes) -> None:
    parts = plain_reader.read(saved)
    assert parts.sections["speculation 0 context"] == bytes(range(200))
    assert np.frombuffer(parts.sections["speculation 0 rows"], "<f4").tolist() == list(range(12))
    assert parts.sections["speculation 1 rows"] == b""
    assert parts.facts["speculation"][0] == {
        "name": "eagle3", "model": "0123456789abcdef", "window": 4096, "types": [1, 1],
        "length": LENGTH, "first": 20, "end": LENGTH - 1,
    }  # fmt: skip


def test_files_without_it(world: Any, saved: bytes) -> None:
    parts = plain_reader.read(saved)
    del parts.facts["speculation"]
    old = replace(parts, sections={k: v for k, v in parts.sections.items() if not k.startswith("speculation")})
    session = world()
    load(session, plain_reader.write(old))
    assert session.follower.adopted == [([], text(LENGTH).tolist())]
    assert "speculation" not in plain_reader.read(dump(world())).facts


def test_texts_that_are_cut_are_saved_without(world: Any) -> None:
    session = world(KNOWN)
    extend(session, text(LENGTH))
    assert "speculation" not in plain_reader.read(dump(session, LENGTH - 1)).facts
    state = restore.state(session, drafts=False)
    assert not state.drafts
    state.release()


def test_it_is_shared_and_counts(world: Any) -> None:
    session = world(KNOWN)
    extend(session, text(LENGTH))
    state, without = restore.state(session), restore.state(session, drafts=False)
    shared = state.share()
    assert shared.drafts == (KNOWN,)
    assert shared.size - without.size == KNOWN.size == 248
    for one in (state, without, shared):
        one.release()


def test_an_interrupt_leaves_an_empty_text(world: Any, saved: bytes) -> None:
    session = world()
    extend(session, text(50, 7))
    session.follower.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        load(session, saved)
    assert session.length == 0
    assert session.follower.lengths[-1] == 0
    session.follower.interrupt = False
    load(session, saved)
    assert session.length == LENGTH


FIELDS = ("name", "model", "window", "types", "length", "first", "end")
POSSIBLE = [("window", 2**31 - 1), ("name", "7"), ("model", "7")]
WRONG = [
    *[(field, value) for field in FIELDS for value in (*NONSENSE, *EXTREMES) if (field, value) not in POSSIBLE],
    ("length", LENGTH + 1), ("length", 100), ("first", LENGTH), ("end", 10), ("end", LENGTH + 1), ("types", [1]),
    ("types", [1, 1.5]), ("types", [True, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_cannot_be_is_refused(field: str, value: Any, world: Any, saved: bytes) -> None:
    session = world()
    extend(session, text(50, 7))
    parts = plain_reader.read(saved)
    parts.facts["speculation"][0][field] = value
    with pytest.raises(SnapshotError, match="contradicts itself: 'speculation 0 "):
        load(session, plain_reader.write(parts))
    del parts.facts["speculation"][0][field]
    with pytest.raises(SnapshotError, match="contradicts itself: 'speculation 0 "):
        load(session, plain_reader.write(parts))
    assert session.tokens.tolist() == text(50, 7).tolist()
    assert not session.follower.adopted


@pytest.mark.parametrize("whole", [*NONSENSE[:4], {}, [1], [[]], [None], [{}] * 17, ["x"]])
def test_lists_that_are_none(whole: Any, world: Any, saved: bytes) -> None:
    parts = plain_reader.read(saved)
    parts.facts["speculation"] = whole
    with pytest.raises(SnapshotError, match="contradicts itself: 'speculation'"):
        load(world(), plain_reader.write(parts))


def test_sections_that_are_missing_or_damaged(world: Any, saved: bytes) -> None:
    """The first is a contradiction; the second is found when somebody wants them, and the text goes on."""
    parts = plain_reader.read(saved)
    for name in ("speculation 0 context", "speculation 1 rows"):
        less = replace(parts, sections={k: v for k, v in parts.sections.items() if k != name})
        with pytest.raises(SnapshotError, match=f"no section '{name}'"):
            load(world(), plain_reader.write(less))
    session = world()
    directory = json.dumps(parts.facts["speculation"]).encode()
    assert directory in saved
    at = saved.index(bytes(range(200)))
    load(session, saved[: at + 9] + b"\0" + saved[at + 10 :])
    with pytest.raises(SnapshotError, match="'speculation 0 context' does not match its checksum"):
        session.follower.adopted[0][0][0].context.read()


# --- who is asked


class Knows:
    """A drafter that can be put aside."""

    wants: Features = Features()

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error
        self.told: list[Any] = []

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        self.told.append((start, len(tokens)))

    def propose(self, root: int, most: int) -> None: ...

    def truncate(self, length: int) -> None:
        self.told.append(length)

    def close(self) -> None: ...

    def state(self) -> SavedDraft | None:
        if self.error is not None:
            raise self.error
        return replace(KNOWN, origin=replace(KNOWN.origin, name=self.name))

    def load(self, saved: SavedDraft) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(saved.origin.name)


@dataclass
class Written:
    """A text, as those who draft for it see it."""

    tokens: Any
    room_ahead: int = 4
    branch_room: int = 0


def speculator(*drafters: Any) -> Any:
    from kvflash_ggml.speculation.decision import Fixed
    from kvflash_ggml.speculation.loop import Speculator

    return Speculator(drafters, Fixed(4), n_vocab=1000, ends=())


def test_each_adopts_its_own(caplog: pytest.LogCaptureFixture) -> None:
    from kvflash_ggml.speculation.ngram import NGram

    eagle, mtp, tokens = Knows("eagle3"), Knows("mtp"), text(LENGTH + 10)
    one = speculator(NGram(), mtp, eagle)
    assert one.state() == []  # nobody has been told of anything
    one.propose(Written(tokens), 1)
    assert [saved.origin.name for saved in one.state()] == ["mtp", "eagle3"]
    one.truncated(0)
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        one.load([KNOWN], tokens)
    one.propose(Written(tokens), 1)
    assert eagle.told == [(0, LENGTH + 10), 0, "eagle3", (LENGTH, 10)]
    assert mtp.told == [(0, LENGTH + 10), 0, 0, (0, LENGTH + 10)]
    assert [record.message for record in caplog.records] == [
        "mtp starts anew behind the restored text: it did not draft when the text was saved"
    ]
    one.truncated(0)
    caplog.clear()
    one.load([], tokens)  # of a file that says nothing
    assert not caplog.records


@pytest.mark.parametrize("error", [SnapshotError("another window"), ValueError("broken")])
def test_what_fails_begins_anew(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked as before."""
    tokens = text(LENGTH)
    refused = Knows("eagle3", error)
    one = speculator(refused)
    one.propose(Written(tokens), 1)
    assert one.state() == []
    one.truncated(0)
    one.load([KNOWN], tokens)
    one.propose(Written(tokens), 1)
    assert refused.told == [(0, LENGTH), 0, 0, (0, LENGTH)]
    assert one.off is None
    assert [record.message for record in caplog.records] == [
        f"the state of eagle3 is not saved: {error}",
        f"eagle3 starts anew behind the restored text: {error}",
    ]


def test_what_cannot_draft_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    one = speculator(drafter := Knows("eagle3"))
    drafter.propose = mock.Mock(side_effect=DecodeError("no numbers"))  # type: ignore[method-assign]
    one.load([KNOWN], text(LENGTH))
    assert drafter.told == ["eagle3", 0]
    assert "starts anew behind the restored text: no numbers" in caplog.text


def test_an_interrupted_load_is_cut(world: Any) -> None:
    """Whatever had been adopted by then is told so."""
    drafter = Knows("eagle3", KeyboardInterrupt())  # type: ignore[arg-type]
    one = speculator(drafter)
    with pytest.raises(KeyboardInterrupt):
        one.load([KNOWN], text(LENGTH))
    one.truncated(0)
    assert drafter.told == [0]


def test_a_state_says_what_it_has(world: Any, saved: bytes) -> None:
    opened = snapshot_store(world()).load(saved)
    assert isinstance(opened, SessionState)
    assert opened.own_size > sum(one.size for one in opened.drafts) == 448
    opened.release()
