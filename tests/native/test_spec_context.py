"""A drafter's context: what it holds, forgets, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS, same_bits

from kvflash_ggml.errors import ConfigError, ConversionError, EngineError

SMALL = MODELS / "scorer-qwen3-q8_0.gguf"


@pytest.fixture
def context(loaded: None) -> Iterator[Callable[..., Any]]:
    """Makes the context of a small model that reads the text by itself."""
    from kvflash_ggml.speculation.base import Target
    from kvflash_ggml.speculation.context import DraftContext, DraftModel

    target = Target(path=SMALL, model=0, context=0, n_embd=256, n_vocab=4096, n_ctx=8192)
    with ExitStack() as stack:

        def make(path: Path = SMALL, **settings: Any) -> Any:
            model = DraftModel(path, offload=False)
            stack.callback(model.close)
            made = DraftContext(model.address, target, **settings)
            stack.callback(made.close)
            return made

        yield make


def next_logits(one: Any, start: int, tokens: Any) -> Any:
    import llama_cpp

    one.run(start, tokens, outputs=len(tokens))
    rows = [llama_cpp.llama_get_logits_ith(one._context, i) for i in range(len(tokens))]
    return np.stack([np.ctypeslib.as_array(row, (one.n_vocab,)).copy() for row in rows])


def test_a_window_of_a_long_text(context: Any, tokens: Any) -> None:
    """Past the window it sees what it would if the text began there; before, all of it."""
    one, whole = context(window=512), context(window=8192)
    one.feed(0, tokens[:3000], None)
    assert one.end == 3000
    assert 512 - 20 <= one.end - one.first <= 512 + 256
    found = next_logits(one, 3000, tokens[3000:3020])
    whole.feed(one.first, tokens[one.first : 3000], None)  # at the same positions, in steps of another length
    wanted = next_logits(whole, 3000, tokens[3000:3020])
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.9
    assert np.abs(found - wanted).max() < 0.5

    whole.feed(0, tokens[:3000], None)
    assert (whole.first, whole.end) == (0, 3000)
    assert not np.allclose(next_logits(whole, 3000, tokens[3000:3020]), wanted, atol=0.5)


def test_text_that_was_cut(context: Any, tokens: Any) -> None:
    one = context(window=512)
    one.feed(0, tokens[:300], None)
    wanted = next_logits(one, 300, tokens[300:310])
    one.run(310, tokens[700:760])
    one.truncate(300)
    assert one.end == 300
    assert same_bits(next_logits(one, 300, tokens[300:310]), wanted)
    one.run(290, tokens[290:300])  # what follows is forgotten by itself
    assert one.end == 300
    assert np.allclose(next_logits(one, 300, tokens[300:310]), wanted, atol=0.2)
    one.truncate(0)
    assert (one.first, one.end) == (0, 0)


def test_a_gap_forgets(context: Any, tokens: Any) -> None:
    one = context(window=512)
    one.feed(0, tokens[:300], None)
    one.run(400, tokens[:5])
    assert (one.first, one.end) == (400, 405)
    one.run(100, tokens[:5])
    assert (one.first, one.end) == (100, 105)


def test_put_aside_and_back(context: Any, tokens: Any) -> None:
    one = context(window=512)
    one.feed(0, tokens[:900], None)
    first, saved = one.first, one.state()
    wanted = next_logits(one, 900, tokens[900:910])
    one.reset()
    other = context(window=512)
    for taker in (one, other):
        taker.feed(0, tokens[1000:1100], None)
        taker.load(first, 900, saved)
        assert (taker.first, taker.end) == (first, 900)
        found = next_logits(taker, 900, tokens[900:910])
        assert (found.argmax(1) == wanted.argmax(1)).all()
        assert np.abs(found - wanted).max() < 0.2

    for damaged in (saved[:-7], b"", saved[:100]):
        other.load(first, 900, damaged)
        assert other.first == other.end == 900  # cold, and it goes on
        other.run(900, tokens[900:910])


def test_a_failure_leaves_it_empty(context: Any, tokens: Any) -> None:
    one = context(window=512)
    one.feed(0, tokens[:300], None)
    wanted = next_logits(one, 300, tokens[300:310])
    for wrong, error in (
        (dict(tokens=np.array([4096], np.int32)), EngineError),
        (dict(tokens=np.array([-1], np.int32)), EngineError),
        (dict(rows=np.zeros((1, 7), np.float32)), EngineError),
        (dict(tokens=np.zeros(513, np.int32)), EngineError),
        (dict(tokens=np.zeros(0, np.int32)), EngineError),
        (dict(), EngineError),
    ):
        with pytest.raises(error):
            one.run(310, **wrong)
        assert one.first == one.end
    one.feed(0, tokens[:300], None)
    assert same_bits(next_logits(one, 300, tokens[300:310]), wanted)


def test_likeliest_tokens(context: Any, tokens: Any) -> None:
    one = context(window=512)
    one.feed(0, tokens[:100], None)
    logits = next_logits(one, 100, tokens[100:108])
    ids, logp = one.top(range(2, 7), 3)
    assert ids.shape == logp.shape == (5, 3)
    for i in range(5):
        row = logits[2 + i].astype(np.float64)
        order = np.argsort(-row, kind="stable")[:3]
        assert ids[i].tolist() == order.tolist()
        assert logp[i] == pytest.approx((row - np.log(np.exp(row).sum()))[order], abs=1e-4)


def test_what_cannot_be(context: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window of 100 tokens: it must be 256"):
        context(window=100)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(SMALL.read_bytes()[:4000])
    with pytest.raises(ConversionError, match=r"broken.gguf: the file is refused by llama.cpp"):
        context(broken)
