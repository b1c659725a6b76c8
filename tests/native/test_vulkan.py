"""What is different on Vulkan: how pages move, and how large a tensor may be.

vulkan.txt names what else is run there. On a machine without a GPU: scripts/test --vulkan, on a software device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from support import device_ladder as ladder
from support.device_ladder import Placed
from support.harness import KV_TYPES, MODELS
from support.rounding import ON_GPU

from kvflash_ggml.native import devices

MIB = 1 << 20

OPENED = """
import sys
from kvflash_ggml import Llama
llm = Llama(sys.argv[1], n_gpu_layers=-1, n_ctx=65536, n_batch=32, verbose=False, kvflash_policy="lru",
            **eval(sys.argv[2]))
print("made", llm.kvflash.stage)
"""


@pytest.fixture
def gpu(loaded: None) -> Any:
    """The first device of Vulkan."""
    found = [device for device in devices.devices() if device.backend == "Vulkan"] if ON_GPU else []
    if not found:
        pytest.skip("needs a device of Vulkan: scripts/test --vulkan")
    return found[0]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_pages_go_out_and_in_unchanged(kind: str, gpu: Any, llama: Any, tokens: Any) -> None:
    ladder.pages_come_back(kind, KV_TYPES["f16"], Placed({}, ("sync",)), llama, tokens)


def test_a_device_tells_its_largest_tensor(gpu: Any, llama: Any) -> None:
    """Vulkan's lowest bound of a storage buffer is 128 MiB."""
    largest = devices.largest_tensor(gpu.name)
    assert largest is None or 128 * MIB - 4 <= largest < 1 << 46
    assert devices.largest_tensor("CPU") is devices.largest_tensor("none") is None


def opened(settings: str) -> subprocess.CompletedProcess[str]:
    """Open the dense model in a process that sees a device of buffers of 8 MiB: 32,768 tokens of one layer's K."""
    bounds = dict.fromkeys(("GGML_VK_FORCE_MAX_BUFFER_SIZE", "GGML_VK_SUBALLOCATION_BLOCK_SIZE"), str(8 * MIB))
    line = [sys.executable, "-c", OPENED, str(MODELS / "recall-qwen3-q8_0.gguf"), settings]
    return subprocess.run(line, env=os.environ | bounds, capture_output=True, text=True, check=False)


def test_a_pool_that_no_tensor_holds_is_refused_before_it_is_loaded(gpu: Any) -> None:
    refused = opened("{'kvflash': 40000, 'kvflash_reading': 'pool'}")
    assert "DeviceLimit: K or V of one layer in a pool of 40,192 tokens takes 10 MiB" in refused.stderr
    assert f"{gpu.name} computes on tensors of 8 MiB at most: take a pool of at most 32768 tokens" in refused.stderr
    fits = opened("{'kvflash': 32768, 'kvflash_reading': 'pool'}")
    assert fits.stdout == "made 0\n", fits.stderr


def test_layer_buffers_are_as_large_as_a_tensor(gpu: Any) -> None:
    fits = opened("{'kvflash': 512}")
    assert fits.stdout == "made 32768\n", fits.stderr
    refused = opened("{'kvflash': 512, 'kvflash_stage': 65536}")
    assert "DeviceLimit: a layer buffer of 65,536 tokens takes 16 MiB" in refused.stderr
    assert "at most 32768 tokens (kvflash_stage" in refused.stderr
