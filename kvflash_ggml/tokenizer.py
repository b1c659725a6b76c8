"""A tokenizer that remembers the text it has just built.

Upstream detokenises the whole completion for every new token. Byte pieces concatenate, so only the new ones are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
        known = len(self._tokens)
        grows = (
            special == self._special
            and 0 < known <= len(tokens)
            and tokens[0] != self._bos()  # its neighbour loses a leading space
            and tokens[known - 1] == self._tokens[-1]
            and tokens[:known] == self._tokens
        )
        if not grows:
            self._text = self._tokenizer.detokenize(tokens, prev_tokens=prev_tokens, special=special)
        elif len(tokens) > known:
            self._text += self._tokenizer.detokenize(tokens[known:], special=special)
        else:
            return self._text
        self._tokens = list(tokens)
        self._special = special
        return self._text
