"""Many answers for a program: `Engine` over a model of a few lines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_model import FakeModel

from kvflash_ggml.batching import llama
from kvflash_ggml.batching.engine import AHEAD, Completion, Engine
from kvflash_ggml.batching.messages import Finished, Piece
from kvflash_ggml.errors import ConfigError, ContextFull, KVFlashError

Make = Callable[[FakeModel], Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[tuple[Engine, FakeModel]] = []

    def start(model: FakeModel) -> Engine:
        monkeypatch.setattr(llama, "LlamaModel", lambda llm: model)
        llm: Any = SimpleNamespace(tokenize=lambda data, special: list(data))
        made.append((Engine(llm), model))
        return made[-1][0]

    yield start
    for engine, model in made:
        engine.close()
        assert model.closed
        assert model.held == 0


def echo(prompt: bytes) -> bytes:
    return b"to " + prompt


def test_answers_in_the_order_of_the_prompts(make: Make) -> None:
    engine = make(FakeModel(reply=echo))
    told: list[tuple[int, Completion]] = []
    found = engine.generate_many(["one", list(b"two"), "three"], progress=lambda *one: told.append(one))
    assert [one.text for one in found] == ["to one", "to two", "to three"]
    assert [one.reason for one in found] == ["stop"] * 3
    assert bytes(found[1].tokens) == b"to two"
    assert found[1].usage.generated == 6
    assert sorted(told, key=lambda one: one[0]) == list(enumerate(found))
    assert engine.generate_many([]) == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_tokens": "4"}, "max_tokens='4': a whole number"),
        ({"max_tokens": 0}, "max_tokens=0: a whole number"),
        ({"priority": "high"}, "priority='high': a whole number"),
        ({"sampling": {"temperature": 0}}, "sampling={'temperature': 0}: a Sampling"),
        ({"stop": [5]}, "stop=[5]: a text, or a list of texts"),
        ({"stop": 5}, "stop=5: a text, or a list of texts"),
        ({"stop": b"o"}, "stop=b'o': a text, or a list of texts"),
    ],
)
def test_a_wrong_value_is_told_and_the_engine_goes_on(make: Make, settings: dict[str, Any], why: str) -> None:
    """It came to the engine's thread, which ended, and every caller waited for ever."""
    engine = make(FakeModel(reply=echo))
    (failed,) = engine.generate_many(["one"], **settings)
    assert failed.error is not None
    assert failed.error.startswith(why)
    assert [one.text for one in engine.generate_many(["one"])] == ["to one"]


def test_what_is_no_prompt_ends_nothing(make: Make) -> None:
    engine = make(FakeModel(reply=echo))
    for text in ("Once", b"Once"):
        with pytest.raises(ConfigError, match="'Once': it is one prompt: put it in a list"):
            engine.generate_many(text)
    wrong: list[Any] = [5, b"bytes", None, [1.5], ["a"], [[1, 2]], [[1], [2, 3]]]
    *failed, last = engine.generate_many([*wrong, "one"])
    for prompt, one in zip(wrong, failed, strict=True):
        assert one.error == f"the prompt {prompt!r} is neither a text nor a list of tokens"
    assert last.text == "to one"


def test_a_limit_and_a_stop(make: Make) -> None:
    engine = make(FakeModel(reply=echo))
    (short,) = engine.generate_many(["prompt"], max_tokens=2)
    assert (short.text, short.reason) == ("to", "length")
    stops: list[tuple[Any, str]] = [(["pro"], "to "), (("x", "mp"), "to pro"), ("pro", "to "), ("zot", "to prompt")]
    for stop, text in stops:
        (stopped,) = engine.generate_many(["prompt"], stop=stop)
        assert (stopped.text, stopped.reason) == (text, "stop")


def test_an_engine_after_fork_says_so(make: Make) -> None:
    """Its thread is in the parent: the child waited for ever."""
    engine = make(FakeModel(reply=echo))

    async def ask() -> None:
        async for _ in engine.generate("one"):
            pass

    def many() -> None:
        engine.generate_many(["one"])

    child = os.fork()
    if not child:
        signal.alarm(60)
        told = 0
        for asks in (many, lambda: asyncio.run(ask())):
            with suppress(BaseException):
                try:
                    asks()
                except KVFlashError as err:
                    told += "fork() copies no threads" in str(err)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    (after,) = engine.generate_many(["one"])
    assert after.text == "to one", "the parent goes on"


def test_prompts_are_taken_as_slots_become_free(make: Make) -> None:
    taken: list[int] = []
    done: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(20):
            taken.append(number)
            assert len(taken) - len(done) <= AHEAD
            yield f"prompt {number}"

    found = make(FakeModel(reply=echo)).generate_many(prompts(), progress=lambda number, _: done.append(number))
    assert [one.text for one in found] == [f"to prompt {number}" for number in range(20)]


def test_one_that_fails_leaves_the_others_alone(make: Make) -> None:
    engine = make(FakeModel(n_ctx=64, reply=echo))
    found = engine.generate_many(["one", "x" * 64, "", "four"])
    assert [one.reason for one in found] == ["stop", "error", "error", "stop"]
    assert "context window of 64" in str(found[1].error)
    assert "no tokens" in str(found[2].error)
    assert [one.text for one in found] == ["to one", "", "", "to four"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_caller_cancels_what_runs(make: Make, kind: type[BaseException]) -> None:
    reached, more = threading.Event(), threading.Semaphore(4 + 7 + 1)

    def step() -> None:
        if not more.acquire(blocking=False):
            reached.set()
            more.acquire(timeout=20)

    def progress(number: int, answer: Completion) -> None:
        assert reached.wait(20)
        raise kind

    model = FakeModel(reply=lambda prompt: b"x" * 5, on_step=step)
    engine = make(model)
    with pytest.raises(kind):
        engine.generate_many((f"prompt {number}" for number in range(9)), progress=progress)
    more.release(10_000)
    (after,) = engine.generate_many(["again"])
    assert after.text == "xxxxx"
    assert model.steps < 9 * 7


def test_pieces_as_they_come(make: Make) -> None:
    engine = make(FakeModel(reply=echo))

    async def collect(prompt: str) -> list[Piece | Finished]:
        return [event async for event in engine.generate(prompt)]

    async def both() -> list[list[Piece | Finished]]:
        return await asyncio.gather(collect("one"), collect("two"))

    for prompt, events in zip(("one", "two"), asyncio.run(both()), strict=True):
        *pieces, end = events
        assert isinstance(end, Finished)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == f"to {prompt}"
        assert end.usage.generated == 6


def test_who_leaves_cancels(make: Make) -> None:
    model = FakeModel(n_ctx=1 << 20, reply=lambda prompt: b"x" * 100_000)
    engine = make(model)

    async def leave() -> None:
        stream = engine.generate("prompt", max_tokens=100_000)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    (after,) = engine.generate_many(["again"], max_tokens=1)
    assert after.text == "x"
    assert model.steps < 100_000


def test_errors_are_raised(make: Make) -> None:
    engine = make(FakeModel(n_ctx=64))

    async def ask(prompt: str) -> None:
        async for _ in engine.generate(prompt):
            pass

    with pytest.raises(ContextFull):
        asyncio.run(ask("x" * 64))
    with pytest.raises(ConfigError, match="no tokens"):
        asyncio.run(ask(""))
    engine.close()
    with pytest.raises(KVFlashError, match="shutting down"):
        asyncio.run(ask("x"))
    with pytest.raises(KVFlashError, match="shutting down"):
        engine.generate_many(["x"])
