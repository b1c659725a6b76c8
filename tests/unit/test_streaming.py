"""A session on the fake engine that reads and answers with more in view than the pool holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import PAGE_BYTES, Faults
from support.fake_session import accept, check, close, ints, make, small_slabs, some
from support.saving import Digest, dump, load

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import DecodeError, HostMemoryError
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence

KINDS: tuple[dict[str, Any], ...] = ({}, {"recurrent": True}, {"n_swa": 70}, {"alibi": True}, {"asynchronous": True})
NAMES = ["plain", "recurrent", "window", "alibi", "asynchronous"]


@pytest.fixture
def world() -> Iterator[Any]:
    made: list[Sequence] = []

    def build(*args: Any, stage: int = 2048, **kwargs: Any) -> Sequence:
        made.append(make(*args, stage=stage, **kwargs))
        return made[-1]

    with small_slabs():
        yield build
        for session in made:
            close(session)


def generate(session: Sequence, count: int, seed: int = 9) -> list[int]:
    """As it were: one token after the other."""
    tokens = some(count, seed).tolist()
    for token in tokens:
        extend(session, ints(token))
    return tokens


def views(session: Sequence) -> list[tuple[int, ...]]:
    engine: Any = session.engine
    return engine.stages.views


# --- reading


@pytest.mark.parametrize("timing", ["lazy", "eager", "random"])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_prompt_sees_all_of_itself_and_is_read_once(kind: dict[str, Any], timing: str, world: Any) -> None:
    session = world(scorer=Digest(), timing=timing, **kind)
    tokens = some(1500)
    extend(session, tokens)
    check(session, tokens.tolist())
    assert session.whole[:1500].all()
    assert sum(session.engine.steps) == 1500, "the question was read again"
    assert session.streamed_steps == len(views(session)) > 0
    assert all(view == tuple(range(len(view))) for view in views(session))
    session.engine.synchronize()
    assert session.engine.streamed_bytes == PAGE_BYTES * sum(map(len, views(session)))
    assert (session.stats.read, session.stats.read_whole, session.stats.view) == (1500, 1500, 1.0)


def test_what_fits_the_pool_is_not_streamed(world: Any) -> None:
    session = world()
    extend(session, some(500))
    assert session.streamed_steps == 0
    assert session.whole[:500].all()


def test_one_look_at_the_end_decides_what_the_answer_begins_with(world: Any) -> None:
    session = world(scorer=Digest())
    extend(session, some(1500))
    assert session.scoring.passes == 1
    assert session.paging.page_ins == 0
    assert session.relevance.rebuild
    extend(session, ints(1))
    assert session.paging.page_ins > 0
    check(session, [*some(1500).tolist(), 1])
    assert not session.whole[1500]
    assert (session.stats.generated, session.stats.generated_whole) == (1, 0)


@pytest.mark.parametrize("scorer", [None, Digest])
def test_of_a_longer_text_a_part_is_seen(scorer: Any, world: Any) -> None:
    session = world(scorer=scorer and scorer(), stage=768)
    tokens = some(1500)
    extend(session, tokens)
    check(session, tokens.tolist())
    room = (768 - 64) // CHUNK
    assert max(map(len, views(session))) == room
    partial = [view for view in views(session) if len(view) == room and view != tuple(range(room))]
    assert partial
    assert all(view[0] == 0 for view in partial), "the sinks are always in view"
    if scorer is None:
        assert all(view[1:] == tuple(range(view[-1] - room + 2, view[-1] + 1)) for view in partial)
    else:
        assert session.scoring.passes > 1
        assert any(view[1:] != tuple(range(view[-1] - room + 2, view[-1] + 1)) for view in partial), "by rank"
    whole = session.whole[:1500]
    assert whole[:700].all()
    assert not whole[-100:].any()
    assert session.stats.read_whole == int(whole.sum())
    assert 0.5 < session.stats.view < 1


@pytest.mark.parametrize("spill", [True, False])
def test_images_that_do_not_fit_in_memory_together_are_left_out(spill: bool, world: Any, tmp_path: Path) -> None:
    """A ceiling on host memory bounds what is seen; with a spill folder it does not bound the text."""
    config = {"host_limit": 10 * PAGE_BYTES} | ({"spill": tmp_path} if spill else {})
    session = world(config=config)
    tokens = some(1500).tolist()
    if spill:
        extend(session, some(1500))
    else:
        with pytest.raises(HostMemoryError):
            extend(session, some(1500))
    check(session, tokens[: session.length])
    assert session.length >= 10 * CHUNK
    assert max(map(len, views(session))) == 10
    if spill:
        assert not session.whole[1400:1500].any()
        assert session.stats.view < 1
    assert session.whole[: 10 * CHUNK].all()


def test_a_restored_text_under_a_ceiling_without_a_spill_folder(world: Any) -> None:
    """What has been written since stays in memory: there may be room for fewer images than a step would see."""
    config = {"host_limit": 10 * PAGE_BYTES}
    session, other = world(scorer=Digest()), world(n_ctx=4096, scorer=Digest(), config=config)
    extend(session, some(1700))
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    text = some(1700).tolist()
    for seed in range(3):
        extend(other, some(200, seed))
        text += some(200, seed).tolist()
        check(other, text)
    assert not other.whole[1700 : len(text)].any()
    assert other.stats.view < 1
    assert 0 < other.streamed_steps < len(other.engine.steps)


def test_later_prompts_see_all_before_them(world: Any) -> None:
    session = world(scorer=Digest())
    extend(session, some(700))
    answer = generate(session, 100)
    extend(session, some(300, 2))
    assert session.whole[:700].all()
    assert session.whole[800:1100].all()
    check(session, [*some(700).tolist(), *answer, *some(300, 2).tolist()])


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_token_of_an_answer_can_see_all(kind: dict[str, Any], world: Any) -> None:
    session = world(scorer=Digest(), config={"answer": "exact", "tau": 4}, **kind)
    extend(session, some(1000))
    answer = generate(session, 80)
    check(session, [*some(1000).tolist(), *answer])
    assert session.whole[:1080].all()
    assert (session.stats.generated, session.stats.generated_whole) == (80, 80)
    session.finish(session.prepare_drafts(some(6, 3), None))
    accept(session, 4)
    check(session, [*some(1000).tolist(), *answer, *some(6, 3)[:4].tolist()])
    assert session.whole[:1084].all()


# --- failures


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [DecodeError, KeyboardInterrupt])
def test_a_streamed_step_that_fails_has_never_been(error: Any, late: bool, kind: dict[str, Any], world: Any) -> None:
    session = world(scorer=Digest(), **kind)
    tokens = some(1500).tolist()
    extend(session, some(900))
    session.engine.faults = Faults(2, lambda: error("on purpose"), late=late, spoil=True)
    with pytest.raises(error):
        extend(session, some(1500)[900:])
    left = session.length
    check(session, tokens[:left])
    extend(session, some(1500)[left:])
    check(session, tokens)
    assert session.whole[:1500].all()


# --- cut, put aside, put back


def test_what_is_whole_goes_with_the_text(world: Any) -> None:
    session, other = world(scorer=Digest()), world(scorer=Digest())
    extend(session, some(900))
    generate(session, 50)
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    assert other.whole[:950].tolist() == session.whole[:950].tolist() == [True] * 900 + [False] * 50
    for each in (session, other):
        each.truncate(700)
        extend(each, some(200, 5))
        assert each.whole[:900].all()
        check(each, [*some(900)[:700].tolist(), *some(200, 5).tolist()])


def test_images_that_are_restored_when_they_are_asked_for(world: Any) -> None:
    session, other = world(), world()
    extend(session, some(1500))
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    extend(other, some(100, 3))
    assert other.whole[:1600].all()
    assert views(other)[-1] == tuple(range(len(views(other)[-1])))
    check(other, [*some(1500).tolist(), *some(100, 3).tolist()])
