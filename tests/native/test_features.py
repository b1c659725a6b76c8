"""What the target's compute leaves for drafters: rows of each token, and refusals instead of aborts."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import same_bits

from kvflash_ggml.arrays import Floats, Int32s
from kvflash_ggml.errors import EngineError, UnsupportedError
from kvflash_ggml.gguf.target import LAST_INPUT
from kvflash_ggml.sequence.prefill import extend

REPO = Path(__file__).parents[2]
LAYERS = (2, 4, 5)


def read(one: Any, tokens: Int32s, *, layers: tuple[int, ...] = LAYERS, nextn: bool = False) -> Floats:
    """What is kept of these tokens while a session reads on."""
    engine, rows = one.session.engine, []
    width = engine.open_features(layers, nextn=nextn)

    def after(start: int, count: int) -> None:
        rows.append(np.full((count, width), np.nan, np.float32))
        engine.read_features(0, rows[-1])

    extend(one.session, tokens, after=after)
    return np.concatenate(rows)


def test_of_a_prompt_they_are_those_of_a_stock_context(bare: Any, tokens: Any, model: Any) -> None:
    """All rows of a step, though only its last token has logits. A pool of the whole context computes the same bits."""
    from kvflash_ggml.speculation.acceptance import TargetModel

    text = tokens[:700]
    found = read(bare(pool=1024, n_ctx=1024, n_ubatch=512), text)
    with ExitStack() as stack:
        target = TargetModel(model("dense"), LAYERS, stack)
        wanted = np.concatenate([target._decode(text[first : first + 512].tolist(), first) for first in (0, 512)])
    assert found.shape == wanted.shape == (700, 3 * 256)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
    assert len(np.unique(found[:, 0])) > 100


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_of_a_step_of_several_ubatches(bare: Any, tokens: Any, kind: str) -> None:
    """A plan that llama.cpp splits gives the bits of the same ubatches as steps of their own."""
    text = tokens[:384]
    whole = read(bare(kind, pool=512, n_ctx=512, n_ubatch=64, n_batch=192), text, layers=(1, 3))
    parts = read(bare(kind, pool=512, n_ctx=512, n_ubatch=64), text, layers=(1, 3))
    assert same_bits(whole, parts)


def test_first_input_is_the_embedding(bare: Any, tokens: Any) -> None:
    text = np.concatenate([tokens[:100], tokens[:100]])
    found = read(bare(pool=512, n_ctx=512), text, layers=(0,))
    assert same_bits(found[:100], found[100:])
    assert not np.array_equal(found[0], found[1])


def test_state_in_front_of_the_head(bare: Any, tokens: Any) -> None:
    """Of every token, alone and behind the inputs of layers."""
    one = bare("hybrid", pool=512, n_ctx=512)
    found = read(one, tokens[:80], layers=(0,), nextn=True)
    assert found.shape == (80, 2 * 256)
    states = found[:, 256:]
    assert np.isfinite(states).all()
    assert len(np.unique(states[:, 0])) == 80
    other = bare("hybrid", pool=512, n_ctx=512)
    assert same_bits(read(other, tokens[:80], layers=(), nextn=True), states)


def test_logits_do_not_change(bare: Any, tokens: Any) -> None:
    plain, kept = bare(pool=512, n_ctx=512), bare(pool=512, n_ctx=512)
    read(kept, tokens[:200])
    extend(plain.session, tokens[:200])
    assert same_bits(kept.row(), plain.row())


def test_part_of_a_step(bare: Any, tokens: Any) -> None:
    one = bare(pool=512, n_ctx=512)
    rows = read(one, tokens[:50])
    part = np.empty((7, rows.shape[1]), np.float32)
    one.session.engine.read_features(20, part)
    assert same_bits(part, rows[20:27])


def test_what_cannot_be_is_refused(bare: Any, tokens: Any) -> None:
    engine = bare(pool=512, n_ctx=512).session.engine
    rows = np.empty((4, 256), np.float32)
    with pytest.raises(EngineError, match="no features are kept"):
        engine.read_features(0, rows)
    for layers, why in (((7,), "the model has 6 layers"), ((-1,), "input of layer -1"), ((2, 2), "named twice")):
        with pytest.raises(EngineError, match=why):
            engine.open_features(layers)
    with pytest.raises(UnsupportedError, match="input of layer 6 of the architecture qwen3"):
        engine.open_features((2, 6))
    with pytest.raises(UnsupportedError, match="in front of the head of the architecture qwen3"):
        engine.open_features((2,), nextn=True)
    assert engine.open_features((2,)) == 256
    with pytest.raises(EngineError, match="kept already"):
        engine.open_features((2,))
    with pytest.raises(EngineError, match="of a step of 0"):
        engine.read_features(0, rows)


def test_none_after_a_step_that_failed_or_logits_put_back(bare: Any, tokens: Any) -> None:
    one = bare(pool=512, n_ctx=512)
    rows = read(one, tokens[:50])
    one.session.engine.set_logits(np.zeros(one.n_vocab, np.float32))
    with pytest.raises(EngineError, match="of a step of 0"):
        one.session.engine.read_features(0, rows)


def test_an_architecture_without(bare: Any) -> None:
    with pytest.raises(UnsupportedError, match="does not hand out the input of layer 1 of the architecture"):
        bare("iswa", pool=512, n_ctx=512).session.engine.open_features((1,))


def test_architectures_that_give_what_comes_out_of_the_last_layer() -> None:
    """No graph tells before it is asked, so the library has a list. DeepSeek V4 cannot be pooled."""
    source = (REPO / "kvflash_ggml/native/kvf_features.cpp").read_text()
    listed = {name.lower() for name in re.findall(r"arch == LLM_ARCH_(\w+)", source)}
    assert listed == LAST_INPUT - {"deepseek4"}
