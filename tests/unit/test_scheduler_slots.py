"""Several slots: answers are decoded together, and what happens to one of them is its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_model import STEP, FakeModel, FakeStep, FakeTask, Hold
from support.served import Asked, answer, ask, request

from kvflash_ggml.batching.conversations import ConversationBusy
from kvflash_ggml.batching.messages import Access, Event, Failed, Finished, Piece
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.errors import DecodeError, HostMemoryError, NotFinite, SnapshotError
from kvflash_ggml.store.swapped import ConversationFolder

Make = Callable[..., Scheduler]
SLOTS = 3


def spelled(prompt: bytes) -> bytes:
    """An answer that is its prompt's own: its first bytes, over and over."""
    return prompt[:8] * 50


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Scheduler] = []

    def start(model: FakeModel | None = None, *, begin: bool = True, **settings: Any) -> Scheduler:
        made.append(Scheduler(model or FakeModel(parallel=SLOTS, reply=spelled), **settings))
        if begin:
            made[-1].start()
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.close()
        for slot in scheduler.slots:
            model = slot.model
            assert isinstance(model, FakeModel)
            assert (model.closed, model.held) == (True, 0)
            assert slot.request is None


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 122, n).tolist()


def started(scheduler: Scheduler, count: int, most: int = 40, **more: Any) -> list[Asked]:
    """Requests that all wait before the first one has a turn."""
    asked = [ask(scheduler, text(100 + 10 * i, i), most, **more) for i in range(count)]
    scheduler.start()
    return asked


def ends(asked: list[Asked]) -> list[str]:
    """The text of each answer, once all have ended well."""
    for one in asked:
        assert isinstance(one.wait(), Finished), one.events[-1]
    return [one.text for one in asked]


def expected(count: int, most: int = 40) -> list[str]:
    return [spelled(bytes(text(100 + 10 * i, i)))[:most].decode() for i in range(count)]


def fake(scheduler: Scheduler) -> FakeModel:
    assert isinstance(scheduler.model, FakeModel)
    return scheduler.model


def test_answers_are_decoded_together(make: Make) -> None:
    scheduler = make(begin=False, clock=lambda: 0.0)  # or the first one ends while a slow machine reads the third
    assert ends(started(scheduler, SLOTS)) == expected(SLOTS)
    sizes = [len(step) for step in fake(scheduler).together]
    assert sizes.count(SLOTS) > 30
    assert max(sizes) == SLOTS


SHORT = 50


def short(count: int) -> list[list[int]]:
    return [text(SHORT - i, i) for i in range(count)]


def test_short_prompts_that_wait_together_share_a_step(make: Make) -> None:
    """Three prompts and 40 tokens each take 40 steps of the engine, and not 42. A long one is read alone."""
    scheduler = make(FakeModel(parallel=SLOTS, reply=spelled, short=SHORT), begin=False)
    asked = [ask(scheduler, prompt, 40) for prompt in short(SLOTS)]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(prompt))[:40].decode() for prompt in short(SLOTS)]
    assert [len(step) for step in fake(scheduler).together] == [SLOTS] * 40
    assert len(fake(scheduler).deals) >= SLOTS
    long, others = ask(scheduler, text(300, 9), 4), [ask(scheduler, prompt[1:], 4) for prompt in short(2)]
    assert ends([long, *others]) == [
        spelled(bytes(prompt))[:4].decode() for prompt in (text(300, 9), *(p[1:] for p in short(2)))
    ]


def test_a_step_of_prompts_is_no_larger_than_the_model_takes(make: Make) -> None:
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT, prompt_rows=2 * SHORT)
    scheduler = make(model, begin=False)
    asked = [ask(scheduler, prompt, 40) for prompt in short(SLOTS)]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(prompt))[:40].decode() for prompt in short(SLOTS)]
    assert [len(step) for step in model.together[:2]] == [2, SLOTS]


@pytest.mark.parametrize(("length", "salt"), [(100, ""), (300, ""), (300, "mine")])
def test_short_prompts_that_begin_alike_are_read_once(make: Make, length: int, salt: str) -> None:
    """Those that wait are not to share a step with the one whose text they can have; not across keys."""
    model = FakeModel(parallel=SLOTS, reply=spelled, short=400, prompt_rows=2000)
    scheduler, prompt = make(model, begin=False), text(length)
    asked = [ask(scheduler, prompt, 40, salt=salt * at) for at in range(SLOTS)]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(prompt))[:40].decode()] * SLOTS
    read = sum(slot.model.read_tokens for slot in scheduler.slots)  # type: ignore[attr-defined]
    assert (read, scheduler.counts.forks) == ((SLOTS * length, 0) if salt else (length + 2, SLOTS - 1))


@pytest.mark.parametrize("other", [400, STEP], ids=["read further out", "that ends meanwhile"])
def test_a_short_prompt_that_takes_two_steps_after_all(make: Make, other: int) -> None:
    """Others go on between its steps: but for one that is being read itself, and one may come to its end."""
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT, twice=SHORT)
    scheduler = make(model, begin=False)
    prompts = [text(SHORT), text(other, 1)]
    asked = [ask(scheduler, prompts[0], 40), ask(scheduler, prompts[1], 1)]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(prompts[0]))[:40].decode(), spelled(bytes(prompts[1]))[:1].decode()]
    assert sum(slot.model.read_tokens for slot in scheduler.slots) == SHORT + other  # type: ignore[attr-defined]


def test_many_short_prompts_that_take_two_steps(make: Make) -> None:
    """They are not read inside one another, which would be too deep."""
    scheduler = make(FakeModel(parallel=150, reply=spelled, short=SHORT, twice=SHORT), begin=False)
    asked = [ask(scheduler, text(SHORT, i), 3) for i in range(150)]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(text(SHORT, i)))[:3].decode() for i in range(150)]


def test_a_prompt_waits_on_if_others_begin_before_it(make: Make) -> None:
    """It waits for a prompt that begins like it. Between the steps of that, a short prompt takes the last slot."""
    scheduler = make(FakeModel(parallel=2, reply=spelled, short=100, twice=100), begin=False)
    asked = [ask(scheduler, prompt, 5) for prompt in (text(100), text(100), text(10, 1))]
    scheduler.start()
    assert ends(asked) == [spelled(bytes(one.request.tokens.tolist()))[:5].decode() for one in asked]


class ReadsAgain(FakeTask):
    """A text that is read again, in two steps, after a step that finds a page damaged."""

    def waits(self, step: FakeStep) -> Iterator[FakeStep | None]:
        read = self.reads
        try:
            yield from super().waits(step)
        except SnapshotError:
            self.reads = True
            yield None
            yield from super().waits(FakeStep(self.model, True, reads=True))
            self.progress(1, 2)
            yield None
            yield from super().waits(FakeStep(self.model, True, reads=True))
            self.progress(2, 2)
            self.reads = read


def test_nobody_begins_without_a_share_of_the_pool(make: Make) -> None:
    """Nor while another text is read again."""
    model, others = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT, task=ReadsAgain), list[Asked]()
    scheduler = make(model, begin=False)
    first, dealt = ask(scheduler, text(SHORT), 5), list[bool]()
    other = scheduler.slots[1].model
    assert isinstance(other, FakeModel)

    def damaged() -> None:
        if not others:
            others.append(ask(scheduler, text(10, 1), 5))
            raise SnapshotError("a page is damaged")

    model.on_step = damaged
    other.on_step = lambda: dealt.append(any(one is other for one, _ in model.deals[-1]))
    scheduler.start()
    assert ends([first]) == [spelled(bytes(text(SHORT)))[:5].decode()]
    assert ends(others) == [spelled(bytes(text(10, 1)))[:5].decode()]
    assert dealt
    assert all(dealt)


def test_a_prompt_that_is_read_again_keeps_its_pace(make: Make) -> None:
    """A page is damaged in its second step: its first one is done again."""
    model = FakeModel(parallel=SLOTS, reply=spelled, task=ReadsAgain)
    scheduler = make(model, begin=False, limits=Limits(itl_target=0.01))
    asked = [ask(scheduler, text(500), 5), ask(scheduler, text(10, 1), 300)]
    damaged = iter([True])

    def step() -> None:
        if model.steps == 1 and next(damaged, False):
            raise SnapshotError("a page is damaged")

    model.on_step = step
    scheduler.start()
    assert ends(asked) == [spelled(bytes(text(500)))[:5].decode(), spelled(bytes(text(10, 1)))[:300].decode()]


def test_others_go_on_while_a_text_is_read_again(make: Make) -> None:
    """It was lost within its answer, and takes turns like a prompt."""
    model, order = FakeModel(parallel=2, reply=spelled, task=ReadsAgain), list[int]()
    scheduler = make(model, begin=False, clock=lambda: 0.0)  # or a slow prompt step lets the other go on for longer

    def step() -> None:
        order.append(0)
        if model.steps == 20:
            model.steps += 1
            order.clear()
            raise SnapshotError("a page is damaged")

    model.on_step, model.beside[0].on_step = step, lambda: order.append(1)  # type: ignore[assignment]
    assert ends(started(scheduler, 2, 100)) == expected(2, 100)
    assert order[:4] == [1, 0, 1, 0]


@pytest.mark.parametrize("most", [1, 40])
def test_prompts_are_computed_once_while_another_text_is_read_again(make: Make, most: int) -> None:
    """Between its steps others go on, whose steps were to follow in the same round, and may end."""
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT, task=ReadsAgain)
    scheduler = make(model, begin=False)
    first = ask(scheduler, text(SHORT, 9), 60)
    others = []

    def step() -> None:
        if model.steps == 5:
            others.extend(ask(scheduler, prompt, most) for prompt in short(2))
        if model.steps == 6:  # the prompts of both are to be read in this round
            model.steps += 1
            raise SnapshotError("a page is damaged")

    model.on_step = step
    scheduler.start()
    assert ends([first]) == [spelled(bytes(text(SHORT, 9)))[:60].decode()]
    assert ends(others) == [spelled(bytes(prompt))[:most].decode() for prompt in short(2)]
    assert [slot.model.steps for slot in scheduler.slots[1:]] == [most, most]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [DecodeError("no"), HostMemoryError("full"), RuntimeError("odd"), NotFinite("nan")])
@pytest.mark.parametrize("who", range(SLOTS))
def test_a_prompt_that_fails_in_a_shared_step_ends_its_own_answer(make: Make, error: Exception, who: int) -> None:
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT)
    scheduler = make(model, begin=False)

    def fail() -> None:
        victim.on_step = lambda: None
        raise error

    victim = scheduler.slots[who].model
    assert isinstance(victim, FakeModel)
    victim.on_step = fail
    asked = [ask(scheduler, prompt, 40) for prompt in short(SLOTS)]
    scheduler.start()
    reports = [one.wait() for one in asked]
    assert [i for i, end in enumerate(reports) if isinstance(end, Failed)] == [who]
    assert answer(scheduler, short(SLOTS)[who], 40).tokens == tuple(spelled(bytes(short(SLOTS)[who]))[:40])


def test_a_client_leaves_before_its_prompt_is_in_a_step(make: Make) -> None:
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT)
    scheduler = make(model, begin=False)
    asked = [ask(scheduler, prompt, 40) for prompt in short(SLOTS)]
    deal = model.deal

    def leave(answered: Any) -> None:
        deal(answered)
        if len(answered) == SLOTS:
            scheduler.cancel(asked[0].request.id)

    model.deal = leave  # type: ignore[method-assign]
    scheduler.start()
    end = asked[0].wait()
    assert isinstance(end, Failed)
    assert end.code == "cancelled"
    assert ends(asked[1:]) == [spelled(bytes(prompt))[:40].decode() for prompt in short(SLOTS)[1:]]


def test_the_pool_is_dealt_to_those_that_are_answered(make: Make) -> None:
    """When one begins, before it reads, and when others have ended; never while a step waits."""
    scheduler = make(begin=False, clock=lambda: 0.0)
    asked = [ask(scheduler, text(100 + 10 * i, i), most) for i, most in enumerate((5, 40, 20))]
    scheduler.start()
    for one in asked:
        assert isinstance(one.wait(), Finished)
    models = [slot.model for slot in scheduler.slots]
    reach = [105, 150, 140]
    everyone = [[(models.index(model), tokens) for model, tokens in deal] for deal in fake(scheduler).deals]
    assert everyone == [list(enumerate(reach))[:count] for count in (1, 2, 3)] + [
        [(1, 150), (2, 140)],
        [(1, 150)],
    ]


def test_a_pool_that_cannot_be_dealt_costs_the_request_that_begins(make: Make) -> None:
    model = FakeModel(parallel=SLOTS, reply=spelled)
    deal, calls = model.deal, iter(range(10))

    def refuse(answered: Any) -> None:
        if next(calls) == 1:
            raise HostMemoryError("the host is full")
        deal(answered)

    model.deal = refuse  # type: ignore[method-assign]
    scheduler = make(model, begin=False)
    first, second, third = started(scheduler, 3)
    end = second.wait()
    assert isinstance(end, Failed)
    assert "the host is full" in end.message
    assert [one.wait().__class__ for one in (first, third)] == [Finished] * 2


def test_more_requests_than_slots(make: Make) -> None:
    scheduler = make(begin=False, clock=lambda: 0.0)  # or answers of a slow machine take turns
    assert ends(started(scheduler, 3 * SLOTS)) == expected(3 * SLOTS)
    assert scheduler.counts.swapped_out == 2 * SLOTS
    assert scheduler.conversations.places(Access()) == {"device": SLOTS, "memory": 2 * SLOTS, "folder": 0}


def test_a_turn_finds_its_conversation_wherever_it_is(make: Make) -> None:
    scheduler = make(begin=False)
    first = started(scheduler, 2 * SLOTS)
    ends(first)
    again = []
    for i, one in enumerate(first):
        end = one.events[-1]
        assert isinstance(end, Finished)
        again.append(ask(scheduler, [*text(100 + 10 * i, i), *end.tokens, *text(20, 50 + i)], 10))
    for one in again:
        end = one.wait()
        assert isinstance(end, Finished)
        assert end.usage.prompt - end.usage.cached <= 21, "what is new, and the token that was not read"


@pytest.mark.parametrize("salt", ["", "mine"])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_beginning_that_another_answer_has_is_copied(stateful: bool, salt: str, make: Make) -> None:
    """What an agent's requests share is prefilled once, though they run at the same time; not across keys."""
    hold = Hold(50)
    scheduler = make(FakeModel(parallel=SLOTS, reply=spelled, stateful=stateful, on_step=hold))
    shared = text(2000)
    one = ask(scheduler, [*shared, *text(30, 1)], 200, shared_until=2000)
    one.next()  # it has begun
    one.next()
    two = ask(scheduler, [*shared, *text(40, 2)], 5, salt=salt)
    hold.set()
    both = [two.wait(), one.wait()]
    assert all(isinstance(end, Finished) for end in both)
    assert two.text == spelled(bytes([*shared, *text(40, 2)]))[:5].decode()
    assert one.text == spelled(bytes(shared))[:200].decode()
    known = both[0].usage.cached  # type: ignore[union-attr]
    assert known == (0 if salt else 2000)
    assert scheduler.counts.forks == (0 if salt else 1)


def test_a_beginning_that_cannot_be_copied_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: FakeModel, swapped: object) -> None:
        raise SnapshotError("a page cannot be read")

    monkeypatch.setattr(FakeModel, "swap_in", broken)
    hold = Hold(50)
    scheduler = make(FakeModel(parallel=SLOTS, reply=spelled, on_step=hold))
    shared = text(2000)
    one = ask(scheduler, [*shared, *text(30, 1)], 200)
    one.next()
    one.next()
    two = ask(scheduler, [*shared, *text(40, 2)], 5)
    hold.set()
    assert isinstance(two.wait(), Finished)
    assert isinstance(one.wait(), Finished)
    assert (two.text, one.text) == (spelled(bytes(shared))[:5].decode(), spelled(bytes(shared))[:200].decode())
    assert scheduler.counts.forks == 0


def test_others_go_on_while_a_prompt_is_read(make: Make) -> None:
    """A long prompt takes many steps; a running answer has tokens between them."""
    hold = Hold(10)
    scheduler = make(FakeModel(parallel=SLOTS, reply=spelled, on_step=hold), begin=False)
    order: list[str] = []
    asked = [Asked(request(text(50), 390)), Asked(request(text(3000, 9), 5))]

    def sink(i: int) -> Callable[[Event], None]:
        return lambda event: (order.append(f"{type(event).__name__} {i}"), asked[i].inbox.put(event))[1]

    scheduler.start()
    scheduler.submit(asked[0].request, sink(0))
    asked[0].next()
    asked[0].next()
    scheduler.submit(asked[1].request, sink(1))
    hold.set()
    for one in asked:
        assert isinstance(one.wait(), Finished)
    assert asked[0].text == spelled(bytes(text(50)))[:390].decode()
    reading = order[order.index("Started 1") : order.index("Piece 1")]
    assert reading.count("Piece 0") >= 3000 // STEP - 1


LONG = 3000


def beside_long(
    make: Make, later: dict[int, list[list[int]]], known: list[int] | None = None, *, priority: int = 0, **settings: Any
) -> tuple[Scheduler, list[Asked], list[int]]:
    """A prompt of LONG tokens is read, and others come at so many steps. Returns all of them, and how many tokens of
    the long one were read at the first token of each.

    known: a prompt that was answered before. priority: of those that come.
    """
    model = FakeModel(parallel=SLOTS, reply=spelled, **settings)
    scheduler, asked = make(model, begin=False), [Asked(request(text(LONG, 9), 5))]
    if known is not None:
        scheduler.start()
        answer(scheduler, known, 5)
    steps, read, long = count(), dict[str, int](), scheduler.slots[0 if known is None else 1].model

    def sink(one: Asked) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            if isinstance(event, Piece):
                read.setdefault(one.request.id, long.read_tokens)  # type: ignore[attr-defined]
            one.inbox.put(event)

        return put

    def come() -> None:
        for prompt in later.pop(next(steps), ()):
            asked.append(Asked(request(prompt, 5, priority=priority)))
            scheduler.submit(asked[-1].request, sink(asked[-1]))

    for one in (model, *model.beside):
        one.on_step = come
    scheduler.submit(asked[0].request, sink(asked[0]))
    if known is None:
        scheduler.start()
    assert isinstance(asked[0].wait(), Finished)
    assert ends(asked) == [spelled(bytes(one.request.tokens.tolist()))[:5].decode() for one in asked]
    return scheduler, asked, [read[one.request.id] for one in asked]


@pytest.mark.parametrize("short", [0, SHORT], ids=["alone", "in shared steps"])
def test_a_short_prompt_does_not_wait_for_a_long_one(make: Make, short: int) -> None:
    """It is answered as soon as twice as much of the long one was read."""
    _, _, read = beside_long(make, {5: [text(SHORT), text(400, 1), text(SHORT, 2)]}, short=short)
    assert read == [LONG, 6 * STEP, -(-2 * (400 + 2 * SHORT) // STEP) * STEP, 6 * STEP]


def test_short_prompts_have_half_of_the_tokens_of_a_long_one_at_most(make: Make) -> None:
    _, _, read = beside_long(make, {5: [text(100, i) for i in range(20)]})
    assert read[1:] == sorted(read[1:])
    assert all(at >= min(LONG, 2 * 100 * (i + 1)) for i, at in enumerate(read[1:]))
    assert read[14] < LONG


def test_while_a_second_prompt_is_read_no_third_one_is(make: Make) -> None:
    _, _, read = beside_long(make, {20: [text(400, 1)], 23: [text(10, 2)]})
    assert read == [LONG, 21 * STEP, 21 * STEP]
    read = beside_long(make, {20: [text(400, 1), text(SHORT, 2)]})[2]


def test_a_prompt_of_a_higher_priority_does_not_wait(make: Make) -> None:
    """However long it is; one of a lower priority waits for the end."""
    assert beside_long(make, {5: [text(2000, 1)]}, priority=1)[2] == [LONG, 6 * STEP]
    assert beside_long(make, {5: [text(SHORT, 1)]}, priority=-1)[2] == [LONG, LONG]


def test_two_long_prompts_are_read_by_turns(make: Make) -> None:
    """The shorter one has half of the tokens that the other has read, and is answered once it is read."""
    assert beside_long(make, {5: [text(1200, 1)]})[2] == [LONG, -(-2 * 1200 // STEP) * STEP]
    asked = beside_long(make, {5: [text(1400, 1), text(1300, 2)]})[1]
    assert [isinstance(one.wait(), Finished) for one in asked] == [True] * 3


def test_a_prompt_that_begins_as_the_long_one_does_waits_for_its_text(make: Make) -> None:
    scheduler, asked, read = beside_long(make, {20: [[*text(LONG, 9)[:1000], *text(50, 1)]]})
    assert read == [LONG, LONG]
    end = asked[1].wait()
    assert isinstance(end, Finished)
    assert (end.usage.cached, scheduler.counts.forks) == (1000, 1)


def test_what_counts_of_a_prompt_is_what_has_to_be_read(make: Make) -> None:
    known = text(2000)
    turn = [*known, *spelled(bytes(known))[:5], *text(50, 1)]
    _, asked, read = beside_long(make, {5: [turn]}, known=known)
    assert read == [LONG, 6 * STEP]
    end = asked[1].wait()
    assert isinstance(end, Finished)
    assert end.usage.cached == 2004


arrivals = st.tuples(
    st.integers(0, 80), st.sampled_from([10, SHORT, 100, 400, 1500]), st.integers(0, 2), st.integers(1, 12)
)


@given(
    st.lists(arrivals, min_size=1, max_size=12), st.sets(st.integers(0, 200), max_size=4),
    st.sets(st.integers(0, 200), max_size=2), st.sampled_from([0.0, 0.3, 3.0]),
)  # fmt: skip
def test_whatever_comes_when_each_gets_its_own_answer(
    coming: list[tuple[int, int, int, int]], damaged: set[int], cancelled: set[int], tick: float
) -> None:
    """Requests come at steps of the others, pages are found damaged in steps, and clients leave. A step takes `tick`
    seconds: turns are over after a few of them.
    """
    model = FakeModel(parallel=SLOTS, reply=spelled, short=SHORT, twice=10, task=ReadsAgain)
    ticks, steps = count(), count()
    scheduler = Scheduler(model, clock=lambda: 1 + tick * next(ticks) / SLOTS)
    later, asked = sorted(coming), list[Asked]()

    def submit() -> None:
        _, length, seed, most = later.pop(0)
        asked.append(ask(scheduler, text(length, seed), most))

    def come() -> int:
        step = next(steps)
        while later and later[0][0] <= step:
            submit()
        if step in cancelled:
            scheduler.cancel(asked[step % len(asked)].request.id)
        return step

    def come_or_fail() -> None:
        if come() in damaged and model.rows == 1:
            raise SnapshotError("a page is damaged")

    model.on_step = come_or_fail
    for other in model.beside:
        other.on_step = come  # type: ignore[assignment]
    submit()
    scheduler.start()
    try:
        for one in asked:  # which grows
            end = one.wait()
            if isinstance(end, Failed):
                assert end.code == "cancelled"
            else:
                assert list(end.tokens) == list(spelled(bytes(one.request.tokens.tolist()))[: one.request.max_tokens])
            if one is asked[-1] and later:  # the engine rests
                submit()
    finally:
        scheduler.close()
    assert all((slot.request, slot.model.held) == (None, 0) for slot in scheduler.slots)  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [DecodeError("step 7 failed"), NotFinite("no numbers")])
def test_what_goes_wrong_is_of_one_answer(make: Make, error: Exception) -> None:
    scheduler = make(begin=False)
    victim = scheduler.slots[1].model
    assert isinstance(victim, FakeModel)
    count = [0]

    def step() -> None:
        count[0] += 1
        if count[0] == 12:
            raise error

    victim.on_step = step
    asked = started(scheduler, SLOTS)
    failed = [one for one in asked if isinstance(one.wait(), Failed)]
    assert len(failed) == 1
    wanted = expected(SLOTS)
    assert [one.text for one in asked if one not in failed] == [
        said for one, said in zip(asked, wanted, strict=True) if one not in failed
    ]
    assert isinstance(answer(scheduler, text(30, 77), 5), Finished)


def test_one_is_cancelled_and_the_others_go_on(make: Make) -> None:
    hold = Hold(30)
    scheduler = make(FakeModel(parallel=SLOTS, reply=spelled, on_step=hold), begin=False)
    asked = started(scheduler, SLOTS, 150)
    asked[1].next()
    scheduler.cancel(asked[1].request.id)
    hold.set()
    assert isinstance(asked[1].wait(), Failed)
    assert [one.wait() and one.text for one in (asked[0], asked[2])] == [
        expected(SLOTS, 150)[0],
        expected(SLOTS, 150)[2],
    ]


def test_a_reader_that_has_enough_leaves_its_slot(make: Make) -> None:
    scheduler, late = make(begin=False), [True]
    slow = ask(scheduler, text(80, 30), 60, full=lambda: late[0])
    others = started(scheduler, 2 * SLOTS)
    assert ends(others) == expected(2 * SLOTS)
    assert scheduler.stalls >= 1
    late[0] = False
    scheduler.wake()
    assert isinstance(slow.wait(), Finished)
    assert slow.text == spelled(bytes(text(80, 30)))[:60].decode()


def test_exact_answers_take_turns_with_the_others(make: Make) -> None:
    """A step that streams is of one text."""
    scheduler = make(begin=False)
    exact = ask(scheduler, text(60, 40), 30, answer="exact")
    others = started(scheduler, SLOTS - 1, 30)
    assert [*ends(others), exact.wait() and exact.text] == [
        *expected(SLOTS - 1, 30),
        spelled(bytes(text(60, 40)))[:30].decode(),
    ]
    assert max(map(len, fake(scheduler).together)) == SLOTS - 1


def test_a_conversation_whose_answer_is_made_is_left_alone(make: Make, tmp_path: Path) -> None:
    hold = Hold(30)
    model = FakeModel(parallel=SLOTS, reply=spelled, on_step=hold)
    scheduler = make(model, begin=False, folder=ConversationFolder(tmp_path))
    asked = started(scheduler, 1, 300)[0]
    id = getattr(asked.next(), "conversation")  # noqa: B009  # of Started
    calls = [
        lambda: scheduler.conversations.erase(id, Access()),
        lambda: scheduler.conversations.swap_out(id, Access()),
        lambda: scheduler.conversations.save(id, Access()),
        lambda: scheduler.conversations.pin(id, 0, 64, Access()),
    ]
    done = [scheduler.call(call) for call in calls]
    hold.set()
    for future in done:
        with pytest.raises(ConversationBusy):
            future.result(timeout=20)
    assert scheduler.conversations.keeps(id, Access())
    assert isinstance(asked.wait(), Finished)
    assert asked.text == spelled(bytes(text(100)))[:300].decode()
    assert scheduler.call(calls[0]).result(timeout=20)


def test_all_that_runs_ends_with_the_server(make: Make) -> None:
    model = FakeModel(parallel=SLOTS, reply=lambda prompt: prompt * 99, on_step=lambda: time.sleep(0.001))
    scheduler = make(model, begin=False)
    asked = started(scheduler, 2 * SLOTS, 3900)
    asked[0].next()
    scheduler.close()
    codes = [end.code for end in (one.wait() for one in asked) if isinstance(end, Failed)]
    assert set(codes) == {"shutdown"}
    assert len(codes) >= 2 * SLOTS - 1


def test_counters_add_up(make: Make) -> None:
    scheduler = make(begin=False)
    one = scheduler.model.counters()
    assert scheduler.counters()["pool"] == one["pool"]
    assert scheduler.counters()["device_bytes"] == one["device_bytes"]
    started(scheduler, 0)
