"""Numbers that everything is laid out by."""

from __future__ import annotations

CHUNK = 64
"""Tokens per chunk, and slots per block. The native code is built for this number."""

POOL_STEP = 256
"""Pool sizes are multiples of this, because llama.cpp widens its attention span in steps of 256 cells."""

MAX_CONTEXT = 2**31 - POOL_STEP
"""Tokens. llama.cpp counts positions with 32 bits, and rounds a context up to POOL_STEP."""

MAX_THREADS = 512
"""Threads of a CPU that ggml knows."""

SPEED_CAP = 16_384
"""Slots. Beyond this, attention over the pool costs more time than a larger pool gains in recall."""

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}
"""ggml's numbers of the types a KV cache can have."""

KV_BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
"""Of each of them: values in a block, and its bytes."""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
