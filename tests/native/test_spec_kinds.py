"""Real drafters in the loop: the text is that of plain decoding, and what they win is counted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafter_models import with_own_vocabulary
from support.harness import MODELS

from kvflash_ggml.config import SpecConfig

KINDS: dict[str, tuple[str, str, SpecConfig]] = {
    "ngram": ("dense", "ngram", SpecConfig(types=("ngram",), width=4)),
    "dflash": (
        "dense", "dflash", SpecConfig(types=("draft-dflash",), draft=MODELS / "recall-dflash.gguf", width=8),
    ),
    "eagle3": (
        "dense", "eagle3", SpecConfig(types=("draft-eagle3",), draft=MODELS / "recall-eagle3-q8_0.gguf", width=5),
    ),
    "small": ("dense", "draft", SpecConfig(types=("draft-simple",), draft=MODELS / "scorer-qwen3-q8_0.gguf", width=4)),
    "mtp": (
        "hybrid", "mtp", SpecConfig(types=("draft-mtp",), draft=MODELS / "mtp-recall-qwen35-q8_0.gguf", width=4),
    ),
    "headed": ("headed", "mtp", SpecConfig(types=("draft-mtp",), width=4)),
}  # fmt: skip
COUNT = 80


def told(llm: Any, prompt: list[int]) -> tuple[list[int], list[Any]]:
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, temp=0.0), COUNT):
        tokens.append(token)
        logits.append(llm.newest_logits())
    return tokens, logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(kind: str, llama: Any, tokens: Any) -> None:
    """Bit for bit where rows are computed one by one; with planes, which need them together, up to rounding."""
    model, source, spec = KINDS[kind]
    prompt = np.tile(tokens[:220], 3)[:620].tolist()
    strict = model == "dense"
    size = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1 if strict else 128, "kvflash": 1024}
    plain, logits = told(llama(model, **size), prompt)
    llm = llama(model, **size, kvflash_spec=spec)
    drafted, theirs = told(llm, prompt)
    own = llm.kvflash.spec.last.by_source[source]
    assert own.accepted > 0
    assert own.steps < COUNT
    if strict:
        assert drafted == plain
        assert all(np.array_equal(mine, its) for mine, its in zip(logits, theirs, strict=True))
        return
    for one, other, mine, its in zip(plain, drafted, logits, theirs, strict=True):
        near = 0.02 * np.abs(mine).max()
        assert np.abs(mine - its).max() <= near
        if one != other:
            assert abs(mine[one] - mine[other]) <= 2 * near
            break


def test_a_drafter_with_a_smaller_vocabulary(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """It drafts tokens of its own alone, and as well as with all of them if it has those that come."""
    prompt = np.tile(tokens[:220], 3)[:620].tolist()
    size = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024}

    def answer(draft: Path) -> tuple[list[int], Any, set[int]]:
        llm = llama("dense", **size, kvflash_spec=SpecConfig(types=("draft-eagle3",), draft=draft, width=5))
        drafter, drafted = llm._drafting.drafters[0], set[int]()
        propose = drafter.propose

        def proposed(root: int, most: int) -> Any:
            draft = propose(root, most)
            drafted.update(draft.tokens.tolist())
            return draft

        drafter.propose = proposed
        return told(llm, prompt)[0], llm.kvflash.spec.last, drafted

    everything = MODELS / "recall-eagle3-q8_0.gguf"
    text, full, drafted = answer(everything)
    own = sorted({*text, *range(0, 4096, 3)} - {next(iter(drafted - set(text)))})
    file = with_own_vocabulary(everything, MODELS / "recall-qwen3-q8_0.gguf", tmp_path / "eagle3.gguf", own)
    again, some, drafted = answer(file)
    assert again == text
    assert drafted <= set(own)
    assert some.accepted >= full.accepted > 0


@pytest.mark.parametrize("width", [8, 16])
def test_a_tree_wins_more_than_a_chain_of_as_many_rows(width: int, llama: Any, tokens: Any) -> None:
    prompt = tokens[:1100].tolist()
    size = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 128, "kvflash": 2048}
    won, texts = [], []
    for tree in (False, True):
        spec = SpecConfig(types=("draft-dflash",), draft=MODELS / "recall-dflash.gguf", width=width, tree=tree)
        llm = llama(**size, kvflash_spec=spec)
        texts.append([*islice(llm.generate(prompt, temp=0.0), 150)])
        won.append(llm.kvflash.spec.last.mean_length)
    assert texts[0][:100] == texts[1][:100]
    assert won[1] > won[0] + 0.3
