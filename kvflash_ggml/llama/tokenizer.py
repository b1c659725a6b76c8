"""A tokenizer that remembers the text it has just built.

Upstream detokenises the whole completion for every new token. Byte pieces concatenate, so only the new ones are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, brief
from ..native import vocabulary

SHORT = 8
"""Lists up to this length are not worth remembering: a stream asks for single tokens between its growing text."""


def check_tokens(tokens: list[int], n_vocab: int) -> None:
    """Raise ConfigError for a token that the model does not have."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ConfigError(f"token {token} has no text: this model has 0 to {n_vocab - 1}")


class WholeTokenizer:
    """Upstream's tokenizer, for texts and pieces of any length. vocab: llama.cpp's pointer."""

    def __init__(self, tokenizer: Any, vocab: Any, bos: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._bos = bos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return vocabulary.tokenize(self._vocab, text, add_special=add_bos, parse_special=special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        text = b"".join(vocabulary.piece(self._vocab, token, special=special) for token in tokens)
        return text.removeprefix(b" ") if tokens and tokens[0] == self._bos() else text


class IncrementalTokenizer:
    """Wraps a tokenizer whose text is the concatenation of its tokens' pieces, as llama.cpp's is.

    incomplete: see `vocabulary.incomplete`. For a text that it cannot spell, and for a token that the model does not
    have, llama.cpp ends the process: here it is a ConfigError. shown: special tokens that have a text for now.
    """

    def __init__(
        self, tokenizer: Any, bos: Callable[[], int], *, n_vocab: int, incomplete: frozenset[bytes] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._incomplete = incomplete
        self._bos = bos
        self._tokens: list[int] = []
        self._text = b""
        self._special = False
        self.shown: frozenset[int] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        if not isinstance(text, bytes):
            raise ConfigError(f"tokenize({brief(repr(text))}): the text must be bytes, as of text.encode()")
        vocabulary.check(text, self._incomplete)
        tokens: list[int] = self._tokenizer.tokenize(text, add_bos, special)
        return tokens

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
        vocabulary.check(b"", self._incomplete)
        check_tokens(tokens, self._n_vocab)
        if not self.shown.isdisjoint(tokens):
            pieces = (self._tokenizer.detokenize([token], special=special or token in self.shown) for token in tokens)
            return b"".join(pieces)
        text: bytes = self._tokenizer.detokenize(tokens, prev_tokens=prev_tokens, special=special)
        return text


class Ends:
    """Ends upstream's completions near `max_tokens`, and at the context's end.

    Upstream reads up to 3 tokens more for the rest of a character, and begins to wait again at each byte that looks
    like the start of one. So an answer of such bytes alone never ended. most: `max_tokens`, None for no limit.
    """

    def __init__(self, most: int | None, n_ctx: int) -> None:
        self._most, self._n_ctx = n_ctx if most is None else most, n_ctx
        self._total = 0

    def shown(self, text: bytes, count: int, total: int) -> bytes:
        """Return the text of an answer as upstream is to see it: without bytes that are no text, where it must end.

        count: tokens of the text; total: these and all before. Upstream looks at the whole answer after each token, and
        then at parts of it, which a stream needs as they are.
        """
        grown, self._total = total > self._total, max(total, self._total)
        ends = count > self._most + 2 or total > self._n_ctx - 3
        return text.decode("utf-8", "ignore").encode() if grown and ends else text
