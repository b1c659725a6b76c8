"""Tokens of a text, and the text of a token. At texts that a vocabulary cannot spell llama.cpp ends the process."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import ConfigError

_BYTES = {name: byte for byte in range(256) for name in (b"<0x%02X>" % byte, bytes([byte]))}
_NONE = "this model's file has no vocabulary: give it tokens (generate, eval) instead of text"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def of(model: Any) -> Any:
    """Return llama.cpp's pointer to the vocabulary of a model. model: its pointer, as `Llama.model` is one."""
    import llama_cpp  # here, as below: `check` needs none

    return llama_cpp.llama_model_get_vocab(model)


def ends(vocab: Any) -> frozenset[int]:
    """Return the tokens that end a text. vocab: llama.cpp's pointer. It takes a call for each token."""
    import llama_cpp

    return frozenset(token for token in range(llama_cpp.llama_vocab_n_tokens(vocab)) if is_end(vocab, token))


def is_end(vocab: Any, token: int) -> bool:
    """Report whether a token ends a text."""
    import llama_cpp

    return bool(llama_cpp.llama_vocab_is_eog(vocab, token))


def name(vocab: Any, token: int) -> str:
    """Return a token as the vocabulary writes it, as "<s>"; empty for -1, which stands for no token."""
    import llama_cpp

    return "" if token == -1 else str(llama_cpp.llama_vocab_get_text(vocab, token).decode("utf-8"))


def incomplete(vocab: Any) -> frozenset[bytes] | None:
    """Return the tokens of a vocabulary that cannot spell every text, none where there is no vocabulary.

    None for a vocabulary that can. vocab: llama.cpp's pointer. Only tokenizers of SentencePiece's kind (SPM) spell text
    in tokens of bytes, and some files lack these.
    """
    import llama_cpp

    kind = llama_cpp.llama_vocab_type(vocab)
    if kind != llama_cpp.LLAMA_VOCAB_TYPE_SPM:
        return frozenset() if kind == llama_cpp.LLAMA_VOCAB_TYPE_NONE else None
    found, missing = set[bytes](), {*range(256)}
    for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        text = llama_cpp.llama_vocab_get_text(vocab, token)
        found.add(text)
        missing.discard(_BYTES.get(text, -1))
        if not missing:
            return None
    return frozenset(found)


def check(text: bytes, tokens: frozenset[bytes] | None) -> None:
    """Raise ConfigError for a text at which llama.cpp would end the process. tokens: what `incomplete` has returned."""
    if tokens is None:
        return
    if not tokens:
        raise ConfigError(_NONE)
    for letter in sorted({*text.decode("utf-8", "surrogateescape"), *" "[: len(text)]}):
        coded = letter.replace(" ", _SPACE).encode("utf-8", "surrogateescape")
        named = (b"<0x%02X>" % byte in tokens or bytes([byte]) in tokens for byte in coded)
        if coded not in tokens and not all(named):
            raise ConfigError(
                f"this model's vocabulary has no token for {letter!a}, nor for its bytes: leave it out, or convert "
                "the model with its tokenizer"
            )


def tokenize(vocab: Any, data: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the tokens of a text that `check` lets pass. vocab: llama.cpp's pointer.

    Upstream makes room for as many tokens as the model was trained on, and takes a second pass for more.
    ConfigError where llama.cpp cannot split it.
    """
    import llama_cpp

    size = len(data) + 2  # a token has a byte, but for those that mark the ends
    while True:
        tokens = (llama_cpp.llama_token * size)()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, size, add_special, parse_special)
        if count >= 0:
            return tokens[:count]
        if count == -(1 << 31):
            from . import guard  # here: it is rare

            raise guard.no_split()
        size = -count


def piece(vocab: Any, token: int, *, special: bool) -> bytes:
    """Return the text of a token that the vocabulary has. Upstream leaves out pieces of more than 32 bytes.

    ConfigError where there is no vocabulary: llama.cpp would end the process.
    """
    import llama_cpp

    if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        raise ConfigError(_NONE)
    size = 64
    while True:
        buffer = (ctypes.c_char * size)()
        count = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if count >= 0:
            return buffer.raw[:count]
        size = -count
