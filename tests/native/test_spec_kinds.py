"""Real drafters in the loop: the text is that of plain decoding, and what they win is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafter_models import with_own_vocabulary
from support.harness import MODELS, assert_alike, drawn
from support.inside import inside

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(kind: str, llama: Any, tokens: Any) -> None:
    """Bit for bit where rows are computed one by one; with planes, which need them together, up to rounding."""
    model, source, spec = KINDS[kind]
    prompt = np.tile(tokens[:220], 3)[:620].tolist()
    strict = model == "dense"
    size = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1 if strict else 128, "kvflash": 1024}
    plain = drawn(llama(model, **size), prompt, COUNT, temp=0.0)
    llm = llama(model, **size, kvflash_spec=spec)
    drafted = drawn(llm, prompt, COUNT, temp=0.0)
    own = llm.kvflash.spec.last.by_source[source]
    assert own.accepted > 0
    assert own.steps < COUNT
    assert_alike(plain, drafted)
    if strict:
        assert drafted[0] == plain[0]
        assert all(map(np.array_equal, plain[1], drafted[1]))


def test_a_drafter_with_a_smaller_vocabulary(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """It drafts tokens of its own alone, and as well as with all of them if it has those that come."""
    prompt = np.tile(tokens[:220], 3)[:620].tolist()
    size = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024}

    def answer(draft: Path) -> tuple[list[int], Any, set[int]]:
        llm = llama("dense", **size, kvflash_spec=SpecConfig(types=("draft-eagle3",), draft=draft, width=5))
        drafter, drafted = inside(llm).drafting.drafters[0], set[int]()
        propose = drafter.propose

        def proposed(root: int, most: int) -> Any:
            draft = propose(root, most)
            drafted.update(draft.tokens.tolist())
            return draft

        drafter.propose = proposed
        return drawn(llm, prompt, COUNT, temp=0.0)[0], llm.kvflash.spec.last, drafted

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
    won, answers = [], []
    for tree in (False, True):
        spec = SpecConfig(types=("draft-dflash",), draft=MODELS / "recall-dflash.gguf", width=width, tree=tree)
        llm = llama("f32", **size, kvflash_spec=spec)
        answers.append(drawn(llm, prompt, 150, temp=0.0))
        won.append(llm.kvflash.spec.last.mean_length)
    assert_alike(*answers)
    assert won[1] > won[0] + 0.3
