"""A prompt that is asked again: on an engine whose scores depend on everything, beside a text that nobody disturbs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import plain_reader
from support.fake_engine import FakeEngine, make_session
from support.integrity import check_table
from support.saving import Digest, decode, dump, load, making, settle_scores, text

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.plan import ABSENT
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence import scoring as kept
from kvflash_ggml.sequence.prefill import extend, prefix_to_keep
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.snapshot import format as written
from kvflash_ggml.state.statistics import RowForm

PROMPT = text(900, 3)
MEMORIES: list[dict[str, Any]] = [{}, {"recurrent": True}, {"n_swa": 80}, {"asynchronous": True}]


@pytest.fixture
def world() -> Iterator[Callable[..., Sequence]]:
    with making() as build:
        yield build


def places(session: Sequence) -> list[int]:
    settle_scores(session)
    check_table(session.table)
    return [chunk.block for chunk in session.table.chunks]


def ask(session: Sequence, prompt: Any = PROMPT) -> None:
    """As `Llama.generate` does: what is shared stays, and the end is read."""
    shared = 0
    while shared < min(session.length, len(prompt) - 1) and session.tokens[shared] == prompt[shared]:
        shared += 1
    left = session.truncate(prefix_to_keep(session, shared, prompt))
    extend(session, prompt[left:], prompt=True)


def answer(session: Sequence, count: int) -> list[list[int]]:
    """Where the chunks are after each of the next tokens."""
    seen = [places(session)]
    for token in text(count, 5):
        extend(session, np.array([token], np.int32))
        seen.append(places(session))
    return seen


def reload(session: Sequence, other: Sequence) -> Sequence:
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    return other


@pytest.mark.parametrize("info", MEMORIES)
def test_wherever_the_text_has_been(info: dict[str, Any], world: Any) -> None:
    """Cut, saved and put back at random, while other prompts go on from it: the same again as a text left alone."""
    chance = random.Random(str(info))
    session = world(**info)
    ask(session)
    want = answer(session, 60)
    assert len({tuple(blocks) for blocks in want}) > 2, "nothing moved"
    for _ in range(6):
        session.truncate(max(len(PROMPT) - CHUNK, session.length - chance.randrange(90)))
        for _ in range(chance.randrange(3)):
            session.truncate(len(PROMPT) + chance.randrange(40))
            decode(session, chance.randrange(1, 90))
            if chance.random() < 0.5:
                session = reload(session, world(**info))
        ask(session)
        assert answer(session, 60) == want


@pytest.mark.parametrize(("count", "steps"), [(64, [64]), (65, [65]), (80, [80]), (81, [17, 64])])
def test_what_little_lies_in_front_of_a_question_is_read_with_it(count: int, steps: list[int]) -> None:
    """It takes no step of its own, and no state has to be kept behind it."""
    engine = FakeEngine(448, 128, query_rows=4, recurrent=True)
    session = make_session(engine, KVFlashConfig(tail=2), n_ctx=4096, n_batch=128, n_ubatch=128, scorer=Digest())
    extend(session, text(900))
    session.checkpoints.before_step(900, wanted=True)
    engine.steps.clear()
    with mock.patch.object(engine, "get_state", wraps=engine.get_state) as reads:
        extend(session, text(count, 4))
    assert list(dict.fromkeys(engine.steps)) == steps, "the last may be read twice"
    assert reads.call_count == len(steps) - 1
    assert engine.tokens == [*text(900), *text(count, 4)]
    session.close()


def test_two_questions_take_turns(world: Any) -> None:
    """The text they have in common reaches as far as the last step of each."""
    prompts = [np.concatenate([PROMPT, text(CHUNK, seed)]) for seed in (7, 8)]
    session, want = world(), []
    ask(session, prompts[0])
    want.append(answer(session, 20))
    session.truncate(len(PROMPT))
    extend(session, prompts[1][len(PROMPT) :], prompt=True)
    want.append(answer(session, 20))
    for number in (0, 1, 1, 0):
        ask(session, prompts[number])
        assert answer(session, 20) == want[number]
    assert len(session.scoring.replays.state()) == 2


def test_only_the_newest_are_kept(world: Any) -> None:
    session = world()
    extend(session, PROMPT)
    for _ in range(10):
        extend(session, text(20, session.length))
    found = session.scoring.replays.state()
    assert [one.start for one in found] == [len(PROMPT) + 20 * at for at in range(2, 10)]
    session.truncate(found[4].start)
    assert session.scoring.replays.state() == found[:5]
    assert restore.state(session).own_size > sum(one.size for one in found[:5]) > 0
    saved = restore.state(session, found[2].start)
    assert [one.start for one in saved.policy.found] == [one.start for one in found[:3]]
    saved.release()
    session.reset()
    assert not session.scoring.replays.state()


def test_other_heads_have_found_nothing(world: Any) -> None:
    session = world()
    extend(session, PROMPT)
    session.scoring.use(np.zeros((1, 2), np.int32))
    assert not session.scoring.replays.state()


def test_a_file_without(world: Any) -> None:
    """As an older version has written it: the prompt's end is read as that of any prompt."""
    session = world()
    ask(session)
    decode(session, 30)
    parts = plain_reader.read(dump(session))
    del parts.facts["policy"]["found"]
    other = world()
    load(other, plain_reader.write(parts))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    assert not other.scoring.replays.state()
    ask(other)
    assert other.scoring.replays.state()


@pytest.mark.parametrize("n_slots", [320, 704])
def test_in_another_pool(n_slots: int, world: Any) -> None:
    """Blocks that are not there, and more that could be resident: the best that can be had."""
    session = world()
    ask(session)
    decode(session, 30)
    other = reload(session, world(n_slots))
    ask(other)
    assert other.length == len(PROMPT)
    np.testing.assert_array_equal(other.relevance.ranking, session.scoring.replays.state()[0].ranking)
    assert sum(block != ABSENT for block in places(other)) <= n_slots // CHUNK
    answer(other, 30)


def test_what_the_steps_lead_to_is_what_the_plan_says(world: Any) -> None:
    """A chunk that is in the pool only stays where it is, and who was there goes elsewhere."""
    session = world()
    ask(session)
    table = session.table
    (found,) = session.scoring.replays.state()
    session.truncate(found.start + 10)
    (newest,) = [chunk for chunk in range(len(table.chunks)) if chunk not in session.store]
    block = table.chunks[newest].block
    (taken,) = [c for c, chunk in enumerate(table.chunks) if chunk.block == 1]
    state = table.state()
    state.blocks[newest], state.blocks[taken] = 1, block
    plan = table.reserve(session.length, 1, None, False, state)
    assert plan.layout.chunks[newest].block == block
    assert plan.layout.chunks[taken].block == 1 or plan.layout.chunks[taken].block not in {block, ABSENT}


def test_a_step_that_does_not_fit_here_is_none(world: Any) -> None:
    """A file of a session with longer steps: the prompt's end is read as that of any prompt."""
    session = world()
    ask(session)
    (found,) = session.scoring.replays.state()
    start = found.start - CHUNK
    table = replace(found.table, blocks=found.table.blocks[:-1], last_use=found.table.last_use[:-1])
    session.scoring.replays.load((replace(found, start=start, tokens=PROMPT[start:], table=table),))
    decode(session, 30)
    ask(session)
    assert session.length == len(PROMPT)
    assert session.scoring.replays.state()[-1].start > found.start


def test_behind_a_table_with_an_older_clock(world: Any) -> None:
    """As a folder has the text at a checkpoint: what the step uses is the newest, and a file of it can be read."""
    session = world()
    ask(session)
    (found,) = session.scoring.replays.state()
    session.truncate(found.start)
    state = replace(found.table, clock=1000, last_use=[1000] * len(found.table.last_use))
    plan = session.table.reserve(session.length, 1, None, False, state)
    assert max(chunk.last_use for chunk in plan.layout.chunks) == plan.layout.clock == 1001
    session.scoring.replays.load((replace(found, table=state),))
    ask(session)
    load(world(), dump(session))


def test_pins_of_a_file_are_of_another_request(world: Any) -> None:
    session = world()
    ask(session)
    parts = plain_reader.read(dump(session))
    parts.facts["policy"]["found"][0]["pins"] = list(range(1000))
    other = world()
    load(other, plain_reader.write(parts))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    decode(other, 3)
    ask(other)
    assert other.length == len(PROMPT)


def test_what_other_heads_have_found_is_not_taken_from_a_file(world: Any) -> None:
    class Other(Digest):
        """Of other heads, as its statistics say."""

        @property
        def layout(self) -> RowForm:
            return RowForm("other", 4)

    session = world()
    ask(session)
    other = world(scorer=Other)
    load(other, dump(session))
    assert not other.scoring.replays.state()


def test_what_a_text_keeps_has_room_in_a_file() -> None:
    assert kept.MAX_FOUND <= written.MAX_FOUND
