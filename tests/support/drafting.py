"""Drafters that know what comes, and answers with the logits that their tokens were chosen from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import Fixed
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.loop import Speculator
from support.harness import drawn
from support.inside import inside


def oracle(text: list[int], right: float, count: int) -> Callable[..., Any]:
    """Drafts what is known to come, each token right so often."""
    rng = np.random.default_rng(1)

    def draft(ids: Any, **_: Any) -> Any:
        after = np.array(text[len(ids) : len(ids) + count], np.intc)
        wrong = rng.random(len(after)) >= right
        return np.where(wrong, (after + 7) % 4000, after)

    return draft


def told(llm: Any, prompt: list[int], count: int, **sampler: Any) -> tuple[list[int], list[bytes]]:
    """Tokens, and the logits that each was sampled from."""
    tokens, logits = drawn(llm, prompt, count, **sampler)
    return tokens, [row.tobytes() for row in logits]


def let_draft(llm: Any, drafter: Any, width: int) -> None:
    """Have this one drafter, and steps of this many rows."""
    inside(llm).speculator = Speculator([drafter], Fixed(width), n_vocab=llm.n_vocab(), ends=())
    inside(llm).session.follower = inside(llm).speculator


class Bush:
    """Drafts a tree around what is known to come: the right tokens on any branch, and wrong ones beside them."""

    name = "bush"
    wants = Features()

    def __init__(self, text: list[int], seed: int) -> None:
        self._text = text
        self._seed = seed
        self._length = 0
        self.trees = 0

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        self._length = start + len(tokens)

    def truncate(self, length: int) -> None:
        self._length = min(length, self._length)

    def close(self) -> None:
        pass

    def propose(self, root: int, most: int) -> Draft | None:
        after = self._text[self._length + 1 : self._length + 6]
        rng = np.random.default_rng((self._seed, self._length))
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token in after:
            siblings = [token, *rng.choice(np.arange(3000, 4000), 2, replace=False).tolist()]
            order = rng.permutation(3).tolist()
            tokens += [siblings[at] for at in order]
            parents += [node] * 3
            node = len(tokens) - 3 + order.index(0)
            if rng.random() < 0.2:
                tokens[node] = 2999  # wrong from here on
        self.trees += 1
        logp = rng.uniform(-3, 0, len(tokens)).astype(np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), self.name, logp) if tokens else None
