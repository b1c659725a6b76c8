"""Reads what a drafter must know of its target from the target's file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ..errors import ConversionError
from .embedding import signature
from .reader import GGUF, Field

LAYER_INPUTS = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35",
    "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
})  # fmt: skip
"""Architectures whose layer inputs llama.cpp can give to a drafter. For others it aborts."""

LAST_INPUT = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
"""Architectures among them that also give the last layer's output."""

USUAL_THETA = 10000.0
"""RoPE's base where a file names none, as llama.cpp assumes."""

_TOKENIZER = "tokenizer."
_REMEDY = "Give the GGUF file of the whole target model, the first one if it is split."


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that verifies drafts.

    where: the name in errors. layers: without MTP heads. context: trained length in tokens. mask: the mask token, None
    without one. sections: whether RoPE counts in sections (M-RoPE). tokenizer: its fields in the file. vocabulary: a
    hash of the tokens. embedding: the signature of `embedding.signature`, None without one.
    """

    where: str
    architecture: str
    layers: int
    hidden: int
    context: int
    vocab: int
    theta: float
    mask: int | None
    sections: bool
    tokenizer: tuple[Field, ...]
    vocabulary: str
    embedding: str | None


def describe(file: GGUF) -> Target:
    """Describe a target. ConversionError if a field is missing or out of bounds."""
    layers, further = _whole(file, "block_count"), f"{file.architecture}.nextn_predict_layers"
    if file.get(further, 0) != 0:
        layers -= _whole(file, "nextn_predict_layers")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is None or not tokens.is_array:
        raise _refusal(file, "tokenizer.ggml.tokens", "not there", "the target's tokens")
    theta = file.own("rope.freq_base", USUAL_THETA)
    if not isinstance(theta, float):
        raise _refusal(file, "rope.freq_base", theta, "a number")
    mask = file.get("tokenizer.ggml.mask_token_id")
    return Target(
        where=file.name,
        architecture=file.architecture,
        layers=layers,
        hidden=_whole(file, "embedding_length"),
        context=_whole(file, "context_length"),
        vocab=tokens.count,
        theta=theta,
        mask=mask if type(mask) is int else None,
        sections=f"{file.architecture}.rope.dimension_sections" in file.fields,
        tokenizer=tuple(field for name, field in file.fields.items() if name.startswith(_TOKENIZER)),
        vocabulary=vocabulary(file),
        embedding=signature(file),
    )


def vocabulary(file: GGUF) -> str:
    """Return a hash of the tokens. How the tokenizer splits text does not matter: a drafter gets tokens."""
    field = file.fields.get("tokenizer.ggml.tokens")
    return hashlib.sha256(b"" if field is None else field.raw).hexdigest()[:16]


def _whole(file: GGUF, key: str) -> int:
    value: Any = file.own(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _refusal(file, f"{file.architecture}.{key}", "not there" if value is None else value, "a positive number")
    return value


def _refusal(file: GGUF, what: str, found: object, wanted: str) -> ConversionError:
    return ConversionError(file.name, what, found=found, wanted=wanted, remedy=_REMEDY)
