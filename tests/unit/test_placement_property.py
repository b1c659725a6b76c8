"""What holds for every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvflash_ggml.config import Fit
from kvflash_ggml.errors import DoesNotFit
from kvflash_ggml.placement.plan import plan
from kvflash_ggml.placement.sizes import HOST, Device, ModelSizes, PlacementRequest
from tests.support.placements import (
    GIB,
    MIB,
    Buffers,
    compute,
    compute_of,
    gpus,
    host,
    machines,
    models,
    moe,
    requests,
    takes,
)
from tests.support.reserve import Reservation, reserve

Devices = tuple[Device, ...]


@given(models(), machines(), requests, compute_of)
def test_nothing_is_over_a_budget(sizes: ModelSizes, devices: Devices, request: PlacementRequest, of: Buffers) -> None:
    try:
        placement = plan(sizes, devices, request, compute(devices, of))
    except DoesNotFit:
        return
    for device, need, taken in zip(devices, placement.needs, takes(placement, sizes, devices, of), strict=True):
        assert taken + need.staging + need.queries + need.margin <= device.free
        assert need.total == taken + need.staging + need.queries + need.margin or device.kind == "host"
        assert need.left >= 0


@given(models(), machines(), requests, compute_of)
def test_what_is_fixed_stays(sizes: ModelSizes, devices: Devices, request: PlacementRequest, of: Buffers) -> None:
    try:
        placement = plan(sizes, devices, request, compute(devices, of))
    except DoesNotFit:
        return
    for name in ("n_ubatch", "type_k", "type_v", "n_gpu_layers", "tensor_split"):
        asked = getattr(request, name)
        assert asked is None or getattr(placement, name) == asked, name
    if request.pool is None:
        assert placement.pool == placement.n_ctx
    elif request.pool != "auto":
        assert placement.pool == min(request.pool, placement.n_ctx)
    if request.n_cpu_moe is not None:
        assert len(placement.host_experts) <= request.n_cpu_moe


@given(models(), machines(), requests, compute_of, st.integers(0, 2), st.integers(1, 4000))
def test_more_memory_never_gives_fewer_expert_layers(
    sizes: ModelSizes, devices: Devices, request: PlacementRequest, of: Buffers, which: int, more: int
) -> None:
    """Nor fewer layers. Of a device's: what is left to the host there does not matter here."""
    assume(which < len(devices) - 1)
    roomy = (*devices[:-1], host(1 << 50))
    larger = [replace(d, free=d.free + more * MIB) if i == which else d for i, d in enumerate(roomy)]
    try:
        before = plan(sizes, roomy, request, compute(devices, of))
    except DoesNotFit:
        return
    after = plan(sizes, tuple(larger), request, compute(devices, of))

    def on_host(placement: object) -> tuple[int, int]:
        need = placement.needs[-1]  # type: ignore[attr-defined]
        return need.layers[1], need.layers[1] + len(need.experts)

    assert on_host(after)[0] <= on_host(before)[0]
    assert on_host(after)[1] <= on_host(before)[1]


@given(models(), machines(), requests, compute_of)
def test_a_remedy_that_is_enough_fits(
    sizes: ModelSizes, devices: Devices, request: PlacementRequest, of: Buffers
) -> None:
    with_room = (*devices[:-1], host(max(devices[-1].free, 20 * GIB)))
    request = replace(request, n_gpu_layers=request.n_gpu_layers or -1)
    error = None
    try:
        plan(sizes, with_room, request, compute(devices, of))
    except DoesNotFit as raised:
        error = raised
    assume(error is not None)
    assert error is not None
    assert error.needed > error.free
    assert error.needed == sum(error.needs.values())
    for remedy in error.remedies:
        assert remedy.frees > 0
        if remedy.enough:
            plan(sizes, with_room, replace(request, **remedy.changes), compute(devices, of))


@given(
    core=st.integers(1, 60).map(lambda x: x * 64 * MIB),
    experts=st.integers(1, 500).map(lambda x: x * MIB),
    free=st.integers(4, 48).map(lambda x: x * GIB),
    n_ctx=st.sampled_from([32_768, 65_536, 131_072, 262_144]),
    pool=st.sampled_from([4096, 16_384, 49_152]),
    fixed=st.integers(100, 2000).map(lambda x: x * MIB),
)
def test_no_more_experts_are_on_the_host_than_a_reservation_by_bytes_leaves(
    core: int, experts: int, free: int, n_ctx: int, pool: int, fixed: int
) -> None:
    """Beyond the layer that it would divide."""
    sizes = moe(dense=core // 64, experts=experts, output=core - 40 * (core // 64))
    devices = (*gpus(free), host(1 << 50))
    slot = sum(layer.slot("f16", "f16") for layer in sizes.layers)
    margin = fixed - slot * 64 * 8 * (pool < n_ctx)  # a pool's pages on their way, which a full cache has not

    def oracle(fixed: int) -> Reservation:
        total = {"total": free, "core": core + 60 * MIB, "experts": 40 * experts}
        return reserve(slot=slot, n_ctx=n_ctx, pool=pool, fixed=fixed, **total)

    assume(oracle(fixed).budget > 0)
    request = PlacementRequest(
        n_ctx=n_ctx, pool=pool, n_ubatch=512, type_k="f16", n_gpu_layers=-1, fit=Fit(margin=margin)
    )
    placement = plan(sizes, devices, request, compute(devices, lambda n_ubatch, pool: 0))
    cold = max(0, 40 * experts - oracle(fixed).budget)
    assert len(placement.host_experts) <= -(-cold // experts)
    assert placement.redundant == (oracle(margin).all_there and pool < n_ctx)


@pytest.mark.parametrize("name", [HOST, "CUDA0"])
def test_free_memory_can_be_named(name: str) -> None:
    devices = (*gpus(64 * GIB), host(64 * GIB))
    request = PlacementRequest(n_ctx=8192, n_gpu_layers=-1, n_cpu_moe=0, fit=Fit(free={name: 1 * MIB}))
    with pytest.raises(DoesNotFit) as failed:
        plan(moe(), devices, request, compute(devices, lambda n_ubatch, pool: 0))
    assert failed.value.device == name
    assert failed.value.free == 1 * MIB
