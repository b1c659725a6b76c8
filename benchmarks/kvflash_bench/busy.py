"""`kvflash-bench busy`: decoding beside programs that use every core, by how threads wait for each other."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any, NamedTuple

from kvflash_ggml import system
from kvflash_ggml.native.library import WAITING

from . import report, stock
from .inside import device_of
from .opening import opened
from .plans import WAYS, Busy

STOCK = "stock"
LOADS = ("idle", "busy")


class Pace(NamedTuple):
    """cpu_ms: milliseconds of all threads for a token; None where nobody counts them."""

    tps: float
    cpu_ms: float | None
    device: str = ""


def run(model: str, plan: Busy, options: dict[str, Any]) -> None:
    loops = plan.loops or system.cores()
    ways = [*plan.ways, *([] if plan.stock is None else [STOCK])]
    found: dict[tuple[str, str], list[Pace]] = {(way, load): [] for way in ways for load in LOADS}
    for _ in range(plan.repeats):
        for load in LOADS:
            with looping(loops if load == "busy" else 0):
                for way in ways:
                    found[way, load].append(_measured(model, plan, options, way))
    device = next((pace.device for paces in found.values() for pace in paces if pace.device), "")
    rows = [_row(way, *(found[way, load] for load in LOADS)) for way in ways]
    report.rows(rows)
    report.told("busy", model, options | asdict(plan) | {"loops": loops}, device, ways=rows)


def _row(way: str, idle: list[Pace], busy: list[Pace]) -> dict[str, Any]:
    """Medians. kept: the part of the idle speed that is left beside the loops."""

    def median(paces: list[Pace]) -> tuple[float, float | None]:
        spent = [pace.cpu_ms for pace in paces if pace.cpu_ms is not None]
        return statistics.median(pace.tps for pace in paces), statistics.median(spent) if spent else None

    (idle_tps, idle_cpu), (busy_tps, busy_cpu) = median(idle), median(busy)
    return {
        "way": way, "idle_tps": idle_tps, "busy_tps": busy_tps, "kept": busy_tps / idle_tps,
        "idle_cpu_ms": idle_cpu, "busy_cpu_ms": busy_cpu, "slowest_busy_tps": min(pace.tps for pace in busy),
    }  # fmt: skip


def _measured(model: str, plan: Busy, options: dict[str, Any], way: str) -> Pace:
    if way == STOCK:
        assert plan.stock is not None
        length, decode = plan.length + plan.stock_tokens, plan.stock_tokens
        with waiting({}):
            tps = stock.pace(plan.stock, model, 1, length=length, share=length + decode, decode=decode, options=options)
        assert tps is not None, "one sequence has room"
        return Pace(tps, None)
    variables = WAYS.get(way) or ({"GOMP_SPINCOUNT": way} if way.isdecimal() else {})
    with waiting(variables), ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(decoded, model, plan, options).result()


def decoded(model: str, plan: Busy, options: dict[str, Any]) -> Pace:
    """Decode for some seconds, in a process whose OpenMP nobody has loaded before."""
    n_ctx = 1 << 17
    with opened(model, n_ctx=n_ctx, options=options, pool=plan.pool, policy="lru") as llm:
        llm.eval([1 + at % 64 for at in range(plan.length)])
        for token in range(4):  # warm
            llm.eval([1 + token])
        began, spent, count = time.perf_counter(), time.process_time(), 0
        while (took := time.perf_counter() - began) < plan.seconds and llm.n_tokens < n_ctx:
            llm.eval([1 + count % 64])
            count += 1
        return Pace(count / took, 1e3 * (time.process_time() - spent) / count, device_of(llm))


@contextmanager
def waiting(variables: Mapping[str, str]) -> Iterator[None]:
    """Let programs that start in this block wait by these variables, and by no others."""
    before = {name: os.environ.pop(name, None) for name in WAITING}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def looping(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep as many cores busy with programs that do nothing else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
