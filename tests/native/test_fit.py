"""A model is fitted to its devices before it is loaded: what was planned is what is taken, and it answers as always.

The devices are this machine's CPU, and a server of it, which counts as a device of its own.
"""

from __future__ import annotations

import ctypes
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.harness import MODELS
from support.inside import inside
from support.rounding import ON_GPU
from support.servers import device_names, running

from kvflash_bench.shapes import SHAPES, write
from kvflash_ggml import Fit, KVFlashConfig
from kvflash_ggml.errors import ConfigError, DoesNotFit
from kvflash_ggml.native.sizes import LayerSizes
from kvflash_ggml.placement.sizes import HOST, ModelSizes, Placement

MIB = 1 << 20
STEPS = {"n_batch": 64, "n_ubatch": 64, "n_threads": 1, "verbose": False}
POOL = {"kvflash": KVFlashConfig(pool=1024, reading="pool"), "n_ctx": 8192}
PROMPT = [5, 6, 7, 8]
ANSWER = list(range(9, 17))
"""The model counts on."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fit") / "moe.gguf"
    write(path, SHAPES["tiny-moe"])
    return str(path)


@pytest.fixture(scope="module")
def servers(loaded: None) -> Iterator[list[str]]:
    with running(2) as found:
        yield [server.endpoint for server in found]


def given(**keywords: Any) -> dict[str, Any]:
    """Keywords of a model that uses no GPU of this machine."""
    if ON_GPU:
        keywords["device"] = device_names([rpc] if isinstance(rpc := keywords.get("rpc", []), str) else rpc)
    return {**STEPS, **POOL, **keywords}


def make(path: str, **keywords: Any) -> Any:
    from kvflash_ggml import Llama

    return Llama(path, **given(**keywords))


def answer(llm: Any) -> list[int]:
    return list(islice(llm.generate(PROMPT, temp=0.0), len(ANSWER)))


def check_taken(llm: Any, placement: Placement) -> None:
    """Byte for byte what the placement says, but for copies of inputs that overlapping steps did not need."""
    from kvflash_ggml.native import measure

    def address(pointer: Any) -> int:
        return ctypes.cast(pointer, ctypes.c_void_p).value or 0

    taken = measure.taken(address(llm._ctx.ctx), address(llm._model.model))
    assert [x.device for x in taken] == [need.device for need in placement.needs]
    for x, need in zip(taken, placement.needs, strict=True):
        assert x.kv == need.kv + need.state
        assert x.queries == need.queries
        assert x.compute == need.compute or (placement.pipeline and x.compute < need.compute)
        mapped = placement.use_mmap and need.device == HOST  # pages of the file count twice
        assert x.weights == need.weights or mapped


def on_server(servers: list[str], free_mib: float) -> Fit:
    return Fit(free={device_names(servers[:1])[0]: int(free_mib * MIB)}, margin=0)


@pytest.mark.parametrize(
    ("free", "level", "layers", "experts"), [(30, 1, 0, 0), (10.5, 2, 0, 2), (6, 2, 0, 8), (3, 3, 7, 1), (0, 4, 8, 0)]
)
def test_what_is_planned_is_what_is_taken(
    free: float, level: int, layers: int, experts: int, mixture: str, servers: list[str]
) -> None:
    llm = make(mixture, rpc=servers[:1], fit=on_server(servers, free))
    found = llm.placement
    assert (found.level, found.needs[-1].layers[1], len(found.host_experts)) == (level, layers, experts)
    assert all(need.left >= 0 for need in found.needs)
    check_taken(llm, found)
    assert answer(llm) == ANSWER
    llm.close()


def test_layers_are_shared_out_by_what_servers_have(mixture: str, servers: list[str]) -> None:
    known = device_names(servers)
    fit = Fit(free=dict(zip(known, (8 * MIB, 10 * MIB), strict=True)), margin=0)
    llm = make(mixture, rpc=servers, fit=fit)
    found = llm.placement
    assert found.level == 1
    assert found.pipeline
    first, second = found.tensor_split
    assert 0 < first < second
    check_taken(llm, found)
    assert answer(llm) == ANSWER
    assert [device.name for device in llm.kvflash.devices] == known
    llm.close()


def test_what_is_not_fitted_is_predicted_as_it_would_be_loaded(mixture: str, servers: list[str]) -> None:
    """Layers are shared out by free memory then, however that suits them."""
    from kvflash_ggml.llama import fitting

    asked = {"rpc": servers, "n_gpu_layers": 6}
    placement, devices = fitting.without_loading(mixture, given(**asked))
    llm = make(mixture, **asked)
    check_taken(llm, placement)
    llm.close()
    sizes = ModelSizes(layers=(LayerSizes(dense=1),) * 8, output=1, embedding=1)
    uneven = (replace(devices[0], free=MIB), replace(devices[1], free=2 * MIB), devices[2])
    for layers, split in ((-1, (3, 6)), (6, (2, 4)), (0, None)):
        assert fitting.by_memory(sizes, uneven, layers) == split


def test_a_machine_that_is_not_here_is_imagined(mixture: str, servers: list[str]) -> None:
    """Beside a server of the same memory, which is there: weights and caches are the same bytes."""
    from kvflash_ggml.llama.fitting import without_loading

    for size in (1 << 30, 6 * MIB):
        (name,) = device_names(servers[:1])
        there, _ = without_loading(mixture, given(rpc=servers[0], fit=Fit(free={name: size}, margin=0)))
        imagined, devices = without_loading(mixture, {**STEPS, **POOL, "fit": Fit(free={"CUDA8": size}, margin=0)})
        assert [(device.name, device.free) for device in devices[:1]] == [("CUDA8", size)]
        assert (imagined.n_gpu_layers, imagined.pool) == (there.n_gpu_layers, there.pool)
        for real, thought in zip(there.needs, imagined.needs, strict=True):
            assert (thought.weights, thought.kv, thought.layers) == (real.weights, real.kv, real.layers)
        assert imagined.needs[0].compute > 0
    with pytest.raises(DoesNotFit, match="CUDA8 has 1 MiB free"):
        without_loading(mixture, {**STEPS, **POOL, "n_gpu_layers": -1, "fit": Fit(free={"CUDA8": MIB})})
    where = {"override_tensor": "exps=CUDA9", "fit": Fit(free={"CUDA8": MIB})}
    with pytest.raises(ConfigError, match="'CUDA9' is none of CUDA8, CPU"):
        without_loading(mixture, {**STEPS, **POOL, **where})
    with pytest.raises(ConfigError, match="'CUDA8' is no device of this model"):
        make(mixture, fit=Fit(free={"CUDA8": 1 << 30}))


def test_a_split_that_gives_more_slots_is_named(
    mixture: str, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the one that was asked for has all the slots on one device, which has room for some of them."""
    from kvflash_ggml.native import weights
    from kvflash_ggml.placement import memory

    of_model, loaded = memory.of_model, []

    def with_little(model: int) -> Any:
        """Less what is loaded: the first who asks is the model, who has its weights, and then a sketch of it."""
        used = [] if loaded else [sum(x.size for x in weights.of_model(model) if x.device == i) for i in (0, 1)]
        loaded.append(model)
        *devices, host = of_model(model)
        left = [535 * MIB - size for size in used or (0, 0)]
        return (*(replace(x, free=free) for x, free in zip(devices, left, strict=True)), host)

    keywords = {"rpc": servers, "kvflash": KVFlashConfig(reading="pool"), "n_ctx": 65_536, "n_gpu_layers": -1}
    with monkeypatch.context() as patched:
        patched.setattr(memory, "of_model", with_little)
        tight = make(mixture, **keywords, tensor_split=[8, 1])
    found = re.search(r"MiB on RPC\d+ beside .*; tensor_split \(-ts\) (\d+),(\d+) gives (\d+)", tight.kvflash.banner())
    assert found is not None
    *split, slots = map(int, found.groups())
    assert tight.kvflash.pool < slots
    tight.close()
    loaded.clear()
    monkeypatch.setattr(memory, "of_model", with_little)
    other = make(mixture, **keywords, tensor_split=split)
    assert other.kvflash.pool >= slots
    other.close()


def test_what_is_given_stays_and_a_remedy_of_what_does_not_fit_fits(mixture: str, servers: list[str]) -> None:
    asked = {"rpc": servers[:1], "fit": on_server(servers, 10.5), "n_gpu_layers": -1, "type_k": 1, "type_v": 1}
    with pytest.raises(DoesNotFit, match=r"RPC\d+ has 10 MiB free.*Enough by itself: .*-ngl") as failed:
        make(mixture, **asked, n_cpu_moe=1)
    options = {remedy.option.split()[0]: remedy for remedy in failed.value.remedies if remedy.enough}
    moved = options["-ncmoe"].changes["n_cpu_moe"]
    llm = make(mixture, **asked, n_cpu_moe=moved)
    assert len(llm.placement.host_experts) == moved
    assert (llm.placement.type_k, llm.placement.n_gpu_layers) == ("f16", -1)
    llm.close()
    fewer = options["-ngl"].changes["n_gpu_layers"]
    llm = make(mixture, **{**asked, "n_gpu_layers": fewer}, n_cpu_moe=1)
    assert llm.placement.needs[-1].layers == (0, 9 - fewer)
    llm.close()


def test_a_size_without_room_is_told_as_one_that_was_found(
    mixture: str, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where llama.cpp cannot make it; what is not for want of memory stays upstream's error."""
    from llama_cpp import llama_cpp

    from kvflash_ggml.placement import memory

    of_model = memory.of_model
    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda *args: None)
    asked = {"rpc": servers[:1], "kvflash": 16_384, "n_ctx": 16_384, "n_gpu_layers": -1}
    with pytest.raises(ValueError, match="Failed to create llama_context"):
        make(mixture, **asked)

    def with_little(model: int) -> Any:
        device, host = of_model(model)
        return replace(device, free=520 * MIB), host

    monkeypatch.setattr(memory, "of_model", with_little)
    with pytest.raises(DoesNotFit, match=r"RPC\d+ has 520 MiB free.*Enough by itself: .*--kvflash 4096") as failed:
        make(mixture, **asked)
    assert isinstance(failed.value.__cause__, ValueError)


def test_stages_that_are_asked_for_are_part_of_the_plan(mixture: str, servers: list[str]) -> None:
    asked = {"rpc": servers[:1], "n_ctx": 32_768, "kvflash": KVFlashConfig(pool=1024, reading="exact")}
    llm = make(mixture, **asked, fit=on_server(servers, 60))
    need, pool = llm.placement.needs[0], inside(llm).session.pool
    assert pool.stage_slots == 32_768
    assert 0 <= pool.stage_bytes + 2 * 32_768 * llm.placement.n_ubatch - need.stages < 4096, "rows of one step"
    llm.close()
    given = {"n_gpu_layers": -1, "n_cpu_moe": 1, "type_k": 1, "type_v": 1}
    with pytest.raises(DoesNotFit, match=r"stages .*--kvflash-reading pool"):
        make(mixture, **asked, **given, fit=on_server(servers, need.total / MIB - 25))


def test_a_machine_without_a_gpu_bounds_the_pool_by_its_memory(mixture: str, loaded: None) -> None:
    def fitted(free_mib: int, **more: Any) -> Any:
        fit = Fit(free={HOST: free_mib * MIB}, margin={HOST: 0})
        return make(mixture, fit=fit, kvflash="auto", n_ctx=0, **more)

    llm = fitted(40)
    found = llm.placement
    assert (found.level, found.n_gpu_layers, found.n_ctx) == (4, 0, SHAPES["tiny-moe"].context)
    assert 512 <= inside(llm).size.slots < 16_384
    assert inside(llm).size.slots == found.pool
    assert answer(llm) == ANSWER
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.placement is None
    assert inside(copy).size.slots == found.pool
    assert copy.context_params.type_k == llm.context_params.type_k
    copy.close()
    llm.close()
    with pytest.raises(DoesNotFit, match=r"^CPU has 15 MiB free"):
        fitted(15)


def test_a_full_cache_can_be_fitted_too(mixture: str, loaded: None) -> None:
    llm = make(mixture, fit=True, kvflash=None, n_ctx=2048)
    assert llm.placement.pool == llm.placement.n_ctx == 2048
    assert llm.kvflash is None
    assert answer(llm) == ANSWER
    llm.close()


def test_replaced_values_are_measured(loaded: None) -> None:
    """The file's were: a context of another length was planned than was made."""
    replaced = {
        "qwen3.context_length": 1024, "qwen3.rope.freq_base": 1e6, "general.name": "another",
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    llm = make(str(MODELS / "recall-qwen3-q8_0.gguf"), fit=True, kvflash=None, n_ctx=0, kv_overrides=replaced)
    assert llm.placement.n_ctx == llm.n_ctx() == 1024
    check_taken(llm, llm.placement)
    llm.close()


def test_without_fit_nothing_is_decided(mixture: str, loaded: None) -> None:
    llm = make(mixture)
    assert llm.placement is None
    llm.close()


def test_what_cannot_be_fitted_is_said(mixture: str, loaded: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'CUDA7' is no device of this model: it has CPU"):
        make(mixture, fit=Fit(free={"CUDA7": MIB}))
    with pytest.raises(ConfigError, match="fit is True, False or a Fit, not 3"):
        make(mixture, fit=3)
    with pytest.raises(ConfigError, match="fit places whole layers"):
        make(mixture, fit=True, split_mode=2)
