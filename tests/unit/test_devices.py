"""Where a model goes: what is asked for, and how layers and experts are shared out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_llama import Stage, staged

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError, UnsupportedModelError
from kvflash_ggml.placement import devices, wanted
from kvflash_ggml.placement.wanted import DeviceChoice


@dataclass
class Device:
    name: str
    kind: str = "gpu"
    backend: str = "CUDA"
    id: str = ""
    free_bytes: int = 1 << 30


def known(*found: Device) -> Any:
    return [*found, Device("CPU", "cpu", "CPU"), Device("BLAS", "other", "BLAS")]


# --- what is asked for


def test_nothing_asked_for_is_llama_cpps_choice() -> None:
    upstream: dict[str, Any] = {"n_ctx": 512}
    assert wanted.read(upstream, None) == DeviceChoice()
    assert upstream == {"n_ctx": 512}


def test_what_is_asked_for() -> None:
    upstream: dict[str, Any] = {
        "device": "CUDA1,CUDA0", "override_tensor": r"ffn_(up|down)=CPU,blk\.1=CUDA0", "n_cpu_moe": 3, "n_ctx": 1,
    }  # fmt: skip
    asked = wanted.read(upstream, KVFlashConfig(pool=512))
    assert asked.device == ("CUDA1", "CUDA0")
    assert asked.override_tensor == (("ffn_(up|down)", "CPU"), (r"blk\.1", "CUDA0"))
    assert upstream == {"n_ctx": 1}
    assert wanted.read(asked.keywords(), None) == asked
    assert wanted.read({"device": "none"}, None).device == ()
    assert wanted.read({"device": ["CUDA0"]}, None).device == ("CUDA0",)


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"override_tensor": "exps"}, ConfigError, "'exps' is not PATTERN=DEVICE"),
        ({"override_tensor": "exps=CPU,=CPU"}, ConfigError, "'=CPU' is not PATTERN=DEVICE"),
        ({"n_cpu_moe": -1}, ConfigError, "n_cpu_moe=-1"),
        ({"split_mode": 3}, UnsupportedModelError, r"split_mode=1 \(layer\)"),
    ],
)
def test_what_cannot_be(asked: dict[str, Any], error: type, why: str) -> None:
    with pytest.raises(error, match=why):
        wanted.read(dict(asked), KVFlashConfig(pool=512))


def test_a_full_cache_may_be_split_by_tensors() -> None:
    assert wanted.read({"split_mode": 3}, None) == DeviceChoice()


def test_only_what_can_hold_layers_is_taken() -> None:
    there = known(Device("CUDA0"), Device("CUDA1"))
    devices.check_devices(["CUDA1", "CUDA0"], there)
    devices.check_overrides([("a", "CPU"), ("b", "CUDA1")], there)
    for use, why in (
        (["CPU"], "'CPU' cannot hold layers: there are CUDA0, CUDA1"),
        (["CUDA0", "CUDA0"], "names one of them twice"),
    ):
        with pytest.raises(ConfigError, match=why):
            devices.check_devices(use, there)
    with pytest.raises(ConfigError, match="there is no device but the CPU"):
        devices.check_devices(["CUDA0"], known())
    with pytest.raises(ConfigError, match="'BLAS' cannot hold tensors: there are CUDA0, CUDA1, CPU"):
        devices.check_overrides([("a", "BLAS")], there)
    many = [Device(f"CUDA{i}") for i in range(16)]
    with pytest.raises(ConfigError, match=r"16 devices: llama\.cpp takes 15"):
        devices.check_devices([device.name for device in many], known(*many))


def test_the_devices_of_llama_cpp() -> None:
    there = known(
        Device("CUDA0", id="a"), Device("Vulkan0", id="a", backend="Vulkan"), Device("iGPU", "integrated"),
        Device("RPC0", backend="RPC"),
    )  # fmt: skip
    assert [device.name for device in devices.default_devices(there)] == ["RPC0", "CUDA0"]
    assert [device.name for device in devices.default_devices(known(Device("iGPU", "integrated")))] == ["iGPU"]


# --- layers


def by_llama_cpp(n_layers: int, n_gpu_layers: int, splits: list[float]) -> list[int | None]:
    """The device of each layer and of the output, None for the CPU: as upstream's loop has it."""
    ends = [sum(splits[: i + 1]) / sum(splits) for i in range(len(splits))]
    first = max(n_layers + 1 - n_gpu_layers, 0)
    count = min(n_gpu_layers, n_layers + 1)
    places = [(il - first) / count if first <= il < first + count else None for il in range(n_layers + 1)]
    return [None if x is None else next(i for i, end in enumerate(ends) if end > x) for x in places]


@pytest.mark.parametrize("splits", [[1.0], [1.0, 1.0], [3.0, 1.0], [0.0, 1.0, 0.0, 2.0], [5.0, 2.0, 4.0], [80e9, 24e9]])
@pytest.mark.parametrize("n_gpu_layers", [0, 1, 5, 12, 13, 99, -1])
def test_slices_are_llama_cpps(n_gpu_layers: int, splits: list[float]) -> None:
    if n_gpu_layers == 0:
        assert not any(devices.slices(12, 0, splits))
        return
    want = by_llama_cpp(12, 13 if n_gpu_layers < 0 else n_gpu_layers, splits)
    parts = devices.slices(12, n_gpu_layers, splits)
    assert [next((i for i, part in enumerate(parts) if il in part), None) for il in range(13)] == want
    counts = [float(len(part)) for part in parts]
    assert devices.slices(12, n_gpu_layers, counts) == parts, "their sizes are a split that gives them again"


def test_experts_leave_all_devices_alike() -> None:
    parts = [range(2, 6), range(6, 7), range(7, 12)]
    assert devices.in_turn(parts, 0) == []
    assert devices.in_turn(parts, 4) == [2, 3, 6, 7]
    assert devices.in_turn(parts, 99) == list(range(2, 12))


def test_the_split_that_experts_were_put_aside_by_is_kept() -> None:
    chosen: Any = [Device("CUDA0", free_bytes=20 << 30), Device("CUDA1", free_bytes=10 << 30)]
    file: Any = SimpleNamespace(own=lambda name: 11)
    settings: dict[str, Any] = {"n_gpu_layers": -1}
    assert devices._share_experts("x", 4, chosen, settings, read=lambda path: file) == [0, 1, 8, 9]
    assert settings["tensor_split"] == [8.0, 4.0]
    settings = {"n_gpu_layers": -1, "tensor_split": [1, 3]}
    assert devices._share_experts("x", 4, chosen, settings, read=lambda path: file) == [0, 1, 3, 4]
    settings = {"n_gpu_layers": 8, "tensor_split": [1, 1]}  # from layer 4 on
    assert devices._share_experts("x", 7, chosen, settings, read=lambda path: file) == [0, 1, 2, 3, 4, 5, 8]
    assert devices._share_experts("x", 3, chosen, settings, read=lambda path: file) == [0, 1, 2]


# --- the command line


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


def test_options_reach_the_model(cli: Stage) -> None:
    line = ["m.gguf", "hello", "-dev", "CUDA1,CUDA0", "-sm", "none", "-ts", "3,1", "-mg", "1"]
    ran = cli(*line, "-ot", r"blk\.1=CPU,x=CUDA0", "-cmoe", "-ncmoe", "2")
    assert ran.exit_code == 0, ran.output
    asked = {name: cli.settings[name] for name in ("device", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe")}
    assert asked == {
        "device": "CUDA1,CUDA0", "split_mode": 0, "tensor_split": [3.0, 1.0], "main_gpu": 1, "n_cpu_moe": 2,
    }  # fmt: skip
    assert cli.settings["override_tensor"] == [(r"blk\.1", "CPU"), ("x", "CUDA0"), (wanted.EXPERTS, "CPU")]
    assert cli("m.gguf", "hello").exit_code == 0
    assert not {"device", "split_mode", "override_tensor"} & set(cli.settings)
    share, pattern = "is not a share", "is not PATTERN=DEVICE"
    for wrong, why in ((["-ts", "0,0"], share), (["-ts", "nan,1"], share), (["-ot", "exps"], pattern)):
        refused = cli("m.gguf", "hello", *wrong)
        assert refused.exit_code == 2
        assert why in refused.output
