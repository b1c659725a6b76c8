"""What upstream's class does by itself: evaluation without a pool, its sampling, and states as llama.cpp has them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp import Llama as Upstream  # bound here: `install` puts our class in its place

from ..errors import ContextFull, SnapshotError
from ..runtime.saving import Saver


class Stock:
    """Upstream's methods on a `Llama`, which are another's where that has a pool. llm: weakly, since it owns this."""

    def __init__(self, llm: Upstream) -> None:
        self._llm: Any = weakref.proxy(llm)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens in llama.cpp's own cache."""
        Upstream.eval(self._llm, tokens)

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


def save_state(saver: Saver) -> llama_cpp.LlamaState:
    """Return a text and its memory as upstream's value."""
    text = saver.text
    data = _state(text.model.context.ctx) if text.sequence is None else saver.snapshots.dump(saver.saved(None))
    rows = text.n_tokens if text.model.logits_all else 0
    return llama_cpp.LlamaState(
        scores=text.scores[:rows].copy(),
        input_ids=text.ids.copy(),
        n_tokens=text.n_tokens,
        llama_state=data,
        llama_state_size=len(data),
        seed=text.seed,
    )


def load_state(saver: Saver, state: llama_cpp.LlamaState) -> None:
    """Return to a state of `save_state`. SnapshotError, ContextFull."""
    text = saver.text
    if not isinstance(state, llama_cpp.LlamaState):
        raise SnapshotError(f"a {type(state).__name__} is no state: give what save_state has returned")
    if state.n_tokens > text.model.n_ctx:
        raise ContextFull(
            f"Requested tokens ({state.n_tokens}) exceed context window of {text.model.n_ctx}: the state is longer"
        )
    if text.sequence is None:
        _set_state(text.model.context.ctx, state.llama_state)
        text.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        text.n_tokens = state.n_tokens
        text.requires_eval = True
    else:
        saver.go_on_from(saver.snapshots.load(state.llama_state))
    text.seed = state.seed
    if text.model.logits_all:
        text.grow_scores(text.n_tokens)
        text.scores[: len(state.scores)] = state.scores


def _state(ctx: Any) -> bytes:
    """Return the state of a context without a pool, as llama.cpp writes it."""
    data = bytearray(llama_cpp.llama_state_get_size(ctx))
    buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
    used = llama_cpp.llama_state_get_data(ctx, buffer, len(data))
    return bytes(data[:used])


def _set_state(ctx: Any, data: bytes) -> None:
    """Put a state back. RuntimeError, with upstream's words, if llama.cpp refuses it."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(ctx, buffer, len(data)) != len(data):
        raise RuntimeError("Failed to set llama state data")
