"""A drafter's own context on stock llama.cpp. Only this file turns addresses into pointers."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ..arrays import Floats, Int32s
from ..config import SPEC_DEFAULT_WINDOW, SPEC_WINDOW
from ..constants import round_up
from ..drafter.model import same_vocabulary
from ..errors import ConfigError, ConversionError, HostMemoryError, NotFinite
from ..native import contexts
from .base import Target

STEP = 512
"""Most tokens that a drafter reads at once."""

_SLACK = SPEC_WINDOW  # the window moves in steps of this: each move scans every cell


class DraftModel:
    """A drafter's weights. mtp: with heads for further tokens. ConversionError if llama.cpp does not load them."""

    def __init__(self, path: Path, *, offload: bool, repack: bool = True, mtp: bool = False) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        params.load_mtp = mtp
        params.n_gpu_layers = -1 if offload else 0
        address = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not address:
            raise ConversionError(
                path.name, "the file", found="refused by llama.cpp", wanted="a model that it loads",
                remedy="kvflash-convert inspect tells what it is.",
            )  # fmt: skip
        self.address: Any = address

    @property
    def recurrent(self) -> bool:
        """Whether it keeps a state that cannot roll back."""
        lc, model = llama_cpp, self.address
        return bool(lc.llama_model_is_recurrent(model) or lc.llama_model_is_hybrid(model))

    def shares_vocabulary(self, target: Target, *, apart: int) -> bool:
        """Return whether its tokens mean what the target's do, except at most `apart` of the target's last ones."""
        vocab = llama_cpp.llama_model_get_vocab
        return same_vocabulary(vocab(target.model), vocab(self.address), apart=apart)

    def close(self) -> None:
        """Free the weights. Close every context on them before."""
        if self.address:
            llama_cpp.llama_model_free(self.address)
            self.address = None


def state_width(model: Any) -> int:
    """Return how many values the state before the head of a model has. model: its address."""
    return int(llama_cpp.llama_model_n_embd_out(model))


class DraftContext:
    """Evaluates tokens and rows at their places in the text, and keeps at least the newest `window` positions.

    model: address of a llama_model; it and the target must outlive this. shares: the drafter uses the target's
    embeddings or head. mtp: the context is of the heads for further tokens in the target's own file. states, causal:
    see `native.contexts`. HostMemoryError if there is no memory.

    types: ggml's types of K and V. A call that fails leaves the context empty: the text must be read again.
    """

    def __init__(
        self, model: Any, target: Target, *, window: int = SPEC_DEFAULT_WINDOW, shares: bool = False, mtp: bool = False,
        states: int = contexts.NO_STATES, causal: bool = True,
    ) -> None:  # fmt: skip
        if window < _SLACK:
            raise ConfigError(f"a drafter's window of {window} tokens: it must be {_SLACK} at least")
        params = llama_cpp.llama_context_default_params()
        self.window = min(window, round_up(target.n_ctx, _SLACK))
        self.step = min(STEP, self.window)
        params.n_ctx = round_up(self.window, _SLACK) + _SLACK
        params.n_batch = params.n_ubatch = self.step
        params.n_threads, params.n_threads_batch = target.threads, target.batch_threads
        params.offload_kqv = target.offload
        self.types = int(params.type_k), int(params.type_v)
        if mtp:
            params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        if shares:
            params.ctx_other = target.context
        with ExitStack() as stack:
            self._context = llama_cpp.llama_init_from_model(model, params)
            if not self._context:
                raise HostMemoryError(
                    f"no context of {params.n_ctx} tokens could be made for a drafter: give it a smaller window"
                )
            stack.callback(llama_cpp.llama_free, self._context)
            contexts.open_draft(self._context, states=states, causal=causal)
            self._stack = stack.pop_all()
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._n_state = state_width(model)
        self.first = self.end = 0  # the held positions

    def run(self, start: int, tokens: Int32s | None = None, rows: Floats | None = None, *, outputs: int = 0) -> None:
        """Evaluate tokens [n], rows [n, width], or both, from position `start` on; at most `step` of them.

        Positions from `start` on are forgotten before, and so is everything if `start` does not follow the held
        positions. outputs: see `native.contexts.run_draft`. Raises DecodeError, or EngineError for a token out of its
        vocabulary and rows of another width.
        """
        count = len(tokens) if tokens is not None else len(rows) if rows is not None else 0
        self.truncate(start)
        if start != self.end:
            self.reset(start)
        if start + count - self.first > self.window + _SLACK:
            self._drop(start + count - self.window)
        try:
            contexts.run_draft(
                self._context, np.arange(start, start + count, dtype=np.int32), tokens, rows, outputs=outputs
            )  # fmt: skip
        except BaseException:
            self.reset(start)
            raise
        self.end = start + count

    def feed(self, start: int, tokens: Int32s | None, rows: Floats | None) -> None:
        """Evaluate any number of tokens or rows without outputs; see `run`."""
        count = len(tokens) if tokens is not None else len(rows) if rows is not None else 0
        for first in range(max(0, count - self.window), count, self.step):
            part = slice(first, first + self.step)
            self.run(start + first, None if tokens is None else tokens[part], None if rows is None else rows[part])

    def encode(self, rows: Floats) -> Floats:
        """Return the states that the encoder makes of rows, [n, state]."""
        made = []
        for first in range(0, len(rows), self.step):
            part = rows[first : first + self.step]
            # an encoder ignores positions, but llama.cpp refuses a gap
            places = np.arange(self.end, self.end + len(part), dtype=np.int32)
            contexts.run_draft(self._context, places, rows=part, outputs=len(part), encode=True)
            made.append(self.states(len(part)))
        return np.concatenate(made)

    def states(self, count: int) -> Floats:
        """Return the states of the first `count` tokens of the last run, [count, state]."""
        return contexts.draft_states(self._context, count, self._n_state)

    def top(self, rows: contexts.Rows, k: int) -> tuple[Int32s, Floats]:
        """Return `native.contexts.top` of rows of the last run. NotFinite, and nothing is held, if a row is not
        finite.
        """
        try:
            return contexts.top(self._context, rows, k)
        except NotFinite:
            llama_cpp.llama_memory_clear(self._memory, True)  # hidden rows would spoil the next steps
            self.first = self.end
            raise

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if length >= self.end:
            return
        done = length > self.first and llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        # layers with a window of their own may not reach back so far
        if done and llama_cpp.llama_memory_seq_pos_max(self._memory, 0) == length - 1:
            self.end = length
        else:
            self.reset(length)

    def reset(self, start: int = 0) -> None:
        """Hold nothing; the next token is at position `start`."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self.first = self.end = start

    def state(self) -> bytes:
        """Return the positions from `first` to before `end` as llama.cpp writes them."""
        size = int(llama_cpp.llama_state_seq_get_size(self._context, 0))
        data = (ctypes.c_uint8 * size)()
        written = int(llama_cpp.llama_state_seq_get_data(self._context, data, size, 0))
        return bytes(data)[:written]

    def load(self, first: int, end: int, saved: bytes) -> None:
        """Take over the state of a context of the same model and window; hold nothing if llama.cpp does not take it.

        first, end: the positions, from `first` to before `end`. saved: the result of `state`.

        The data may come from anybody. llama.cpp compares its sizes with the context's own, and the data counts only if
        its positions are the expected ones. Whether its values are numbers shows when the context computes.
        """
        self.reset(end)
        data = (ctypes.c_uint8 * len(saved)).from_buffer_copy(saved)
        taken = llama_cpp.llama_state_seq_set_data(self._context, data, len(saved), 0)
        lowest = llama_cpp.llama_memory_seq_pos_min(self._memory, 0)
        highest = llama_cpp.llama_memory_seq_pos_max(self._memory, 0)
        if taken == len(saved) and first <= lowest and highest == end - 1:
            self.first = first
        else:
            self.reset(end)

    def _drop(self, first: int) -> None:
        """Forget the positions before `first`."""
        if first >= self.end:
            self.reset(self.end)
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, 0, first)
            self.first = first

    def close(self) -> None:
        """Free the memory. It may be called again."""
        self._stack.close()
