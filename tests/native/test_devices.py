"""A pool on several devices: half of the layers in host memory, two servers of this machine, and all GPUs (`two`).

On a machine with a GPU: scripts/test --gpu tests/native/test_devices.py. One GPU shows as two and as three in processes
of their own, which run the same tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import device_ladder as ladder
from support.device_ladder import Placed
from support.harness import KV_TYPES
from support.rounding import ON_GPU
from support.servers import running

from kvflash_ggml import Llama
from kvflash_ggml.errors import ConfigError, UnsupportedModelError
from kvflash_ggml.llama.fitting import without_loading
from kvflash_ggml.native.devices import finds

HALF = {"dense": 4, "hybrid": 5, "iswa": 4}
"""n_gpu_layers by kind: the output, and the layers of the second half, one of those with a pool at least."""

POOLED = {"dense": 6, "hybrid": 2, "iswa": 2}
"""Layers with a pool: where there are fewer of them than devices, some devices have none."""

KINDS = ("dense", "hybrid", "iswa")
BOTH_TYPES = [KV_TYPES["f16"], KV_TYPES["q8_0"]]
PLACES = ("host", "half", "two", "servers")
TWO = ("half", "two")


@pytest.fixture(scope="module")
def gpus(loaded: None) -> list[Any]:
    """Those of this process; none unless the tests are asked to use them."""
    from kvflash_ggml.native.devices import devices

    return [device for device in devices() if device.kind == "gpu"] if ON_GPU else []


@pytest.fixture(scope="module")
def endpoints(loaded: None) -> Iterator[list[str]]:
    with running(2) as servers:
        yield [server.endpoint for server in servers]


@pytest.fixture
def place(gpus: list[Any], request: pytest.FixtureRequest) -> Any:
    """Keywords and modes of a place by name, for a kind of model."""

    def find(name: str, kind: str = "dense") -> Placed:
        if name == "host":
            return Placed({"n_gpu_layers": 0}, ("host",))
        if name == "servers" and gpus:
            pytest.skip("servers are tried where there is no GPU to hold a part of the model")
        if name == "servers":
            settings = {"rpc": request.getfixturevalue("endpoints"), "n_gpu_layers": -1, "tensor_split": [1.0, 1.0]}
            return Placed(settings, ("remote", "remote"))
        if not gpus:
            pytest.skip("needs a GPU: scripts/test --gpu")
        if name == "half":
            return Placed({"n_gpu_layers": HALF[kind], "split_mode": 0}, ("host", _mode(gpus[0])))
        if len(gpus) < 2:
            pytest.skip("needs two devices: the test of virtual ones makes them")
        names = [gpu.name for gpu in gpus]
        settings = {"n_gpu_layers": 99, "device": names, "tensor_split": [1.0] * len(gpus)}
        return Placed(settings, tuple(map(_mode, gpus[: POOLED[kind]])))

    return find


def _mode(gpu: Any) -> str:
    return os.environ.get("KVFLASH_LANE") or ("stream" if gpu.backend in ("CUDA", "ROCm", "MUSA") else "sync")


@pytest.mark.parametrize("kv", BOTH_TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", TWO)
def test_whole_context_is_stock(
    where: str, kind: str, kv: int, place: Any, llama: Any, stock: Any, tokens: Any
) -> None:
    ladder.whole_context_is_stock(kind, kv, place(where, kind), llama, _stock_at(stock), tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLACES[:3])
def test_pages_come_back(where: str, kind: str, place: Any, llama: Any, tokens: Any) -> None:
    for kv in BOTH_TYPES if where != "host" else BOTH_TYPES[:1]:
        ladder.pages_come_back(kind, kv, place(where, kind), llama, tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", TWO)
def test_restored_goes_on(where: str, kind: str, place: Any, llama: Any, tokens: Any) -> None:
    ladder.restored_goes_on(kind, place(where, kind), llama, tokens)


@pytest.mark.parametrize("where", PLACES)
def test_looks_repeat(where: str, place: Any, llama: Any, tokens: Any) -> None:
    ladder.looks_repeat(place(where), llama, tokens)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("where", PLACES[1:])
def test_exact_reading_sees_all(where: str, kind: str, place: Any, llama: Any, tokens: Any) -> None:
    """With a part in host memory attention may be computed on another device than in the full cache."""
    ladder.exact_reading_sees_all(kind, place(where, kind), llama, tokens, bitwise=where != "half")


@pytest.mark.parametrize("where", PLACES)
def test_order_holds(where: str, place: Any, llama: Any, tokens: Any) -> None:
    ladder.order_holds(place(where), llama, tokens)


def test_a_full_pool_reuses_its_graph(place: Any, llama: Any, tokens: Any) -> None:
    """What keeps several devices from overlapping, shown where there is one: the next test could not fail otherwise."""
    in_prompt, in_answer = ladder.reused_graphs(place("host"), llama, tokens)
    assert in_prompt >= 6
    assert in_answer >= 6


@pytest.mark.parametrize("where", ["two", "servers"])
def test_steps_of_a_prompt_overlap(where: str, place: Any, llama: Any, tokens: Any) -> None:
    """0010: on several devices no step of a prompt waits for the one before it; a single token reuses the graph."""
    in_prompt, in_answer = ladder.reused_graphs(place(where), llama, tokens)
    assert in_prompt == 0
    assert in_answer >= 6


@pytest.mark.parametrize("count", [2, 3])
def test_two_virtual_gpus(count: int, gpus: list[Any]) -> None:
    """One CUDA device as several: `two` of everything above, in a process that sees them so."""
    if len(gpus) != 1 or gpus[0].backend != "CUDA":
        pytest.skip("needs one CUDA device that can show as several")
    environment = os.environ | {"GGML_CUDA_DEVICES": str(count)}
    line = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__]
    line += ["-k", "two and not virtual"]
    ran = subprocess.run(line, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout.splitlines()[-1], ran.stdout[-3000:]


def _stock_at(stock: Any) -> Any:
    """Stock takes no names of devices: it takes the first ones by itself, which are those."""

    def make(kind: str, **keywords: Any) -> Any:
        keywords.pop("device", None)
        return stock(kind, **keywords)

    return make


# --- what is asked for


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"device": ["nowhere0"]}, ConfigError, "device='nowhere0' cannot hold layers: there"),
        ({"device": ["CPU"]}, ConfigError, "device='CPU' cannot hold layers: there"),
        ({"override_tensor": [("exps", "nowhere0")]}, ConfigError, "'nowhere0' cannot hold tensors: there are"),
        ({"override_tensor": [("exps(", "CPU")]}, ConfigError, r"'exps\(' is no regular expression"),
        ({"tensor_split": [1.0] * 17}, ConfigError, "16 at most"),
        ({"tensor_split": [float("nan"), 1.0]}, ConfigError, "0 or more"),
        ({"split_mode": 3, "kvflash": 512}, UnsupportedModelError, r"split_mode=1 \(layer\), or kvflash=None"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], error: type, why: str, models: Any) -> None:
    with pytest.raises(error, match=why):
        Llama(str(models["dense"]), verbose=False, **asked)
    if error is ConfigError:
        with pytest.raises(error, match=why):
            without_loading(str(models["dense"]), {"fit": True, **asked})


def test_a_pattern_of_the_loaders_language_is_fitted(models: Any) -> None:
    """It is no regular expression of Python's."""
    placement, _ = without_loading(str(models["dense"]), {"fit": True, "override_tensor": [(r"\cA", "CPU")]})
    assert placement.overrides == ((r"\cA", "CPU"),)
    assert finds("[[:alpha:]]+_exps", "blk.0.ffn_up_exps.weight")
    assert not finds("[", "[")


def test_more_layers_than_there_are_can_be_asked_for(llama: Any) -> None:
    """As upstream's users write it who mean all of them."""
    assert llama("small", n_cpu_moe=99_999).n_tokens == 0


def test_overrides_reach_the_loader(
    llama: Any, gpus: list[Any], tokens: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensors go where the patterns say, all of them are read, and the model computes as ever."""
    plain = llama("dense", kvflash=1024)
    placed = llama(
        "dense", kvflash=1024, override_tensor=[("ffn_down", "CPU"), ("ffn_up", "CPU")], n_cpu_moe=2, verbose=True
    )
    told = capfd.readouterr().err
    assert "blk.0.ffn_down.weight" in told
    assert "overridden to CPU" in told or "buffer type overridden" in told
    assert placed.model_params.tensor_buft_overrides
    assert bool(placed.model_params.devices) == (len(gpus) > 1)  # several are named, since experts are shared out
    state = placed.__getstate__()
    assert state["override_tensor"] == (("ffn_down", "CPU"), ("ffn_up", "CPU"))
    assert (state["device"], state["n_cpu_moe"]) == (None, 2)
    rows = [logits(llm, tokens) for llm in (plain, placed)]
    assert abs(rows[0] - rows[1]).max() < 0.05 * abs(rows[0]).max()


def logits(llm: Any, tokens: Any) -> Any:
    return ladder.logits_along(llm, tokens[:100], tokens[100:104])
