"""The trained MTP head and EAGLE3 drafter: they load as llama.cpp wants them, and what they draft is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.harness import TEXT

PROMPT, CHAIN = 600, 3


@pytest.fixture
def recalled(loaded: None, model: Callable[[str], Path]) -> Callable[[str, str], tuple[list[int], np.ndarray]]:
    """How many tokens of each chain are accepted in an answer, and the logits of a chain in the prompt."""
    from train_recall import eval_chain
    from train_recall.eval_dflash import Target, prompts

    def ask(target: str, drafter: str) -> tuple[list[int], np.ndarray]:
        reader = Target(str(model(target)), n_ctx=1024, threads=1)
        draft = eval_chain.Chain(str(model(drafter)), reader, n_ctx=1024, threads=1)
        eval_chain.watch(reader, draft)
        kind, prompt = next(prompts(reader, [str(TEXT)], length=PROMPT, rng=random.Random(3)))
        assert kind == "recall"
        tokens = eval_chain.greedy(reader, prompt, n=32)
        rows = draft.fuse(eval_chain.observe(reader, tokens, draft.layers))
        draft.feed(tokens[:-1], rows)
        logits = draft.draft(tokens[-1], rows[-2], len(tokens) - 1, n=CHAIN)
        lengths = eval_chain.accepted(draft, tokens, rows, prompt=len(prompt), n=CHAIN)
        draft.close()
        return lengths, logits

    return ask


@pytest.mark.parametrize(("target", "drafter"), [("dense", "eagle3"), ("hybrid", "mtp")])
def test_answers_are_drafted(
    recalled: Callable[[str, str], tuple[list[int], np.ndarray]], target: str, drafter: str
) -> None:
    lengths, _ = recalled(target, drafter)
    assert np.mean(lengths) > 2


def test_a_head_drafts_alike_in_a_file_of_its_own_and_in_its_targets(
    recalled: Callable[[str, str], tuple[list[int], np.ndarray]],
) -> None:
    own, own_logits = recalled("hybrid", "mtp")
    joined, joined_logits = recalled("headed", "headed")
    assert own == joined
    assert np.array_equal(own_logits, joined_logits)
