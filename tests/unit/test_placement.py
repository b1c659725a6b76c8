"""What goes where: known cases."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.config import Fit
from kvflash_ggml.errors import ConfigError, DoesNotFit
from kvflash_ggml.native.sizes import LayerSizes, Measure, Needs
from kvflash_ggml.placement import devices as device_options
from kvflash_ggml.placement import table
from kvflash_ggml.placement.devices import bounds_of
from kvflash_ggml.placement.layout import partition
from kvflash_ggml.placement.plan import fit, plan
from kvflash_ggml.placement.sizes import HOST, Device, ModelSizes, Placement, PlacementRequest
from tests.support.placements import GIB, MIB, compute, gpus, host, moe
from tests.support.reserve import reserve

ONE = (*gpus(16 * GIB), host(64 * GIB))


def nothing(n_ubatch: int, pool: int) -> int:
    return 0


def mask(n_ubatch: int, pool: int) -> int:
    return 100 * MIB + n_ubatch * (200_000 + 2 * pool)


def placed(sizes: ModelSizes, devices: tuple[Device, ...], request: PlacementRequest, of: object = mask) -> Placement:
    return plan(sizes, devices, request, compute(devices, of))  # type: ignore[arg-type]


# --- the reservation that moved experts off the device

SLOT = 80 << 10
CORE, EXPERTS = 3194 * MIB, 13_507 * MIB
OTHER = (200 + 256 + 1200) * MIB

CASES = {
    "C1": (0, 65_536, "all there"),
    "C2": (49_152, 65_536, "redundant"),
    "C3": (49_152, 131_072, "reduced"),
    "C4": (0, 131_072, "cold"),
    "C5": (32_768, 32_768, "all there"),
    "C6": (16_384, 262_144, "reduced"),
}


def big() -> ModelSizes:
    """Its K and V take 80 KiB a token."""
    layer = LayerSizes(dense=CORE // 40, experts=EXPERTS // 40, k_row=512, v_row=512)
    return ModelSizes(layers=(layer,) * 40, output=CORE - CORE // 40 * 40, embedding=0)


@pytest.mark.parametrize("case", CASES)
def test_the_pool_is_what_is_reserved(case: str) -> None:
    pool, n_ctx, outcome = CASES[case]
    staging = SLOT * 64 * 8 * (0 < pool < n_ctx)
    request = PlacementRequest(
        n_ctx=n_ctx, pool=pool or None, n_ubatch=512, type_k="f16", n_gpu_layers=-1, fit=Fit(margin=OTHER - staging)
    )
    found = placed(big(), (*gpus(24 * GIB), host(64 * GIB)), request, nothing)
    oracle = reserve(slot=SLOT, n_ctx=n_ctx, pool=pool, total=24 * GIB, core=CORE, experts=EXPERTS, fixed=OTHER)
    assert (found.level == 2) == (outcome == "cold")
    assert found.redundant == (outcome == "redundant")
    assert oracle.reduced == (outcome == "reduced")
    assert found.pool == pool or found.pool == n_ctx
    cold = max(0, EXPERTS - oracle.budget)
    assert len(found.host_experts) == -(-cold // (EXPERTS // 40))
    assert found.host_experts == tuple(range(len(found.host_experts)))


def test_a_pool_that_keeps_experts_on_the_device_is_not_redundant() -> None:
    request = PlacementRequest(n_ctx=131_072, pool=16_384, n_ubatch=512, type_k="f16")
    devices = (*gpus(24 * GIB), host(64 * GIB))
    assert not placed(big(), devices, request).redundant
    assert placed(big(), (*gpus(32 * GIB), host(64 * GIB)), request).redundant


def test_experts_that_the_user_keeps_on_the_host_are_counted_before_a_pool_is_called_redundant() -> None:
    """A full cache would fit here, but only because of what was asked for."""
    devices = (*gpus(64 * GIB), host(64 * GIB))
    request = PlacementRequest(n_ctx=131_072)
    assert placed(big(), devices, request).redundant
    moved = PlacementRequest(n_ctx=131_072, n_cpu_moe=4)
    assert placed(big(), devices, moved).host_experts == (0, 1, 2, 3)
    assert not placed(big(), devices, moved).redundant
    fixed = ModelSizes(layers=(LayerSizes(dense=MIB),) * 4, output=0, embedding=0, fixed={HOST: GIB})
    assert not placed(fixed, devices, request).redundant


def test_layers_on_the_host_count_among_those_that_have_their_experts_there() -> None:
    """On one device the first ones of the model, as upstream's; on several in turn."""
    partial = {"n_ctx": 131_072, "n_gpu_layers": 31, "type_k": "f16"}  # of 40 and the output: from layer 10 on
    one, two = ((*gpus(*[64 * GIB] * n), host(64 * GIB)) for n in (1, 2))
    for count, want in ((4, ()), (10, ()), (12, (10, 11))):
        assert placed(moe(), one, PlacementRequest(**partial, n_cpu_moe=count)).host_experts == want
    halves = PlacementRequest(**partial, n_cpu_moe=13, tensor_split=(16.0, 15.0))
    assert placed(moe(), two, halves).host_experts == (10, 11, 26)


def test_exact_scores_have_room_where_layers_have_stages() -> None:
    """Of the heads of a device, and no more than are asked for; a device behind a network makes none."""
    layer = LayerSizes(dense=MIB, k_row=512, v_row=512, query=16384, heads=16, heads_kv=4)
    sizes = ModelSizes(layers=(layer,) * 8, output=0, embedding=0)
    request = PlacementRequest(
        n_ctx=131_072, n_ubatch=512, pool=4096, type_k="f16", type_v="f16", stage=131_072, query_rows=32
    )
    (gpu, cpu), far = (*gpus(16 * GIB), host(64 * GIB)), replace(gpus(16 * GIB)[0], kind="remote")
    plain, asked, behind = (
        placed(sizes, (device, cpu), replace(request, masses=masses, n_gpu_layers=-1)).needs
        for device, masses in ((gpu, 0), (gpu, 2**22 + 1), (far, 2**22 + 1))
    )
    pieces = 4096 * 32 + 3 * 4 * 2**20
    assert [need.masses for need in plain] == [need.masses for need in behind] == [0, 0]
    assert [need.masses for need in asked] == [4 * (8 * 16 * 32 + 5 * 2**20) + pieces, 0]
    assert asked[0].total - plain[0].total == asked[0].masses


@pytest.mark.parametrize(
    ("free", "layers", "want"), [(600, -1, 100), (81, -1, 16), (65, -1, 0), (600, 6, 0), (600, 0, 0)]
)
def test_an_index_takes_what_is_left_beside_all_layers(free: int, layers: int, want: int) -> None:
    """No layer leaves for it. Sizes are MiB."""
    layer = LayerSizes(dense=7 * MIB, k_row=64, v_row=64, query=4096, heads=8, heads_kv=2)
    sizes = ModelSizes(layers=(layer,) * 8, output=0, embedding=0)
    request = PlacementRequest(
        n_ctx=131_072, n_ubatch=512, pool=4096, type_k="f16", type_v="f16", n_gpu_layers=layers,
        fit=Fit(margin=0), index={"CUDA0": 100 * MIB},
    )  # fmt: skip
    plain, indexed = (
        placed(sizes, (*gpus(free * MIB), host(64 * GIB)), one, nothing)
        for one in (replace(request, index={}), request)
    )
    assert (indexed.n_gpu_layers, indexed.pool) == (plain.n_gpu_layers, plain.pool)
    need = indexed.needs[0]
    assert need.index == want * MIB
    assert replace(need, index=0) == plain.needs[0]


def test_stages_that_are_asked_for_have_room_set_aside() -> None:
    """Two of a layer's K and V in turn where transfers overlap, and their columns of the mask."""
    request = PlacementRequest(n_ctx=131_072, n_ubatch=512, type_k="f16", type_v="f16")
    plain, staged = (placed(moe(), ONE, replace(request, stage=stage)) for stage in (0, 131_072))
    assert plain.needs[0].stages == 0
    copies = 2 if ONE[0].overlaps else 1
    assert staged.needs[0].stages == 131_072 * (copies * 2 * 512 * 2 + 2 * 512)
    assert staged.needs[0].left >= 0
    assert staged.needs[0].masses == 0
    assert len(staged.host_experts) > len(plain.host_experts)
    whole = placed(moe(), (*gpus(64 * GIB), host(64 * GIB)), replace(request, stage=131_072, fit=Fit(prefer="exact")))
    assert whole.needs[0].stages == 0
    assert "stages" in json.dumps(table.document(staged, ONE))
    given = replace(request, pool=plain.pool, n_gpu_layers=-1, n_cpu_moe=len(plain.host_experts))
    assert placed(moe(), ONE, given).pool == plain.pool
    with pytest.raises(DoesNotFit, match=r"stages .*--kvflash-reading pool \(frees"):
        placed(moe(), ONE, replace(given, stage=131_072))


def test_a_pool_stays_though_a_full_cache_would_fit_unless_exactness_is_preferred() -> None:
    devices = (*gpus(64 * GIB), host(64 * GIB))
    assert placed(moe(), devices, PlacementRequest(n_ctx=131_072)).pool == 16_384
    exact = placed(moe(), devices, PlacementRequest(n_ctx=131_072, fit=Fit(prefer="exact")))
    assert exact.pool == exact.n_ctx == 131_072
    small = placed(moe(), devices, PlacementRequest(n_ctx=10_000))
    assert small.pool == small.n_ctx == 10_240


# --- levels and their order


def test_experts_leave_before_layers_and_layers_before_everything() -> None:
    def level(free: int) -> int:
        return placed(moe(), (*gpus(free), host(64 * GIB)), PlacementRequest(n_ctx=131_072)).level

    assert [level(free * GIB) for free in (24, 16, 6, 3, 0)] == [1, 2, 2, 3, 4]
    assert placed(moe(), (host(64 * GIB),), PlacementRequest(n_ctx=131_072)).level == 4


def test_small_experts_do_not_come_and_go_with_layers_that_leave() -> None:
    """An expert layer that has room beside some layers would have to leave again for one layer more."""
    sizes, request = moe(dense=300 * MIB, experts=60 * MIB), PlacementRequest(n_ctx=131_072)
    places = [placed(sizes, (*gpus(free * 128 * MIB), host(64 * GIB)), request) for free in range(16, 64)]
    there = [40 - found.needs[-1].layers[1] - len(found.host_experts) for found in places]
    assert there == sorted(there)
    assert {found.level for found in places} == {3}


def test_the_pool_of_a_host_alone_leaves_half_to_page_images() -> None:
    sizes = moe()
    weights = sum(layer.dense + layer.experts for layer in sizes.layers) + sizes.output + sizes.embedding
    slot = sum(layer.slot("f16", "f16") for layer in sizes.layers)
    state = sum(layer.state for layer in sizes.layers)
    for slots in (8192, 16_384):
        free = weights + state + 2 * slots * slot + mask(512, slots) + 10 * MIB
        request = PlacementRequest(n_ctx=131_072, n_ubatch=512, fit=Fit(margin={HOST: 0}))
        found = placed(sizes, (host(free),), request)
        assert slots <= found.pool <= slots + 1024
        assert found.n_gpu_layers == 0
        assert found.tensor_split is None


def test_a_smaller_pool_is_preferred_to_an_expert_on_the_host() -> None:
    request = PlacementRequest(n_ctx=131_072, type_k="f16", n_ubatch=512)
    free = next(
        size * 64 * MIB
        for size in itertools.count(128)
        if placed(moe(), (*gpus(size * 64 * MIB), host(64 * GIB)), request).level == 1
    )
    found = placed(moe(), (*gpus(free), host(64 * GIB)), request)
    assert found.pool < 8192


def test_quantised_kv_only_where_it_pays() -> None:
    def found(free: int, **more: object) -> Placement:
        return placed(big(), (*gpus(free), host(64 * GIB)), PlacementRequest(n_ctx=131_072, **more))  # type: ignore[arg-type]

    assert found(30 * GIB).type_k == "f16"
    assert found(30 * GIB).pool == 16_384
    weights = CORE + EXPERTS + 40 * MIB + 512 * MIB + mask(512, 6000)
    few = found(weights + 6000 * SLOT)
    assert (few.type_k, few.type_v) == ("q8_0", "q8_0")
    assert found(weights + 6000 * SLOT, type_k="f16").pool < 6000 < 8192 < few.pool
    cold = found(weights + 3000 * SLOT, type_k="f16")
    assert cold.level == 2
    assert found(weights + 3000 * SLOT).level == 1


def test_with_experts_on_the_host_a_large_step_is_worth_one_layer() -> None:
    def steps(step: int) -> tuple[int, int]:
        def of(n_ubatch: int, pool: int) -> int:
            return n_ubatch * step

        found = placed(moe(), ONE, PlacementRequest(n_ctx=131_072), of)
        return found.n_ubatch, len(found.host_experts)

    least = steps(0)[1]
    assert steps(0)[0] == 2048
    assert steps(200_000) == (2048, least + 1)  # 293 MiB more, a layer has 338
    assert steps(300_000)[0] < 2048


def test_layers_of_a_device_lose_their_experts_from_its_first_on() -> None:
    devices = (*gpus(8 * GIB, 8 * GIB), host(64 * GIB))
    found = placed(moe(), devices, PlacementRequest(n_ctx=131_072))
    assert found.tensor_split is not None
    assert sum(found.tensor_split) == 41
    second = found.needs[1].layers[0]
    moved = found.host_experts
    assert moved[0] == 0
    assert second in moved
    assert second - 1 not in moved
    assert not found.pipeline


def test_several_devices_overlap_only_if_they_hold_everything() -> None:
    devices = (*gpus(16 * GIB, 16 * GIB), host(64 * GIB))
    found = placed(moe(), devices, PlacementRequest(n_ctx=131_072))
    assert found.level == 1
    assert found.pipeline
    shares = [need.total / need.free for need in found.needs[:-1]]
    assert max(shares) - min(shares) < 0.05


def test_a_device_that_tells_nothing_of_its_memory_gets_no_layers() -> None:
    silent = Device(name="GPU0", kind="gpu", free=0, total=0)
    found = placed(moe(), (silent, *gpus(24 * GIB), host(64 * GIB)), PlacementRequest(n_ctx=131_072))
    assert found.tensor_split == (0, 41)
    assert found.needs[0].total == 0


def test_an_integrated_device_has_the_memory_of_the_host() -> None:
    shared = Device(name="Vulkan0", kind="integrated", free=24 * GIB, total=32 * GIB)
    assert placed(moe(), (shared, host(24 * GIB)), PlacementRequest(n_ctx=131_072)).level == 1
    with pytest.raises(DoesNotFit):
        placed(moe(), (shared, host(12 * GIB)), PlacementRequest(n_ctx=131_072))


def host_margin(free: int) -> int:
    return max(2 * GIB, free // 10)


def test_weights_are_read_to_memory_where_a_device_copies_them_and_images_have_room_too() -> None:
    assert placed(moe(), (*gpus(24 * GIB), host(64 * GIB)), PlacementRequest(n_ctx=131_072)).use_mmap
    request = PlacementRequest(n_ctx=131_072)
    assert not placed(moe(), ONE, request).use_mmap
    tight = placed(moe(), ONE, request).needs[-1].total - host_margin(64 * GIB) + host_margin(0) + GIB
    assert placed(moe(), (*gpus(16 * GIB), host(tight)), request).use_mmap


# --- splits and patterns


@given(st.data())
def test_a_partition_is_the_best_of_all(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    values = st.sampled_from([0.0, 1.0, 2.0, np.inf])
    costs = [np.array(data.draw(st.lists(values, min_size=(n + 1) ** 2, max_size=(n + 1) ** 2))) for _ in range(k)]
    costs = [np.where(np.triu(np.ones((n + 1, n + 1))) > 0, cost.reshape(n + 1, n + 1), np.inf) for cost in costs]
    loads = [
        np.array(data.draw(st.lists(st.integers(0, 9), min_size=(n + 1) ** 2, max_size=(n + 1) ** 2))) for _ in costs
    ]
    loads = [load.reshape(n + 1, n + 1).astype(float) for load in loads]

    def worth(bounds: tuple[int, ...]) -> tuple[float, float]:
        spans = list(itertools.pairwise(bounds))
        return (
            sum(cost[span] for cost, span in zip(costs, spans, strict=True)),
            max(load[span] for load, span in zip(loads, spans, strict=True)),
        )

    every = [(0, *inner, n) for inner in itertools.combinations_with_replacement(range(n + 1), k - 1)]
    best = min(map(worth, every))
    found = partition(costs, loads)
    assert (found is None) == (best[0] == np.inf)
    assert found is None or worth(found) == best


@given(st.lists(st.integers(0, 80), min_size=1, max_size=5).filter(any))
def test_whole_numbers_of_layers_come_out_as_they_are(counts: list[int]) -> None:
    assert bounds_of(counts, sum(counts)) == (0, *itertools.accumulate(counts))


def test_shares_are_divided_as_llama_cpp_does() -> None:
    assert bounds_of((3, 1), 41) == (0, 31, 41)
    assert bounds_of((0, 0), 4) == (0, 2, 4)


@given(st.sets(st.integers(0, 130)))
def test_a_pattern_finds_the_experts_of_its_layers_only(layers: set[int]) -> None:
    patterns = device_options.experts(layers, HOST)
    assert len(patterns) == bool(layers)
    for pattern, device in patterns:
        assert device == HOST
        for i in range(131):
            for name in ("ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_down_chexps.weight"):
                assert bool(re.search(pattern, f"blk.{i}.{name}")) == (i in layers)
            assert not re.search(pattern, f"blk.{i}.ffn_up_shexp.weight")
            assert not re.search(pattern, f"blk.{i}.ffn_gate_inp.weight")
            assert not re.search(pattern, f"x.blk.{i}.ffn_up_exps.weight")


def test_the_users_patterns_come_first() -> None:
    mine = (("ffn_up_exps", "CUDA0"),)
    found = placed(moe(), ONE, PlacementRequest(n_ctx=131_072, overrides=mine))
    assert found.overrides[:1] == mine
    assert len(found.overrides) == 2


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"margin": "1G"}, "margin is a number of bytes, 0 or more, not '1G'"),
        ({"margin": {"CUDA0": -1}}, "margin of CUDA0 is a number of bytes, 0 or more, not -1"),
        ({"free": {"CUDA0": 0.5}}, "free of CUDA0 is a number of bytes"),
        ({"prefer": "speed"}, "prefer is 'pool' or 'exact', not 'speed'"),
    ],
)
def test_what_fitting_cannot_be_asked(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Fit(**asked)


# --- what does not fit


def test_an_error_names_what_would_fit() -> None:
    request = PlacementRequest(n_ctx=131_072, pool=None, n_gpu_layers=-1, n_cpu_moe=0, n_ubatch=2048, type_k="f16")
    with pytest.raises(DoesNotFit) as failed:
        placed(moe(), ONE, request)
    error = failed.value
    assert isinstance(error, MemoryError)
    assert error.device == "CUDA0"
    assert "CUDA0 has 16,384 MiB free" in str(error)
    assert [remedy.option.split()[0] for remedy in error.remedies if remedy.enough] == ["-ncmoe", "-ngl"]
    assert {remedy.option for remedy in error.remedies if not remedy.enough} >= {"-ub 512", "--kvflash 4096"}
    assert "Enough by itself: -ncmoe" in str(error)
    assert "Helps: -ub 512" in str(error)


def test_what_needs_two_changes_names_both() -> None:
    request = PlacementRequest(n_ctx=262_144, pool=None, n_gpu_layers=-1, n_cpu_moe=38, type_k="f16", n_ubatch=512)
    devices = (*gpus(5 * GIB), host(64 * GIB))
    with pytest.raises(DoesNotFit) as failed:
        placed(moe(), devices, request)
    assert failed.value.remedies[0].enough


def test_a_host_that_is_too_small_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"^CPU has .* Take a smaller model") as failed:
        placed(moe(), (host(8 * GIB),), PlacementRequest(n_ctx=8192))
    assert failed.value.remedies == ()


# --- rounds


def measured(placement: Placement, more: int) -> Measure:
    """All computes as was thought, but for so much more on the GPU."""
    compute = {"CUDA0": mask(placement.n_ubatch, placement.pool) + more}
    return Measure(
        n_ubatch=placement.n_ubatch,
        pool=placement.pool,
        devices=tuple(
            Needs(
                device=need.device,
                weights=need.weights,
                kv=need.kv + need.state,
                compute=compute.get(need.device, need.compute),
            )
            for need in placement.needs
        ),
    )


def rounds(more: list[int], request: PlacementRequest) -> tuple[list[Placement], Placement]:
    tried: list[Placement] = []

    def measure(placement: Placement) -> Measure:
        tried.append(placement)
        return measured(placement, more[len(tried) - 1])

    points = [
        Measure(
            n_ubatch=n_ubatch,
            pool=pool,
            devices=tuple(Needs(device=x, compute=mask(n_ubatch, pool)) for x in ("CUDA0", HOST)),
        )
        for n_ubatch in (512, 2048)
        for pool in (4096, 16_384)
    ]
    return tried, fit(moe(), ONE, request, points, measure)


def test_a_placement_that_takes_less_than_was_thought_is_kept() -> None:
    tried, found = rounds([-50 * MIB], PlacementRequest(n_ctx=131_072))
    assert len(tried) == 1
    assert found.needs[0].compute == tried[0].needs[0].compute - 50 * MIB


def test_what_a_placement_takes_beyond_is_taken_from_the_pool_and_then_from_the_experts() -> None:
    request = PlacementRequest(n_ctx=131_072, n_ubatch=512)
    tried, found = rounds([80 * MIB] * 3, request)
    before = tried[0]
    left = before.needs[0].left
    assert len(found.host_experts) == len(before.host_experts)
    assert left >= 80 * MIB or found.pool < before.pool
    tried, found = rounds([900 * MIB] * 3, request)
    assert len(found.host_experts) > len(tried[0].host_experts)
    assert found.needs[0].left >= 0


def test_three_rounds_and_no_more() -> None:
    more = [size * GIB for size in (4, 8, 12)]
    with pytest.raises(DoesNotFit) as failed:
        rounds(more, PlacementRequest(n_ctx=131_072))
    assert failed.value.device == "CUDA0"
    assert "Of 3 placements each took more" in str(failed.value)
    assert failed.value.remedies
    with pytest.raises(DoesNotFit) as failed:
        rounds([800 * MIB, 1600 * MIB, 2400 * MIB], PlacementRequest(n_ctx=131_072, n_ubatch=512))
    (margin,) = failed.value.remedies
    assert not margin.enough
    over = failed.value.needs["margin"] + failed.value.needed - failed.value.free
    assert margin.option == f"-fitt CUDA0={over // MIB + 1}"


# --- what is shown


def test_a_table_tells_of_every_device() -> None:
    found = placed(moe(), ONE, PlacementRequest(n_ctx=131_072))
    text = table.table(found, ONE)
    head, gpu, cpu, last = text.splitlines()
    assert head.split()[:3] == ["device", "free", "weights"]
    assert gpu.startswith("CUDA0")
    assert gpu.endswith("layers 0-39 + output")
    assert f"experts of layers {table.spans(found.host_experts)} + token embedding" in cpu
    assert last == f"pool {found.pool:,} of 131,072 tokens, f16, ubatch 2,048"


def test_a_document_adds_up() -> None:
    found = placed(moe(), ONE, PlacementRequest(n_ctx=131_072))
    document = json.loads(json.dumps(table.document(found, ONE)))
    for device in document["devices"]:
        assert device["free"] - sum(device["needs"].values()) == device["left"] >= 0
    assert document["options"][document["options"].index("-ot") + 1].endswith("=CPU")
    assert [device["name"] for device in document["devices"]] == ["CUDA0", HOST]
