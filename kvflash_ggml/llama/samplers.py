"""Chains of samplers: upstream's with a chat's grammar, and llama.cpp's own of all its samplers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp.llama_grammar import LlamaGrammar

from ..errors import ConfigError, brief
from ..native import chat
from . import asked
from .bias import without_end

if TYPE_CHECKING:
    from ..chat.values import Grammar
    from ..sampling import Samplers

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
    try:
        made = chat.sampler(vocab, grammar.as_asked())
    except ConfigError as err:
        raise ConfigError(
            f"the grammar cannot be parsed, or costs too much: {err}: it needs to be GBNF with a rule 'root', without "
            f"left recursion, and with fewer repetitions, groups within groups, and ways to read the same text"
        ) from None
    return ctypes.cast(made, llama_cpp.llama_sampler_p_ctypes)


def chain_of(llm: Any, stock: Callable[..., Any], chain: Samplers | None, text: Any, keywords: dict[str, Any]) -> Any:
    """The chain for one answer, as upstream's `LlamaSampler`.

    stock: upstream's `_init_sampler`. chain: llama.cpp's chain with these settings, None for upstream's chain with the
    `keywords`. text: the prompt's tokens. Only llama.cpp's penalties look at them. ConfigError for a grammar, and for
    keywords that are not of their kinds.
    """
    counting = {**keywords, "seed": llm._seed} if chain is None else {"seed": llm._seed}
    asked.check({"logits_processor": keywords.get("logits_processor"), **counting})
    grammar = keywords.pop("grammar", None)
    if grammar is not None:
        from ..chat.values import Grammar  # here: most answers have none

        if isinstance(grammar, LlamaGrammar):
            grammar = Grammar(text=grammar._grammar)
        if not isinstance(grammar, Grammar):
            raise ConfigError(f"grammar={brief(repr(grammar))}: it must be a LlamaGrammar, as of its from_string(text)")
    held = () if grammar is None else (sampler_of(llm._model.vocab, grammar),)
    if chain is None:
        made = stock(**keywords)
        # upstream puts one behind the penalties
        for one in (*held, *_cut(made, len(made.custom_samplers) + 1)) if held else ():
            llama_cpp.llama_sampler_chain_add(made.sampler, one)
        return made
    processor = keywords.get("logits_processor")
    if chain.min_tokens:
        processor = without_end(processor, llm._model, len(text) + chain.min_tokens)
    made = stock(logits_processor=processor)
    for one in _cut(made, len(made.custom_samplers) + 1):
        llama_cpp.llama_sampler_free(one)
    for one in held + _settled(llm, chain, text):
        llama_cpp.llama_sampler_chain_add(made.sampler, one)
    return made


def _cut(made: Any, place: int) -> list[Any]:
    """Take the samplers out of a chain that are at this place and behind it."""
    count = llama_cpp.llama_sampler_chain_n(made.sampler)
    return [llama_cpp.llama_sampler_chain_remove(made.sampler, place) for _ in range(place, count)]


def _settled(llm: Any, chain: Samplers, text: Any) -> tuple[Any, ...]:
    """llama.cpp's samplers in their order, the last of which draws. Those that look back know the text."""
    if chain.mirostat:
        warm = llama_cpp.llama_sampler_init_temp(chain.temperature)
        tau, eta = chain.mirostat_tau, chain.mirostat_eta
        if chain.mirostat == 1:
            last = llama_cpp.llama_sampler_init_mirostat(llm._n_vocab, llm._seed, tau, eta, _MIROSTAT_M)
        else:
            last = llama_cpp.llama_sampler_init_mirostat_v2(llm._seed, tau, eta)
        return warm, last
    if chain.keeps_likeliest:
        return (llama_cpp.llama_sampler_init_greedy(),)
    made = {
        "penalties": lambda: _penalties(llm, chain, text),
        "dry": lambda: _dry(llm, chain, text),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(chain.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(chain.top_k),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(chain.typical_p, 1),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(chain.top_p, 1),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(chain.min_p, 1),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(chain.xtc_probability, chain.xtc_threshold, 1, llm._seed),
        "infill": lambda: llama_cpp.llama_sampler_init_infill(llm._model.vocab),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            chain.temperature, chain.dynatemp_range, chain.dynatemp_exponent
        ),
    }
    if "adaptive_p" in chain.samplers:  # it draws, so it is the last wherever the order has it
        last = llama_cpp.llama_sampler_init_adaptive_p(chain.adaptive_target, chain.adaptive_decay, llm._seed)
    else:
        last = llama_cpp.llama_sampler_init_dist(llm._seed)
    return (*(made[name]() for name in chain.samplers if name in made), last)


def _penalties(llm: Any, chain: Samplers, text: Any) -> Any:
    back = _back(llm, chain.repeat_last_n)
    penalties = chain.repeat_penalty, chain.frequency_penalty, chain.presence_penalty
    made = llama_cpp.llama_sampler_init_penalties(llm._n_vocab, back, *penalties)
    return _told(made, text, back if penalties != (1, 0, 0) else 0)


def _dry(llm: Any, chain: Samplers, text: Any) -> Any:
    back = _back(llm, chain.dry_penalty_last_n)
    breakers = [word.encode("utf-8", "surrogatepass") for word in chain.breakers] if chain.dry_multiplier else []
    made = llama_cpp.llama_sampler_init_dry(
        llm._model.vocab, chain.dry_multiplier, chain.dry_base, chain.dry_allowed_length, back,
        (ctypes.c_char_p * len(breakers))(*breakers), len(breakers),
    )  # fmt: skip
    return _told(made, text, back if chain.dry_multiplier else 0)


def _back(llm: Any, tokens: int) -> int:
    """How many tokens to look back at; -1 asks for the whole context."""
    return int(llm._n_ctx) if tokens < 0 else min(tokens, int(llm._n_ctx))


def _told(made: Any, text: Any, last: int) -> Any:
    """The sampler, after it has been told the last tokens of a text."""
    for token in text[max(0, len(text) - last) :] if last else ():
        if token >= 0:  # a media row has no token
            llama_cpp.llama_sampler_accept(made, int(token))
    return made
