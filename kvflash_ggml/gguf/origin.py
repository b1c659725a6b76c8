"""Keys in a drafter's file that name the model it was trained for, and their comparison with a target."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import ConversionError
from . import embedding
from .reader import GGUF, Field

if TYPE_CHECKING:
    from .target import Target

ARCHITECTURE = "kvflash.target.architecture"
EMBEDDING = "kvflash.target.embedding"
KEYS = frozenset({ARCHITECTURE, EMBEDDING})

TOLERATED = 51
"""Bits of 256 in which two files of one model may differ: a fifth, as for embeddings whose cosine is 0.8."""

_SIGNATURE = re.compile(rf"[0-9a-f]{{{embedding.ROWS * embedding.BITS // 4}}}")
_OTHER = (
    "Give the target that it was trained for. If it was trained for this one and the keys are wrong, "
    "kvflash-convert bind writes others."
)


def fields(aim: Target) -> list[Field]:
    """Return the keys for a drafter of this target. The vocabulary needs no key: the drafter's file has it."""
    found = [Field.of(ARCHITECTURE, aim.architecture)]
    return found if aim.embedding is None else [*found, Field.of(EMBEDDING, aim.embedding)]


def check(file: GGUF, aim: Target) -> bool:
    """Compare a drafter's keys with a target. Return False if one of the two has no signature.

    Raises ConversionError if the drafter was trained for another model, or a key is damaged.
    """
    architecture, trained = file.get(ARCHITECTURE), file.get(EMBEDDING)
    if architecture is not None and architecture != aim.architecture:
        raise ConversionError(
            file.name, ARCHITECTURE, found=architecture, wanted=f"{aim.architecture}, the target's", remedy=_OTHER
        )
    if trained is None or aim.embedding is None:
        return False
    if not isinstance(trained, str) or not _SIGNATURE.fullmatch(trained):
        raise ConversionError(
            file.name, EMBEDDING, found=trained, wanted="64 hexadecimal digits", remedy="Fetch the file again."
        )
    differ = embedding.distance(trained, aim.embedding)
    if differ > TOLERATED:
        raise ConversionError(
            file.name, "the model that it was trained for", found=f"another one: the signatures of the embeddings "
            f"differ in {differ} of 256 bits", wanted=f"{aim.where}, or at most {TOLERATED} bits", remedy=_OTHER,
        )  # fmt: skip
    return True
