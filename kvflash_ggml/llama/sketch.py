"""The pool as a drafter: what is resident proposes tokens, and all of the text verifies them at once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats, Int32s
from ..spec.base import Features
from ..spec.draft import Draft, chain

if TYPE_CHECKING:
    from .generation import GeneratingLlama


class PoolDrafter:
    """Decodes a few tokens with what is in the pool in view, by the sampler of the running answer.

    It draws from a copy of that sampler, with the same random numbers: where the pool sees what the text holds, what it
    draws is what will be drawn. A sampler that calls Python cannot be copied; then the likeliest tokens are proposed.

    made: the model, weakly, since it owns this.
    """

    name = "pool"
    wants = Features()

    def __init__(self, made: GeneratingLlama) -> None:
        self._made = weakref.ref(made)

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See `Drafter`: what the text is, the pool knows."""

    def propose(self, root: int, most: int) -> Draft | None:
        """See `Drafter`. None where a step sees no more than the pool, or everything is resident."""
        llm = self._made()
        assert llm is not None
        session = llm._session
        assert session is not None
        if session.sees_everything or not session.reading.answers_exactly:
            return None
        sampler = llm._sampler
        copy = None if llm._greedy or sampler is None or sampler.custom_samplers else sampler.clone()
        tokens = [root]
        for _ in range(most):
            session.sketch(np.array(tokens[-1:], np.int32), room=most)
            tokens.append(copy.sample(llm._ctx, -1) if copy is not None else llm._likeliest())
        return chain(tokens[1:], self.name)

    def truncate(self, length: int) -> None:
        """See `Drafter`."""

    def close(self) -> None:
        """See `Drafter`."""
