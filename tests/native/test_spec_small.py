"""A small model as drafter: what it drafts is what it would write by itself, whatever was cut or skipped before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafter_models import with_other_tokens
from support.harness import MODELS

from kvflash_ggml.errors import ConversionError

TARGET = MODELS / "recall-qwen3-q8_0.gguf"
SMALL = MODELS / "scorer-qwen3-q8_0.gguf"


@pytest.fixture
def small(stock: Any) -> Iterator[Callable[..., Any]]:
    import ctypes

    from kvflash_ggml.speculation.base import Target
    from kvflash_ggml.speculation.chained import Small

    llm = stock("dense")
    target = Target(
        path=TARGET,
        model=ctypes.cast(llm._model.model, ctypes.c_void_p).value or 0,
        context=ctypes.cast(llm._ctx.ctx, ctypes.c_void_p).value or 0,
        n_embd=256,
        n_vocab=4096,
        n_ctx=4096,
        ends=frozenset({4094}),
    )
    with ExitStack() as stack:

        def make(path: Path = SMALL, **settings: Any) -> Any:
            drafter = Small(path, target, **settings)
            stack.callback(drafter.close)
            return drafter

        yield make


def written(llm: Any, text: Any, count: int) -> list[int]:
    """What a model writes greedily after a text."""
    llm.reset()
    llm.eval(text.tolist())
    found = []
    for _ in range(count):
        logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(4096,))
        found.append(int(logits.argmax()))
        llm.eval(found[-1:])
    return found


def test_it_drafts_what_it_would_write(small: Any, stock: Any, tokens: Any) -> None:
    alone, drafter = stock("small", n_ctx=2048, flash_attn=True), small()  # a drafter attends so
    text, read, agree = tokens[:900], 0, []
    for root in (600, 603, 604, 690, 860):
        drafter.observe(read, text[read:root], None)
        draft, read = drafter.propose(int(text[root]), 6), root
        assert (draft.source, len(draft)) == ("draft", 6)
        assert draft.is_chain
        assert (draft.logp < 0).all()
        agree.append(draft.tokens[:3].tolist() == written(alone, text[: root + 1], 3))
    assert sum(agree) >= 4  # steps of other lengths round differently


def test_a_draft_leaves_nothing_behind(small: Any, tokens: Any) -> None:
    drafter = small()
    drafter.observe(0, tokens[:100], None)
    first = drafter.propose(5, 8).tokens.tolist()
    assert drafter.propose(5, 8).tokens.tolist() == first
    drafter.propose(9, 8)
    drafter.observe(100, tokens[100:120], None)
    drafter.propose(9, 8)
    drafter.truncate(100)
    assert drafter.propose(5, 8).tokens.tolist() == first


def test_nothing_follows_an_end(small: Any, tokens: Any) -> None:
    drafter = small()
    drafter.observe(0, tokens[:100], None)
    draft = drafter.propose(5, 8)
    end = int(draft.tokens[2])
    object.__setattr__(drafter._target, "ends", frozenset({end}))
    assert drafter.propose(5, 8).tokens.tolist() == draft.tokens[: draft.tokens.tolist().index(end) + 1].tolist()


def test_a_token_that_it_does_not_know(small: Any, tokens: Any) -> None:
    drafter = small()
    drafter.observe(0, tokens[:50], None)
    drafter.observe(50, np.array([5000, 6, 7, 8], np.int32), None)
    assert drafter.propose(5000, 4) is None
    found = drafter.propose(5, 4)
    fresh = small()
    fresh.observe(51, np.array([6, 7, 8], np.int32), None)
    assert found.tokens.tolist() == fresh.propose(5, 4).tokens.tolist()


def test_what_cannot_draft(small: Any, tmp_path: Path) -> None:
    hybrid = MODELS / "recall-qwen35-q8_0.gguf"
    with pytest.raises(ConversionError, match=r"recall-qwen35-q8_0.gguf: its memory is recurrent state.*qwen35"):
        small(hybrid)
    with pytest.raises(ConversionError, match=r"general\.architecture is dflash"):
        small(MODELS / "recall-dflash.gguf")
    with pytest.raises(ConversionError, match="the vocabulary is another one"):
        small(with_other_tokens(SMALL, tmp_path / "other.gguf"))
