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
from support.beside import decode
from support.device_ladder import Placed
from support.harness import MODELS, assert_same, logits_along, same_bits
from support.inside import inside
from support.rounding import LOGITS, ON_GPU, near

from kvflash_ggml.native import devices
from kvflash_ggml.sequence.prefill import extend

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


def test_a_pool_that_holds_the_context_is_the_full_cache(gpu: Any, llama: Any, stock: Any, tokens: Any) -> None:
    size, prompt, rest = {"n_ctx": 512, "n_ubatch": 128}, tokens[:260], tokens[260:264]
    ours, theirs = llama("small", kvflash=512, **size), stock("small", flash_attn=True, swa_full=False, **size)
    ladder.check_place(ours, Placed({}, ("sync",)))
    assert same_bits(logits_along(ours, prompt, rest), logits_along(theirs, prompt, rest))


def test_pages_go_out_and_in_unchanged(gpu: Any, llama: Any, tokens: Any) -> None:
    """A text beyond the pool goes on from its state as it does where it was read."""
    size = {"kvflash": 512, "n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
    one, other = (llama("small", **size) for _ in range(2))
    one.eval(tokens[:640].tolist())
    assert one.kvflash.page_outs > 0
    other.load_state(one.save_state())
    rest = tokens[640:644]
    assert same_bits(logits_along(one, rest[:1], rest[1:]), logits_along(other, rest[:1], rest[1:]))


def test_exact_reading_sees_what_a_full_cache_sees(gpu: Any, llama: Any, tokens: Any) -> None:
    """Scores of the keys in the layer buffers, computed on the device, choose what is resident then."""
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
    exact = {"kvflash_reading": "exact", "kvflash_answer": "exact", "kvflash_policy": "qk"}
    streamed = llama("small", kvflash=512, **exact, **size)
    rows = logits_along(streamed, tokens[:700], tokens[700:702])
    assert streamed.kvflash.streamed_steps > 2
    assert (streamed.kvflash.last.ranked, streamed.kvflash.last.ranked_why) == ("exact", "")
    assert_same(rows, logits_along(llama("small", kvflash=1024, **size), tokens[:700], tokens[700:702]))


def test_an_answer_is_scored_and_brings_pages_back(gpu: Any, llama: Any, tokens: Any) -> None:
    size = {"kvflash": 512, "n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
    llm = llama("small", kvflash_policy="qk", kvflash_deterministic=True, **size)
    for _, _ in zip(range(40), llm.generate(tokens[:700].tolist(), temp=0.0), strict=False):
        pass
    assert inside(llm).session.scoring.passes > 0
    llm.kvflash.pin(64, 128)
    llm.eval([5])
    assert llm.kvflash.page_ins > 0


def test_two_texts_in_one_step(gpu: Any, bare: Any, tokens: Any) -> None:
    """Each as alone, up to rounding."""
    made, alone = bare("small", pool=1024, n_seq_max=2, n_ubatch=128), bare("small", pool=512, n_ubatch=128)
    for text, start in zip(made.sessions, (0, 500), strict=True):
        extend(text, tokens[start : start + 70])
    both = decode(made, made.sessions, [9, 9])
    assert near(both[0], alone.logits_along(tokens[:70], [9])[-1], LOGITS)
    assert not near(both[1], both[0], LOGITS)


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


EXACT = """
import sys
from kvflash_ggml import Llama
llm = Llama(sys.argv[1], n_gpu_layers=-1, n_ctx=1024, n_batch=128, n_ubatch=128, verbose=False, kvflash=512,
            kvflash_policy="lru", kvflash_reading="exact")
llm.eval([300 + i % 99 for i in range(700)])
llm.eval([5])
print(llm.kvflash.streamed_steps)
"""


def test_an_exact_prompt_is_read_after_buffers_were_destroyed(gpu: Any) -> None:
    """0041: the context's buffers are made again for the largest streamed step."""
    line = [sys.executable, "-c", EXACT, str(MODELS / "scorer-qwen3-q8_0.gguf")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


SET = """
import ctypes, sys
from kvflash_ggml.native import library
library.load()
ggml, ptr, size = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t
def call(name, result, *values):
    function = getattr(ggml, name)
    function.restype = result
    return function(*values)
class Params(ctypes.Structure):
    _fields_ = [("mem_size", size), ("mem_buffer", ptr), ("no_alloc", ctypes.c_bool)]
n, few = 1 << 25, 1024
ctx = ptr(call("ggml_init", ptr, Params(1 << 20, None, True)))
whole, part = (ptr(call("ggml_new_tensor_1d", ptr, ctx, 0, ctypes.c_int64(k))) for k in (n, few))
done = ptr(call("ggml_set_1d_inplace", ptr, ctx, whole, part, size(4 * (n - few))))
graph = ptr(call("ggml_new_graph", ptr, ctx))
call("ggml_build_forward_expand", None, graph, done)
device = ptr(call("ggml_backend_dev_by_name", ptr, sys.argv[1].encode()))
backend = ptr(call("ggml_backend_dev_init", ptr, device, None))
buffer = ptr(call("ggml_backend_alloc_ctx_tensors", ptr, ctx, backend))
call("ggml_backend_buffer_clear", None, buffer, ctypes.c_uint8(0))
ones = (ctypes.c_float * few)(*[1.0] * few)
call("ggml_backend_tensor_set", None, part, ones, size(0), size(4 * few))
assert call("ggml_backend_graph_compute", ctypes.c_int, backend, graph) == 0
found = (ctypes.c_float * n)()
call("ggml_backend_tensor_get", None, whole, found, size(0), size(4 * n))
print(sum(found[-few:]), any(found[:-few]))
"""


def test_a_part_of_a_large_tensor_is_set(gpu: Any) -> None:
    """0042: 2**25 values, as many as the mask of 512 tokens over 131,072 has, are 65,536 groups of 512."""
    largest = devices.largest_tensor(gpu.name)
    if largest is not None and largest < 4 << 25:
        pytest.skip(f"{gpu.name} computes on {largest} bytes at most")
    done = subprocess.run([sys.executable, "-c", SET, gpu.name], capture_output=True, text=True, check=False)
    assert done.stdout == "1024.0 False\n", done.stderr[-2000:]
