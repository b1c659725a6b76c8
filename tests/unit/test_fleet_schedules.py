"""Several servers go on with the conversations of one store, and another machine prunes it: any of them is next at any
operation. Operations fail, get lost, come late, or are the last of their server; clocks differ by hours.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_objects import MemoryObjects

from kvflash_fleet import shared as shared_module
from kvflash_fleet import tidy
from kvflash_fleet.objects import Listed
from kvflash_fleet.shared import Draft, Head, SharedTexts, begin_of
from kvflash_ggml.errors import SnapshotError

TEXT = np.arange(70, dtype=np.int32) + 33
BEGIN = begin_of(TEXT, "")
MODEL = "0123456789abcdef" * 2
TURNS = 4

EVENTS = {"kill": 0.01, "fail": 0.03, "late": 0.04, "lose": 0.02}
"""How likely it is that an operation ends otherwise than well."""


IDS = random.Random()
"""Decides the ids of conversations: a server chooses by their order, and a seed is to give one schedule."""


def new_id() -> str:
    return f"c-{IDS.getrandbits(64):016x}"


class Killed(Exception):
    """The server ends here, and forgets what it had."""


class Actors:
    """Threads of which one runs at a time. Whose turn it is, `draw` decides at each operation of the store."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._back = threading.Semaphore(0)
        self._go: dict[int, threading.Semaphore] = {}
        self.current = 0
        self.errors: list[BaseException] = []

    def run(self, *works: Callable[[], None]) -> None:
        threads = []
        for number, work in enumerate(works):
            self._go[number] = threading.Semaphore(0)
            threads.append(threading.Thread(target=self._play, args=(number, work)))
        for thread in threads:
            thread.start()
        while self._go:
            self.current = self.draw.choice(sorted(self._go))
            self._go[self.current].release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        for error in self.errors:
            raise error

    def _play(self, number: int, work: Callable[[], None]) -> None:
        self._go[number].acquire()
        try:
            work()
        except BaseException as err:
            self.errors.append(err)
        finally:
            del self._go[number]
            self._back.release()

    def give_way(self) -> None:
        mine = self._go.get(self.current)
        if mine is not None:
            self._back.release()
            mine.acquire()


class Unreliable(MemoryObjects):
    """lost: whether a write has been lost without an error, or a block removed."""

    def __init__(self, actors: Actors) -> None:
        super().__init__(self._happens, self._time)
        self.actors, self.draw = actors, actors.draw
        self.skew = [self.draw.uniform(-2, 2) * tidy.GRACE_S for _ in range(5)]
        self.steps = 0
        self.calm = False
        self.lost = False
        self.late: list[Callable[[], Any]] = []

    def _time(self) -> float:
        return 1e6 + self.steps * 120.0 + self.skew[self.actors.current]

    def _event(self) -> str:
        at = self.draw.random()
        for event, share in EVENTS.items():
            at -= share
            if at < 0:
                return event
        return ""

    def _happens(self, what: str, name: str) -> None:
        self.steps += 1
        if self.calm:
            return
        self.actors.give_way()
        while self.late and self.draw.random() < 0.2:
            self.late.pop(self.draw.randrange(len(self.late)))()
        event = self._event()
        if event == "kill":
            raise Killed
        if event == "fail":
            raise OSError("the store is away")
        if event == "late" and what == "delete":
            self.late.append(lambda: self.all.pop(name, None))
            raise OSError("timed out")

    def put(self, name: str, data: bytes) -> None:
        event = "" if self.calm else self._event()
        if event == "late":
            self.late.append(lambda: self.all.__setitem__(name, (data, self.clock())))
            raise OSError("timed out")
        if event == "lose":
            self.lost = True
        else:
            super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        if not self.calm and self._event() == "late":
            self.late.append(lambda: self._created_late(name, data))
            raise OSError("timed out")
        return super().create(name, data)

    def _created_late(self, name: str, data: bytes) -> None:
        """Create it, and perhaps delete it later, as `TimedObjects` does."""
        if self.create_now(name, data) and self.draw.random() < 0.5:
            self.late.append(lambda: self.all.pop(name, None))

    def delete(self, name: str) -> None:
        self.lost |= "/blocks/" in name
        super().delete(name)


class Of:
    """The objects of one model."""

    def __init__(self, objects: MemoryObjects) -> None:
        self._objects = objects

    def get(self, name: str) -> bytes:
        return self._objects.get(f"{MODEL}/{name}")

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(f"{MODEL}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        return self._objects.create(f"{MODEL}/{name}", data)

    def list(self, prefix: str) -> list[Listed]:
        found = self._objects.list(f"{MODEL}/{prefix}")
        return [Listed(one.name.removeprefix(f"{MODEL}/"), one.size, one.modified) for one in found]

    def delete(self, name: str) -> None:
        self._objects.delete(f"{MODEL}/{name}")


class Fleet:
    """done: all states that a server was told are written, in no order."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        IDS.seed(seed)
        self.actors = Actors(self.draw)
        self.objects = Unreliable(self.actors)
        self.texts = [SharedTexts(Of(self.objects)) for _ in range(4)]  # of each server, and of who looks at the end
        self.folder = folder
        self.done: list[Head] = []
        self.marks = iter(range(1000, 10**6))
        self.taken = 0

    def serve(self, number: int) -> None:
        """Take over what counts and go on with it, or go on with what this server has."""
        base: Head | None = None
        texts = self.texts[number]
        for _ in range(TURNS):
            try:
                if base is None or self.draw.random() < 0.5:
                    base = self.take_over(number) or base
                text = np.append(TEXT if base is None else base.tokens, np.int32(next(self.marks)))
                path = self.folder / f"{number}"
                path.write_bytes(text.tobytes())
                id = new_id() if base is None else base.id
                draft = Draft(id=id, salt="", prompt=1, places=None, tokens=text, base=base)
                with texts.announced(draft):
                    base = texts.publish(draft, path)
                self.done.append(base)
            except Killed:
                base = None
            except OSError:
                pass

    def take_over(self, number: int) -> Head | None:
        found = sorted(self.texts[number].latest(BEGIN).items())
        if not found:
            return None
        head = self.texts[number].read(BEGIN, *self.draw.choice(found))
        try:
            self.check(head, self.folder / f"{number}")
        except SnapshotError:
            assert self.objects.lost, "only a lost block may be missed"
            return None  # the text is read again
        self.taken += 1
        return head

    def check(self, head: Head, path: Path) -> None:
        self.texts[-1].fetch(head, path)
        assert path.read_bytes() == head.tokens.tobytes(), "a mixed text"

    def prune(self) -> None:
        for _ in range(2):
            try:
                for one in tidy.removable(tidy.survey(self.objects), now=self.objects.clock()):
                    assert one.why == "left over", one
                    self.objects.delete(one.name)
            except (Killed, OSError):
                pass

    def end(self) -> None:
        """What is late comes now. Each state that was written counts, or one that goes on from it does."""
        self.objects.calm = True
        for write in self.objects.late:
            write()
        latest = self.texts[-1].latest(BEGIN)
        for id, number in latest.items():
            try:
                self.check(self.texts[-1].read(BEGIN, id, number), self.folder / "end")
            except SnapshotError:
                assert self.objects.lost, "only a lost block may be missed"
        for head in self.done:
            assert latest[head.id] >= head.number, "a state was lost"
            now = self.texts[-1].read(head.begin, head.id, latest[head.id])
            assert np.array_equal(now.tokens[: len(head.tokens)], head.tokens), "two texts were mixed"


@settings(max_examples=settings().max_examples * (14 if settings().max_examples > 1000 else 1))  # 21000 in the long one
@given(st.integers(0, 2**48))
def test_any_schedule_keeps_texts_whole(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    fleet = Fleet(seed, folder(tmp_path_factory))
    servers = [lambda number=number: fleet.serve(number) for number in range(fleet.draw.choice([2, 3]))]
    pruning = [fleet.prune] if fleet.draw.random() < 0.5 else []
    fleet.actors.run(*servers, *pruning)
    fleet.end()


def test_schedules_meet_what_they_are_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take over, find their number taken, and come too late."""
    refused = []
    take = SharedTexts._take
    monkeypatch.setattr(SharedTexts, "_take", lambda self, head: take(self, head) or refused.append(head) or False)
    taken = written = 0
    for seed in range(60):
        fleet = Fleet(seed, tmp_path)
        fleet.actors.run(lambda: fleet.serve(0), lambda: fleet.serve(1), fleet.prune)  # noqa: B023 (run at once)
        fleet.end()
        taken, written = taken + fleet.taken, written + len(fleet.done)
    assert min(taken, written, len(refused)) > 30


def test_a_seed_gives_one_schedule(tmp_path: Path) -> None:
    """Whatever ran before, so that a seed that fails can be run again."""

    def left(seed: int) -> list[str]:
        fleet = Fleet(seed, tmp_path)
        fleet.actors.run(lambda: fleet.serve(0), lambda: fleet.serve(1), fleet.prune)
        return list(fleet.objects.all)

    assert [left(seed) for seed in range(5)] == [left(seed) for seed in range(5)]


def folder(factory: pytest.TempPathFactory) -> Path:
    path = factory.getbasetemp() / "fleet"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def small_blocks_and_known_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "BLOCK", 128)
    monkeypatch.setattr(shared_module, "ANNOUNCED", 64)
    monkeypatch.setattr(shared_module, "new_id", new_id)
