"""Attention of a step's rows over a pool's slots, on the device under test, beside float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from support.on_device import POINTER, Work, function, has_our_kernels, new, put, quantised, take
from support.rounding import ON_GPU

OP_PARAMS = 84
"""Bytes of a tensor before the parameters of its operation."""

TILE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of queries and of keys, and the values of one."""

    count: int
    keys: int
    wide: int


SHAPES = {
    "27b": Heads(24, 4, 256),
    "8b": Heads(32, 8, 128),
    "small": Heads(9, 3, 64),
    "many": Heads(20, 1, 128),
    "own": Heads(4, 4, 128),
}


CASES = [(4864, "small"), (4864, "own")]
if ON_GPU:  # the most tiles are more than a block has threads
    CASES = [*((slots, shape) for slots in (256, 4864, 10_240) for shape in SHAPES), (66_048, "small")]


@dataclass(frozen=True, slots=True)
class Inputs:
    """q of rows, heads and values; k and v of slots and bytes, and what they stand for; a mask of rows and slots."""

    heads: Heads
    kind: Type
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    apart: bool
    ours: bool


def inputs(heads: Heads, kind: Type, rows: int, slots: int, *, apart: bool) -> Inputs:
    """apart: each row sees tiles of its own, the newest in part. Else a row sees what lies before it. Tiles that nobody
    sees hold no numbers, where our kernel computes.
    """
    alone = kind == Type.Q8_0 and rows <= 3 and slots >= 4096 and heads.count > heads.keys
    ours = has_our_kernels() and (rows <= 64 if apart and rows > 2 else alone)
    random = np.random.default_rng(rows)
    mask = np.triu(np.full((rows, slots), -np.inf, np.float16), slots - rows + 1)
    if apart:
        mask[:] = 0
        owner = random.permutation(np.arange(slots // TILE) % (rows + 1))
        mask[owner.repeat(TILE)[None] != np.arange(rows)[:, None]] = -np.inf
        for row in range(rows):
            last = np.flatnonzero(owner == row)[-1] * TILE
            mask[row, last + 1 + row % TILE : last + TILE] = -np.inf
    unseen = np.isinf(mask).all(axis=0).reshape(-1, TILE).all(axis=1).repeat(TILE)
    stored = []
    for _ in range(2):
        drawn = random.standard_normal((slots, heads.keys * heads.wide)).astype(np.float32)
        blocks = quantised(kind, drawn) if kind == Type.Q8_0 else drawn.astype(np.float16).view(np.uint8)
        if ours:
            blocks[unseen] = 0xFF  # of float16 no number; of Q8_0 its scale
        stored.append(blocks)
    k, v = stored
    keys, values = (
        dequantize(blocks, Type.Q8_0) if kind == Type.Q8_0 else blocks.view(np.float16).astype(np.float32)
        for blocks in stored
    )
    q = random.standard_normal((rows, heads.count, heads.wide)).astype(np.float32)
    return Inputs(heads, kind, q, k, v, keys, values, mask, apart, ours)


def attention(given: Inputs) -> np.ndarray:
    """What the device computes: of rows, heads and values. Slots lie as in a cache: all heads of a slot together."""
    heads, (rows, slots) = given.heads, given.mask.shape
    turn = function("ggml_permute", POINTER, *[POINTER] * 2, *[ctypes.c_int] * 4)
    with Work() as work:
        context = work.context()
        q = new(context, Type.F32, heads.wide, heads.count, rows)
        k, v = (new(context, given.kind, heads.wide, heads.keys, slots) for _ in range(2))
        mask = new(context, Type.F16, slots, rows, 1)
        compute = function("ggml_flash_attn_ext", POINTER, *[POINTER] * 5, *[ctypes.c_float] * 3)
        turned = (turn(context, tensor, 0, 2, 1, 3) for tensor in (q, k, v))
        out = compute(context, *turned, mask, heads.wide**-0.5, 0, 0)
        parameters = (ctypes.c_int32 * 16).from_address(out + OP_PARAMS)
        assert ctypes.c_float.from_buffer(parameters).value == np.float32(heads.wide**-0.5)
        parameters[15] = (rows + 1) // 2 if given.apart else 1  # of sequences
        graph = work.graph(context, out)
        work.place(context)
        for tensor, data in (q, given.q), (k, given.k), (v, given.v), (mask, given.mask):
            put(tensor, data)
        work.compute(graph)
        return take(out, given.q.shape)


def exact(given: Inputs, row: int) -> np.ndarray:
    """The same in float64, of a row's heads and values."""
    heads, share = given.heads, given.heads.count // given.heads.keys
    seen = np.flatnonzero(np.isfinite(given.mask[row]))
    k, v = (stored[seen].reshape(-1, heads.keys, heads.wide) for stored in (given.keys, given.values))
    found = []
    for head in range(heads.keys):
        scores = given.q[row, head * share : (head + 1) * share].astype(np.float64) @ k[:, head].T * heads.wide**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head])
    return np.concatenate(found)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 33, 64, 65] if ON_GPU else [1, 4, 33])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F16])
@pytest.mark.parametrize(("slots", "shape"), CASES)
def test_attention_is_right_and_rows_apart(shape: str, kind: Type, rows: int, slots: int, apart: bool) -> None:
    """Within what rounding costs. A number that is none reaches no other row, and what no row sees reaches none.

    Upstream's vector kernel, and a CPU, round queries to 8 bits where keys have 8. Some CPUs sum in float16.
    """
    if slots < TILE * (rows + 1):
        slots = 256 * (-(-TILE * (rows + 1) // 256))
    given = inputs(SHAPES[shape], kind, rows, slots, apart=apart)
    found = attention(given)
    some = sorted({0, rows // 2, rows - 1})
    want = np.stack([exact(given, row) for row in some])
    error = np.linalg.norm(found[some] - want, axis=2) / np.linalg.norm(want, axis=2)
    assert error.max() < (0.0025 if given.ours else 0.03)
    half = rows // 2
    given.q[half] = np.nan
    again = attention(given)
    others = np.arange(rows) != half
    np.testing.assert_array_equal(again[others].view(np.int32), found[others].view(np.int32))
    assert np.isnan(again[half]).all() or not ON_GPU  # a CPU rounds such a row to zeros
