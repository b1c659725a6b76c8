"""Upstream's `save_state` and `load_state`, of a text with a pool or without one."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from ..errors import ContextFull, SnapshotError
from ..runtime.saving import Saver


def save(saver: Saver) -> llama_cpp.LlamaState:
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


def load(saver: Saver, state: llama_cpp.LlamaState) -> None:
    """Return to a state of `save`. SnapshotError, ContextFull."""
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
