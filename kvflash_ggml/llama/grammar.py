"""Grammars of chats in a chain of samplers."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from ..chat.values import Grammar
from ..errors import ConfigError
from ..native import chat


def sampler_of(vocab: int, grammar: Grammar) -> Any:
    """A llama_sampler that holds an answer to a grammar. vocab: address of the llama_vocab. ConfigError."""
    try:
        grammar.text.encode()
    except UnicodeEncodeError as err:
        raise ConfigError(f"the grammar is no text that can be written as UTF-8: {err.reason}") from None
    made = chat.sampler(vocab, grammar.as_asked())
    if not made:
        raise ConfigError(
            "the grammar cannot be parsed, or costs too much: it needs to be GBNF with a rule 'root', without left "
            "recursion, and with fewer repetitions, groups within groups, and ways to read the same text"
        )
    return ctypes.cast(made, llama_cpp.llama_sampler_p_ctypes)


def put_into(sampler: Any, vocab: int, grammar: Grammar) -> None:
    """Put a grammar where upstream puts one in a chain: behind the penalties. sampler: upstream's `LlamaSampler`."""
    made, chain, place = sampler_of(vocab, grammar), sampler.sampler, len(sampler.custom_samplers) + 1
    behind = [
        llama_cpp.llama_sampler_chain_remove(chain, place) for _ in range(place, llama_cpp.llama_sampler_chain_n(chain))
    ]
    for one in (made, *behind):
        llama_cpp.llama_sampler_chain_add(chain, one)
