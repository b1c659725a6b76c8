"""The seam to llama-cpp-python: a context whose memory belongs to a sequence."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import llama_cpp
from llama_cpp import _internals as internals

from ..errors import ConfigError, KVFlashError

if TYPE_CHECKING:
    from ..sequence.sequence import Sequence as Text

_paged: weakref.WeakValueDictionary[int, PagedContext] = weakref.WeakValueDictionary()
"""The contexts that live, by address."""


class Batch(internals.LlamaBatch):
    """Upstream's batch, which writes before its first row for a text without tokens. ConfigError here."""

    def add_sequence(self, batch: Sequence[int], seq_id: int, logits_all: bool) -> None:
        if len(batch) == 0:
            raise ConfigError("a text has no tokens, and this model puts none before it: embed texts that have some")
        super().add_sequence(batch, seq_id, logits_all)


class PagedContext(internals.LlamaContext):
    """Takes over an upstream context. Calls that change the memory go to the sequence; the rest is inherited."""

    def __init__(self, base: internals.LlamaContext, sequence: Text) -> None:
        # not upstream's __init__, which would make a second native context: share the one that exists
        self.__dict__.update(base.__dict__)
        self.sequence = sequence
        address = ctypes.cast(self.ctx, ctypes.c_void_p).value or 0
        _paged[address] = self
        self._exit_stack.callback(_paged.pop, address, None)

    def decode(self, batch: internals.LlamaBatch) -> NoReturn:
        raise KVFlashError(
            "this context is paged, so a batch cannot be decoded behind the pool's back: use Llama.eval, or "
            "kvflash=None for code that decodes on its own (multimodal handlers, parallel sequences)"
        )

    def kv_cache_clear(self) -> None:
        self.sequence.reset()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1). True if exactly that was done; only the end of the text can be removed."""
        length = self.sequence.length
        p0 = max(p0, 0)
        if p0 >= length:
            return True
        if 0 <= p1 < length or not self.sequence.can_truncate(p0):
            return False
        return self.sequence.truncate(p0) == p0

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> NoReturn:
        raise KVFlashError("a pool holds one sequence: copying sequences needs kvflash=None")

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        """Do nothing: the pool holds one sequence, so there is nothing else to drop."""

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> NoReturn:
        raise KVFlashError("paged positions are fixed: context shift needs kvflash=None")


def take_closing(context: internals.LlamaContext) -> ExitStack:
    """Take what is left of closing a context and its model, which the caller does then, and they no longer."""
    rest: ExitStack = context.model._exit_stack.pop_all()
    rest.callback(context._exit_stack.pop_all().close)
    return rest


def _explain(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """Say why llama.cpp refuses a program that decodes on a paged context by itself, as guidance does, or a step."""
    if result == -3:  # it could not be computed
        from ..native import guard  # here: it is rare

        guard.check_step()
    if result != 0 and ctypes.cast(arguments[0], ctypes.c_void_p).value in _paged:
        raise KVFlashError(
            "llama_decode was called on a paged context: only Llama.eval and what is built on it can evaluate "
            "there. A program that calls llama.cpp's functions by itself needs kvflash=None"
        )
    return result


llama_cpp.llama_decode.errcheck = _explain
