"""The exactness ladder for a pool on several devices: each rung takes what makes models, and where they are put."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvflash_ggml.arrays import address
from kvflash_ggml.native.engine import probe
from kvflash_ggml.placement import memory
from support.harness import CHUNK, logits_along, same_bits
from support.inside import inside

Make = Callable[..., Any]
Tokens = npt.NDArray[np.int32]

STOCK = {"flash_attn": True, "swa_full": False}
"""What a pool implies, for a stock context to compare with."""


@dataclass(frozen=True)
class Placed:
    """settings: keywords that put a model there. modes: of the devices that hold its pool, in their order."""

    settings: dict[str, Any]
    modes: tuple[str, ...]

    @property
    def overlapping(self) -> int:
        """Devices whose transfers run beside the host."""
        return sum(mode in ("stream", "remote") for mode in self.modes)


def check_place(llm: Any, placed: Placed) -> None:
    """The pool is where it was put: a rung that ran elsewhere proves nothing."""
    info = inside(llm).session.engine.info
    assert tuple(device.mode for device in info.devices) == placed.modes
    assert all(device.layers > 0 for device in info.devices)
    assert info.asynchronous == any(mode != "host" for mode in placed.modes)
    assert info.host_compute or "host" not in placed.modes
    assert info.pinned == any(device.pinned for device in info.devices)
    assert sum(device.bytes for device in llm.kvflash.devices) >= info.page_bytes * (info.n_slots // CHUNK)
    assert _shares(llm) == {device.name: device.slot_bytes for device in info.devices}


def _shares(llm: Any) -> dict[str, int]:
    """What a token takes of each device, as it is told before there is a context."""
    model, params = address(llm.model), llm.context_params
    shares = probe(model, type_k=params.type_k, type_v=params.type_v, offload=params.offload_kqv, arch="")
    names = [device.name for device in memory.of_model(model)]
    return {name: share for name, share in zip(names, shares, strict=True) if share}


def whole_context_is_stock(kind: str, kv: int, placed: Placed, llama: Make, stock: Make, tokens: Tokens) -> None:
    """A pool that holds the whole context computes stock's bits on the same devices."""
    prompt, rest = tokens[:600], tokens[600:616]
    ours = llama(kind, kvflash=1024, type_k=kv, type_v=kv, **placed.settings)
    check_place(ours, placed)
    theirs = stock(kind, type_k=kv, type_v=kv, **STOCK, **placed.settings)
    assert same_bits(logits_along(ours, prompt, rest), logits_along(theirs, prompt, rest))


def pages_come_back(kind: str, kv: int, placed: Placed, llama: Make, tokens: Tokens) -> None:
    """Blocks go to images, are overwritten and come back, several at once and one by one: the same bytes and bits."""
    moved, still = (llama(kind, kvflash=1024, type_k=kv, type_v=kv, **placed.settings) for _ in range(2))
    for llm in (moved, still):
        llm.eval(tokens[:512].tolist())
    engine = inside(moved).session.engine
    page, blocks = engine.info.page_bytes, list(range(8))
    slab = engine.alloc(16 * page)
    bytes_of = np.frombuffer(engine.view(slab, 16 * page), np.uint8).reshape(16, page)
    kept, seen = [slab + i * page for i in blocks], [slab + (8 + i) * page for i in blocks]
    try:
        engine.wait(engine.page_out(blocks, kept))
        for device in engine.info.devices:  # every share has arrived
            share = bytes_of[:8, device.share_offset : device.share_offset + device.share_bytes]
            assert share.any(axis=1).all()
            assert len({row.tobytes() for row in share}) == 8

        bytes_of[8:] = 0
        engine.wait(engine.page_in(blocks, seen))
        bytes_of[8:] = 1
        engine.wait(engine.page_out(blocks, seen))
        assert not bytes_of[8:].any()

        engine.page_in(blocks[1:], kept[1:])  # several: through the staging area of a stream
        engine.page_in(blocks[:1], kept[:1])  # one: by its spans
        engine.wait(engine.page_out(blocks[::-1], seen[::-1]))
        assert bytes_of[:8].tobytes() == bytes_of[8:].tobytes()
        rest = tokens[512:528]
        assert same_bits(logits_along(moved, rest[:1], rest[1:]), logits_along(still, rest[:1], rest[1:]))
    finally:
        engine.synchronize()
        del bytes_of
        engine.free(slab)


def restored_goes_on(kind: str, placed: Placed, llama: Make, tokens: Tokens) -> None:
    """A text beyond the pool is saved, and goes on in another model as it does in the first."""
    size = {"kvflash": 512, "n_ctx": 2048, "n_batch": 128, "n_ubatch": 128}
    one, other = (llama(kind, **size, **placed.settings) for _ in range(2))
    one.eval(tokens[:1500].tolist())
    assert one.kvflash.page_outs > 0
    state = one.save_state()
    other.eval(tokens[3000:3700].tolist())
    other.load_state(state)
    rest = tokens[1500:1516]
    assert same_bits(logits_along(one, rest[:1], rest[1:]), logits_along(other, rest[:1], rest[1:]))


def looks_repeat(placed: Placed, llama: Make, tokens: Tokens) -> None:
    """Queries are read of all devices, pages move by them, and the same call gives the same tokens and bits."""
    size = {"kvflash": 512, "n_ctx": 4096, "n_batch": 128, "n_ubatch": 128}
    runs = []
    for _ in range(2):
        llm = llama("dense", **size, kvflash_policy="qk", kvflash_deterministic=True, **placed.settings)
        check_place(llm, placed)
        scoring = inside(llm).session.scoring
        assert scoring._behind == (max(1, placed.overlapping) if any(mode != "host" for mode in placed.modes) else 0)
        answer = []
        for token in llm.generate(tokens[:2500].tolist(), temp=0.0):
            answer.append(token)
            if len(answer) == 80:
                break
        assert scoring.passes > 10
        assert llm.kvflash.page_ins > 0
        queries = np.empty(sum(int(np.prod(shape)) for shape in inside(llm).session.engine.query_shapes), np.float32)
        inside(llm).session.engine.wait(inside(llm).session.engine.read_queries(queries))
        layers = np.split(
            queries, np.cumsum([np.prod(shape) for shape in inside(llm).session.engine.query_shapes])[:-1]
        )
        assert all(layer.any() for layer in layers)
        runs.append((answer, llm.kvflash.resident_chunks, queries.tobytes()))
    assert runs[0][:2] == runs[1][:2]


def exact_reading_sees_all(kind: str, placed: Placed, llama: Make, tokens: Tokens, *, bitwise: bool) -> None:
    """Steps that stream page images to every device see what a full cache there does."""
    size = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 128, **placed.settings}
    prompt, rest = tokens[:1200], tokens[1200:1204]
    exact = {"kvflash_reading": "exact", "kvflash_answer": "exact", "kvflash_policy": "qk"}
    streamed = llama(kind, kvflash=512, **exact, **size)
    check_place(streamed, placed)
    rows = logits_along(streamed, prompt, rest)
    assert streamed.kvflash.streamed_steps > len(rest)
    last = streamed.kvflash.last
    assert (last.ranked, last.ranked_why) == ("exact", "") or (last.ranked == "index" and last.ranked_why), last
    want = logits_along(llama(kind, kvflash=2048, **size), prompt, rest)
    assert same_bits(rows, want) if bitwise else np.abs(rows - want).max() < 0.05 * np.abs(want).max()


def reused_graphs(placed: Placed, llama: Make, tokens: Tokens) -> tuple[int, int]:
    """Of eight steps of a prompt in a full pool, and of eight tokens: how many took the graph of the step before."""
    llm = llama("dense", kvflash=512, n_ctx=4096, n_batch=128, n_ubatch=128, **placed.settings)
    check_place(llm, placed)
    llm.eval(tokens[:1024].tolist())
    counts = [_reused(llm)]
    llm.eval(tokens[1024:2048].tolist())
    counts.append(_reused(llm))
    for token in tokens[2048:2056].tolist():
        llm.eval([token])
    counts.append(_reused(llm))
    return counts[1] - counts[0], counts[2] - counts[1]


def _reused(llm: Any) -> int:
    return int(llama_cpp.llama_perf_context(llm._ctx.ctx).n_reused)


def order_holds(placed: Placed, llama: Make, tokens: Tokens, *, rounds: int = 600) -> None:
    """Random transfers and steps, while other threads wait for any: every byte ends where it would one by one."""
    llm = llama("dense", kvflash=1024, **placed.settings)
    check_place(llm, placed)
    llm.eval(tokens[:1000].tolist())
    engine = inside(llm).session.engine
    page, blocks, images = engine.info.page_bytes, 15, 24
    slab = engine.alloc((images + blocks) * page)
    found = np.frombuffer(engine.view(slab, (images + blocks) * page), np.uint8).reshape(-1, page)
    at = [slab + i * page for i in range(images + blocks)]
    rng, tickets, stop = random.Random(3), [0], threading.Event()

    def waits(seed: int) -> None:
        choose = random.Random(seed)
        while not stop.is_set():
            engine.wait(choose.choice(tickets[-80:]))

    threads = [threading.Thread(target=waits, args=(seed,)) for seed in (1, 2)]
    try:
        engine.wait(engine.page_out(list(range(blocks)), at[images:]))
        pool = found[images:].copy()
        found[:images] = np.random.default_rng(5).integers(0, 256, (images, 1), np.uint8)
        host = found[:images].copy()
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            count = rng.choice((1, 2, 8, 11))
            some, kept = rng.sample(range(blocks), count), rng.sample(range(images), count)
            if rng.random() < 0.5:
                tickets.append(engine.page_out(some, [at[i] for i in kept]))
                host[kept] = pool[some]
            else:
                tickets.append(engine.page_in(some, [at[i] for i in kept]))
                pool[some] = host[kept]
            if rng.random() < 0.02:
                engine.wait(tickets[-1])
            if rng.random() < 0.05:  # it attends to all blocks, and writes the last one, which does not move
                llm.n_tokens = 1000
                llm.eval(tokens[1000 : 1000 + rng.choice((1, 4))].tolist())
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    engine.wait(engine.page_out(list(range(blocks)), at[images:]))
    assert (found[:images] == host).all()
    assert (found[images:] == pool).all()
    del found
    engine.free(slab)
