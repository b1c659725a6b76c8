"""What a drafter's file says of its target, and what must be known of it: fields, vocabulary, and a signature.

The signature of a model's embedding hardly changes when the model is quantised. Another training changes half of it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConversionError
from . import encoding
from .reader import GGUF, Field, Tensor, file_pieces, parts

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

TRAINED_FOR = "kvflash.target.architecture"
SIGNATURE = "kvflash.target.embedding"
KEYS = frozenset({TRAINED_FOR, SIGNATURE})
"""Keys in a drafter's file that name the model it was trained for."""

TOLERATED = 51
"""Bits of 256 in which two files of one model may differ: a fifth, as for embeddings whose cosine is 0.8."""

EMBEDDING = "token_embd.weight"
ROWS, BITS = 64, 4
"""Tokens, evenly spaced over the vocabulary, and bits of each: 256 bits, 64 hexadecimal digits."""

_WIDEST = 1 << 16

_TOKENIZER = "tokenizer."
_REMEDY = "Give the GGUF file of the whole target model, the first one if it is split."
_DIGITS = re.compile(rf"[0-9a-f]{{{ROWS * BITS // 4}}}")
_OTHER = (
    "Give the target that it was trained for. If it was trained for this one and the keys are wrong, "
    "kvflash-convert bind writes others."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """The model that verifies drafts.

    where: the name in errors. layers: without MTP heads. context: trained length in tokens. mask: the mask token, None
    without one. sections: whether RoPE counts in sections (M-RoPE). tokenizer: its fields in the file. vocabulary: a
    hash of the tokens. embedding: see `signature`, None without one.
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


def describe(file: GGUF) -> TargetFile:
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
    return TargetFile(
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


def keys_of(aim: TargetFile) -> list[Field]:
    """Return the keys for a drafter of this target. The vocabulary needs no key: the drafter's file has it."""
    found = [Field.of(TRAINED_FOR, aim.architecture)]
    return found if aim.embedding is None else [*found, Field.of(SIGNATURE, aim.embedding)]


def check_keys(file: GGUF, aim: TargetFile) -> bool:
    """Compare a drafter's keys with a target. Return False if one of the two has no signature.

    Raises ConversionError if the drafter was trained for another model, or a key is damaged.
    """
    architecture, trained = file.get(TRAINED_FOR), file.get(SIGNATURE)
    if architecture is not None and architecture != aim.architecture:
        raise ConversionError(
            file.name, TRAINED_FOR, found=architecture, wanted=f"{aim.architecture}, the target's", remedy=_OTHER
        )
    if trained is None or aim.embedding is None:
        return False
    if not isinstance(trained, str) or not _DIGITS.fullmatch(trained):
        raise ConversionError(
            file.name, SIGNATURE, found=trained, wanted="64 hexadecimal digits", remedy="Fetch the file again."
        )
    differ = distance(trained, aim.embedding)
    if differ > TOLERATED:
        raise ConversionError(
            file.name, "the model that it was trained for", found=f"another one: the signatures of the embeddings "
            f"differ in {differ} of 256 bits", wanted=f"{aim.where}, or at most {TOLERATED} bits", remedy=_OTHER,
        )  # fmt: skip
    return True


def signature(file: GGUF) -> str | None:
    """Return the signature of a model, 64 hexadecimal digits; None without an embedding of a type that numpy reads.

    Each bit is the sign of a token's embedding, [hidden], times a fixed pattern of ones and minus ones. Two files of
    one model in types of four bits and more differ in few of 256 bits, two trainings in about 128.

    file: of the model, the first part if it is split. Raises ConversionError if a part is missing.
    """
    for part in parts(file):
        if (tensor := part.tensors.get(EMBEDDING)) is not None:
            return _signature(part, tensor)
    return None


def distance(one: str, other: str) -> int:
    """Return how many bits differ between two signatures."""
    return (int(one, 16) ^ int(other, 16)).bit_count()


def _signature(file: GGUF, tensor: Tensor) -> str | None:
    if len(tensor.shape) != 2 or tensor.shape[0] > _WIDEST:
        return None
    hidden, count = tensor.shape
    places = [tensor.offset + tensor.row * (row * (count - 1) // (ROWS - 1)) for row in range(ROWS)]
    raw = np.concatenate([piece for at in places for piece in file_pieces(file.path, at, tensor.row, row=tensor.row)])
    rows = encoding.dequantise(raw, tensor.kind)
    if rows is None:
        return None
    bits = (rows.reshape(ROWS, 1, hidden) * _pattern(hidden)).sum(-1) > 0
    return np.packbits(bits).tobytes().hex()


def _pattern(hidden: int) -> np.ndarray:
    """Return ones and minus ones, [ROWS, BITS, hidden], the same for every model of this width."""
    width = -(-hidden // 8)
    drawn = np.frombuffer(hashlib.shake_128(EMBEDDING.encode()).digest(ROWS * BITS * width), np.uint8)
    signs = np.unpackbits(drawn.reshape(ROWS, BITS, width), axis=-1)[:, :, :hidden]
    return signs.astype(np.float32) * 2 - 1


def _whole(file: GGUF, key: str) -> int:
    value: Any = file.own(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _refusal(file, f"{file.architecture}.{key}", "not there" if value is None else value, "a positive number")
    return value


def _refusal(file: GGUF, what: str, found: object, wanted: str) -> ConversionError:
    return ConversionError(file.name, what, found=found, wanted=wanted, remedy=_REMEDY)
