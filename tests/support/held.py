"""The sampler of a chat's grammar, to be asked what it allows. Needs the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from kvflash_ggml.chat.values import Grammar
from kvflash_ggml.runtime.samplers import sampler_of


class Held:
    """A sampler of a grammar, and what it allows next."""

    def __init__(self, llm: Any, grammar: Grammar) -> None:
        self._llm, self._vocab = llm, llm._model.vocab
        self.sampler = sampler_of(self._vocab, grammar)

    def write(self, *texts: str) -> None:
        for text in texts:
            for token in self._tokens(text):
                llama_cpp.llama_sampler_accept(self.sampler, token)

    def takes(self, text: str) -> bool:
        """May the answer go on with this text? As far as it may, it does."""
        for token in self._tokens(text):
            if not self._allowed([token])[0]:
                return False
            llama_cpp.llama_sampler_accept(self.sampler, token)
        return True

    def allows(self, *words: str) -> list[bool]:
        """May the next token be the first of each word?"""
        return self._allowed([self._tokens(word)[0] for word in words])

    def _tokens(self, text: str) -> list[int]:
        return list(self._llm.tokenize(text.encode(), add_bos=False, special=True))

    def _allowed(self, tokens: Sequence[int]) -> list[bool]:
        data = (llama_cpp.llama_token_data * len(tokens))(*((token, 0.0, 0.0) for token in tokens))
        array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return [data[i].logit == 0.0 for i in range(len(tokens))]
