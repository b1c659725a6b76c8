"""A tokenizer that remembers the text it has just built.

Upstream detokenises the whole completion for every new token. Byte pieces concatenate, so only the new ones are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHORT = 8
"""Lists up to this length are not worth remembering: a stream asks for single tokens between its growing text."""


class IncrementalTokenizer:
    """Wraps a tokenizer whose text is the concatenation of its tokens' pieces, as llama.cpp's is."""

    def __init__(self, tokenizer: Any, bos: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._bos = bos
        self._tokens: list[int] = []
        self._text = b""
        self._special = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        if len(tokens) <= SHORT:
            return self._plain(tokens, prev_tokens, special)
        known = len(self._tokens)
        bos = self._bos()
        grows = (
            special == self._special
            and 0 < known <= len(tokens)
            and bos not in (tokens[0], tokens[known] if known < len(tokens) else None)  # a space after it is dropped
            and tokens[known - 1] == self._tokens[-1]
            and tokens[:known] == self._tokens
        )
        if not grows:
            self._text = self._plain(tokens, prev_tokens, special)
        elif len(tokens) > known:
            self._text += self._plain(tokens[known:], None, special)
        self._tokens = list(tokens)
        self._special = special
        return self._text

    def _plain(self, tokens: list[int], prev_tokens: list[int] | None, special: bool) -> bytes:
        text: bytes = self._tokenizer.detokenize(tokens, prev_tokens=prev_tokens, special=special)
        return text
