"""A long text in a small pool: nothing on the device, and next to nothing in Python, grows with it."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

from support.harness import CHUNK, check_device_bytes
from support.inside import inside
from support.integrity import check_table

LENGTH = 32_768


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_a_long_text_in_a_small_pool(llama: Any, tokens: Any) -> None:
    llm = llama("small", n_ctx=65_536, n_batch=512, n_ubatch=512, kvflash=1024, kvflash_policy="lru")
    view = llm.kvflash
    device = view.device_bytes
    check_device_bytes(llm, 1024)
    llm.eval(tokens[:4096].tolist())
    before, host_before = resident_bytes(), view.host_bytes
    llm.eval(tokens[4096:LENGTH].tolist())
    grown = resident_bytes() - before
    check_table(inside(llm).session.table)

    assert view.device_bytes == device
    assert view.resident <= 1024 // CHUNK
    assert view.host_bytes == LENGTH // CHUNK * view.page_bytes
    assert view.page_outs == LENGTH // CHUNK
    # the images themselves, and some slack for the page table and the allocator
    assert grown < view.host_bytes - host_before + (16 << 20)

    grown = python_growth(llm, tokens, steps=192)
    assert grown / 192 < 64, f"{grown} bytes in 192 steps"
    assert llm.n_tokens == LENGTH + 2 * 192 + 64


def python_growth(llm: Any, tokens: Any, *, steps: int) -> int:
    """Bytes of Python memory that so many decode steps leave behind, after a warm-up."""
    ids = [[int(token)] for token in tokens[LENGTH : LENGTH + 2 * steps + 64]]
    tracemalloc.start()
    try:
        for token in ids[: steps + 64]:
            llm.eval(token)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for token in ids[steps + 64 :]:
            llm.eval(token)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def test_a_long_context_costs_nothing_before_it_is_used(llama: Any) -> None:
    """Buffers for logits and batches follow use: 131,072 positions would take gigabytes of them."""
    llama("dense", n_ctx=1024, kvflash=512)
    gc.collect()
    before = resident_bytes()
    llm = llama("dense", n_ctx=131_072, kvflash=512, logits_all=True)
    assert llm.kvflash.n_ctx == 131_072
    assert resident_bytes() - before < 64 << 20
    check_device_bytes(llm, 512)


def test_a_long_context_takes_memory_as_its_text_grows(llama: Any) -> None:
    """Layer buffers of exact reading have room for all of it, and are zero until they are written."""
    llama("small", n_ctx=1024, kvflash=512)
    before = resident_bytes()
    llm = llama("small", n_ctx=1 << 21, kvflash=512, kvflash_reading="exact")
    assert llm.kvflash.stage_bytes > 128 << 20
    assert resident_bytes() - before < llm.kvflash.stage_bytes // 4
