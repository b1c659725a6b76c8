"""Overrides, for one answer, how its prompt is read and what its tokens see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .llama import Llama


def readings(llm: Llama) -> tuple[str, ...]:
    """How prompts can be read: "pool", and "exact" where there are stages, or the pool holds all there can be."""
    return ("pool", "exact") if _stages(llm) or _holds_all(llm) else ("pool",)


def answers(llm: Llama) -> tuple[str, ...]:
    """What a generated token can see: as `readings`, or "lossless" in place of "exact" where the pool was to draft."""
    config = llm._config
    if config is None or not _stages(llm):
        return readings(llm)
    return ("pool", "lossless" if config.answer == "lossless" else "exact")


@contextmanager
def overridden(
    llm: Llama, *, reading: str | None = None, answer: str | None = None, drafts: bool = True
) -> Iterator[None]:
    """Override, for the answer within, how its prompt is read, what its tokens see, and whether drafts are verified.

    None leaves it to the model's configuration. What is known of the prompt stays as it was read. ConfigError for what
    the model was not opened for.
    """
    sequence = llm._reader.pooled
    for name, value, possible in (("reading", reading, readings(llm)), ("answer", answer, answers(llm))):
        if value is not None and value not in possible:
            here = f"{name} can be {' or '.join(possible)} here, not {value!r}"
            raise ConfigError(f"{here}: make the model with kvflash_{name}={value!r}")
    before, speculator = sequence.reading, llm._reader.speculator
    if _stages(llm):
        exact = before.exact if reading is None else reading == "exact"
        answers_exactly = before.answers_exactly if answer is None else answer != "pool"
        sequence.reading = replace(before, exact=exact, answers_exactly=answers_exactly)
    if not drafts:
        llm._reader.speculator = None
    try:
        yield
    finally:
        sequence.reading, llm._reader.speculator = before, speculator


def _stages(llm: Llama) -> bool:
    return llm._reader.sequence is not None and llm._reader.sequence.pool.stage_slots > 0


def _holds_all(llm: Llama) -> bool:
    return llm._reader.sequence is not None and not llm._reader.sequence.bounded
