"""How long prompt steps are while answers run, on devices that are made up. No clock is looked at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.fake_model import STEP, FakeModel
from support.served import Asked, ask, request

from kvflash_ggml.batching.messages import Finished
from kvflash_ggml.batching.pace import LEAST_ROWS, MOST_STEPS, PROMPT_ROWS, Pace
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.errors import SnapshotError

Costs = Callable[[int], float]
"""Seconds of a prompt step by its rows."""


def read(pace: Pace, costs: Costs, decode: float, steps: int = 40) -> tuple[list[int], list[int]]:
    """Rows of the prompt steps, and how many steps the answers had behind each."""
    rows, decoded = [], []
    pace.begin()
    for _ in range(steps):
        rows.append(pace.rows)
        pace.read(pace.rows, costs(pace.rows))
        count = 1
        while pace.goes_on(count, count * decode):
            count += 1
        decoded.append(count)
    return rows, decoded


def test_a_step_becomes_short_enough() -> None:
    """1 ms a token, and 20 ms for the others: steps of 128 rows and one of theirs fit into 200 ms."""
    rows, decoded = read(Pace(0.2), lambda rows: 0.001 * rows, 0.02)
    assert rows[:4] == [1024, 512, 256, 128]
    assert set(rows[3:]) == {128}
    assert set(decoded[3:]) == {1}


def test_it_grows_again_where_there_is_time() -> None:
    pace = Pace(0.2)
    read(pace, lambda rows: 0.001 * rows, 0.02)
    rows, _ = read(pace, lambda rows: 0.0001 * rows, 0.02)
    assert rows[-1] == PROMPT_ROWS
    pace.read(17, 0.001)  # the end of a prompt says nothing of longer steps
    assert pace.rows == PROMPT_ROWS


def test_a_step_whose_half_takes_as_long_stays() -> None:
    """The copies of a streamed step take 400 ms: the answers decode until the mean fits."""
    rows, decoded = read(Pace(0.1), lambda rows: 0.4 + 0.0001 * rows, 0.02)
    assert rows[:3] == [1024, 512, 1024]
    assert set(rows[2:]) == {1024}
    assert decoded[-1] == 7
    assert (0.4 + 0.1024 + 7 * 0.02) / 7 <= 0.1


def test_a_target_that_is_out_of_reach_starves_nobody() -> None:
    rows, decoded = read(Pace(0.01), lambda rows: 0.001 * rows, 0.02)
    assert rows[-1] == LEAST_ROWS
    assert decoded[-1] == MOST_STEPS


def test_without_a_target_answers_have_half_the_time_of_a_step() -> None:
    rows, decoded = read(Pace(None), lambda rows: 0.001 * rows, 0.02)
    assert set(rows) == {PROMPT_ROWS}
    assert set(decoded) == {26}


@pytest.mark.parametrize("target", [None, 0.2])
def test_streams_have_their_tokens_in_time(target: float | None) -> None:
    """A prompt of 8,192 tokens beside an answer: 1 ms a token, and 20 ms a step of answers."""
    now = [0.0]
    model = FakeModel(parallel=2, n_ctx=16384, most=4096, reply=lambda prompt: b"abcdefgh" * 1000)
    texts, sizes, gaps = (model, *model.beside), [], []

    def step(text: FakeModel) -> None:
        now[0] += 0.02 if text.rows == 1 else 0.001 * text.rows
        sizes.append(text.rows)
        if text.rows > 1:
            gaps[:] = scheduler.gaps  # those before the last step of the prompt

    for text in texts:
        text.on_step = lambda text=text: step(text)  # type: ignore[misc]
    scheduler = Scheduler(model, limits=Limits(itl_target=target), clock=lambda: now[0])
    prompts = [np.full(300, 97), np.full(8192, 98)]
    asked = [Asked(request(tokens, 4000 if len(tokens) == 300 else 2)) for tokens in prompts]
    for one in asked:
        scheduler.submit(one.request, one.inbox.put)
    scheduler.start()
    assert isinstance(asked[1].wait(), Finished)
    assert max(sizes) == PROMPT_ROWS
    assert len(gaps) > 40
    assert max(gaps[-40:]) <= (target or 1.1)
    scheduler.close()
    assert sum(rows for rows in sizes if rows > 1) == 8492


@pytest.mark.parametrize("target", [None, 0.2])
def test_a_text_that_is_read_again_did_not_wait_for_its_steps(
    target: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was parked for a long time, and lost: others do not decode for half of that before its second step."""

    def broken(model: FakeModel, swapped: object) -> None:
        raise SnapshotError("a page cannot be read")

    monkeypatch.setattr(FakeModel, "swap_in", broken)
    now, late = [0.0], [True]
    rows: list[int] = []

    def step(text: FakeModel) -> None:
        now[0] += 0.01
        rows.append(text.rows)

    model = FakeModel(parallel=2, reply=lambda prompt: b"abcdefgh" * 500)
    for text in (model, *model.beside):
        text.on_step = lambda text=text: step(text)  # type: ignore[misc]
    scheduler = Scheduler(model, limits=Limits(itl_target=target), clock=lambda: now[0])
    slow = ask(scheduler, [97] * 400, 4, full=lambda: late[0])
    other = ask(scheduler, [98] * 100, 3500)
    third = ask(scheduler, [99] * 100, 3)  # takes the slot
    scheduler.start()
    assert isinstance(third.wait(), Finished)
    now[0] += 1000
    late[0] = False
    scheduler.wake()
    assert isinstance(slow.wait(), Finished)
    assert isinstance(other.wait(), Finished)
    scheduler.close()
    assert scheduler.counts.lost == 1
    again = [at for at, count in enumerate(rows) if count == STEP][-6:]
    assert again[-1] - again[0] < 50
