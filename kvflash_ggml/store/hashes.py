"""Names for the beginnings of texts: each chunk's name depends on all tokens up to its end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Int32s
from ..constants import CHUNK

SIZE = 16


def root(facts: dict[str, Any]) -> str:
    """The name of the empty text under these facts. Texts under other facts share nothing with it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[: 2 * SIZE]


def names(start: str, tokens: Int32s) -> list[str]:
    """The names of the text's beginnings at chunk boundaries, the empty one first."""
    result = [start]
    for at in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        result.append(extend(result[-1], tokens[at : at + CHUNK]))
    return result


def extend(name: str, tokens: Int32s | Sequence[int]) -> str:
    """The name of a text that goes on from a named one."""
    data = np.asarray(tokens, "<i4").tobytes()
    return hashlib.blake2b(bytes.fromhex(name) + data, digest_size=SIZE).hexdigest()
