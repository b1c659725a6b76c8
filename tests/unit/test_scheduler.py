"""The engine's thread: one request after the other, each to its end, whatever the others do."""

from __future__ import annotations

import errno
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_model import STEP, FakeModel, FakeSwapped, Hold
from support.served import Asked, answer, ask, request

from kvflash_ggml.batching.messages import Access, Failed, Finished, Started
from kvflash_ggml.batching.queue import QueueFull
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.errors import DecodeError, HostMemoryError, KVFlashError, NotFinite, SnapshotError
from kvflash_ggml.store import folder
from kvflash_ggml.store.swapped import ConversationFolder

Make = Callable[..., Scheduler]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Scheduler] = []

    def start(model: FakeModel | None = None, **settings: Any) -> Scheduler:
        made.append(Scheduler(model or FakeModel(), **settings))
        made[-1].start()
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.close()
        model = scheduler.model
        assert isinstance(model, FakeModel)
        assert model.closed
        assert model.held == 0, "parked texts that nobody has released"


class Gate:
    """Holds a model at its next step."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> None:
        self.reached.release()
        assert self.open.acquire(timeout=20)

    def step(self) -> None:
        self.open.release()

    def wait(self) -> None:
        assert self.reached.acquire(timeout=20)

    def release(self) -> None:
        self.open.release(100_000)


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 122, n).tolist()


def test_an_answer(make: Make) -> None:
    asked = ask(make(), text(100), 20)
    end = asked.wait()
    assert isinstance(end, Finished)
    assert (asked.text, end.reason) == ("an answer", "stop")
    assert isinstance(asked.events[0], Started)
    assert (end.usage.prompt, end.usage.cached, end.usage.generated) == (100, 0, 9)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_limit(make: Make, most: int) -> None:
    asked = ask(make(), text(100), most)
    end = asked.wait()
    assert isinstance(end, Finished)
    assert (asked.text, end.reason) == ("an answer"[:most], "length")


def test_the_end_of_the_context_is_a_limit(make: Make) -> None:
    scheduler = make(FakeModel(n_ctx=64, reply=lambda prompt: b"x" * 99))
    end = answer(scheduler, text(60), 50)
    assert (end.usage.generated, end.reason) == (4, "length")
    asked = ask(scheduler, text(64), 5)
    last = asked.wait()
    assert isinstance(last, Failed)
    assert last.code == "context_length_exceeded"


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_first_token_is_told_before_the_state_is_kept(make: Make, most: int) -> None:
    """To keep it takes long with a large model. It is that of the prompt's end, wherever the answer ends."""
    told: list[str] = []

    class Slow(FakeModel):
        def checkpoint(self) -> None:
            super().checkpoint()
            told.append(f"kept at {len(self.tokens)}")

    asked = Asked(request(text(100), most))
    make(Slow(stateful=True)).submit(
        asked.request, lambda event: (told.append(type(event).__name__), asked.inbox.put(event))[1]
    )
    asked.wait()
    piece = ["Piece"] if most else []
    assert told[: 2 + len(piece)] == ["Started", *piece, "kept at 100"]


def test_the_next_turn_reads_what_is_new(make: Make) -> None:
    scheduler = make()
    first = answer(scheduler, text(300), 20)
    again = [*text(300), *first.tokens, *text(40, 1)]
    assert answer(scheduler, again, 20).usage.cached == 300 + len(first.tokens)


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("call", ["usable", "limit_prompt_steps"])
def test_an_unexpected_error_before_the_first_step_ends_that_request_alone(
    make: Make, parallel: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks for its slot is no part of an answer yet: the engine's thread would have ended."""
    scheduler = make(FakeModel(parallel=parallel))
    answer(scheduler, text(300))
    fails = threading.Event()
    usual = getattr(FakeModel, call)

    def broken(model: FakeModel, *args: Any) -> Any:
        if fails.is_set():
            raise RuntimeError("a defect")
        return usual(model, *args)

    monkeypatch.setattr(FakeModel, call, broken)
    fails.set()
    end = ask(scheduler, text(310)).wait()
    assert isinstance(end, Failed)
    assert (end.code, "RuntimeError" in end.message) == ("internal_error", True)
    fails.clear()
    assert answer(scheduler, text(310)).reason == "length"
    assert scheduler.outcomes.totals.finished["internal_error"] == 1
    assert scheduler.idle


@pytest.mark.parametrize("length", [1, 2, 5, 20, 63, 64, 100, 200, 300])
def test_what_others_ask_does_not_change_what_is_read(make: Make, length: int) -> None:
    """A text is found again however short it is: for its next turn, for another turn, and for its prompt again."""
    for turn in range(3):
        read = []
        for others in (0, 3):
            scheduler = make()
            first = answer(scheduler, text(length), 5)
            for i in range(others):
                answer(scheduler, text(30, 10 + i), 2)
            prompts = [*text(length), *first.tokens, *text(40, 1)], [*text(length), *text(40, 2)], text(length)
            read.append(answer(scheduler, prompts[turn], 0).usage.cached)
        assert read[0] == read[1]
        assert read[0] >= (length, length, length - 1)[turn]


def test_cancelled_while_it_waits(make: Make) -> None:
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate))
    one, two, three = (ask(scheduler, text(10, i)) for i in range(3))
    gate.wait()
    scheduler.cancel(two.request.id)
    gate.release()
    assert [type(x.wait()) for x in (one, two, three)] == [Finished, Failed, Finished]
    assert not any(isinstance(event, Started) for event in two.events)


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_cancelled_within_a_step(make: Make, steps: int) -> None:
    """In the prompt and in the answer: not one more step is made."""
    gate = Gate()
    model = FakeModel(on_step=gate)
    scheduler = make(model)
    asked = ask(scheduler, text(STEP * 4), 20)
    for _ in range(steps - 1):
        gate.wait()
        gate.step()
    gate.wait()
    scheduler.cancel(asked.request.id)
    gate.step()
    end = asked.wait()
    assert isinstance(end, Failed)
    assert end.code == "cancelled"
    assert model.steps == steps
    gate.release()
    assert answer(scheduler, text(STEP * 4), 20).usage.cached >= min(steps, 4) * STEP - 1


def test_too_late(make: Make) -> None:
    now = [0.0]
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate), clock=lambda: now[0])
    running = ask(scheduler, text(10), timeout_s=100.0)
    gate.wait()
    waiting = ask(scheduler, text(10, 1), queue_timeout_s=5.0)
    now[0] = 6.0
    gate.step()
    end = waiting.wait()
    assert isinstance(end, Failed)
    assert end.code == "queue_timeout"
    gate.wait()
    now[0] = 101.0
    gate.step()
    end = running.wait()
    assert isinstance(end, Failed)
    assert end.code == "timeout"
    gate.release()


def test_a_clock_that_is_set(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back by years, and forward: nobody's time is up, and nobody waits for it."""
    assert inspect.signature(Scheduler).parameters["clock"].default is time.monotonic
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate))
    limits = {"timeout_s": 60.0, "queue_timeout_s": 60.0}
    running = ask(scheduler, text(100), **limits)
    gate.wait()
    waiting = ask(scheduler, text(100, 1), **limits)
    for now in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        gate.step()
        gate.wait()
    gate.release()
    for asked in (running, waiting):
        end = asked.wait()
        assert isinstance(end, Finished)
        assert 0 <= end.usage.queue_s + end.usage.prompt_s + end.usage.generation_s < 60


def test_the_queue_is_bounded(make: Make) -> None:
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate), limits=Limits(most=2))
    asked = [ask(scheduler, text(10))]
    gate.wait()
    asked += [ask(scheduler, text(10, i)) for i in (1, 2)]
    with pytest.raises(QueueFull):
        ask(scheduler, text(10, 3))
    gate.release()
    assert all(isinstance(one.wait(), Finished) for one in asked)


@pytest.mark.parametrize("error", [DecodeError("no"), RuntimeError("what"), MemoryError("none")])
@pytest.mark.parametrize("step", [1, 3, 6])
def test_an_error_is_of_one_request(make: Make, error: Exception, step: int) -> None:
    model = FakeModel()

    def fail() -> None:
        if model.steps + 1 == step:
            model.on_step = lambda: None
            raise error

    model.on_step = fail
    scheduler = make(model)
    end = ask(scheduler, text(200), 20).wait()
    assert isinstance(end, Failed)
    assert end.code == "internal_error"
    assert "Traceback" not in end.message
    assert answer(scheduler, text(200), 20).tokens == tuple(b"an answer")


def test_a_reader_that_fails_hurts_nobody(make: Make) -> None:
    scheduler = make()
    asked = ask(scheduler, text(10))
    asked.wait()

    def broken(event: object) -> None:
        raise OSError("gone")

    scheduler.submit(request(text(10)), broken)
    assert answer(scheduler, text(20)).tokens


def test_conversations_take_turns(make: Make) -> None:
    model = FakeModel()
    scheduler = make(model)
    texts = [text(300, i) for i in range(5)]
    for turn in range(3):
        for i in (3, 0, 4, 1, 2):
            end = answer(scheduler, texts[i], 20)
            assert turn == 0 or end.usage.cached == len(texts[i]) - 40
            texts[i] += [*end.tokens, *text(40, 10 * turn + i)]
    assert scheduler.conversations.places(Access()) == {"device": 1, "memory": 4, "folder": 0}
    assert model.read_tokens == 5 * (300 + 40 + 40), "each token once"


def test_a_side_request_leaves_the_long_text_alone(make: Make) -> None:
    scheduler = make()
    long = [*text(300), *text(900, 1)]
    long += answer(scheduler, long, 20).tokens
    side = answer(scheduler, [*text(300), *text(30, 2)], 20)
    assert side.usage.cached == 300
    assert answer(scheduler, [*long, *text(30, 3)], 20).usage.cached == len(long)


def test_an_earlier_turn_again_is_another_conversation(make: Make) -> None:
    scheduler = make()
    first = text(300)
    second = [*first, *answer(scheduler, first, 20).tokens, *text(300, 1)]
    second += answer(scheduler, second, 20).tokens
    answer(scheduler, first, 20)
    assert answer(scheduler, [*second, *text(30, 2)], 20).usage.cached == len(second)


def test_another_answer_to_the_same_prompt_takes_its_place(make: Make) -> None:
    scheduler = make()
    for _ in range(3):
        answer(scheduler, text(300), 20)
    assert scheduler.conversations.places(Access()) == {"device": 1, "memory": 0, "folder": 0}


def test_salts_keep_texts_apart(make: Make) -> None:
    scheduler = make()
    answer(scheduler, text(300), salt="aa")
    assert answer(scheduler, text(300), salt="bb").usage.cached == 0
    assert answer(scheduler, text(300), salt="aa").usage.cached == 299


def test_a_request_that_is_not_kept(make: Make) -> None:
    scheduler = make()
    answer(scheduler, text(300))
    assert answer(scheduler, text(300), reuse=False).usage.cached == 0
    assert scheduler.conversations.places(Access()) == {"device": 0, "memory": 1, "folder": 0}
    assert answer(scheduler, text(300)).usage.cached == 299


def test_what_finds_no_room_goes_to_the_folder(make: Make, tmp_path: Path) -> None:
    scheduler = make(limits=Limits(park_bytes=5000), folder=ConversationFolder(tmp_path))
    texts = [text(300, i) for i in range(4)]
    for one in texts:
        answer(scheduler, one)
    assert scheduler.conversations.places(Access()) == {"device": 1, "memory": 1, "folder": 2}
    # of a fake's text as much as its tokens take, and the tokens of all
    assert scheduler.swapped.size == sum(one.tokens.nbytes * (1 + (one.where == "memory")) for one in scheduler.swapped)
    assert all(answer(scheduler, one).usage.cached == 299 for one in texts)
    assert scheduler.swapped.counts.dropped == 0


def test_two_that_change_places_need_room_for_one(make: Make) -> None:
    """Where the other one is put aside, what is asked for leaves: it is not let go of for that."""
    scheduler = make(limits=Limits(park_bytes=3000))
    texts = [text(300, i) for i in range(2)]
    for one in texts:
        answer(scheduler, one)
    assert [answer(scheduler, one).usage.cached for one in texts * 2] == [299] * 4
    assert scheduler.swapped.counts.dropped == scheduler.slot.counts.lost == 0
    assert 0 < scheduler.swapped.size <= 3000


def test_what_another_goes_on_from_stays(make: Make) -> None:
    """The one that is put aside for that goes, as there is room for one."""
    scheduler = make(limits=Limits(park_bytes=3000))
    for one in (text(300), text(300, 1)):
        answer(scheduler, one)
    assert answer(scheduler, [*text(300)[:280], *text(50, 2)]).usage.cached == 280
    assert [list(one.tokens[:300]) for one in scheduler.swapped] == [text(300)]
    assert scheduler.swapped.size <= 3000


def test_where_memory_is_full_what_is_asked_for_comes_from_the_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    swap_out = model.swap_out

    def one_at_a_time() -> FakeSwapped:
        if model.held:
            raise HostMemoryError("no memory")
        return swap_out()

    monkeypatch.setattr(model, "swap_out", one_at_a_time)
    scheduler = make(model, folder=ConversationFolder(tmp_path))
    texts = [text(300, i) for i in range(2)]
    for one in texts:
        answer(scheduler, one)
    assert [answer(scheduler, one).usage.cached for one in texts] == [299, 299]
    assert scheduler.slot.counts.lost == scheduler.swapped.counts.dropped == 0


def test_where_memory_is_full_others_go_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long what is asked for has been waiting."""
    model = FakeModel()
    swap_out = model.swap_out

    def two_at_a_time() -> FakeSwapped:
        if model.held == 2:
            raise HostMemoryError("no memory")
        return swap_out()

    monkeypatch.setattr(model, "swap_out", two_at_a_time)
    scheduler = make(model)
    texts = [text(300, i) for i in range(3)]
    for one in texts:
        answer(scheduler, one)
    assert answer(scheduler, texts[0]).usage.cached == 299
    assert (scheduler.slot.counts.lost, scheduler.swapped.counts.dropped) == (0, 1)


def test_a_text_that_is_not_finite_is_let_go_of(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other texts on the shelf stay there."""
    model = FakeModel()
    scheduler = make(model)
    texts = [text(300, i) for i in range(3)]
    for one in texts[:2]:
        answer(scheduler, one)

    def refused() -> None:
        raise NotFinite("its values are not finite")

    with monkeypatch.context() as patch:
        patch.setattr(model, "swap_out", refused)
        assert answer(scheduler, texts[2]).usage.cached == 0
    assert [answer(scheduler, one).usage.cached for one in texts] == [299, 0, 299]
    assert (scheduler.slot.counts.lost, scheduler.swapped.counts.dropped) == (1, 0)


def test_what_cannot_be_brought_back_is_let_go_of_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    scheduler = make(model)
    for one in (text(300), text(300, 1)):
        answer(scheduler, one)

    def damaged(swapped: object) -> None:
        raise SnapshotError("damaged")

    monkeypatch.setattr(model, "swap_in", damaged)
    assert answer(scheduler, text(300)).usage.cached == 0
    assert (scheduler.slot.counts.lost, model.held) == (1, 1)


def test_without_a_folder_it_is_read_again(make: Make) -> None:
    scheduler = make(limits=Limits(park_bytes=3000))
    for i in range(4):
        answer(scheduler, text(300, i))
    assert scheduler.swapped.counts.dropped == 2
    assert answer(scheduler, text(300)).usage.cached == 0


def test_a_folder_that_is_full(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(swapped: object, path: Path, *, sync: bool) -> None:
        raise OSError(28, "No space left on device")

    model = FakeModel()
    monkeypatch.setattr(model, "write", full)
    scheduler = make(model, limits=Limits(park_bytes=3000), folder=ConversationFolder(tmp_path))
    for i in range(4):
        answer(scheduler, text(300, i))
    assert scheduler.swapped.counts.failed == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_is_full_keeps_the_newest(
    code: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was used longest ago goes for it; where something else is wrong with the folder, nothing that is there."""
    model = FakeModel()
    write = model.write

    def for_two(swapped: FakeSwapped, path: Path, *, sync: bool) -> None:
        if len(list(path.parent.iterdir())) == 2:
            raise SnapshotError("cannot write") from OSError(code, "why")
        write(swapped, path, sync=sync)

    monkeypatch.setattr(model, "write", for_two)
    scheduler = make(model, limits=Limits(park_bytes=0), folder=ConversationFolder(tmp_path))
    for i in range(5):
        answer(scheduler, text(300, i))
    full = code == errno.ENOSPC
    assert [one.tokens[0] for one in scheduler.swapped] == [text(1, i)[0] for i in ((2, 3) if full else (0, 1))]
    assert scheduler.swapped.counts.dropped == 2
    assert scheduler.swapped.counts.failed == (0 if full else 2)
    assert caplog.text.count("cannot be stored") == 1
    assert answer(scheduler, text(300, 3 if full else 1)).usage.cached == 299


def test_what_is_larger_than_a_disk_costs_no_others(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    write = model.write

    def but_long_ones(swapped: FakeSwapped, path: Path, *, sync: bool) -> None:
        if len(swapped.tokens) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(swapped, path, sync=sync)

    monkeypatch.setattr(model, "write", but_long_ones)
    monkeypatch.setattr(folder.Folder, "free", 0)
    scheduler = make(model, limits=Limits(park_bytes=0), folder=ConversationFolder(tmp_path))
    for length in (300, 301, 2000, 302):
        answer(scheduler, text(length, length))
    assert len(scheduler.swapped) == 2
    assert (scheduler.swapped.counts.dropped, scheduler.swapped.counts.failed) == (1, 1)
    assert [answer(scheduler, text(length, length)).usage.cached for length in (300, 301)] == [299, 300]


def test_a_damaged_file_is_read_again(make: Make, tmp_path: Path) -> None:
    scheduler = make(limits=Limits(park_bytes=0), folder=ConversationFolder(tmp_path))
    answer(scheduler, text(300))
    answer(scheduler, text(300, 1))
    (path,) = (tmp_path / "parked").iterdir()
    path.write_bytes(b"xyz")
    assert answer(scheduler, text(300)).usage.cached == 0
    assert not path.exists()
    assert scheduler.slot.counts.lost == 1


def test_only_at_the_end_is_the_disk_waited_for(tmp_path: Path) -> None:
    """While a request waits for room, the system brings files to the disk when it likes."""
    model = FakeModel()
    scheduler = Scheduler(model, folder=ConversationFolder(tmp_path))
    scheduler.start()
    for i in range(4):
        answer(scheduler, text(300, i))
    scheduler.call(scheduler.swapped.evict).result(10)
    assert (len(model.files), model.synced) == (1, 0)
    scheduler.close()
    assert (len(model.files), model.synced) == (4, 3)


def test_the_end_puts_everything_aside(tmp_path: Path) -> None:
    first = Scheduler(FakeModel(), folder=ConversationFolder(tmp_path))
    first.start()
    for i in range(3):
        answer(first, text(300, i), salt="ab" * (i == 2))
    first.close()
    with pytest.raises(KVFlashError, match="shutting down"):
        ask(first, text(5))
    second = Scheduler(FakeModel(), folder=ConversationFolder(tmp_path))
    second.start()
    assert [answer(second, text(300, i)).usage.cached for i in range(3)] == [299, 299, 0]
    assert answer(second, text(300, 2), salt="ab").usage.cached == 299
    second.close()


def test_of_two_files_of_one_conversation_the_newer_counts(tmp_path: Path) -> None:
    """A server that is killed between writing one and deleting the other leaves both."""
    first = Scheduler(FakeModel(), folder=ConversationFolder(tmp_path))
    first.start()
    answer(first, text(300))
    first.close()
    (newer,) = (tmp_path / "parked").iterdir()
    older = newer.with_name(newer.name.replace("~300", "~299"))
    older.write_bytes(newer.read_bytes())
    os.utime(older, (1, 1))
    second = Scheduler(FakeModel(), folder=ConversationFolder(tmp_path))
    second.start()
    (known,) = second.call(lambda: second.conversations.describe(Access())).result(10)
    assert known["prompt"] == 300
    assert list((tmp_path / "parked").iterdir()) == [newer]
    assert second.call(lambda: second.conversations.erase(known["id"], Access())).result(10)
    assert answer(second, text(300)).usage.cached == 0
    second.close()


def test_running_answers_end_when_told(make: Make) -> None:
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate))
    running, waiting = ask(scheduler, text(300)), ask(scheduler, text(10))
    gate.wait()
    scheduler.end_answers()
    gate.release()
    for asked in (running, waiting):
        end = asked.wait()
        assert isinstance(end, Failed)
        assert end.code == "shutdown"


@pytest.mark.parametrize("what", ["submit", "call"])
def test_what_comes_while_the_server_ends_is_told_so(make: Make, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold()
    scheduler = make(FakeModel(on_step=hold))
    closing = threading.Thread(target=scheduler.close)

    class Late(deque[Any]):
        """Something comes in, and the server begins to end before it is noted."""

        def append(self, item: Any) -> None:
            closing.start()
            closing.join(0.2)
            super().append(item)

    if what == "call":
        monkeypatch.setattr(scheduler._calls, "waiting", Late())
        assert scheduler.call(lambda: 3).result(60) == 3
    else:
        put = scheduler.waiting.put
        monkeypatch.setattr(
            scheduler.waiting, "put", lambda job, pace: (closing.start(), closing.join(0.2), put(job, pace=pace))
        )
        asked = ask(scheduler, [1, 2, 3])
        while not (called := scheduler.call(int)).done() or called.exception() is None:  # until calls are refused
            time.sleep(0.001)
        hold.set()
        end = asked.wait()
        assert isinstance(end, Failed)
        assert end.code == "shutdown"
    closing.join(60)


def test_calls_come_between_requests(make: Make) -> None:
    gate = Gate()
    scheduler = make(FakeModel(on_step=gate))
    asked = ask(scheduler, text(10))
    gate.wait()
    done = scheduler.call(lambda: threading.current_thread().name)
    failing = scheduler.call(lambda: 1 / 0)
    assert not done.done()
    gate.release()
    asked.wait()
    assert done.result(10) == "kvflash-engine"
    with pytest.raises(ZeroDivisionError):
        failing.result(10)


def test_conversations_can_be_kept_by_hand(make: Make, tmp_path: Path) -> None:
    scheduler = make(folder=ConversationFolder(tmp_path))
    answer(scheduler, text(300), conversation="mine")
    answer(scheduler, text(300, 1))
    known = scheduler.call(lambda: scheduler.conversations.describe(Access())).result()
    assert [one["where"] for one in known] == ["memory", "device"]
    here, there = known[1]["id"], known[0]["id"]
    assert scheduler.call(lambda: scheduler.conversations.save(there, Access())).result()
    assert scheduler.call(lambda: scheduler.conversations.save(here, Access())).result()
    assert len(list((tmp_path / "parked").iterdir())) == 2
    assert scheduler.call(lambda: scheduler.conversations.erase(there, Access())).result()
    assert not scheduler.call(lambda: scheduler.conversations.erase("c-0", Access())).result()
    assert len(list((tmp_path / "parked").iterdir())) == 1
    assert answer(scheduler, text(300)).usage.cached == 0


def test_a_thousand_cancels_leave_nothing_behind(make: Make) -> None:
    model = FakeModel()
    scheduler = make(model, limits=Limits(most=2000))
    asked = [ask(scheduler, text(100, i % 7), 50) for i in range(1000)]
    for one in asked:
        scheduler.cancel(one.request.id)
    ends = [one.wait() for one in asked]
    assert {type(end) for end in ends} <= {Finished, Failed}
    assert scheduler.idle
    assert len(scheduler.outcomes.pending) == 0
    assert sum(scheduler.outcomes.totals.finished.values()) == 1000


def test_overload_loses_nobody(make: Make) -> None:
    """Three times as many as it can take, for a while: each is answered or refused at once."""
    model = FakeModel(on_step=lambda: time.sleep(0.0005))
    scheduler = make(model, limits=Limits(most=8))
    refused, asked = 0, []
    for i in range(120):
        try:
            asked.append(ask(scheduler, text(70, i % 5), 6, key=str(i % 3)))
        except QueueFull:
            refused += 1
        time.sleep(0.001)
    assert refused > 0
    assert all(isinstance(one.wait(), Finished) for one in asked)
    assert len(asked) + refused == 120


class Shut:
    """A reader that has enough after so many tokens, until it is opened."""

    def __init__(self, after: int) -> None:
        self._left, self._open = after, False

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0 and not self._open

    def open(self, scheduler: Scheduler) -> None:
        self._open = True
        scheduler.wake()


@pytest.mark.parametrize("stateful", [False, True])
def test_a_reader_that_has_enough_gives_up_the_slot(make: Make, stateful: bool) -> None:
    model = FakeModel(reply=lambda prompt: bytes(range(97, 117)), stateful=stateful)
    scheduler, shut = make(model), Shut(5)
    slow = ask(scheduler, text(300), 40, full=shut, stop=("pq",))
    assert answer(scheduler, text(300, 1)).usage.generated == 8, "others are answered meanwhile"
    assert slow.inbox.qsize() == 7, "its start, and six tokens"
    assert not scheduler.idle
    shut.open(scheduler)
    end = slow.wait()
    assert isinstance(end, Finished)
    assert (slow.text, end.stop, end.usage.generated, end.usage.cached) == ("abcdefghijklmno", "pq", 17, 0)
    assert scheduler.stalls == 1
    assert model.read_tokens == 601, "and one drawn token"
    later = answer(scheduler, [*text(300), *end.tokens, *text(9, 3)])
    assert later.usage.cached == 316, "the same conversation"
    assert len(scheduler.swapped) == 1


def test_how_an_answer_ends_that_was_put_aside(make: Make) -> None:
    def one(**more: Any) -> tuple[Scheduler, Asked]:
        scheduler = make(FakeModel(reply=lambda prompt: b"x" * 50), **more)
        asked = ask(scheduler, text(70), 40, full=Shut(3), timeout_s=60)
        while not scheduler.stalls:
            time.sleep(0.001)
        return scheduler, asked

    scheduler, asked = one()
    scheduler.cancel(asked.request.id)
    assert asked.wait() == Failed(code="cancelled", message="the client has left")
    assert sum(scheduler.outcomes.totals.finished.values()) == 1
    scheduler, asked = one()
    scheduler.end_answers()
    assert getattr(asked.wait(), "code", None) == "shutdown"
    scheduler, asked = one()
    scheduler.close()
    assert getattr(asked.wait(), "code", None) == "shutdown"
    now = [0.0]
    scheduler, asked = one(clock=lambda: now[0])
    now[0] = 61.0
    scheduler.wake()
    assert getattr(asked.wait(), "code", None) == "timeout"


def test_while_an_answer_is_put_aside_somebody_waits(make: Make) -> None:
    """A server that drains would end it otherwise."""
    idle = []

    class Watched(FakeModel):
        def swap_out(self) -> Any:
            idle.append(scheduler.idle)
            return super().swap_out()

    scheduler, shut = make(Watched(reply=lambda prompt: b"x" * 9)), Shut(3)
    slow = ask(scheduler, text(300), 40, full=shut)
    while not scheduler.stalls:
        time.sleep(0.001)
    shut.open(scheduler)
    slow.wait()
    assert idle == [False]


def test_the_same_prompt_leaves_alone_what_was_put_aside(make: Make) -> None:
    model = FakeModel(reply=lambda prompt: bytes(range(97, 117)))
    scheduler, shut = make(model), Shut(5)
    slow = ask(scheduler, text(300), 40, full=shut)
    assert answer(scheduler, text(300), 3).usage.cached == 299
    shut.open(scheduler)
    assert isinstance(slow.wait(), Finished)
    assert slow.text == bytes(range(97, 117)).decode()
    assert model.read_tokens == 302, "a token of the prompt for the other answer, and a drawn one"
    assert len(scheduler.swapped) == 1
