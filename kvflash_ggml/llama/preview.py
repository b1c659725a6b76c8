"""Previews: a first answer from the passages of a long prompt that share the most telling tokens with its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s, Int64s, numbers
from ..config import PrefixCache
from ..errors import ConfigError

if TYPE_CHECKING:
    import llama_cpp

    from ..runtime.saving import Saver

Tokens = Generator[int, Sequence[int] | None, None]
Make = Callable[..., Tokens]
Criteria = Callable[[Any, Any], bool]

LEAST = 2048
"""Tokens that a preview reads at least. A prompt with less than twice that to read is read as a whole."""

PASSAGE, STRIDE = 64, 32
"""Tokens of a passage, and from one to the next. They overlap: a sentence of up to 32 tokens is whole in one."""

QUERY, HALF = 256, 16
"""Tokens at the prompt's end that are looked for, and how far before its end one counts half as much."""

SATURATION = 1.2
"""Of BM25: how soon one more of the same token counts no more."""

FIRST, LAST = 64, 128
"""Tokens at the prompt's beginning and end that are always read."""


def passages(ids: Int32s, most: int) -> Int64s:
    """Rank the passages of a prompt by BM25 of the tokens, and pairs of tokens, at its end.

    Returns the positions to read, in order, `most` of them at most: the first, the last, and the best passages.
    """
    starts = np.arange(FIRST, max(FIRST, len(ids) - LAST), STRIDE)
    return best(len(ids), most, starts, _scores(ids, starts))


def part(ids: Int32s, known: int, share: float) -> Int64s | None:
    """Return the positions that a preview reads of a prompt, `known` tokens of which are known; None for all of it.

    share: the part that it reads, 0 to 1.
    """
    most = max(LEAST, int(share * len(ids)))
    if len(ids) - known <= 2 * most or ids.min() < 0:  # negative: an image's place
        return None
    return passages(ids, most)


def best(length: int, most: int, starts: Int64s, scores: npt.NDArray[np.float64]) -> Int64s:
    """Choose the passages to read; return the positions as `passages` does.

    starts: of each in a prompt of `length` tokens. scores: above 0 where it may be read.
    """
    keep = np.zeros(length, np.bool_)
    keep[:FIRST] = keep[-LAST:] = True
    left = most - int(np.count_nonzero(keep))
    for at in np.argsort(-scores, kind="stable"):
        span = keep[starts[at] : starts[at] + PASSAGE]
        left -= int(np.count_nonzero(~span))
        if left < 0 or scores[at] <= 0:
            break
        span[:] = True
    return np.flatnonzero(keep)


def _scores(ids: Int32s, starts: Int64s) -> npt.NDArray[np.float64]:
    """Score each passage by BM25; [passages]. All are equally long."""
    res = np.zeros(len(starts))
    singles = ids.astype(np.int64)
    for terms in (singles, singles[:-1] << 32 | singles[1:]):
        for back, term in _asked(terms):
            places = np.flatnonzero(terms == term)
            counts = np.searchsorted(places, starts + PASSAGE) - np.searchsorted(places, starts)
            found = np.count_nonzero(counts)
            weight = 0.5 ** (back / HALF) * np.log(1 + (len(starts) - found + 0.5) / (found + 0.5))
            res += weight * counts * (SATURATION + 1) / (counts + SATURATION)
    return res


def _asked(terms: Int64s) -> list[tuple[int, int]]:
    """Return the terms at the end, each once: how far it is from the end, and the term."""
    newest = terms[-QUERY:][::-1]
    found, at = np.unique(newest, return_index=True)
    return list(zip(at.tolist(), found.tolist(), strict=True))


class Previews:
    """Answers from a part of long prompts, for a `Llama`, which holds after each the text that it held before.

    saver: of its text. share: the part of a prompt that is read, 0 to 1.
    """

    def __init__(self, llm: llama_cpp.Llama, saver: Saver, share: float) -> None:
        self._llm = weakref.proxy(llm)
        self._saver = saver
        self._share = share
        self._unread: Callable[[], Tokens] | None = None
        """Answers the newest prompt that a preview has answered as if there had been none."""
        if saver.text.model.logits_all:
            raise ConfigError("logits_all keeps the logits of every token of a prompt, and a preview reads only some")

    def answer(self, make: Make, tokens: Sequence[int], reset: bool, settings: Mapping[str, Any]) -> Tokens:
        """Yield what `make` does, from a part of the prompt where that is less than half of what is to be read."""
        cache, self._unread = self._llm.cache, None
        if settings["grammar"] is not None:
            refuse("grammars and response formats")
        if cache is not None and not isinstance(cache, PrefixCache):
            refuse("caches of upstream's")
        ids, make = numbers(tokens).astype(np.int32), partial(make, **settings)
        known = self._saver.known(ids) if reset and len(ids) > 2 * LEAST and ids.min() >= 0 else len(ids)
        places = part(ids, known, self._share)
        yield from make(tokens, reset=reset) if places is None else self._preview(make, tokens, places)

    def _preview(self, make: Make, tokens: Sequence[int], places: Int64s) -> Tokens:
        saver, text = self._saver, self._saver.text
        before = saver.saved(None) if text.n_tokens else None
        text.previewing = True
        try:
            with saver.uncached():
                yield from make([tokens[at] for at in places])
        finally:
            told = replace(text.pooled.stats, previewed=len(tokens))
            try:
                if before is None:
                    text.reset()
                else:
                    saver.go_on_from(before)
            except BaseException:
                text.reset()  # nothing of a preview stays, whatever goes wrong
                raise
            finally:
                text.previewing = False
            self._unread = partial(make, tokens)
            text.pooled.stats = told

    def criteria(self, stopping: Criteria | None) -> Criteria | None:
        """Wrap stopping criteria for upstream, which asks again when the preview's text has gone: the outcome stays."""
        met = False

        def ask(ids: Any, logits: Any) -> bool:
            nonlocal met
            if stopping is not None and (self._unread is None or self._saver.text.previewing):
                met = stopping(ids, logits)
            return met

        return None if stopping is None else ask

    def finish(self) -> int:
        """See `Llama.finish_preview`."""
        if self._unread is None:
            return 0
        with closing(self._unread()) as stream:
            next(stream)
        self._unread = None
        return self._saver.text.n_tokens


def refuse(what: str) -> None:
    """Raise ConfigError for what a preview does not serve."""
    raise ConfigError(f"reading='preview' reads a part of a prompt, and {what} need all of it: use 'auto'")
