"""How fast pages move, against one plain copy of the same bytes through page-locked memory."""

from __future__ import annotations

import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.native.engine import PagedEngine

from . import report
from .inside import paged, plain_copy
from .opening import opened
from .plans import Paging


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One direction and one number of chunks: bytes a second of paging, of the plain copy, and their ratio."""

    direction: str
    chunks: int
    gib_s: float
    plain_gib_s: float
    ratio: float
    ms_per_chunk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A device alone: bytes a second of one plain copy of its share of so many chunks."""

    direction: str
    chunks: int
    device: str
    mode: str
    share: float
    plain_gib_s: float


def run(model: str, plan: Paging, options: dict[str, Any]) -> None:
    with opened(model, n_ctx=2 * plan.pool, options=options, pool=plan.pool, policy="lru") as llm:
        engine = paged(llm).engine
        rows = measure(engine, plan.chunks)
        alone = measure_lanes(engine, plan.chunks) if plan.lanes else []
        device, types = engine.info.device, [engine.info.type_k, engine.info.type_v]
    report.table(["direction", "chunks", "GiB/s", "plain GiB/s", "ratio", "ms a chunk"], [astuple(row) for row in rows])
    if alone:
        report.table(["direction", "chunks", "device", "mode", "share", "plain GiB/s"], [astuple(row) for row in alone])
    found = {"rows": [asdict(row) for row in rows], "lanes": [asdict(row) for row in alone]}
    report.told("paging", model, options | asdict(plan), device, pool=plan.pool, types=types, **found)


def measure_lanes(engine: PagedEngine, counts: tuple[int, ...], *, repeats: int = 5) -> list[Lane]:
    """What each device of the pool could do at best."""
    return [
        Lane(
            direction=direction,
            chunks=count,
            device=device.name,
            mode=device.mode,
            share=device.share_bytes / engine.info.page_bytes,
            plain_gib_s=_plain(engine, count * device.share_bytes, direction, repeats, device=i),
        )
        for count in counts
        for direction in ("out", "in")
        for i, device in enumerate(engine.info.devices)
    ]


def _plain(engine: PagedEngine, size: int, direction: str, repeats: int, *, device: int) -> float:
    """Bytes a second, in GiB."""
    took = [plain_copy(engine, size, to_device=direction == "in", device=device) for _ in range(repeats)]
    return size / float(np.median(took)) / 2**30


def measure(engine: PagedEngine, counts: tuple[int, ...], *, repeats: int = 5, seed: int = 0) -> list[Transfer]:
    """Page random sets of blocks in and out. The contents of the pool are lost."""
    info = engine.info
    blocks = info.n_slots // CHUNK
    rng = np.random.default_rng(seed)
    slab = engine.alloc(blocks * info.page_bytes)
    images = [slab + i * info.page_bytes for i in range(blocks)]
    out = []
    try:
        for count in (n for n in counts if n <= blocks):
            size = count * info.page_bytes
            for direction, move in (("out", engine.page_out), ("in", engine.page_in)):
                took = []
                for _ in range(repeats + 1):
                    where = rng.permutation(blocks)[:count].tolist()
                    what = [images[i] for i in rng.permutation(blocks)[:count]]
                    engine.synchronize()
                    began = time.perf_counter()
                    engine.wait(move(where, what))
                    took.append(time.perf_counter() - began)
                seconds = float(np.median(took[1:]))
                plain = float(
                    np.median([plain_copy(engine, size, to_device=direction == "in") for _ in range(repeats)])
                )
                out.append(
                    Transfer(
                        direction=direction,
                        chunks=count,
                        gib_s=size / seconds / 2**30,
                        plain_gib_s=size / plain / 2**30,
                        ratio=plain / seconds,
                        ms_per_chunk=seconds / count * 1e3,
                    )
                )
    finally:
        engine.free(slab)
    return out
