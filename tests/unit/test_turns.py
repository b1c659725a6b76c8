"""Answers without an end in more number than slots: all of them go on, and nobody waits for the end of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_model import STEP, FakeModel
from support.served import Asked, ask

from kvflash_ggml.batching.messages import Access, Event, Failed, Finished, Piece
from kvflash_ggml.batching.queue import Job, RequestQueue
from kvflash_ggml.batching.schedule import LEAST_TURN_S, SWAPS, Turn, gives_way
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.store.swapped import ConversationFolder

SLOTS, ENDLESS, SHORT = 2, 500, 5


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 122, n).tolist()


def spelled(prompt: bytes) -> bytes:
    return prompt[:8] * 500


def expected(prompt: list[int], most: int) -> str:
    return spelled(bytes(prompt))[:most].decode()


class Clock:
    """Shows a number that grows by `tick` with each step of a model."""

    def __init__(self, tick: float = 0.1) -> None:
        self.now, self.tick, self.steps = 1.0, tick, 0
        self.at: dict[int, Callable[[], object]] = {}
        """What is done before the step of this number."""

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += self.tick
        self.steps += 1
        self.at.pop(self.steps, lambda: None)()


@contextmanager
def served(parallel: int = SLOTS, *, clock: Clock, begin: bool = True, **settings: Any) -> Iterator[Scheduler]:
    names = {"folder"}
    model = FakeModel(
        parallel=parallel,
        reply=spelled,
        on_step=clock.step,
        **{name: value for name, value in settings.items() if name not in names},
    )
    scheduler = Scheduler(model, clock=clock, **{name: settings[name] for name in names if name in settings})
    if begin:
        scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()
    assert all((slot.request, slot.model.held) == (None, 0) for slot in scheduler.slots)  # type: ignore[attr-defined]


# --- the rules


def test_a_turn_lasts_as_long_as_its_swap_is_cheap() -> None:
    assert gives_way([Turn(held=LEAST_TURN_S), Turn(held=None)]) is None
    assert gives_way([Turn(held=LEAST_TURN_S + 0.1), Turn(held=None)]) == 0
    assert gives_way([Turn(held=SWAPS * 3.0, swap_s=3.0)]) is None
    assert gives_way([Turn(held=SWAPS * 3.0 + 0.1, swap_s=3.0)]) == 0


def test_who_has_decoded_longest_beyond_its_turn_gives_way() -> None:
    assert gives_way([Turn(held=5.0), Turn(held=9.0), Turn(held=8.0)]) == 1
    assert gives_way([Turn(held=5.0), Turn(held=9.0, swap_s=0.4)]) == 0


def test_a_lower_priority_gives_way_first() -> None:
    assert gives_way([Turn(held=90.0), Turn(held=3.0, priority=-1), Turn(held=4.0, priority=-1)]) == 2
    assert gives_way([Turn(held=90.0), Turn(held=1.0, priority=-1)]) == 0


turns = st.builds(
    Turn, held=st.none() | st.floats(0, 1e4), swap_s=st.floats(0, 100), priority=st.integers(-1, 1)
)  # fmt: skip


@given(st.lists(turns))
def test_nobody_gives_way_within_its_turn_or_its_prompt(running: list[Turn]) -> None:
    at = gives_way(running)
    over = [turn for turn in running if turn.held is not None and turn.held > max(LEAST_TURN_S, SWAPS * turn.swap_s)]
    assert (at is None) == (not over)
    if at is not None:
        assert running[at] in over
        assert running[at].priority == min(turn.priority for turn in over)


def test_requests_that_had_a_turn_alternate_with_those_that_had_none() -> None:
    def job(name: str, *, begun: bool, **more: Any) -> Job:
        from support.served import request

        return Job(request=request([1, 2, 3], **more), sink=lambda event: None, submitted=0.0, begun=begun, behind=name)

    waiting = RequestQueue(most=99, most_tokens=9999)
    for name in "abc":
        waiting.put(job(name, begun=False), pace=1.0)
    for name in "xyz":
        waiting.put_last(job(name, begun=True, key="another"))
    waiting.put_last(job("high", begun=True, priority=1))
    order = [waiting.take() for _ in range(8)]
    assert [one and one.behind for one in order] == ["high", "a", "x", "b", "y", "c", "z", None]


# --- answers


@pytest.mark.parametrize("slots", [1, SLOTS])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_chat_beside_more_endless_answers_than_slots(slots: int, stateful: bool) -> None:
    """It begins after two turns at most, and all others go on. No text is read twice."""
    clock, chats = Clock(), list[Asked]()
    prompts, chat = [text(100 + i, i) for i in range(slots + 1)], text(50, 9)
    began, told = dict[str, int](), dict[str, list[int]]()

    def seen(one: Asked, event: Event) -> None:
        if isinstance(event, Piece):
            began.setdefault(one.request.id, clock.steps)
            told.setdefault(one.request.id, []).append(clock.steps)

    def come() -> None:
        chats.append(ask(scheduler, chat, SHORT, seen=seen))

    clock.at[600] = come
    with served(slots, clock=clock, begin=False, stateful=stateful) as scheduler:
        endless = [ask(scheduler, prompt, ENDLESS, seen=seen) for prompt in prompts]
        scheduler.start()
        for one in endless:
            assert isinstance(one.wait(), Finished)
        assert isinstance(chats[0].wait(), Finished)
        turn = slots * (LEAST_TURN_S / clock.tick + 2)  # steps of all slots
        assert began[chats[0].request.id] - 600 <= 2 * turn + 2
        for one in endless:  # its turns come before those of each other one are over twice
            steps = told[one.request.id]
            assert max(b - a for a, b in pairwise(steps)) <= 2 * (slots + 2) * turn
        assert [one.text for one in endless] == [expected(prompt, ENDLESS) for prompt in prompts]
        assert chats[0].text == expected(chat, SHORT)
        assert scheduler.stalls > 3
        read = sum(slot.model.read_tokens for slot in scheduler.slots)  # type: ignore[attr-defined]
        assert read == sum(map(len, [*prompts, chat])) + scheduler.stalls, "and the token that was drawn last"


def test_nobody_is_swapped_out_for_nobody() -> None:
    clock = Clock(1.0)
    with served(clock=clock, begin=False) as scheduler:
        asked = [ask(scheduler, text(80, i), 200) for i in range(SLOTS)]
        scheduler.start()
        assert all(isinstance(one.wait(), Finished) for one in asked)
        assert scheduler.stalls == 0


def test_a_lower_priority_waits_for_the_end_of_a_higher_one() -> None:
    clock = Clock(1.0)
    with served(1, clock=clock, begin=False) as scheduler:
        high, low = (ask(scheduler, text(80, i), 50, priority=1 - i) for i in range(2))
        scheduler.start()
        assert isinstance(high.wait(), Finished)
        assert isinstance(low.wait(), Finished)
        assert scheduler.stalls == 0


@pytest.mark.parametrize("kind", ["private", "preview", "told"])
def test_an_answer_that_is_not_kept_takes_turns_too(kind: str) -> None:
    """Its text comes back as it was, and is nobody else's."""
    more = {
        "private": {"reuse": False},
        "preview": {"reading": "preview"},
        "told": {"reuse": False, "prompt_logprobs": True, "logprobs": 0},
    }[kind]
    clock, prompt = Clock(), text(300)
    with served(1, clock=clock, begin=False) as scheduler:
        asked = ask(scheduler, prompt, ENDLESS, **more)
        other = ask(scheduler, prompt, ENDLESS)
        scheduler.start()
        ends = [one.wait() for one in (asked, other)]
        assert all(isinstance(end, Finished) for end in ends)
        begun = prompt[-STEP:] if kind == "preview" else prompt
        assert asked.text.endswith(expected(begun, ENDLESS))
        assert other.text == expected(prompt, ENDLESS)
        assert scheduler.stalls > 3
        logprobs = [told for event in asked.events if isinstance(event, Piece) for told in event.logprobs]
        assert len(logprobs) == (len(prompt) + ENDLESS if kind == "told" else 0), "told once"
        read = scheduler.model.read_tokens  # type: ignore[attr-defined]
        whole = 2 * len(prompt) + scheduler.stalls
        assert read <= (whole if kind != "preview" else whole + STEP)
        salts = {one["id"] for one in scheduler.call(lambda: scheduler.conversations.describe(Access())).result()}
        assert len(salts) <= 2


def test_an_answer_goes_on_while_a_long_prompt_is_read() -> None:
    """However long its own prompt is: nothing of it has to be read."""
    clock, pieces = Clock(), 0

    def seen(one: Asked, event: Event) -> None:
        nonlocal pieces
        pieces += isinstance(event, Piece) and any(len(request.tokens) == 2000 for request, _ in scheduler.reading)

    with served(clock=clock, begin=False) as scheduler:
        first = ask(scheduler, text(900), ENDLESS, reuse=False, seen=seen)
        other = ask(scheduler, text(30, 1), ENDLESS)
        clock.at[200] = lambda: ask(scheduler, text(2000, 9), 1)
        scheduler.start()
        assert isinstance(first.wait(), Finished)
        assert isinstance(other.wait(), Finished)
        assert first.text == expected(text(900), ENDLESS)
    assert pieces > 5


@pytest.mark.parametrize("why", ["cancelled", "timeout", "shutdown"])
def test_an_answer_ends_while_it_waits_for_its_turn(why: str, tmp_path: Path) -> None:
    """Without another one, and its private text is nowhere: in no file either."""
    clock = Clock()
    with served(1, clock=clock, begin=False, folder=ConversationFolder(tmp_path)) as scheduler:
        first = ask(scheduler, text(100), ENDLESS, reuse=False, timeout_s=60.0)

        def end() -> None:
            assert scheduler.doing(first.request) == "parked"
            if why == "cancelled":
                scheduler.cancel(first.request.id)
            elif why == "timeout":
                clock.now += 61
            else:
                scheduler.end_answers()

        def seen(one: Asked, event: Event) -> None:
            if isinstance(event, Piece) and not hasattr(one, "done"):
                one.done = True  # type: ignore[attr-defined]
                end()

        other = ask(scheduler, text(100, 1), 40, seen=seen)
        scheduler.start()
        ended = first.wait()
        assert isinstance(ended, Failed)
        assert ended.code == why
        assert scheduler.stalls <= 2
        assert scheduler.outcomes.totals.generated_tokens > 0
        assert isinstance(other.wait(), Failed if why == "shutdown" else Finished)
        assert scheduler.outcomes.totals.finished[why] >= 1
    files = [path.read_bytes()[:32] for path in tmp_path.rglob("*.kvs")]
    assert np.asarray(text(100)[:8], np.int32).tobytes() not in files


def test_a_text_that_cannot_be_swapped_out_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what that takes makes its turns longer."""
    clock, prompt = Clock(), text(640)

    def full(self: FakeModel) -> Any:
        raise HostMemoryError("no room")

    with served(1, clock=clock, begin=False) as scheduler:
        monkeypatch.setattr(FakeModel, "swap_out", full)
        first, other = ask(scheduler, prompt, ENDLESS), ask(scheduler, text(30, 1), ENDLESS)
        scheduler.start()
        assert isinstance(first.wait(), Finished)
        assert isinstance(other.wait(), Finished)
        assert (first.text, other.text) == (expected(prompt, ENDLESS), expected(text(30, 1), ENDLESS))
        steps = scheduler.model.steps  # type: ignore[attr-defined]
        assert steps < 1.2 * (2 * ENDLESS + 11)
        monkeypatch.undo()
