#!/usr/bin/env python3
"""Computes what well-known models take of a device, and writes docs/memory.md. No model and no library is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "memory.md"

if str(REPO) not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path.insert(0, str(REPO))

from kvflash_ggml.constants import SPEED_CAP  # noqa: E402
from kvflash_ggml.gguf import types  # noqa: E402
from kvflash_ggml.llama.reading import SHARE  # noqa: E402
from kvflash_ggml.native.sizes import LayerSizes, Needs  # noqa: E402
from kvflash_ggml.placement.needs import Bill, Shape  # noqa: E402
from kvflash_ggml.placement.sizes import Device, ModelSizes, PlacementRequest  # noqa: E402
from kvflash_ggml.policy.qk import QKScorer  # noqa: E402

GIB = 1 << 30
LENGTHS = (32 << 10, 128 << 10, 256 << 10)
SMALL = 4096
N_UBATCH = 512
"""llama-cpp-python's default."""

COMPUTE = GIB // 2
"""Compute buffers of such steps; `--dry-run` told 519 MiB for the 27B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a model, from its public configuration.

    every: each `every`-th layer attends to the whole text. The others see a `window` of tokens, or, with `linear`, keep
    a recurrent state of (key heads, value heads, values of a head, kernel of the convolution). gated: a query has an
    output gate of its width. ffn: width of the feed-forward net, or of one of the `experts`. tied: the output is the
    token embedding. context: tokens it was trained for.
    """

    name: str
    layers: int
    width: int
    ffn: int
    vocab: int
    heads: int
    heads_kv: int
    head: int
    context: int
    every: int = 1
    window: int = 0
    linear: tuple[int, int, int, int] | None = None
    gated: bool = False
    experts: int = 0
    tied: bool = False


MODELS = (
    Model(
        name="Llama-3.1-8B", layers=32, width=4096, ffn=14_336, vocab=128_256, heads=32, heads_kv=8, head=128,
        context=131_072,
    ),
    Model(
        name="Qwen3.5-27B (hybrid)", layers=64, width=5120, ffn=17_408, vocab=248_320, heads=24, heads_kv=4, head=256,
        context=262_144, every=4, linear=(16, 48, 128, 4), gated=True,
    ),
    Model(
        name="Qwen3-32B", layers=64, width=5120, ffn=25_600, vocab=151_936, heads=64, heads_kv=8, head=128,
        context=40_960,
    ),
    Model(
        name="Qwen3-30B-A3B-2507 (MoE)", layers=48, width=2048, ffn=768, vocab=151_936, heads=32, heads_kv=4, head=128,
        context=262_144, experts=128,
    ),
    Model(
        name="Gemma-3-27B (sliding window)", layers=62, width=5376, ffn=21_504, vocab=262_208, heads=32, heads_kv=16,
        head=128, context=131_072, every=6, window=1024, tied=True,
    ),
)  # fmt: skip


def sizes(model: Model) -> ModelSizes:
    """Return the bytes of each layer: matrices in Q4_K, the output in Q6_K; norms and biases are left out."""
    table = model.vocab * model.width
    return ModelSizes(
        layers=tuple(_layer(model, full=(i + 1) % model.every == 0) for i in range(model.layers)),
        output=_bytes(table, "q6_k"),
        embedding=_bytes(table, "q6_k" if model.tied else "q4_k"),
        n_ctx_train=model.context,
    )


def _layer(model: Model, *, full: bool) -> LayerSizes:
    net = 3 * model.width * model.ffn
    experts, dense = (net * model.experts, model.width * model.experts) if model.experts else (0, net)
    if not full and model.linear is not None:
        k_heads, v_heads, head, kernel = model.linear
        mixed = (2 * k_heads + v_heads) * head
        dense += model.width * (mixed + 2 * v_heads * head + 2 * v_heads)
        state = types.BY_NAME["f32"].size * (v_heads * head * head + (kernel - 1) * mixed)
        return LayerSizes(dense=_bytes(dense), experts=_bytes(experts), state=state)
    q, kv = model.heads * model.head, model.heads_kv * model.head
    dense += model.width * ((2 if model.gated else 1) * q + 2 * kv + q)
    row = LayerSizes(dense=_bytes(dense), experts=_bytes(experts), k_row=kv, v_row=kv)
    if not full:
        return LayerSizes(dense=row.dense, experts=row.experts, k_row=kv, v_row=kv, window=model.window)
    query = types.BY_NAME["f32"].size * q
    return LayerSizes(
        dense=row.dense, experts=row.experts, k_row=kv, v_row=kv, query=query, heads=model.heads,
        heads_kv=model.heads_kv,
    )  # fmt: skip


def _bytes(values: int, kind: str = "q4_k") -> int:
    return types.nbytes(types.BY_NAME[kind], (values,))


def needs(model: Model, n_ctx: int, pool: int, *, exact: bool = False, kv: str = "f16") -> Needs:
    """Return what a model takes of one device that holds all of it, without compute buffers.

    n_ctx: tokens of the context. pool: slots, n_ctx of them for a full cache. exact: with layer buffers for reading
    exactly. kv: the type of K and V.
    """
    found, scorer = sizes(model), QKScorer()
    rows = scorer.query_rows if pool < n_ctx else 0
    request = PlacementRequest(n_ctx=n_ctx, query_rows=rows, stage=n_ctx if exact else 0)
    device = Device(name="GPU", kind="gpu", free=0, total=0, overlaps=True)
    bill = Bill(found, request, Shape(pool=pool, n_ubatch=N_UBATCH, type_k=kv, type_v=kv), {})
    return bill.device(device, 0, len(found.layers) + 1, 0)


def cache(need: Needs) -> int:
    """Return the bytes that the context keeps on the device: K and V, states, windows, pages on their way, queries."""
    return need.kv + need.state + need.staging + need.queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model on a card. card: GiB. model: how its name begins. parallel: answers at once, each with its own state."""

    card: int
    model: str
    n_ctx: int
    pool: int
    kv: str = "f16"
    parallel: int = 1


RECIPES = (
    Recipe(card=8, model="Llama", n_ctx=131_072, pool=8192),
    Recipe(card=8, model="Llama", n_ctx=65_536, pool=8192, parallel=2),
    Recipe(card=12, model="Llama", n_ctx=131_072, pool=16_384, parallel=4),
    Recipe(card=16, model="Qwen3.5-27B", n_ctx=32_768, pool=4096),
    Recipe(card=16, model="Qwen3.5-27B", n_ctx=131_072, pool=4096, kv="q8_0"),
    Recipe(card=24, model="Qwen3.5-27B", n_ctx=262_144, pool=16_384, parallel=4),
    Recipe(card=24, model="Qwen3-30B", n_ctx=262_144, pool=16_384, parallel=8),
    Recipe(card=24, model="Qwen3-32B", n_ctx=40_960, pool=16_384),
)

HEAD = """\
# How much memory a model takes

This page says how much memory of a device (VRAM) a model and its context take at 32K, 128K and 256K tokens. It also has
settings for cards of 8 to 24 GiB. `kvflash-run MODEL --dry-run --kvflash auto -c 131072` measures the same for a file
and a machine of yours, with compute buffers. `python scripts/memory_table.py` writes this page from the public shapes
of the models, by the arithmetic that places a model ([devices.md](devices.md#what-goes-where)).

## Weights and cache

The full cache grows with the context. A pool does not: its size is the same at every length. The default pool
(`kvflash="auto"`) has at most {cap:,} tokens, and fewer where the device has less room. The unit is GiB.
Matrices are Q4_K and the output is Q6_K; a Q4_K_M file is a little larger. The token embedding stays in host memory. K
and V are f16, the default; with `q8_0` they take 53 % of that. Recurrent state and sliding windows are counted, and
with a pool also the pages on their way and the captured queries. Compute buffers and the margin of 512 MiB come on top.

"""

BEYOND = """
Qwen3-32B was trained for 40,960 tokens, Llama-3.1-8B and Gemma-3-27B for 131,072: larger figures are for size only.
For a model with sliding windows the full cache is that of `swa_full=False`, which a pool implies.
The host keeps an image of each full 64-token chunk: at most as much memory as the full cache takes.
"""

EXACT = """
## Exact reading

Where there is memory for it, a prompt is read with the whole text in view
([exact-reading.md](exact-reading.md)). The keys and values of one layer at a time pass through layer buffers on the
device. Layer buffers grow with the context, by one layer instead of all. GiB beside the pool, for steps of
{n_ubatch} tokens:

"""

CARDS = """
## By card

Each row leaves 1 GiB or more: half for compute buffers (`--dry-run` told 519 MiB for the 27B in steps of 512 tokens),
half for the margin. GiB as above, with layer buffers for the whole context and a state for each answer. By default
layer buffers get a third of what is free beside all the rest: rows with `--kvflash-stage` give them more. Where less is
left than you like, take a smaller `--kvflash` first. The last column is for one conversation. The server keeps idle
ones in `--park-memory` (8G unless given): raise it where a conversation takes more, or give a `--session-dir`.

"""


def _row(recipe: Recipe) -> list[str]:
    model = next(model for model in MODELS if model.name.startswith(recipe.model))
    need = needs(model, recipe.n_ctx, recipe.pool, exact=True, kv=recipe.kv)
    states = (recipe.parallel - 1) * need.state
    options = f"--kvflash {recipe.pool >> 10}K -c {recipe.n_ctx} -ub {N_UBATCH}"
    options += f" -ctk {recipe.kv} -ctv {recipe.kv}" if recipe.kv != "f16" else ""
    options += f" --parallel {recipe.parallel}" if recipe.parallel > 1 else ""
    rest = need.weights + cache(need) + states
    if need.stages > ((recipe.card << 30) - rest - COMPUTE) // SHARE:
        options += f" --kvflash-stage {recipe.n_ctx >> 10}K"
    taken = rest + need.stages
    images = recipe.n_ctx * need.kv // recipe.pool
    row = [f"{recipe.card}", model.name, f"`serve {options}`", _gib(taken), _gib((recipe.card << 30) - taken)]
    return [*row, _gib(images)]


def render() -> str:
    """Return the text of docs/memory.md."""
    lengths = [f"{n_ctx >> 10}K" for n_ctx in LENGTHS]
    full = [f"full, {length}" for length in lengths]
    pools = [f"pool of {pool:,}" for pool in (SPEED_CAP, SMALL)]
    totals, buffers = [], []
    for model in MODELS:
        whole = [needs(model, n_ctx, n_ctx) for n_ctx in LENGTHS]
        pooled = [needs(model, LENGTHS[-1], pool) for pool in (SPEED_CAP, SMALL)]
        exact = [needs(model, n_ctx, SPEED_CAP, exact=True).stages for n_ctx in LENGTHS]
        taken = [*map(cache, whole), *map(cache, pooled)]
        weights = whole[0].weights
        totals.append([model.name, _gib(weights), *(_gib(weights + size) for size in taken)])
        buffers.append([model.name, *map(_gib, exact)])
    return (
        HEAD.format(cap=SPEED_CAP)
        + _table(["model", "weights", *full, *pools], totals)
        + BEYOND
        + EXACT.format(n_ubatch=N_UBATCH)
        + _table(["model", *lengths], buffers)
        + CARDS
        + _table(["card", "model", "options", "taken", "left", "images of a full context, host"], map(_row, RECIPES))
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
