"""Logits processors: a bias beside another one, which upstream loses, and one that keeps an answer from its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, brief
from ..native import vocabulary

if TYPE_CHECKING:
    import llama_cpp
    from llama_cpp._internals import LlamaModel

_ENDS: WeakKeyDictionary[LlamaModel, list[int]] = WeakKeyDictionary()
"""The tokens of a model that end an answer."""

_MOST = 1e30
"""Of a bias: a temperature below 1 multiplies it, and float32 has nothing above 3e38 but infinity."""


def with_bias(
    processor: llama_cpp.LogitsProcessorList | None, bias: dict[int, float], n_vocab: int
) -> llama_cpp.LogitsProcessorList:
    """Return the processors, and one that adds the bias of each token. ConfigError for a token that the model has not,
    and for a bias that is no number. -inf forbids a token.

    An error of a processor is printed, and its answer goes on without it.
    """
    import llama_cpp

    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias={brief(repr(bias))}: it must be a dict of tokens and numbers")
    added: dict[int, float] = {}
    for token, value in bias.items():
        number = int(token) if str(token).isdecimal() else -1
        if not 0 <= number < n_vocab:
            raise ConfigError(f"logit_bias of token {brief(token)}: this model has 0 to {n_vocab - 1}")
        if not isinstance(value, Real) or not value <= _MOST:
            raise ConfigError(
                f"logit_bias of token {number} is {brief(repr(value))}: it must be a number up to {_MOST:g}, or -inf "
                f"to forbid the token"
            )
        added[number] = float(value) if value >= -_MOST else -math.inf
    return llama_cpp.LogitsProcessorList([*(processor or ()), _bias_processor(added)])


def _bias_processor(bias: dict[int, float]) -> Any:
    def add_bias(input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        biased: npt.NDArray[np.single] = scores.copy()
        for token, value in bias.items():
            biased[token] += value
        return biased

    return add_bias


def without_end(
    processor: Sequence[Callable[[Any, Any], Any]] | None, model: LlamaModel, length: int
) -> llama_cpp.LogitsProcessorList:
    """Return the processors, and one that lets no answer end before so many tokens."""
    import llama_cpp

    if model not in _ENDS:  # a call for each token of the vocabulary
        _ENDS[model] = list(vocabulary.ends(model.vocab))
    ends = _ENDS[model]

    def go_on(input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        if len(input_ids) >= length:
            return scores
        longer: npt.NDArray[np.single] = scores.copy()
        longer[ends] = -np.inf
        return longer

    return llama_cpp.LogitsProcessorList([*(processor or ()), go_on])
