"""Previews in a scheduler: an answer from a part of a prompt, and all of it read behind while nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_model import STEP, FakeModel, FakeTask
from support.served import answer, ask

from kvflash_ggml.batching.messages import Access, Failed, Finished, Preview, Started
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.errors import DecodeError, HostMemoryError
from kvflash_ggml.store.swapped import ConversationFolder

LENGTH = 10 * STEP
Make = Callable[..., Scheduler]


class Counted(FakeModel):
    """Does something before its n-th step: `at` has it."""

    at: dict[int, Callable[[], None]]

    def __init__(self, **settings: Any) -> None:
        self.at = {}
        super().__init__(**settings, on_step=lambda: self.at.pop(self.steps, lambda: None)())


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Scheduler] = []

    def start(model: FakeModel | None = None, **settings: Any) -> Scheduler:
        made.append(Scheduler(model or Counted(), **settings))
        made[-1].start()
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.close()
        assert isinstance(scheduler.model, FakeModel)
        assert (scheduler.model.closed, scheduler.model.held) == (True, 0)


def text(n: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 122, n).tolist()


def model_of(scheduler: Scheduler) -> Counted:
    assert isinstance(scheduler.model, Counted)
    return scheduler.model


def preview(scheduler: Scheduler, tokens: list[int], **more: Any) -> tuple[Finished, Started]:
    asked = ask(scheduler, tokens, 20, reading="preview", **more)
    end, begun = asked.wait(), asked.events[0]
    assert isinstance(end, Finished)
    assert isinstance(begun, Started)
    return end, begun


def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def known(scheduler: Scheduler) -> dict[str, int]:
    """Tokens of each conversation."""
    found = scheduler.call(lambda: scheduler.conversations.describe(Access()), looks=True).result(20)
    return {one["id"]: one["tokens"] for one in found}


def interruptions(scheduler: Scheduler) -> list[int]:
    """Gets the tokens that are read, each time that the reading behind gives way."""
    found, put_back = list[int](), scheduler.behind.put_back

    def noted(job: Any) -> None:
        if len(scheduler.model.tokens) > STEP + 20:  # a preview has added it before anything was read
            found.append(len(scheduler.model.tokens))
        put_back(job)

    scheduler.behind.put_back = noted  # type: ignore[method-assign]
    return found


def read_behind(scheduler: Scheduler, id: str, length: int = LENGTH) -> None:
    until(lambda: known(scheduler).get(id) == length)


def test_a_preview_says_what_it_is_and_all_is_read_behind(make: Make) -> None:
    seen: list[bytes] = []
    scheduler = make(Counted(reply=lambda prompt: (seen.append(prompt), b"an answer")[1]))
    end, begun = preview(scheduler, text())
    assert end.usage.preview == begun.preview == Preview(read=STEP, prompt=LENGTH)
    assert (end.usage.prompt, end.usage.cached, end.usage.generated) == (LENGTH, 0, 9)
    read_behind(scheduler, begun.conversation)
    assert seen[0] == bytes(text()[-STEP:])
    assert scheduler.model.tokens.tolist() == text()
    assert model_of(scheduler).read_tokens == LENGTH + STEP
    assert scheduler.outcomes.totals.finished == {"stop": 1}
    turn = [*text(), *end.tokens, *text(70, 1)]
    after = answer(scheduler, turn, 20, reading="preview")
    assert (after.usage.preview, after.usage.cached) == (None, LENGTH)
    assert list(known(scheduler)) == [begun.conversation]


def test_a_short_prompt_is_read_as_usual(make: Make) -> None:
    scheduler = make()
    end, begun = preview(scheduler, text(100))
    assert end.usage.preview is begun.preview is None
    assert known(scheduler) == {begun.conversation: 109}
    assert len(scheduler.behind) == 0


def test_the_text_before_stays_and_is_gone_on_from(make: Make) -> None:
    scheduler = make()
    first = answer(scheduler, text(300), 20)
    (id,) = known(scheduler)
    whole = [*text(300), *first.tokens, *text(LENGTH, 1)]
    end, begun = preview(scheduler, whole)
    assert end.usage.preview == Preview(read=STEP, prompt=len(whole))
    assert begun.conversation == id
    read_behind(scheduler, id, len(whole))
    assert model_of(scheduler).read_tokens == 300 + STEP + LENGTH
    assert list(known(scheduler)) == [id]


def test_a_preview_that_leaves_a_text_is_a_conversation_of_its_own(make: Make) -> None:
    scheduler = make()
    answer(scheduler, text(300), 20)
    (id,) = known(scheduler)
    whole = [*text(280), *text(LENGTH, 1)]
    _, begun = preview(scheduler, whole)
    assert begun.conversation != id
    read_behind(scheduler, begun.conversation, len(whole))
    assert known(scheduler).keys() == {id, begun.conversation}


def test_who_waits_comes_first_and_no_step_is_lost(make: Make) -> None:
    scheduler = make()
    model, others, waits = model_of(scheduler), [], []
    # the preview takes a step to read, and 10 to write
    for step in (13, 15):
        model.at[step] = lambda seed=step: others.append(ask(scheduler, text(STEP, seed)))
    model.at[14] = lambda: waits.append(len(scheduler.behind))
    end, begun = preview(scheduler, text())
    read_behind(scheduler, begun.conversation)
    assert waits == [1], "the reading went on"
    assert [type(one.wait()) for one in others] == [Finished, Finished]
    assert model.read_tokens == STEP + LENGTH + 2 * STEP
    assert end.usage.preview is not None


def test_a_reading_that_cannot_be_left_ends_nobody_else(make: Make) -> None:
    """What it holds cannot be written when another request comes. The engine goes on."""

    class Stuck(FakeTask):
        def steps(self) -> Any:
            try:
                yield from super().steps()
            except GeneratorExit:
                if not self.request.max_tokens:  # it is read behind a preview
                    raise HostMemoryError("full") from None
                raise

    scheduler, others = make(Counted(task=Stuck)), list[Any]()
    model_of(scheduler).at[13] = lambda: others.append(ask(scheduler, text(STEP, 1)))
    preview(scheduler, text())
    until(lambda: len(others) == 1)
    assert isinstance(others[0].wait(), Finished)
    assert answer(scheduler, text(STEP, 2)).usage.generated > 0


def test_calls_and_shutdown_do_not_wait_for_it(make: Make) -> None:
    scheduler = make()
    model, done = model_of(scheduler), []
    model.at[13] = lambda: done.append(
        (scheduler.call(lambda: len(scheduler.behind)), scheduler.idle, scheduler.running)
    )
    _, begun = preview(scheduler, text())
    until(lambda: bool(done))
    future, idle, running = done[0]
    assert (future.result(20), idle, running) == (1, True, [])
    read_behind(scheduler, begun.conversation)
    model.at[model.steps + 14] = scheduler.end_answers
    preview(scheduler, text(seed=1))
    scheduler.close()
    assert model.closed


@pytest.mark.parametrize("step", [11, 14])
def test_another_turn_before_it_is_read_is_a_preview_of_its_own(make: Make, step: int) -> None:
    scheduler = make()
    model, later = model_of(scheduler), []
    turn = [*text(), *text(400, 1)]
    model.at[step] = lambda: later.append(ask(scheduler, turn, 20, reading="preview"))
    preview(scheduler, text())
    until(lambda: bool(later))
    end = later[0].wait()
    assert isinstance(end, Finished)
    assert end.usage.preview == Preview(read=STEP, prompt=len(turn))
    read_behind(scheduler, later[0].events[0].conversation, len(turn))
    assert model.read_tokens == 2 * STEP + len(turn)


@pytest.mark.parametrize("step", [11, 14])
def test_a_conversation_that_goes_is_not_read(make: Make, step: int) -> None:
    scheduler = make()
    model, gone = model_of(scheduler), []
    begun: list[str] = []

    def erase() -> None:
        gone.append(scheduler.call(lambda: scheduler.conversations.erase(begun[0], Access())))

    model.at |= {1: lambda: until(lambda: bool(begun)), step: erase}
    asked = ask(scheduler, text(), 20, reading="preview")
    begun.append(asked.next().conversation)
    asked.wait()
    until(lambda: bool(gone))
    assert gone[0].result(20) is True
    assert known(scheduler) == {}
    assert len(scheduler.behind) == 0
    assert model.read_tokens <= 5 * STEP
    assert not scheduler.call(lambda: scheduler.conversations.erase(begun[0], Access())).result(20)


@pytest.mark.parametrize("step", [0, 4])
def test_a_client_that_leaves_has_nothing_read(make: Make, step: int) -> None:
    scheduler = make()
    model = model_of(scheduler)
    asked: list[Any] = []
    model.at[step] = lambda: scheduler.cancel(asked[0].request.id)
    model.at[0 if step else 1] = lambda: until(lambda: bool(asked))
    asked.append(ask(scheduler, text(), 20, reading="preview"))
    assert isinstance(asked[0].wait(), Failed)
    assert known(scheduler) == {}
    assert len(scheduler.behind) == 0
    assert answer(scheduler, text(), 20).usage.cached == 0


def test_a_preview_that_is_not_to_be_kept_is_not_read_again(make: Make) -> None:
    scheduler = make()
    end, _ = preview(scheduler, text(), reuse=False)
    assert end.usage.preview is not None
    assert known(scheduler) == {}
    assert len(scheduler.behind) == 0


@pytest.mark.parametrize("error", [DecodeError("no"), HostMemoryError("full"), RuntimeError("odd")])
@pytest.mark.parametrize("step", [1, 4, 12, 14])
def test_what_fails_leaves_a_conversation_that_goes_on(make: Make, error: Exception, step: int) -> None:
    scheduler = make()
    model = model_of(scheduler)
    first = answer(scheduler, text(300), 20)

    def fail() -> None:
        raise error

    model.at[model.steps + step] = fail
    whole = [*text(300), *first.tokens, *text(LENGTH, 1)]
    asked = ask(scheduler, whole, 20, reading="preview")
    assert isinstance(asked.wait(), Failed if step < 11 else Finished)
    until(lambda: not model.at)
    end = answer(scheduler, whole, 20)
    assert end.usage.preview is None
    assert scheduler.model.tokens[: len(whole)].tolist() == whole
    assert all(slot.request is None for slot in scheduler.slots)


def test_nothing_of_a_preview_comes_into_the_folder(make: Make, tmp_path: Path) -> None:
    scheduler = make(folder=ConversationFolder(tmp_path))
    model = model_of(scheduler)
    model.at[12] = scheduler.end_answers  # within the reading behind
    _, begun = preview(scheduler, text())
    until(lambda: not model.at)
    scheduler.close()
    (path,) = (tmp_path / "parked").glob("c-*")
    assert path.name.startswith(begun.conversation)
    kept = np.frombuffer(path.read_bytes(), np.int32).tolist()
    assert 0 < len(kept) < LENGTH
    assert kept == text()[: len(kept)]
    again = make(folder=ConversationFolder(tmp_path))
    assert answer(again, text(), 20).usage.cached == len(kept)


def test_who_looks_at_the_conversations_does_not_interrupt_the_reading(make: Make) -> None:
    """A page that polls them made a reading of 1.5 s one of 4.5 s. What changes something still comes first."""
    scheduler = make()
    model, gave_way, seen = model_of(scheduler), interruptions(scheduler), []

    def look() -> None:
        describe = lambda: len(scheduler.conversations.describe(Access()))  # noqa: E731
        seen.append((len(model.tokens), scheduler.call(describe, looks=True)))

    model.at |= dict.fromkeys(range(12, 18), look)
    model.at[18] = lambda: seen.append((len(model.tokens), scheduler.call(lambda: len(model.tokens))))
    _, begun = preview(scheduler, text())
    read_behind(scheduler, begun.conversation)
    assert [future.result(20) for _, future in seen] == [*[1] * 6, seen[-1][0] + STEP]
    assert gave_way == [seen[-1][0] + STEP]


def test_calls_come_between_two_steps_of_a_prompt(make: Make) -> None:
    """Who looks need not wait for the end of a long prompt; with several slots, nor need who changes something."""
    for parallel in (1, 2):
        scheduler = make(Counted(parallel=parallel))
        model, seen = model_of(scheduler), []

        def ask_both(scheduler: Scheduler = scheduler, model: Counted = model, seen: list[Any] = seen) -> None:
            seen += [scheduler.call(lambda: len(model.tokens), looks=looks) for looks in (True, False)]

        model.at[2] = ask_both
        answer(scheduler, text(), 1)
        looked, changed = (future.result(20) for future in seen)
        assert looked == 3 * STEP
        assert changed == (3 * STEP if parallel > 1 else LENGTH)


def test_it_goes_on_beside_who_was_put_aside_until_its_reader_takes_more(make: Make) -> None:
    scheduler = make()
    stalled = [True]
    slow = ask(scheduler, text(STEP, 5), 20, full=lambda: stalled[0])
    until(lambda: scheduler.put_aside == 1)
    model, before, gave_way = model_of(scheduler), scheduler.counts.swapped_out, interruptions(scheduler)
    _, begun = preview(scheduler, text())
    read_behind(scheduler, begun.conversation)
    assert gave_way == []
    assert (scheduler.put_aside, scheduler.counts.swapped_out) == (1, before)
    model.at[model.steps + 15] = lambda: stalled.__setitem__(0, False)
    _, begun = preview(scheduler, text(seed=1))
    assert isinstance(slow.wait(), Finished)
    read_behind(scheduler, begun.conversation)
    assert len(gave_way) == 1


def test_a_next_turn_that_is_cancelled_does_not_end_the_reading(make: Make) -> None:
    scheduler, later = make(), list[Any]()
    model, turn = model_of(scheduler), [*text(), *text(400, 1)]
    model.at[11] = lambda: later.append(ask(scheduler, turn, 20, reading="preview"))
    model.at[13] = lambda: scheduler.cancel(later[0].request.id)
    _, begun = preview(scheduler, text())
    until(lambda: bool(later))
    assert isinstance(later[0].wait(), Failed)
    until(lambda: known(scheduler).get(begun.conversation) == LENGTH)
