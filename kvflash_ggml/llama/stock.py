"""What upstream's class does by itself: evaluation without a pool, and its sampling."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp import Llama as Upstream  # bound here: `install` puts our class in its place

from ..errors import EncoderError, UnsupportedModelError


class Stock:
    """Upstream's methods on a `Llama`, which are another's where that has a pool. llm: weakly, since it owns this."""

    def __init__(self, llm: Upstream) -> None:
        self._llm: Any = weakref.proxy(llm)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens in llama.cpp's own cache. UnsupportedModelError for a model that writes no text by itself."""
        if self._llm.n_tokens == 0:
            self._check_writes()
        Upstream.eval(self._llm, tokens)

    def _check_writes(self) -> None:
        model = self._llm._model.model
        encodes, decodes = llama_cpp.llama_model_has_encoder(model), llama_cpp.llama_model_has_decoder(model)
        if encodes and decodes:
            raise UnsupportedModelError(
                "this model's decoder reads what its encoder has made of a text, and Llama asks no encoder: "
                "use a model without one, or a program of llama.cpp"
            )
        if encodes or self._llm._ctx.memory is None:
            raise EncoderError(
                "this model is an encoder: it embeds texts and writes none. Make it with embedding=True, and call embed"
            )

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
