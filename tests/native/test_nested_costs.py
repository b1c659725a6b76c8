"""Nested drafts with measured costs: each level is used where it pays, and costs little where it does not.

Times are those of a large model on a fast device, in seconds; nothing here looks at a real clock.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvflash_ggml.llama.speculating import HOPES, SERIAL
from kvflash_ggml.runtime import pool_drafter as pool_sketch
from kvflash_ggml.runtime.pool_drafter import Draw, PoolDrafter
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import WIDTHS, Controller
from kvflash_ggml.speculation.draft import Draft, chain
from kvflash_ggml.speculation.guarded import GuardedDrafter
from kvflash_ggml.speculation.loop import Speculator

ROWS = [1, 4, 8, 16, 32]
POOL = [0.0132, 0.019, 0.026, 0.031, 0.036]
STREAM = {"32K": [0.027, 0.033, 0.039, 0.045, 0.052], "128K": [0.095, 0.099, 0.103, 0.108, 0.115]}
SWITCH = 0.003
N_VOCAB = 1000


class World:
    """A text in which the token at p is p, a pool that says so with probability `right`, a source that foresees that
    with probability `foreseen`."""

    branch_room, room_ahead = 0, 32

    def __init__(self, context: str, right: float, foreseen: float, seed: int) -> None:
        self.now, self.length, self.sketched, self.rows = 0.0, 50, 0, ("", 0)
        self.stream = STREAM[context]
        self.right, self.foreseen = np.random.default_rng(seed).random((2, 4096)) < np.array([[right], [foreseen]])

    @property
    def tokens(self) -> Any:
        return np.arange(self.length + self.sketched, dtype=np.int32) % N_VOCAB

    def drawn(self, at: int) -> int:
        return at % N_VOCAB if self.right[at % 4096] else (at + 7) % N_VOCAB

    def step(self, kind: str, rows: int) -> None:
        self.now += float(np.interp(rows, ROWS, POOL if kind == "pool" else self.stream))
        self.now += SWITCH * (self.rows != (kind, rows))
        self.rows = kind, rows


class Source:
    name, wants = "source", Features()

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds

    def propose(self, root: int, most: int) -> Draft:
        self.world.now += self.seconds
        first = self.world.length + self.world.sketched + 1
        places = range(first, first + most)
        said = [self.world.drawn(at) + 3 * (not self.world.foreseen[at % 4096]) for at in places]
        return chain(np.array(said, np.int32) % N_VOCAB, self.name)

    def observe(self, start: int, tokens: Any, rows: Any) -> None: ...
    def truncate(self, length: int) -> None: ...
    def close(self) -> None: ...


class SelfDraft:
    """`sequence.self_draft.SelfDraft` as far as it takes time."""

    branch_room = 0

    def __init__(self, session: Any, room: int) -> None:
        self.world, self.room = session.world, room

    def __enter__(self) -> SelfDraft:
        return self

    def __exit__(self, *error: object) -> None:
        self.world.sketched = 0

    @property
    def tokens(self) -> Any:
        return self.world.tokens

    @property
    def room_ahead(self) -> int:
        return self.room - int(self.world.sketched)

    def write(self, tokens: list[int]) -> None:
        self.world.step("pool", len(tokens))

    def retain(self, length: int) -> bool:
        self.world.sketched = length - self.world.length
        return True


class Model:
    greedy, llm = True, SimpleNamespace(_sampler=None)

    def __init__(self, world: World) -> None:
        self.sequence = SimpleNamespace(
            world=world, sees_everything=False, reading=SimpleNamespace(answers_exactly=True)
        )


class Pool(PoolDrafter):
    def _drawing(self, rows: int, drawn: list[int], copy: Any) -> Draw:
        world = self._text.sequence.world  # type: ignore[union-attr]
        return lambda row: int(world.drawn(world.length + world.sketched + row + 1))


def test_the_pool_is_not_charged_for_a_prompt_that_it_need_not_read() -> None:
    llm: Any = Model(World("32K", 0.9, 0.0, 1))
    pool, controls = GuardedDrafter(PoolDrafter(llm)), Controller(serial=SERIAL, hopes=HOPES)
    for _ in range(3):
        controls.record(1, 0.1)
    for length in (5_000, 100_000):
        assert controls.ask("pool", pool.unread(length)) > 0
        controls.proposed("pool", chain([1], "pool"), 0.1)
        pool.read = length
        controls.begin(length)
        for _ in range(3):
            controls.record(1, 0.1)


def speed(
    context: str, right: float, foreseen: float | None, *, seconds: float = 0.002, tokens: int = 500, seed: int = 1
) -> float:
    """Tokens a second."""
    world = World(context, right, foreseen or 0.0, seed)
    llm: Any = Model(world)
    settings: dict[str, Any] = {"n_vocab": N_VOCAB, "ends": [], "clock": lambda: world.now}
    nested = None
    if foreseen is not None:
        nested = Speculator([Source(world, seconds)], Controller(WIDTHS), **settings)
    known = [] if nested is None else nested.active
    speculator = Speculator(
        [*known, Pool(llm, nested)], Controller(WIDTHS, serial=SERIAL, hopes=HOPES), nested=nested, **settings
    )
    speculator.begin(world.length)
    begin = world.length
    with mock.patch.object(pool_sketch, "SelfDraft", SelfDraft):
        while world.length < begin + tokens:
            draft = speculator.propose(world, world.length % N_VOCAB)  # type: ignore[arg-type]
            if draft is None:
                world.step("stream", 1)
                speculator.plain()
                world.length += 1
                continue
            world.step("stream", len(draft) + 1)
            path = 0
            while path < len(draft) and draft.tokens[path] == (world.length + 1 + path) % N_VOCAB:
                path += 1
            speculator.verified(range(path), len(draft) + 1)
            world.length += 1 + path
    return float((world.length - begin) / world.now)


def mean(*args: Any, **settings: Any) -> float:
    """Of answers that are lucky in different ways."""
    return float(np.mean([speed(*args, **settings, seed=seed) for seed in (1, 2, 3)]))


@pytest.mark.parametrize("right", [0.6, 0.95])
@pytest.mark.parametrize("context", STREAM)
def test_who_drafts_for_the_pool_wins_or_costs_little(context: str, right: float) -> None:
    alone = mean(context, right, None)
    assert alone > 0.94 / STREAM[context][0], "than streamed steps without drafts"
    assert mean(context, right, 0.0) > 0.9 * alone, "never right"
    assert mean(context, right, 0.0, seconds=0.02) > 0.9 * alone, "and dear"
    assert mean(context, right, 0.8) > 1.05 * alone
    assert mean(context, right, 0.95) > 1.25 * alone
