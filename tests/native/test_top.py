"""The likeliest tokens of rows of logits, against numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import Bare, evaluate
from support.rounding import ON_GPU

from kvflash_ggml.errors import DecodeError, EngineError
from kvflash_ggml.sequence.prefill import extend

Make = Callable[..., Bare]
ROWS = 4


@pytest.fixture
def run(bare: Make, tokens: Any) -> Bare:
    """Four tokens behind a text, the logits of all of them kept."""
    one = bare(pool=512, n_ctx=512, n_ubatch=96)
    extend(one.session, tokens[:50])
    places = range(50, 50 + ROWS)
    evaluate(one, tokens[50 : 50 + ROWS], places, places, [[*range(i)] for i in places])
    return one


@pytest.fixture
def logits(run: Bare) -> Any:
    """What the context holds, to be overwritten: [ROWS, n_vocab]."""
    return np.ctypeslib.as_array(run._ctx.get_logits(), shape=(ROWS, run.n_vocab))


def address(run: Bare) -> int:
    return ctypes.cast(run._ctx.ctx, ctypes.c_void_p).value or 0


def expected(logits: Any, k: int) -> tuple[Any, Any]:
    """Best first, equal ones by id, and their log-probabilities in double precision."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    wide = logits.astype(np.float64)
    top = wide.max(1, keepdims=True)
    logp = wide - top - np.log(np.exp(wide - top).sum(1, keepdims=True))
    return order.astype(np.int32), np.take_along_axis(logp, order, 1)


def compare(run: Bare, logits: Any, k: int) -> None:
    from kvflash_ggml.native.contexts import top

    ids, logp = top(address(run), range(ROWS), k)
    want_ids, want_logp = expected(logits, k)
    assert ids.tolist() == want_ids.tolist()
    assert (ids.dtype, logp.dtype, logp.shape) == (np.int32, np.float32, (ROWS, k))
    possible = want_logp > -np.inf
    assert ((logp > -np.inf) == possible).all()
    np.testing.assert_allclose(logp[possible], want_logp[possible], rtol=1e-6, atol=2e-6)
    assert run.session.engine.argmax(range(ROWS)).tolist() == want_ids[:, 0].tolist()


@pytest.mark.parametrize("k", [1, 2, 8, 64, 4096])
def test_of_a_model(k: int, run: Bare, logits: Any) -> None:
    compare(run, logits, k)


SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "normal": lambda rng, n: rng.standard_normal((ROWS, n)) * 4,
    "rising": lambda rng, n: np.tile(np.linspace(-30, 30, n), (ROWS, 1)),
    "falling": lambda rng, n: np.tile(np.linspace(30, -30, n), (ROWS, 1)),
    "far apart": lambda rng, n: rng.standard_normal((ROWS, n)) * 1e4,
    "large": lambda rng, n: rng.standard_normal((ROWS, n)) + 1e6,
    "huge": lambda rng, n: rng.uniform(-3e38, 3e38, (ROWS, n)),
    "flat": lambda rng, n: np.zeros((ROWS, n)),
    "of few values": lambda rng, n: rng.integers(0, 3, (ROWS, n)),
    "mostly impossible": lambda rng, n: np.where(rng.random((ROWS, n)) < 0.999, -np.inf, 1.5),
    "one possible": lambda rng, n: np.where(np.arange(n) == n - 1, 3.0, -np.inf)[None].repeat(ROWS, 0),
}


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_of_any_shape(shape: Callable[[Any, int], Any], k: int, run: Bare, logits: Any) -> None:
    rng = np.random.default_rng(5)
    logits[:] = shape(rng, run.n_vocab)
    compare(run, logits, k)


def test_equal_ones_come_in_their_order_wherever_they_are(run: Bare, logits: Any) -> None:
    """At the end of a span, at its beginning, and beyond the last vector."""
    from kvflash_ggml.native.contexts import top

    logits[:] = -1
    places = [17, 2047, 2048, 2049, 4094, 4095]
    logits[:, places] = 7
    assert top(address(run), [2], 4)[0].tolist() == [places[:4]]
    logits[:, 4000] = 8
    assert top(address(run), [-1], 4)[0].tolist() == [[4000, *places[:3]]]


@pytest.mark.parametrize("at", [0, 16, 2047, 2048, 4095])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_rows_that_are_not_finite_are_refused(bad: float, at: int, run: Bare, logits: Any) -> None:
    engine = run.session.engine
    before = engine.argmax([0, 1, 2])
    logits[3, at] = bad
    with pytest.raises(DecodeError, match="the logits of row 3 are not finite"):
        engine.argmax(range(ROWS))
    assert engine.argmax([0, 1, 2]).tolist() == before.tolist()


def test_a_row_without_a_possible_token_is_refused(run: Bare, logits: Any) -> None:
    logits[1] = -np.inf
    with pytest.raises(DecodeError, match="row 1"):
        run.session.engine.argmax(range(ROWS))


def test_rows_that_were_not_kept_are_refused(run: Bare, tokens: Any) -> None:
    from kvflash_ggml.native.contexts import top

    engine, n_vocab = run.session.engine, run.n_vocab
    for row in (4, 96, 2**31 - 1, -5, -(2**31)):
        with pytest.raises(EngineError, match=rf"row {row} has no logits"):
            engine.argmax([0, row])
    for k in (0, -1, n_vocab + 1):
        with pytest.raises(EngineError, match=rf"the {k} best tokens of a vocabulary of {n_vocab}"):
            top(address(run), [0], k)
    assert engine.argmax([]).tolist() == []

    engine.truncate(50, seq=0)
    extend(run.session, tokens[50:60])  # keeps those of its last token alone
    assert engine.argmax([9]).tolist() == engine.argmax([-1]).tolist() == [run.row().argmax()]
    with pytest.raises(EngineError, match="row 8 has no logits"):
        engine.argmax([8])


def test_of_logits_that_were_put_back(run: Bare) -> None:
    row = np.zeros(run.n_vocab, np.float32)
    row[77] = 1
    run.session.engine.set_logits(row)
    assert run.session.engine.argmax([-1, 0]).tolist() == [77, 77]


@pytest.mark.skipif(not ON_GPU, reason="logits that a CPU makes are in host memory at once")
def test_logits_stay_on_a_gpu_until_they_are_asked_for(run: Bare, logits: Any, tokens: Any) -> None:
    engine = run.session.engine
    engine.truncate(50, seq=0)
    extend(run.session, tokens[50:60])  # after somebody has asked, these come at once
    first = engine.argmax([-1])
    logits[0] = 0
    extend(run.session, tokens[60:61])
    best = engine.argmax([-1])
    assert not logits[0].any()
    assert best.tolist() == [run.row().argmax()]
    assert logits[0].any()
    logits[0, :] = np.eye(run.n_vocab, dtype=np.float32)[first[0] - 1]  # who has asked for them may change them
    assert engine.argmax([-1]).tolist() == [first[0] - 1]


def test_the_first_of_equally_likely_tokens(bare: Make, tokens: Any) -> None:
    one = bare("twins", pool=512, n_ctx=512)
    extend(one.session, tokens[:50])
    best = one.session.engine.argmax([-1])
    row = one.row()
    assert (row == row.max()).sum() > 1
    assert best.tolist() == [row.argmax()]
