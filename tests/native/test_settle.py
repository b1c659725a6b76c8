"""Rows move between slots: every byte of them, in every layer, and what llama.cpp believes about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.harness import CHUNK, KV_TYPES, Bare, evaluate, read_block, same_bits

from kvflash_ggml.errors import EngineError, UnsupportedError
from kvflash_ggml.sequence.prefill import extend

Make = Callable[..., Bare]
TEXT = 200
LATENT = pytest.param("latent", "f16", marks=pytest.mark.slow)  # compiles the generator of such models first
KINDS = [*(("dense", kv) for kv in KV_TYPES), ("hybrid", "f16"), ("hybrid", "q8_0"), ("iswa", "f16"), ("uneven", "f16")]


def text(bare: Make, tokens: Any, kind: str = "dense", kv: str = "f16", **settings: Any) -> Bare:
    run = bare(kind, pool=512, n_ctx=512, n_ubatch=96, type_kv=KV_TYPES[kv], **settings)
    extend(run.session, tokens[:TEXT] % run.n_vocab)
    return run


def rows(run: Bare) -> list[npt.NDArray[np.uint8]]:
    """Keys and values of each layer by slot: [n_slots, bytes of a row]."""
    engine = run.session.engine
    images = [np.frombuffer(read_block(run.session, b), np.uint8) for b in range(engine.info.n_slots // CHUNK)]
    spans = [span for x in engine.layers for span in ((x.k_offset, x.k_row), (x.v_offset, x.v_row))]
    return [np.concatenate([i[at : at + CHUNK * row].reshape(CHUNK, row) for i in images]) for at, row in spans if row]


def check_moves(run: Bare, source: Sequence[int], target: Sequence[int]) -> None:
    engine = run.session.engine
    before, cells = rows(run), engine.cells(0, 512)
    engine.settle(source, target, [])
    want = cells.copy()
    want[list(source)] = -1
    want[list(target)] = cells[list(source)]
    assert engine.cells(0, 512).tolist() == want.tolist()
    for old, new in zip(before, rows(run), strict=True):
        expected = old.copy()
        expected[list(target)] = old[list(source)]
        assert same_bits(new, expected)


@pytest.mark.parametrize(("kind", "kv"), [*KINDS, LATENT])
def test_every_byte_moves(kind: str, kv: str, bare: Make, tokens: Any) -> None:
    run = text(bare, tokens, kind, kv)
    rng = np.random.default_rng(2)
    for n in (1, 2, 7, 40, 150):
        held = np.flatnonzero(run.session.engine.cells(0, 512) >= 0)
        free = np.flatnonzero(run.session.engine.cells(0, 512) < 0)
        source = rng.permutation(held)[:n]
        target = rng.permutation(np.concatenate([source, rng.permutation(free)[:n]]))[:n]
        check_moves(run, source.tolist(), target.tolist())


def test_a_chain_of_moves_reads_before_it_writes(bare: Make, tokens: Any) -> None:
    run = text(bare, tokens)
    check_moves(run, [100, 101, 102, 103], [101, 102, 103, 300])  # each goes where the next one was
    check_moves(run, [10, 11], [11, 10])
    check_moves(run, [10, 11, 12], [11, 12, 10])
    check_moves(run, [5, 6, 7], [5, 301, 7])  # some stay
    check_moves(run, [5], [5])
    check_moves(run, [], [])


def test_rows_that_are_no_whole_number_of_floats(bare: Make, tokens: Any) -> None:
    """They are copied one by one."""
    run = text(bare, tokens, "narrow", "q8_0")
    assert all(x.k_row == 34 for x in run.session.engine.layers)
    check_moves(run, [100, 101, 102], [101, 300, 100])


def test_the_text_goes_on_from_where_it_lies(bare: Make, tokens: Any) -> None:
    """After it a step sees the rows in their new places, and positions and tokens have come along."""
    moved, back, straight = (text(bare, tokens) for _ in range(3))
    source, target = [3, 64, 65, 199], [300, 65, 301, 302]
    for run in (moved, back):
        run.session.engine.settle(source, target, [])
    back.session.engine.settle(target, source, [])
    places = [dict(zip(source, target, strict=True)).get(i, i) for i in range(TEXT)]

    def after(run: Bare, places: list[int]) -> Any:
        return evaluate(run, tokens[TEXT : TEXT + 2], [TEXT, TEXT + 1], [400, 401], [places, [*places, 400]])

    want = after(straight, [*range(TEXT)])
    assert same_bits(after(back, [*range(TEXT)]), want)
    got = after(moved, places)
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.999  # summed in another order
    assert (got.argmax(1) == want.argmax(1)).all()
    assert moved.session.engine.truncate(150, seq=0)
    held = moved.session.engine.cells(0, 512)
    assert sorted(held[held >= 0].tolist()) == list(range(150))
    assert held[[300, 65, 301, 302]].tolist() == [3, 64, 65, -1]


REFUSED = {
    "from beyond": ([512], [300], "row 0 settles from slot 512 in slot 300, there are 512"),
    "from below": ([-1], [300], "row 0 settles from slot -1 in slot 300, there are 512"),
    "to beyond": ([1, 2], [300, 512], "row 1 settles from slot 2 in slot 512, there are 512"),
    "to below": ([1], [-1], "row 0 settles from slot 1 in slot -1, there are 512"),
    "from nothing": ([1, 400], [300, 301], "row 1 settles from slot 400, which is empty"),
    "from twice": ([1, 1], [300, 301], "row 1 settles from slot 1 in slot 301, as one before it"),
    "to twice": ([1, 2], [300, 300], "row 1 settles from slot 2 in slot 300, as one before it"),
    "taken": ([1, 2], [300, 3], "row 1 settles in slot 3, which is taken"),
    "stays twice": ([1, 2], [2, 2], "row 1 settles from slot 2 in slot 2, as one before it"),
    "lengths": ([1, 2], [300], "2 slots to settle in 1"),
}


@pytest.mark.parametrize(("source", "target", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_impossible_moves_are_refused(source: Any, target: Any, why: str, bare: Make, tokens: Any) -> None:
    run = text(bare, tokens)
    before, cells = rows(run), run.session.engine.cells(0, 512)
    with pytest.raises(EngineError, match=re.escape(why)) as refused:
        run.session.engine.settle(source, target, [])
    assert type(refused.value) is EngineError
    assert all(map(same_bits, rows(run), before))
    assert run.session.engine.cells(0, 512).tolist() == cells.tolist()


def test_transposed_values_are_refused(bare: Make, tokens: Any) -> None:
    run = text(bare, tokens, flash=False)
    with pytest.raises(UnsupportedError, match="V is stored transposed, so rows cannot move"):
        run.session.engine.settle([1], [300], [])
