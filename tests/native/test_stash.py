"""A state that is kept on the device: what follows when it is put back is what follows a copy on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Bare, evaluate, same_bits

from kvflash_ggml.errors import DecodeError, EngineError, SnapshotError
from kvflash_ggml.sequence.prefill import extend

Make = Callable[..., Bare]
TEXT = 100
SLOTS = 512


@pytest.fixture
def make(bare: Make, tokens: Any) -> Make:
    """A model that has read a text."""

    def text(kind: str = "hybrid", planes: int = 0, length: int = TEXT) -> Bare:
        run = bare(kind, pool=SLOTS, n_ctx=SLOTS, n_ubatch=96, planes=planes)
        extend(run.session, tokens[:length])
        return run

    return text


def step(run: Bare, tokens: Any, start: int) -> Any:
    """Rows behind the text in one step: their logits. Each sees the text and the rows before it."""
    n = len(tokens)
    places = range(start, start + n)
    return evaluate(run, tokens, places, places, [[*range(start + i)] for i in range(n)])


def sketch(run: Bare, tokens: Any, start: int) -> None:
    for i, token in enumerate(tokens):
        step(run, [token], start + i)


def fail(run: Bare, tokens: Any, start: int) -> None:
    """A step that the device breaks off."""
    import llama_cpp

    abort = llama_cpp.ggml_abort_callback(lambda _: True)
    llama_cpp.llama_set_abort_callback(run._ctx.ctx, abort, None)
    with pytest.raises(DecodeError, match="returned 2"):
        step(run, tokens, start)
    llama_cpp.llama_set_abort_callback(run._ctx.ctx, llama_cpp.ggml_abort_callback(0), None)


def rewound(run: Bare, tokens: Any, start: int) -> None:
    """Another plane is the current one."""
    step(run, tokens, start)
    assert run.session.engine.truncate(start + 2, seq=0) == (run.session.engine.info.rs_planes > 0)


def emptied(run: Bare, _tokens: Any, _start: int) -> None:
    run.session.engine.clear(seq=0)


def state(run: Bare) -> bytes:
    return bytes(run.session.engine.get_state(seq=0))


@pytest.mark.parametrize("meanwhile", [sketch, step, fail, rewound, emptied])
@pytest.mark.parametrize("planes", [0, 7])
def test_what_follows_is_what_follows_a_copy_on_the_host(
    planes: int, meanwhile: Callable[..., Any], make: Make, tokens: Any
) -> None:
    """Also where what is kept is an earlier plane."""
    ours, theirs = make(planes=planes), make(planes=planes)
    length = TEXT
    if planes:
        length += 3
        for run in (ours, theirs):
            step(run, tokens[TEXT : TEXT + 6], TEXT)
            assert run.session.engine.truncate(length, seq=0)
    copy = theirs.session.engine.get_state(seq=0)
    ours.session.engine.keep_state(seq=0)
    for run in (ours, theirs):
        meanwhile(run, tokens[300:304], length)
    ours.session.engine.put_state(length, seq=0)
    theirs.session.engine.set_state(copy, length, seq=0)
    assert state(ours) == state(theirs) == bytes(copy)
    for run in (ours, theirs):
        engine = run.session.engine
        for pos in (length - 1, length + 1, 1):
            assert engine.can_truncate(pos, seq=0) == (pos > length)
        assert engine.truncate(length, seq=0)
    assert same_bits(ours.session.engine.cells(0, SLOTS), theirs.session.engine.cells(0, SLOTS))
    if meanwhile is emptied:
        return
    assert ours.session.engine.cells(0, SLOTS).max() == length - 1
    after = [step(run, tokens[200:203], length) for run in (ours, theirs)]
    assert same_bits(*after)
    assert state(ours) == state(theirs)
    for run in (ours, theirs):
        assert run.session.engine.can_truncate(length + 1, seq=0) == (planes > 0)


def test_it_is_kept_until_the_next_one_is(make: Make, tokens: Any) -> None:
    run = make()
    engine, first = run.session.engine, state(run)
    engine.keep_state(seq=0)
    for _ in range(2):
        sketch(run, tokens[TEXT : TEXT + 3], TEXT)
        engine.put_state(TEXT, seq=0)
        assert state(run) == first
        assert engine.truncate(TEXT, seq=0)
    step(run, tokens[TEXT : TEXT + 1], TEXT)
    second = state(run)
    engine.keep_state(seq=0)
    step(run, tokens[:1], TEXT + 1)
    engine.put_state(TEXT + 1, seq=0)
    assert state(run) == second != first


@pytest.mark.parametrize("kind", ["iswa", "dense"])
def test_windows_are_kept_as_well(kind: str, make: Make, tokens: Any) -> None:
    """And of a memory that is all in the pool nothing."""
    run = make(kind, length=20)
    engine = run.session.engine
    engine.keep_state(seq=0)
    step(run, tokens[20:90], 20)
    engine.put_state(20, seq=0)
    assert engine.truncate(20, seq=0)
    engine.keep_state(seq=0)  # less than this was kept before
    before = state(run)
    step(run, tokens[20:90], 20)
    engine.put_state(20, seq=0)
    assert engine.truncate(20, seq=0)
    assert state(run) == before
    assert same_bits(step(run, tokens[200:203], 20), step(make(kind, length=20), tokens[200:203], 20))


def test_an_empty_text_has_a_state(make: Make, tokens: Any) -> None:
    run = make(length=0)
    engine = run.session.engine
    engine.keep_state(seq=0)
    step(run, tokens[:5], 0)
    engine.put_state(0, seq=0)
    assert engine.truncate(0, seq=0)
    engine.keep_state(seq=0)
    step(run, tokens[:5], 0)
    engine.keep_state(seq=0)  # more than before
    saved = state(run)
    step(run, tokens[5:6], 5)
    engine.put_state(5, seq=0)
    assert state(run) == saved


def test_what_does_not_fit_is_refused(make: Make, tokens: Any) -> None:
    """A text of another length leaves nothing in place; what is kept can still be put back."""
    run = make()
    engine, saved = run.session.engine, state(run)
    with pytest.raises(SnapshotError, match="no state is kept"):
        engine.put_state(TEXT, seq=0)
    assert state(run) == saved
    engine.keep_state(seq=0)
    with pytest.raises(EngineError, match="a state for -1 tokens"):
        engine.put_state(-1, seq=0)
    with pytest.raises(EngineError, match="sequence 1"):
        engine.keep_state(seq=1)
    with pytest.raises(EngineError, match="sequence 1"):
        engine.put_state(TEXT, seq=1)
    assert state(run) == saved
    with pytest.raises(SnapshotError, match=f"{TEXT + 1} tokens: a recurrent state that does not end"):
        engine.put_state(TEXT + 1, seq=0)
    assert state(run) != saved
    engine.put_state(TEXT, seq=0)
    assert state(run) == saved
