"""Checks what an answer is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, brief

if TYPE_CHECKING:
    import llama_cpp


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral)


def _each_callable(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str, tuple[str, ...]]] = {
    "finite": (_finite, "a finite number", (
        "temp", "top_p", "min_p", "typical_p", "repeat_penalty", "frequency_penalty", "presence_penalty",
        "mirostat_tau", "mirostat_eta",
    )),
    "whole": (_whole, "a whole number", ("top_k", "mirostat_mode")),
    "optional": (lambda value: value is None or _whole(value), "a whole number, or None", ("max_tokens", "seed")),
    "text": (lambda value: value is None or isinstance(value, str), "a text, or None", ("suffix",)),
    "called": (
        lambda value: value is None or callable(value), "a StoppingCriteriaList of functions", ("stopping_criteria",),
    ),
    "several": (
        lambda value: value is None or _each_callable(value), "a LogitsProcessorList of functions",
        ("logits_processor",),
    ),
    "prompt": (lambda value: isinstance(value, str | list), "a text, or a list of tokens", ("prompt",)),
}  # fmt: skip

_TOLD = {"temp": "temperature"}
"""What callers of `create_completion` call keywords of samplers."""


def check(keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of a kind that an answer cannot be asked for with. Other keywords are let pass."""
    for right, what, names in _KINDS.values():
        for name in names:
            if name in keywords and not right(keywords[name]):
                raise ConfigError(f"{_TOLD.get(name, name)}={brief(repr(keywords[name]))}: it must be {what}")


def embed_checked(embed: Callable[..., Any]) -> Callable[..., Any]:
    """Return upstream's `Llama.embed`, with a ConfigError for an empty list."""

    @wraps(embed)
    def call(llm: llama_cpp.Llama, input: str | list[str], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, str) and not len(input):
            raise ConfigError(f"embed({input!r}): there is no text in it: give at least one")
        return embed(llm, input, *args, **kwargs)

    return call
