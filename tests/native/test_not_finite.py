"""A text whose values are not finite leaves nothing behind that a step of another text, or its next one, can meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.beside import SHARE, Make, alike, all_finite, check, decode, logits_of, make, spoil
from support.harness import Bare
from support.rounding import LAYOUT, ON_GPU, near

from kvflash_ggml.errors import NotFinite
from kvflash_ggml.media.rows import Part, numbers_of
from kvflash_ggml.sequence import restore, together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST

Tokens = npt.NDArray[np.int32]

KINDS = ["dense", "iswa", "hybrid", "latent heads"]
ROWS = numbers_of(b"rows of a medium", 8)


def poisoned(run: Bare, ids: Tokens, value: float = np.nan) -> Tokens:
    """A text that begins with 300 of these tokens, with rows of this value between them and 200 more."""
    rows = np.full((len(ROWS), run.session.engine.info.n_embd), value, np.float32)
    run.session.pool.media.rows = lambda before, numbers: Part(rows[: len(numbers)])
    return np.concatenate([ids[:300], ROWS, ids[1000:1200]])


def read(text: Any, ids: Tokens) -> None:
    """Read a prompt; scores of chunks can show that it is not finite before its logits do."""
    with suppress(NotFinite):
        extend(text, ids)


@contextmanager
def counted(run: Bare) -> Iterator[list[int]]:
    """The rows of each step of the engine within."""
    engine, rows = run.session.engine, list[int]()
    step = engine.step

    def noted(count: int, *rest: Any) -> None:
        rows.append(count)
        step(count, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", noted)
        yield rows


@pytest.mark.parametrize("length", [0, 200])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_leaves_only_finite_rows(kind: str, flash: bool, length: int, bare: Make, tokens: Tokens) -> None:
    """Without flash attention a CPU multiplies hidden rows too, as GPUs always do."""
    found = []
    for value in (0.1, np.nan):
        run = bare(kind, pool=1024, flash=flash)
        ids = tokens % run.n_vocab
        read(run.session, poisoned(run, ids, value))
        assert run.session.is_finite() == np.isfinite(value)
        left = run.session.truncate(length)
        assert left == (0 if kind == "hybrid" else length)
        assert not flash or all_finite(run.session.engine)
        extend(run.session, ids[left:700])
        found.append(run.row())
    assert np.isfinite(found[1]).all()
    assert near(*found, LAYOUT)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_layer_buffers_forget_a_text_that_was_not_finite(kind: str, bare: Make, tokens: Tokens) -> None:
    """Streamed steps read up to 255 rows behind their own, of whatever was there."""
    found = []
    for value in (0.1, np.nan):
        run = bare(kind, pool=512, n_ctx=4096, stages=4096, answers_exactly=True)
        for length in (600, 700, 1000):
            read(run.session, np.concatenate([poisoned(run, tokens, value), tokens[2000:3000]]))
            run.session.reset()
            extend(run.session, tokens[4000 : 4000 + length])
            found.append(run.row())
            run.session.reset()
    for mine, its in zip(found[:3], found[3:], strict=True):
        assert near(mine, its, LAYOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_text_meets_a_prompt_that_is_not_finite(kind: str, bare: Make, tokens: Tokens) -> None:
    """It is dropped before the next step of another text, whether or not anybody waits for it."""
    found = []
    for value in (0.1, np.nan):
        run = make(bare, 3, kind=kind)
        ids = tokens % run.n_vocab
        one, victim, other = run.sessions
        extend(one, ids[3000:3400])
        read(victim, poisoned(run, ids, value))
        rows = decode(run, [one], ids[:1]) if np.isfinite(value) else step(run, one, ids[:1])
        if np.isnan(value):
            assert victim.spoiled
            assert all_finite(run.session.engine)
            with pytest.raises(NotFinite, match="reset"):
                extend(victim, ids[:1])
            with pytest.raises(NotFinite, match="not kept"):
                restore.state(victim)
        extend(other, ids[5000:5300])
        rows.append(logits_of(run, other))
        victim.reset()
        extend(victim, ids[6000:6300])
        rows.append(logits_of(run, victim))
        rows += decode(run, run.sessions, ids[7000:7003])
        found.append(rows)
    assert all(alike(a, b) if kind == "iswa" else near(a, b, LAYOUT) for a, b in zip(*found, strict=True))


def step(run: Bare, text: Any, ids: Tokens) -> list[Any]:
    """The logits of a text after its next token."""
    extend(text, ids)
    return [logits_of(run, text)]


@pytest.mark.parametrize("length", [0, 100])
def test_a_cut_text_that_was_given_up_is_read_from_its_beginning(length: int, bare: Make, tokens: Tokens) -> None:
    run = make(bare, 2)
    one, victim = run.sessions
    extend(one, tokens[3000:3400])
    read(victim, poisoned(run, tokens))
    extend(one, tokens[:1])
    assert victim.truncates_to(length) == victim.truncate(length) == 0
    assert not victim.spoiled
    extend(victim, tokens[:200])
    check(run)


@pytest.mark.parametrize("count", [2, 3])
def test_neighbours_of_one_step_are_computed_again_once(count: int, bare: Make, tokens: Tokens) -> None:
    """A GPU multiplies rows that are hidden from neighbours. On a CPU only the text itself is computed again."""
    again = count if ON_GPU else 1
    found = []
    for spoiled in (False, True):
        run = make(bare, count)
        for i, text in enumerate(run.sessions):
            extend(text, tokens[1000 * i :][:100])
        victim = run.sessions[0]
        if spoiled:
            spoil(run.session.engine, victim.table.chunks[0].block)
        with counted(run) as steps:
            errors = together.compute([(text, text.prepare(tokens[5000:5040], LAST)) for text in run.sessions])
        assert steps == [40 * count, *[40] * again * spoiled]
        assert [type(error) for error in errors] == [NotFinite if spoiled else type(None), *[type(None)] * (count - 1)]
        victim.reset()
        assert all_finite(run.session.engine)
        with counted(run) as steps:
            errors = together.compute([(text, text.prepare(tokens[6000:6040], LAST)) for text in run.sessions])
        assert errors == [None] * count
        assert steps == [40 * count]
        found.append([logits_of(run, text) for text in run.sessions[1:]])
        check(run)
    assert all(alike(mine, its) for mine, its in zip(*found, strict=True))


def test_blocks_of_a_text_that_is_not_finite_are_zeroed_before_another_gets_them(bare: Make, tokens: Tokens) -> None:
    run = make(bare, 2)
    one, victim = run.sessions
    extend(one, tokens[3000:3400])
    read(victim, poisoned(run, tokens))
    run.session.pool.deal({0: 2 * SHARE})
    assert all_finite(run.session.engine)
    extend(one, tokens[4000:4500])
    assert np.isfinite(logits_of(run, one)).all()
