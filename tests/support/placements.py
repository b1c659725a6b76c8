"""Models and machines to place, and a second way to add up what a placement takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from kvflash_ggml.config import Fit
from kvflash_ggml.native.sizes import LayerSizes, Measure, Needs
from kvflash_ggml.placement.layout import Compute
from kvflash_ggml.placement.sizes import HOST, Device, ModelSizes, Placement, PlacementRequest

MIB = 1 << 20
GIB = 1 << 30

Buffers = Callable[[int, int], int]
"""Bytes of a device's compute buffers for a step and a pool."""


def buffers(base: int, token: int) -> Buffers:
    return lambda n_ubatch, pool: base + n_ubatch * (token + 2 * pool)


def compute(devices: Sequence[Device], of: Buffers) -> Compute:
    """Measured at four points, the same on every device."""
    return Compute(
        [
            Measure(
                n_ubatch=n_ubatch,
                pool=pool,
                devices=tuple(Needs(device=device.name, compute=of(n_ubatch, pool)) for device in devices),
            )
            for n_ubatch in (512, 2048)
            for pool in (4096, 16384)
        ]
    )


def gpus(*free: int) -> tuple[Device, ...]:
    return tuple(
        Device(name=f"CUDA{i}", kind="gpu", free=size, total=max(size, 1), overlaps=True) for i, size in enumerate(free)
    )


def host(free: int) -> Device:
    return Device(name=HOST, kind="host", free=free, total=free)


def moe(
    *, layers: int = 40, dense: int = 70 * MIB, experts: int = 338 * MIB, every: int = 4, output: int = 300 * MIB
) -> ModelSizes:
    """Of the kind that has attention in every so-many-th layer, and experts in each."""
    return ModelSizes(
        layers=tuple(
            LayerSizes(dense=dense, experts=experts, k_row=512, v_row=512, query=16384)
            if i % every == every - 1
            else LayerSizes(dense=dense, experts=experts, state=2 * MIB)
            for i in range(layers)
        ),
        output=output,
        embedding=output,
    )


def takes(placement: Placement, sizes: ModelSizes, devices: Sequence[Device], of: Buffers) -> list[int]:
    """Bytes by device, the host's last, added up as llama.cpp would place it. Compute buffers where layers are."""
    n = len(sizes.layers)
    names = [device.name for device in devices]
    where = _where(placement, n, len(devices) - 1)
    there = [0] * len(devices)
    there[-1] += sizes.embedding
    for i, layer in enumerate(sizes.layers):
        experts = where[i]
        for pattern, device in placement.overrides:
            if re.search(pattern, f"blk.{i}.ffn_down_exps.weight"):
                experts = names.index(device)
                break
        there[where[i]] += layer.dense + layer.state
        there[experts] += layer.experts
        tokens = placement.pool
        if layer.window:
            tokens = -(-min(placement.n_ctx, layer.window + placement.n_ubatch) // 256) * 256
        there[where[i]] += tokens * layer.slot(placement.type_k, placement.type_v)
    there[where[n]] += sizes.output
    for i in set(where):
        there[i] += of(placement.n_ubatch, placement.pool)
    return there


def _where(placement: Placement, n: int, n_devices: int) -> list[int]:
    """The device of every layer and of the output, by llama.cpp's rule."""
    count = n + 1 if placement.n_gpu_layers < 0 else min(placement.n_gpu_layers, n + 1)
    first = n + 1 - count
    shares = placement.tensor_split or (1,) * n_devices
    edges = [sum(shares[: i + 1]) / sum(shares) for i in range(n_devices)]
    res = [n_devices] * first
    return res + [sum(edge <= (i - first) / count for edge in edges) for i in range(first, n + 1)]


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    dense = draw(st.integers(1, 300)) * MIB
    experts = draw(st.sampled_from([0, 0, 60, 340, 900])) * MIB
    plain = draw(st.integers(0, 3))
    every = draw(st.integers(1, 4))
    window = draw(st.sampled_from([0, 0, 1024]))
    row = draw(st.sampled_from([256, 512, 1024]))

    def layer(i: int) -> LayerSizes:
        attends = i % every == every - 1
        return LayerSizes(
            dense=dense + (i % 3) * MIB,
            experts=experts if i >= plain else 0,
            k_row=row if attends or window else 0,
            v_row=row if attends or window else 0,
            window=0 if attends else window,
            state=0 if attends or window else 2 * MIB,
            query=4 * row if attends else 0,
        )

    return ModelSizes(
        layers=tuple(layer(i) for i in range(draw(st.integers(2, 60)))),
        output=draw(st.integers(0, 900)) * MIB,
        embedding=draw(st.integers(0, 900)) * MIB,
    )


@st.composite
def machines(draw: st.DrawFn) -> tuple[Device, ...]:
    free = draw(st.lists(st.integers(0, 40_000), max_size=3))
    return (*gpus(*(size * MIB for size in free)), host(draw(st.integers(1, 100_000)) * MIB))


requests = st.builds(
    PlacementRequest,
    n_ctx=st.sampled_from([1000, 8192, 40_000, 262_144]),
    pool=st.sampled_from(["auto", "auto", "auto", None, 2048, 12_288]),
    n_ubatch=st.sampled_from([None, None, 512, 1024]),
    type_k=st.sampled_from([None, "f16"]),
    type_v=st.sampled_from([None, None, "q8_0"]),
    n_gpu_layers=st.sampled_from([None, None, None, -1, 0, 3, 20]),
    n_cpu_moe=st.sampled_from([None, None, None, 0, 5]),
    query_rows=st.sampled_from([0, 64]),
    fit=st.builds(Fit, margin=st.sampled_from([None, 0, 300 * MIB]), prefer=st.sampled_from(["pool", "exact"])),
)

compute_of = st.builds(buffers, st.integers(0, 500).map(lambda x: x * MIB), st.integers(0, 1_000_000))
