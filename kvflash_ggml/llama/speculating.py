"""Makes what drafts for a `Llama`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import KVFlashConfig, SpecConfig
from ..spec.base import Drafter
from ..spec.callback import Callback
from ..spec.fixed import Fixed
from ..spec.loop import Judge, Speculator
from ..spec.ngram import NGram

if TYPE_CHECKING:
    from llama_cpp import Llama

ROWS = 32
"""Rows of a step that verifies drafts, at most."""


def rows_at_most(config: KVFlashConfig | None, draft_model: object) -> int:
    """How many rows a step can verify beside the text; 0 without drafts."""
    if config is None or (config.spec is None and draft_model is None):
        return 0
    spec = config.spec or SpecConfig()
    return max(spec.width or 0, spec.max_width or ROWS)


def open_speculator(llm: Llama, config: KVFlashConfig) -> Speculator | None:
    """What drafts for a model, as it is asked to; None if nothing does."""
    if config.spec is None and llm.draft_model is None:
        return None
    spec = config.spec or SpecConfig()
    drafters: list[Drafter] = [*_given(llm), *(_open(llm, spec) if config.spec is not None else ())]
    judge: Judge = Fixed(spec.width or rows_at_most(config, llm.draft_model))
    return Speculator(drafters, judge, n_vocab=llm.n_vocab(), ends=_ends(llm))


def _given(llm: Llama) -> Sequence[Drafter]:
    return [] if llm.draft_model is None else [Callback(llm.draft_model)]


def _open(llm: Llama, spec: SpecConfig) -> Sequence[Drafter]:
    return [NGram()]


def _ends(llm: Llama) -> frozenset[int]:
    """The tokens that end a text."""
    import llama_cpp

    vocab = llm._model.vocab
    return frozenset(token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token))
