"""Decode and prefill speed against depth: the full cache and pools, one after the other in one run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from . import report
from .inside import decode_seconds, device_of, paged, session_of, wait
from .opening import EXACT, opened
from .plans import Depth

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Speeds of one arm at one depth. python_us: a decode step's time outside llama_decode, in microseconds.

    looks, page_ins: during the timed decode. look_ms: time of one look, beside the decode where the device allows.
    """

    arm: str
    policy: str
    depth: int
    prefill_tps: float
    decode_tps: float
    python_us: float | None
    looks: int
    look_ms: float
    page_ins: int
    page_outs: int
    host_mib: float
    device_mib: float | None


COLUMNS = {
    "arm": "arm", "policy": "policy", "depth": "depth", "decode_tps": "decode t/s", "decode_vs_full": "/full",
    "decode_vs_first": "/first", "decode_vs_lru": "/lru", "prefill_tps": "prefill t/s", "prefill_vs_full": "/full",
    "prefill_vs_first": "/first", "prefill_vs_lru": "/lru", "python_us": "python us", "looks": "looks",
    "look_ms": "look ms", "page_ins": "page-ins",
}  # fmt: skip


def run(model: str, plan: Depth, options: dict[str, Any]) -> None:
    points, device = [], ""
    arms: list[tuple[int | None, str]] = [(None, "-")] if plan.full else []
    for pool, policy in arms + [(pool, policy) for pool in plan.pools for policy in plan.policies]:
        arm, where = run_arm(model, pool, policy, plan, options)
        points += arm
        device = where or device
        for p in arm:
            speeds = f"{p.decode_tps:.1f} tok/s, prefill {p.prefill_tps:.0f}"
            click.echo(f"{p.arm} {p.policy} at {p.depth}: {speeds}", err=True)
    rows = ratios(points)
    report.columns(COLUMNS, rows)
    report.told("depth", model, options | asdict(plan), device, points=rows)


def run_arm(model: str, pool: int | None, policy: str, plan: Depth, options: dict[str, Any]) -> tuple[list[Point], str]:
    """Walk one cache through the depths. Returns its points and the device it ran on."""
    n_ctx = max(plan.depths) + 2 * plan.decode + 256
    with opened(model, n_ctx=n_ctx, options=options, pool=pool, policy=policy, swa_full=False) as llm:
        rng = np.random.default_rng(plan.seed)
        text = rng.integers(10, min(llm.n_vocab() - 10, 4000), n_ctx).astype(np.int32)
        points = [_point(llm, text, depth, plan) for depth in sorted(plan.depths)]
        device = device_of(llm)
    return points, device


def _point(llm: Llama, text: np.ndarray, depth: int, plan: Depth) -> Point:
    start = max(llm.n_tokens, depth - plan.window)
    llm.eval(text[llm.n_tokens : start].tolist())
    _finish(llm)
    began = time.perf_counter()
    llm.eval(text[start:depth].tolist())
    _finish(llm)
    prefill = (depth - start) / (time.perf_counter() - began)

    for token in text[depth : depth + 8]:  # warm-up: the first steps build and capture the graph
        llm.eval([token])
    _finish(llm)
    session = session_of(llm)
    chooser = session.scoring if session else None
    looks, looked = (chooser.passes, chooser.seconds) if chooser else (0, 0.0)
    page_ins = session.paging.page_ins if session else 0
    began = time.perf_counter()
    for token in text[depth + 8 : depth + 8 + plan.decode]:
        llm.eval([token])
        _finish(llm)
    wall = time.perf_counter() - began
    view = llm.kvflash
    return Point(
        arm=f"pool {view.pool}" if view else "full",
        depth=depth,
        prefill_tps=prefill,
        decode_tps=plan.decode / wall,
        policy=f"{view.policy}{EXACT if view.reading == 'exact' else ''}" if view else "-",
        looks=chooser.passes - looks if chooser else 0,
        look_ms=(chooser.seconds - looked) / max(1, chooser.passes - looks) * 1e3 if chooser else 0.0,
        page_ins=session.paging.page_ins - page_ins if session else 0,
        python_us=_python_us(llm, text[depth + 8 + plan.decode :][: plan.decode]) if session else None,
        page_outs=view.page_outs if view else 0,
        host_mib=view.host_bytes / 2**20 if view else 0.0,
        device_mib=view.device_bytes / 2**20 if view else None,
    )


def _python_us(llm: Llama, tokens: np.ndarray) -> float:
    """Time of a decode step outside llama_decode, in microseconds, with the device idle before each step."""
    session = paged(llm)
    total = 0.0
    for token in tokens:
        _finish(llm)
        inside = decode_seconds(session.engine)
        began = time.perf_counter()
        llm.eval([token])
        total += time.perf_counter() - began - (decode_seconds(session.engine) - inside)
    return total / len(tokens) * 1e6


def _finish(llm: Llama) -> None:
    """Wait for the logits, as sampling would."""
    if llm.n_tokens:
        wait(llm)


def ratios(points: list[Point]) -> list[dict[str, Any]]:
    """Each pool against the full cache and against recency at the same depth, and against its own first depth."""
    full = {p.depth: p for p in points if p.arm == "full"}
    lru = {(p.arm, p.depth): p for p in points if p.policy == "lru"}
    first: dict[tuple[str, str], Point] = {}
    out = []
    for p in points:
        base = first.setdefault((p.arm, p.policy), p)
        row = asdict(p) | {
            "decode_vs_first": p.decode_tps / base.decode_tps,
            "prefill_vs_first": p.prefill_tps / base.prefill_tps,
        }
        if (p.arm, p.depth) in lru:
            row["decode_vs_lru"] = p.decode_tps / lru[p.arm, p.depth].decode_tps
            row["prefill_vs_lru"] = p.prefill_tps / lru[p.arm, p.depth].prefill_tps
        if p.depth in full:
            row["decode_vs_full"] = p.decode_tps / full[p.depth].decode_tps
            row["prefill_vs_full"] = p.prefill_tps / full[p.depth].prefill_tps
        out.append(row)
    return out
