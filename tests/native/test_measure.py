"""What a context would take is told before it is made, to the byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.inside import inside

from kvflash_ggml import system
from kvflash_ggml.constants import KV_TYPES
from kvflash_ggml.errors import ConfigError, UnsupportedModelError

SHAPES = {
    "dense": "small",
    "hybrid": "hybrid",
    "mixture": "of olmoe",
    "latent": "latent",
    "window": "iswa",
    "tied": "dense",
}
POOL = 512


@pytest.fixture
def llama(llama: Callable[..., Any]) -> Callable[..., Any]:
    """Models on the host alone, whose memory these tests count, also on a machine with GPUs."""
    return partial(llama, device="none")


def address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_measured_is_what_is_taken(
    llama: Callable[..., Any], model: Callable[[str], Path], shape: str, kind: str
) -> None:
    from kvflash_ggml.native import measure, weights

    types = {"type_k": KV_TYPES[kind], "type_v": KV_TYPES[kind]}
    llm = llama(SHAPES[shape], kvflash=POOL, kvflash_policy="qk", use_mmap=False, **types)
    rows = inside(llm).session.engine.info.query_rows
    taken = measure.taken(address(llm._ctx.ctx), address(llm._model.model))
    assert rows > 0
    assert sum(x.queries for x in taken) > 0

    with measure.sketch(model(SHAPES[shape]), llm.model_params) as found:
        sketched = measure.measure(found, llm.context_params, cells=POOL, query_rows=rows)
        found_weights = weights.of_model(found)
    assert sketched.devices == taken
    assert sum(x.size for x in found_weights) == sum(x.weights for x in taken)
    assert (sum(x.kind == weights.EXPERTS for x in found_weights) > 0) == (shape in ("mixture", "latent"))
    assert any(x.state for x in sketched.layers) == (shape == "hybrid")
    assert any(x.window for x in sketched.layers) == (shape == "window")
    assert any(x.query and not x.v_row for x in sketched.layers) == (shape == "latent")

    # of the loaded model too, which computes on as it did
    assert measure.measure(address(llm._model.model), llm.context_params, cells=POOL, query_rows=rows) == sketched
    llm.eval(list(range(1, 20)))


def test_each_of_several_devices_is_measured(llama: Callable[..., Any], model: Callable[[str], Path]) -> None:
    from dataclasses import replace

    from support.servers import device_names, running

    from kvflash_ggml.native import measure

    with running(2) as servers:
        endpoints = [server.endpoint for server in servers]
        settings = {"n_gpu_layers": -1, "tensor_split": [1, 1], "rpc": endpoints, "use_mmap": False}
        llm = llama("small", device=device_names(endpoints), kvflash=POOL, kvflash_policy="qk", **settings)
        rows = inside(llm).session.engine.info.query_rows
        taken = measure.taken(address(llm._ctx.ctx), address(llm._model.model))
        with measure.sketch(model("small"), llm.model_params) as found:
            sketched = measure.measure(found, llm.context_params, cells=POOL, query_rows=rows).devices
        llm.close()
    assert len(taken) == 3
    assert all(min(x.weights, x.kv, x.compute, x.queries) > 0 for x in taken[:-1])
    # where steps overlap, llama.cpp thinks that what crosses takes a little more of the device where it arrives
    assert taken[1].compute <= sketched[1].compute < 1.25 * taken[1].compute
    assert [replace(x, compute=0) for x in sketched] == [replace(x, compute=0) for x in taken]
    assert [sketched[i].compute for i in (0, 2)] == [taken[i].compute for i in (0, 2)]


def test_a_larger_pool_takes_its_slots(llama: Callable[..., Any]) -> None:
    from kvflash_ggml.native import measure

    llm = llama("small", n_ctx=4096)
    small, large = (
        measure.measure(address(llm._model.model), llm.context_params, cells=cells) for cells in (512, 2048)
    )
    slot = sum(2 * (x.k_row + x.v_row) for x in large.layers if x.query)
    assert large.devices[-1].kv - small.devices[-1].kv == (2048 - 512) * slot
    assert large.devices[-1].compute > small.devices[-1].compute


def test_recurrent_state_is_measured_and_not_made(llama: Callable[..., Any]) -> None:
    from kvflash_ggml.native import measure
    from kvflash_ggml.placement.predict import copied

    llm = llama("hybrid")
    planes = 1 << 20  # more than any machine has room for
    params = copied(llm.context_params, n_rs_seq=planes)
    found = measure.measure(address(llm._model.model), params, cells=POOL)
    assert found.devices[-1].kv > sum(x.state for x in found.layers) > 1 << 38


def test_files_that_are_no_models(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    import llama_cpp

    from kvflash_ggml.native import measure

    params = llama_cpp.llama_model_default_params()
    whole = models["small"].read_bytes()
    cases = {
        "cut": whole[: len(whole) // 2],
        "head": whole[:5000],
        "nothing": b"",
        "noise": whole[:64] + b"\xff" * 4096,
    }
    for name, data in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"{name}\.gguf: \S"), measure.sketch(path, params):
            pass
    with pytest.raises(ConfigError, match="failed to open"), measure.sketch(tmp_path / "missing.gguf", params):
        pass


def test_a_number_that_upstream_takes_on_trust(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    """llama.cpp ends the process over it when it loads the file. Here it is an error, and the next file is measured."""
    import llama_cpp

    from kvflash_ggml.native import measure, weights

    key = b"qwen3.block_count" + (4).to_bytes(4, "little")
    data = bytearray(models["small"].read_bytes())
    at = data.index(key) + len(key)
    data[at : at + 4] = (1 << 20).to_bytes(4, "little")
    path = tmp_path / "deep.gguf"
    path.write_bytes(data)
    params = llama_cpp.llama_model_default_params()
    with pytest.raises(ConfigError, match="GGML_ASSERT"), measure.sketch(path, params):
        pass
    with measure.sketch(models["small"], params) as found:
        assert weights.of_model(found)


def test_contexts_that_cannot_be(llama: Callable[..., Any]) -> None:
    from kvflash_ggml.native import measure
    from kvflash_ggml.placement.predict import copied

    llm = llama("small")
    model = address(llm._model.model)
    with pytest.raises(ConfigError, match="multiple of 256"):
        measure.measure(model, llm.context_params, cells=100)
    with pytest.raises(ConfigError, match="no context can be made"):
        measure.measure(model, copied(llm.context_params, n_batch=0, n_ubatch=0, n_seq_max=100_000), cells=0)
    with pytest.raises(ConfigError, match="one stream of cells"):
        measure.measure(model, copied(llm.context_params, n_seq_max=2), cells=POOL)


def test_a_model_without_a_pool_is_refused(model: Callable[[str], Path], loaded: None) -> None:
    import llama_cpp

    from kvflash_ggml.native import measure

    params = llama_cpp.llama_context_default_params()
    with measure.sketch(model("of mamba"), llama_cpp.llama_model_default_params()) as found:
        assert measure.measure(found, params, cells=0).devices[-1].compute > 0
        with pytest.raises(UnsupportedModelError, match="purely recurrent"):
            measure.measure(found, params, cells=POOL)


def test_sizes_add_up_to_what_is_there(model: Callable[[str], Path], loaded: None) -> None:
    import llama_cpp

    from kvflash_ggml.native import measure
    from kvflash_ggml.placement import memory
    from kvflash_ggml.placement.predict import copied, sizes_of

    params = copied(llama_cpp.llama_context_default_params(), n_ctx=4096, swa_full=False, flash_attn_type=1)
    with measure.sketch(model("of olmoe"), llama_cpp.llama_model_default_params()) as found:
        sizes = sizes_of(found, params)
        measured = measure.measure(found, params, cells=512)
        devices = memory.of_model(found)
        moved = sizes_of(found, params, overrides=[("exps", "CPU")])
    total = sum(layer.dense + layer.experts for layer in sizes.layers) + sizes.output + sizes.embedding
    assert total == sum(device.weights for device in measured.devices)
    assert all(layer.experts and layer.dense for layer in sizes.layers)
    assert sum(x.slot("f16", "f16") for x in sizes.layers) * 512 == sum(x.kv for x in measured.devices)
    assert sizes.n_ctx_train > 0
    assert moved.fixed == {"CPU": sum(layer.experts for layer in sizes.layers)}
    assert [device.name for device in devices] == [device.device for device in measured.devices]
    assert devices[-1].total == memory.host().total
    assert 0 < devices[-1].free <= devices[-1].total


# --- a pool that is sized by it


def test_auto_takes_what_there_is_room_for(llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host with less memory: what that has beyond its margin, of which page images get half."""
    from dataclasses import replace

    from kvflash_ggml.native import measure
    from kvflash_ggml.placement import memory

    wide = llama("small", n_ctx=32_768, kvflash="auto", kvflash_reading="pool")
    assert wide.kvflash.pool == 16_384
    rows = inside(wide).session.engine.info.query_rows

    def need(cells: int) -> Any:
        found = measure.measure(address(wide._model.model), wide.context_params, cells=cells, query_rows=rows)
        return found.devices[-1]

    def room(cells: int) -> int:
        return need(cells).kv + need(cells).compute + need(cells).queries

    host, pools = memory.host(), []
    for spare in (0, (room(16_384) - room(512)) // 2, room(16_384) - room(512) - 1):
        # the margin, the file's pages, and page images need as much
        free = (2 << 30) + need(512).weights + 2 * (room(512) + spare)
        monkeypatch.setattr(memory, "host", lambda free=free: replace(host, free=free))
        narrow = llama("small", n_ctx=32_768, kvflash="auto", kvflash_reading="pool")
        pools.append(narrow.kvflash.pool)
        assert "on CPU beside a margin of 2,048" in narrow.kvflash.banner()
        assert room(pools[-1]) <= room(512) + spare
        narrow.close()
    assert pools == [512, 8448, 16_128]


def test_auto_takes_half_where_no_context_can_be_made(
    llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import llama_cpp

    from kvflash_ggml.errors import DoesNotFit

    make, refusals = llama_cpp.llama_init_from_model, []

    def refuse(*args: Any) -> Any:
        return make(*args) if not refusals else refusals.pop()

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", refuse)
    refusals += [None] * 2
    llm = llama("small", n_ctx=32_768, kvflash="auto", kvflash_reading="pool")
    assert llm.kvflash.pool == 4096
    assert "16384 could not be made" in llm.kvflash.banner()
    llm.eval(list(range(1, 20)))

    refusals += [None] * 3
    with pytest.raises(DoesNotFit, match=r"^CPU has .* could not make it all the same.* Helps: ") as failed:
        llama("small", n_ctx=32_768, kvflash="auto", n_ubatch=512)
    helps = {remedy.option: remedy.frees for remedy in failed.value.remedies}
    assert helps["-ctk q8_0 -ctv q8_0"] > 0
    assert not any(remedy.enough for remedy in failed.value.remedies)
    refusals += [None]
    with pytest.raises(ValueError, match="Failed to create llama_context"):
        llama("small", n_ctx=32_768, kvflash=1024)  # what was asked for is never changed
    assert not refusals


def test_a_container_s_limit_is_the_host_s_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvflash_ggml.placement import memory

    stat = "anon 1\ninactive_file 268435456\n"
    for name, text in {"max": "1073741824", "current": "805306368", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    monkeypatch.setattr(system, "_MEMINFO", tmp_path / "meminfo")
    for folder, free, total in ((tmp_path / "none", 4 << 30, 8 << 30), (tmp_path, 512 << 20, 1 << 30)):
        monkeypatch.setattr(system, "_CGROUP", folder)
        assert (memory.host().free, memory.host().total) == (free, total)
    (tmp_path / "memory.max").write_text("max")
    assert memory.host().total == 8 << 30


def test_images_of_the_context_and_the_host_s_memory(
    llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a spill folder they get what is left beside the weights, without one there is a warning."""
    from kvflash_ggml.placement import memory
    from kvflash_ggml.placement.sizes import Device

    total = 3 << 30
    monkeypatch.setattr(memory, "host", lambda: Device(name="CPU", kind="host", free=total, total=total))
    llm = llama("small", n_ctx=4096, kvflash=512)
    heap = inside(llm).session.paging.heap
    assert heap.limit is None
    page = heap.page_bytes
    assert not any("page images" in told for told in caplog.messages)
    spilling = llama("small", n_ctx=4096, kvflash=512, kvflash_spill=tmp_path)
    limit = inside(spilling).session.paging.heap.limit
    weights = total - (2 << 30) - limit
    assert 0 < weights < 2 * Path(llm.model_path).stat().st_size
    total = weights + 2048 // 64 * page
    told = llama("small", n_ctx=4096, kvflash=512)
    assert inside(told).session.paging.heap.limit is None
    assert sum("a context of at most 2048 " in told for told in caplog.messages) == 1
    caplog.clear()
    spilling = llama("small", n_ctx=4096, kvflash=512, kvflash_spill=tmp_path)
    assert inside(spilling).session.paging.heap.limit == 512 // 64 * page
    assert not caplog.messages


# --- from the command line


def write_hollow(path: Path, vocab: int) -> None:
    """A model of the 27B shape with a vocabulary, whose weights are a hole in the file."""
    import gguf
    import numpy as np

    from kvflash_bench import shapes

    shape = shapes.SHAPES["27b"]
    writer = gguf.GGUFWriter(path, "qwen35")
    shapes._add_metadata(writer, shape)
    for name, dims, kind in shapes._tensors(shape):
        size = shapes._bytes(dims, kind)
        writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), size, raw_dtype=kind)
    words = [f"w{i}" for i in range(vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words + [f"[{i}]" for i in range(shape.vocab - vocab)])
    writer.add_token_types([1] * shape.vocab)
    writer.add_token_merges([f"w {i}" for i in range(vocab)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (20 << 30))


def test_a_dry_run_reads_no_weights(tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    path = tmp_path / "hollow.gguf"
    write_hollow(path, 150_000)
    command = [
        sys.executable,
        "-m",
        "kvflash_ggml",
        str(path),
        "--device",
        "none",
        "--kvflash",
        "4096",
        "--dry-run",
        "--json",
    ]
    # Started by a small process: the most that a child is said to have used begins with what its parent had.
    measure = "import resource, subprocess, sys\n"
    measure += "done = subprocess.run(sys.argv[1:])\n"
    measure += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
    measure += "sys.exit(done.returncode)"
    process = subprocess.run([sys.executable, "-c", measure, *command], capture_output=True, text=True)
    assert process.returncode in (0, 3), process.stderr
    fits = process.returncode == 0
    found = json.loads(process.stdout)
    assert found["fits"] is fits
    if fits:
        (device,) = found["devices"]
        assert device["needs"]["weights"] > 14 << 30
        assert device["needs"]["KV"] == 4096 * 64 * 1024
    else:
        assert "weights" in found["why"]
    assert int(process.stderr.splitlines()[-1]) < 1500 << 10
