"""Recurrent state goes back over the last tokens of a step: to the state after each of them, and to nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import Bare, evaluate, same_bits

from kvflash_ggml.errors import DecodeError, UnsupportedModelError
from kvflash_ggml.sequence.prefill import extend

Make = Callable[..., Bare]
TEXT = 100
PLANES = 4
WIDTH = PLANES + 1


@pytest.fixture
def make(bare: Make, tokens: Any) -> Callable[..., Bare]:
    """A hybrid with rollback planes that has read a text."""

    def text(planes: int = PLANES, length: int = TEXT, **settings: Any) -> Bare:
        run = bare("hybrid", pool=512, n_ctx=512, n_ubatch=96, planes=planes, **settings)
        extend(run.session, tokens[:length])
        return run

    return text


def step(run: Bare, tokens: Any, start: int = TEXT) -> Any:
    """Rows behind the text in one step: their logits. Each sees the text and the rows before it."""
    n = len(tokens)
    places = range(start, start + n)
    return evaluate(run, tokens, places, places, [[*range(start + i)] for i in range(n)])


def values(run: Bare) -> Any:
    """The state that is not pooled, as numbers."""
    return np.frombuffer(bytes(run.session.engine.get_state(seq=0)), np.float32)


def fail(run: Bare, tokens: Any) -> None:
    """A step behind the text that the device breaks off."""
    import llama_cpp

    abort = llama_cpp.ggml_abort_callback(lambda _: True)
    llama_cpp.llama_set_abort_callback(run._ctx.ctx, abort, None)
    with pytest.raises(DecodeError, match="returned 2"):
        step(run, tokens)
    llama_cpp.llama_set_abort_callback(run._ctx.ctx, llama_cpp.ggml_abort_callback(0), None)


def model_of(run: Bare) -> int:
    """Address of the llama_model."""
    import llama_cpp

    return ctypes.cast(llama_cpp.llama_get_model(run._ctx.ctx), ctypes.c_void_p).value or 0


def upstream_truncates(run: Bare, pos: int) -> bool:
    """What llama.cpp itself says, with nobody to ask whether the plane is known."""
    import llama_cpp

    return bool(llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(run._ctx.ctx), 0, pos, -1))


def test_planes(make: Any, bare: Make) -> None:
    """They are counted, and have a size; where there are none, or the architecture has none, there are 0."""
    from kvflash_ggml.native import engine as native

    info = make().session.engine.info
    assert (info.recurrent, info.rs_planes) == (True, PLANES)
    none = make(0)
    size = native.plane_bytes(model_of(none))
    assert none.session.engine.info.rs_planes == 0
    assert size < len(none.session.engine.get_state(seq=0)) < size + 1000
    dense = bare("dense", pool=512, n_ctx=512, planes=PLANES)
    assert (dense.session.engine.info.rs_planes, native.plane_bytes(model_of(dense))) == (0, 0)


@pytest.mark.parametrize("width", range(2, WIDTH + 2))
def test_the_state_after_each_row(width: int, make: Any, tokens: Any) -> None:
    """It is that of a step of this width, whatever the rows after it were; up to rounding that of a shorter step."""
    rows = tokens[TEXT : TEXT + width]
    for kept in range(max(1, width - PLANES), width):
        run, other, alone = (make() for _ in range(3))
        step(run, rows)
        step(other, [*rows[:kept], *[7] * (width - kept)])
        step(alone, rows[:kept])
        for one in (run, other):
            assert one.session.engine.can_truncate(TEXT + kept, seq=0)
            assert one.session.engine.truncate(TEXT + kept, seq=0)
        assert same_bits(values(run), values(other))
        np.testing.assert_allclose(values(run), values(alone), atol=5e-2)
        after = [step(one, tokens[200:203], TEXT + kept) for one in (run, other, alone)]
        assert same_bits(after[0], after[1])
        np.testing.assert_allclose(after[0], after[2], atol=0.2)  # a GPU computes it by another kernel
        assert run.session.engine.cells(0, 512).max() == TEXT + kept + 2


ARCHS = ["bailingmoe3", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_with_planes(arch: str, bare: Make) -> None:
    """Each writes them in code of its own."""
    rng = np.random.default_rng(3)
    before, rows, after = (rng.integers(0, 100, n).astype(np.int32) for n in (TEXT, WIDTH, 3))
    for kept in range(1, WIDTH):
        run, other, alone = (bare(f"of {arch}", pool=512, n_ctx=512, n_ubatch=96, planes=PLANES) for _ in range(3))
        for one in (run, other, alone):
            extend(one.session, before)
        assert run.session.engine.info.rs_planes == PLANES
        step(run, rows)
        step(other, [*rows[:kept], *[7] * (WIDTH - kept)])
        step(alone, rows[:kept])
        for one in (run, other):
            assert one.session.engine.truncate(TEXT + kept, seq=0)
        assert same_bits(values(run), values(other))
        ours, theirs, shorter = (step(one, after, TEXT + kept) for one in (run, other, alone))
        assert same_bits(ours, theirs)
        np.testing.assert_allclose(ours, shorter, atol=1e-4)


def test_planes_of_earlier_steps_are_not_gone_back_to(make: Any, tokens: Any) -> None:
    """A step writes as many states as it has tokens: the others are of the steps before it."""
    run, stale = make(), make()
    for one in (run, stale):
        step(one, tokens[TEXT : TEXT + 2])
    engine = run.session.engine
    before = values(run), engine.cells(0, 512).tolist()
    for pos in (TEXT, TEXT - 1, TEXT - 2, TEXT - 3, 1):
        assert not engine.can_truncate(pos, seq=0)
        assert not engine.truncate(pos, seq=0)
    assert same_bits(values(run), before[0])
    assert engine.cells(0, 512).tolist() == before[1]
    assert engine.truncate(TEXT + 1, seq=0)

    assert upstream_truncates(stale, TEXT), "llama.cpp has learned it: the guard can go"
    assert np.abs(values(stale) - values(make())).max() > 0.1


def test_one_rollback_a_step(make: Any, tokens: Any) -> None:
    run = make()
    step(run, tokens[TEXT : TEXT + 5])
    engine = run.session.engine
    assert engine.truncate(TEXT + 4, seq=0)
    once = values(run)
    assert engine.can_truncate(TEXT + 4, seq=0)
    assert engine.truncate(TEXT + 4, seq=0), "nothing to take back"
    for pos in (TEXT + 3, TEXT + 1):
        assert not engine.can_truncate(pos, seq=0)
        assert not engine.truncate(pos, seq=0)
    assert same_bits(values(run), once)
    step(run, tokens[TEXT + 4 : TEXT + 6], TEXT + 4)
    assert engine.truncate(TEXT + 5, seq=0)


@pytest.mark.parametrize("planes", [0, PLANES])
def test_nothing_is_gone_back_to_after_a_failed_step(planes: int, make: Any, tokens: Any) -> None:
    """llama.cpp takes the rows of a failed step back: with planes to a state that was never written."""
    run, stale = make(planes), make(planes)
    saved = run.session.engine.get_state(seq=0)
    for one in (run, stale):
        fail(one, tokens[TEXT : TEXT + 3])
    engine = run.session.engine
    assert not engine.can_truncate(TEXT, seq=0)
    assert not engine.truncate(TEXT, seq=0)
    assert upstream_truncates(stale, TEXT) == (planes > 0)

    engine.set_state(saved, TEXT, seq=0)
    assert engine.can_truncate(TEXT, seq=0)
    assert engine.truncate(TEXT, seq=0)
    assert same_bits(step(run, tokens[200:203]), step(make(planes), tokens[200:203]))


def test_an_impossible_step_takes_no_plane_away(make: Any, tokens: Any) -> None:
    run = make()
    step(run, tokens[TEXT : TEXT + 4])
    engine = run.session.engine
    with pytest.raises(DecodeError, match="returned -1"):
        evaluate(run, [5], [TEXT], [TEXT + 9], [[*range(TEXT)]])
    assert engine.truncate(TEXT + 1, seq=0)


def test_a_restored_state_has_no_planes(make: Any, tokens: Any) -> None:
    """What is saved after a rollback is the state that was gone back to; what is put back is all there is."""
    run, other = make(), make(length=50)
    step(run, tokens[TEXT : TEXT + 5])
    assert run.session.engine.truncate(TEXT + 2, seq=0)
    state = run.session.engine.get_state(seq=0)
    step(other, tokens[50:55], 50)
    engine = other.session.engine
    engine.set_state(state, TEXT + 2, seq=0)
    assert engine.get_state(seq=0) == state
    for pos in (TEXT + 1, TEXT - 1, 50):
        assert not engine.can_truncate(pos, seq=0)
        assert not engine.truncate(pos, seq=0)
    assert engine.can_truncate(TEXT + 2, seq=0)
    assert engine.can_truncate(0, seq=0)

    fresh = make()
    step(fresh, tokens[TEXT : TEXT + 5])
    fresh.session.engine.set_state(state, TEXT + 2, seq=0)
    fresh.session.engine.clear_cells(TEXT + 2, 3)
    assert same_bits(step(fresh, tokens[200:203], TEXT + 2), step(run, tokens[200:203], TEXT + 2))


def test_after_a_refused_state_a_text_begins_anew(make: Any, tokens: Any) -> None:
    from kvflash_ggml.errors import EngineError, SnapshotError

    run = make()
    step(run, tokens[TEXT : TEXT + 5])
    with pytest.raises(SnapshotError):
        run.session.engine.set_state(b"no state", TEXT, seq=0)
    with pytest.raises(EngineError, match="is empty"):
        step(run, tokens[:1], TEXT + 5)
    run.session.engine.clear(seq=0)
    step(run, tokens[:1], 0)


@pytest.mark.parametrize("how", ["clear", "truncate"])
def test_a_memory_that_was_emptied_is_a_new_one(how: str, make: Any, tokens: Any) -> None:
    """Also after a step that failed, with nothing else to go back to."""
    run, fresh = make(), make(length=0)
    fail(run, tokens[TEXT : TEXT + 3])
    engine = run.session.engine
    assert engine.can_truncate(0, seq=0)
    assert engine.truncate(0, seq=0) if how == "truncate" else engine.clear(seq=0) is None
    assert engine.cells(0, 512).max() == -1
    assert same_bits(step(run, tokens[:5], 0), step(fresh, tokens[:5], 0))
    assert engine.truncate(1, seq=0)
    assert fresh.session.engine.truncate(1, seq=0)
    assert np.array_equal(values(run), values(fresh)), "but for signs: empty is 0 times what was there"


def test_only_the_last_part_of_a_long_step_is_gone_back_over(make: Any, tokens: Any) -> None:
    """A step of several ubatches: its last tokens are in one, and have their planes."""
    long = tokens[TEXT : TEXT + 98]
    for back in range(1, WIDTH):
        run, other = make(n_batch=192), make(n_batch=192)
        step(run, long)
        step(other, [*long[: 98 - back], *[7] * back])
        for one in (run, other):
            assert not one.session.engine.can_truncate(TEXT + 98 - WIDTH, seq=0)
            assert one.session.engine.truncate(TEXT + 98 - back, seq=0)
        assert same_bits(values(run), values(other))


@pytest.mark.parametrize("kind", ["dense", "iswa"])
def test_what_has_no_recurrent_state_goes_back_anywhere(kind: str, bare: Make, tokens: Any) -> None:
    run = bare(kind, pool=512, n_ctx=512, n_ubatch=96)
    extend(run.session, tokens[:TEXT])
    for pos in (99, 98, 40, 0):
        assert run.session.engine.can_truncate(pos, seq=0)
        assert run.session.engine.truncate(pos, seq=0)
        assert run.session.engine.cells(0, 512).max() == pos - 1


def test_more_planes_than_an_ubatch_has_room_for_are_refused(bare: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="n_rs_seq is 7, which needs an n_ubatch of 9 or more, not 8"):
        bare("hybrid", pool=512, n_ctx=512, n_ubatch=8, planes=7)


def test_a_short_step_writes_no_planes_that_it_has_no_state_for(make: Any, tokens: Any) -> None:
    """0009: a step of one token is the same work with any number of planes, and one of more has a window for each."""

    def nodes(planes: int, width: int) -> int:
        seen: list[int] = []
        run = make(planes, nodes=seen)
        step(run, tokens[TEXT : TEXT + width])
        seen.clear()
        step(run, tokens[200 : 200 + width], TEXT + width)
        return len(seen)

    one = [nodes(planes, 1) for planes in (1, 4, 7)]
    assert len(set(one)) == 1
    two = [nodes(planes, 2) for planes in (1, 4, 7)]
    assert len(set(two)) == 1
    assert two[0] < nodes(4, 3)
