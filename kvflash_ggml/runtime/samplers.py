"""Chains of samplers: upstream's with a chat's grammar, and llama.cpp's own of all its samplers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaSampler
from llama_cpp.llama_grammar import LlamaGrammar

from ..errors import ConfigError, brief

if TYPE_CHECKING:
    from ..chat.values import Grammar
    from ..sampling import Samplers
    from .model import Model
    from .text import Text

Processors = Sequence[Callable[[Any, Any], Any]]

_TAKING = frozenset(
    (b"penalties", b"dry", b"top-n-sigma", b"top-k", b"typical", b"top-p", b"min-p", b"temp", b"temp-ext", b"dist",
     b"greedy")
)  # fmt: skip
"""Samplers of llama.cpp to whom one candidate is as good as many: what they remember is the tokens."""

_MIROSTAT_M = 100
"""llama.cpp's number of tokens that Mirostat 1 estimates with."""


def sampler_of(vocab: int, grammar: Grammar) -> Any:
    """Return a llama_sampler that holds an answer to a grammar. vocab: address of the llama_vocab. ConfigError."""
    try:
        grammar.text.encode()
    except UnicodeEncodeError as err:
        raise ConfigError(f"the grammar is no text that can be written as UTF-8: {err.reason}") from None
    if not grammar.text:
        raise ConfigError("the grammar is empty: it needs a rule 'root'")  # llama.cpp would hold to nothing
    from ..native import chat  # here: most answers have no grammar

    try:
        made = chat.sampler(vocab, grammar.as_asked())
    except ConfigError as err:
        raise ConfigError(
            f"the grammar cannot be parsed, or costs too much: {err}: it needs to be GBNF with a rule 'root', without "
            f"left recursion, and with fewer repetitions, groups within groups, and ways to read the same text"
        ) from None
    return ctypes.cast(made, llama_cpp.llama_sampler_p_ctypes)


def stock_chain(
    stock: Callable[..., Any], model: Model, grammar: LlamaGrammar | Grammar | None, keywords: dict[str, Any]
) -> Any:
    """Return upstream's chain with its `keywords`, held to a grammar by llama.cpp's own sampler.

    stock: upstream's `_init_sampler`. ConfigError for a grammar.
    """
    made = stock(**keywords)
    if grammar is not None:
        # upstream puts one behind the penalties
        place = len(made.custom_samplers) + 1
        count = llama_cpp.llama_sampler_chain_n(made.sampler)
        behind = [llama_cpp.llama_sampler_chain_remove(made.sampler, place) for _ in range(place, count)]
        for one in (_held(model, grammar), *behind):
            llama_cpp.llama_sampler_chain_add(made.sampler, one)
    return made


def chain(
    text: Text,
    asked: Samplers,
    prompt: Any,
    *,
    grammar: LlamaGrammar | Grammar | None = None,
    processor: Processors | None = None,
) -> Any:
    """Return llama.cpp's chain with these settings for one answer, as upstream's `LlamaSampler`.

    prompt: its tokens. Only llama.cpp's penalties look at them. processor: upstream's, called with the text and the
    logits. ConfigError for a grammar.
    """
    model = text.model
    if asked.min_tokens:
        from .bias import without_end

        processor = without_end(processor, model.weights, len(prompt) + asked.min_tokens)
    made = LlamaSampler()
    if processor is not None:
        made.add_custom(partial(_process, processor, weakref.proxy(text)))
    for one in (() if grammar is None else (_held(model, grammar),)) + _settled(model, text.seed, asked, prompt):
        llama_cpp.llama_sampler_chain_add(made.sampler, one)
    return made


def can_take(sampler: Any) -> bool:
    """Tell whether `take` works: not with samplers that want all logits (Python's, XTC, infill), that draw by how
    likely the tokens before were (Mirostat, adaptive-p), or that hold to a grammar.
    """
    if sampler.custom_samplers:  # which have no names
        return False
    chain = sampler.sampler
    all_of = range(llama_cpp.llama_sampler_chain_n(chain))
    names = [llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(chain, at)) for at in all_of]
    # a mark in front says where a sampler runs; XTC has one only where it is off
    return all(x == b"?xtc" or x.lstrip(b"?+-") in _TAKING for x in names)


def take(sampler: Any, token: int) -> None:
    """Let a chain draw a token as if there were no other: its random numbers go on, and the token counts as drawn."""
    only = llama_cpp.llama_token_data(token, 0.0, 0.0)
    choice = llama_cpp.llama_token_data_array(ctypes.pointer(only), 1, -1, False)
    llama_cpp.llama_sampler_apply(sampler.sampler, ctypes.pointer(choice))
    sampler.accept(token)


def _process(processor: Processors, text: Text, candidates: Any) -> None:
    """Let logits processors change the logits of a `llama_token_data_array`."""
    found = candidates.contents
    logits = np.ctypeslib.as_array(found.data, shape=(found.size,))["logit"]
    for one in processor:
        logits[:] = one(text.ids, logits)


def _held(model: Model, grammar: LlamaGrammar | Grammar) -> Any:
    """Return a llama_sampler that holds an answer to a grammar."""
    from ..chat.values import Grammar  # here: most answers have none

    if isinstance(grammar, LlamaGrammar):
        grammar = Grammar(text=grammar._grammar)
    if not isinstance(grammar, Grammar):
        raise ConfigError(f"grammar={brief(repr(grammar))}: it must be a LlamaGrammar, as of its from_string(text)")
    return sampler_of(model.weights.vocab, grammar)


def _settled(model: Model, seed: int, chain: Samplers, text: Any) -> tuple[Any, ...]:
    """Make llama.cpp's samplers in their order, the last of which draws. Those that look back know the text."""
    if chain.mirostat:
        warm = llama_cpp.llama_sampler_init_temp(chain.temperature)
        tau, eta = chain.mirostat_tau, chain.mirostat_eta
        if chain.mirostat == 1:
            last = llama_cpp.llama_sampler_init_mirostat(model.n_vocab, seed, tau, eta, _MIROSTAT_M)
        else:
            last = llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta)
        return warm, last
    if chain.keeps_likeliest:
        return (llama_cpp.llama_sampler_init_greedy(),)
    made = {
        "penalties": lambda: _penalties(model, chain, text),
        "dry": lambda: _dry(model, chain, text),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(chain.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(chain.top_k),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(chain.typical_p, 1),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(chain.top_p, 1),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(chain.min_p, 1),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(chain.xtc_probability, chain.xtc_threshold, 1, seed),
        "infill": lambda: llama_cpp.llama_sampler_init_infill(model.weights.vocab),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            chain.temperature, chain.dynatemp_range, chain.dynatemp_exponent
        ),
    }
    if "adaptive_p" in chain.samplers:  # it draws, so it is the last wherever the order has it
        last = llama_cpp.llama_sampler_init_adaptive_p(chain.adaptive_target, chain.adaptive_decay, seed)
    else:
        last = llama_cpp.llama_sampler_init_dist(seed)
    return (*(made[name]() for name in chain.samplers if name in made), last)


def _penalties(model: Model, chain: Samplers, text: Any) -> Any:
    back = _back(model, chain.repeat_last_n)
    penalties = chain.repeat_penalty, chain.frequency_penalty, chain.presence_penalty
    made = llama_cpp.llama_sampler_init_penalties(model.n_vocab, back, *penalties)
    return _told(made, text, back if penalties != (1, 0, 0) else 0)


def _dry(model: Model, chain: Samplers, text: Any) -> Any:
    back = _back(model, chain.dry_penalty_last_n)
    breakers = [word.encode("utf-8", "surrogatepass") for word in chain.breakers] if chain.dry_multiplier else []
    made = llama_cpp.llama_sampler_init_dry(
        model.weights.vocab, chain.dry_multiplier, chain.dry_base, chain.dry_allowed_length, back,
        (ctypes.c_char_p * len(breakers))(*breakers), len(breakers),
    )  # fmt: skip
    return _told(made, text, back if chain.dry_multiplier else 0)


def _back(model: Model, tokens: int) -> int:
    """Return how many tokens to look back at; -1 asks for the whole context."""
    return model.n_ctx if tokens < 0 else min(tokens, model.n_ctx)


def _told(made: Any, text: Any, last: int) -> Any:
    """Tell a sampler the last tokens of a text, and return it."""
    for token in text[max(0, len(text) - last) :] if last else ():
        if token >= 0:  # a media row has no token
            llama_cpp.llama_sampler_accept(made, int(token))
    return made
