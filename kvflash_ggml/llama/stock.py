"""What upstream's class does by itself: evaluation without a pool, and its sampling."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from llama_cpp import Llama as Upstream  # bound here: `install` puts our class in its place
from llama_cpp import llama_get_memory, llama_model_has_encoder


class Stock:
    """Upstream's methods on a `Llama`, which are another's where that has a pool. llm: weakly, since it owns this."""

    def __init__(self, llm: Upstream) -> None:
        self._llm: Any = weakref.proxy(llm)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens in llama.cpp's own cache. UnsupportedModelError for a model that writes no text by itself."""
        llm = self._llm
        if llm.n_tokens == 0 and (llama_get_memory(llm.ctx) is None or llama_model_has_encoder(llm.model)):
            from .embedding import no_writer  # here: it is rare

            raise no_writer(llm.model)
        Upstream.eval(llm, tokens)

    def reset(self) -> None:
        """Forget the text."""
        Upstream.reset(self._llm)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Draw a token as upstream does."""
        return int(Upstream.sample(self._llm, *args, **kwargs))

    def drafts(self, tokens: Any, room: int) -> list[int]:
        """Return what upstream's `draft_model` proposes after a text, `room` tokens at most."""
        model = self._llm.draft_model
        return [] if model is None or room <= 0 else [int(draft) for draft in model(tokens)[:room]]
