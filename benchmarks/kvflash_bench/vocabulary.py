"""A made-up vocabulary, so that text goes into a model of random weights and comes out of it."""

from __future__ import annotations

import gguf

from kvflash_ggml.errors import ConfigError

BYTES = 256


def add(writer: gguf.GGUFWriter, count: int) -> None:
    """`count` tokens: the 256 bytes, evenly spread, words that count between them, and an end of text, the last one.

    Text is read byte by byte. A model that counts on from a token writes words: their ids, and seldom a byte.

    Raises:
        ConfigError: fewer tokens than bytes and an end.
    """
    if count <= BYTES:
        raise ConfigError(f"a vocabulary of {count} tokens: {BYTES} bytes and an end of text need {BYTES + 1}")
    step = (count - 1) // BYTES
    tokens = [f"Ġ{i}" for i in range(count)]
    tokens[: BYTES * step : step] = _bytes()
    tokens[-1] = "<|end|>"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (count - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ Ġ"])  # never used: none of its words is a token. An empty list cannot be written.
    writer.add_eos_token_id(count - 1)


def _bytes() -> list[str]:
    """The bytes as characters, as vocabularies of this kind spell them: printable ones as they are, others from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(b) if b in printable else chr(next(others)) for b in range(BYTES)]
