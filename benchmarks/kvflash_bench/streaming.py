"""Exact reading through stages beside the full cache and beside a pool: time, memory, bits of the last logits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from kvflash_ggml.arrays import address
from kvflash_ggml.policy.qk import QKScorer

from . import report
from .inside import device_of, paged, plain_copy, session_of, step
from .opening import opened
from .plans import Streaming

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

QUESTION = 64
"""Tokens of a turn."""

COPIED = 1 << 28
"""Bytes of the plain copy that gives the speed of the bus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One arm at one depth. kv_mib: K and V on the device, pool and stages. used_mib: all device memory in use.

    step_ms: of a step of so many rows that sees the whole text (in the arm "pool": what is resident), and copy_ms: a
    plain copy of the bytes that it streams. decode_tps: of single tokens as they are generated. turn_ms: of a question
    of QUESTION tokens that goes on from the text, until it is read, and until the first token of its answer has been
    evaluated, by what the resident set is chosen: exact masses, or a look at the index.
    """

    arm: str
    depth: int
    prefill_s: float
    prefill_tps: float
    decode_tps: float
    kv_mib: float
    used_mib: float
    streamed_gib: float
    step_ms: dict[int, float]
    copy_ms: float
    turn_ms: dict[str, float]


def run(model: str, plan: Streaming, options: dict[str, Any]) -> None:
    points, logits, device = [], {}, ""
    for arm in plan.arms:
        for point, row, where in run_arm(model, arm, plan, options):
            points.append(point)
            logits[arm, point.depth] = row
            device = where or device
            click.echo(f"{arm} at {point.depth}: read in {point.prefill_s:.2f} s", err=True)
    found = ratios(points, logits)
    report.table(*table(found))
    report.told("streaming", model, options | asdict(plan), device, points=found)


def run_arm(
    model: str, arm: str, plan: Streaming, options: dict[str, Any]
) -> Iterator[tuple[Point, npt.NDArray[np.float32], str]]:
    """The points of an arm, the last logits of each text, and the device."""
    n_ctx = max(plan.depths) + 2048
    fields = {"reading": arm, "deterministic": True} if arm != "full" else {}
    pool = None if arm == "full" else plan.pool
    with opened(model, n_ctx=n_ctx, options=options, pool=pool, policy="qk", fields=fields, swa_full=False) as llm:
        rng = np.random.default_rng(plan.seed)
        text = rng.integers(10, min(llm.n_vocab() - 10, 4000), n_ctx).astype(np.int32)
        device = device_of(llm)
        for depth in sorted(plan.depths):
            llm.reset()
            began = time.perf_counter()
            llm.eval(text[:depth].tolist())
            logits = _finish(llm)
            seconds = time.perf_counter() - began
            yield _point(llm, arm, text, depth, seconds, plan), logits, device


def _point(llm: Llama, arm: str, text: npt.NDArray[np.int32], depth: int, seconds: float, plan: Streaming) -> Point:
    view, session = llm.kvflash, session_of(llm)
    streamed = view.streamed_bytes if view else 0
    decode = _decode(llm, text[depth : depth + 40])
    steps = {rows: _step_ms(llm, text, rows, plan.repeats, streams=arm == "exact") for rows in plan.rows}
    turns = _turns(llm, text, plan.repeats) if arm == "exact" else {}
    copied = 0.0
    if session is not None and arm == "exact":
        size = depth * session.engine.info.page_bytes // 64
        copied = (
            float(np.median([plain_copy(session.engine, COPIED, to_device=True) for _ in range(5)])) * size / COPIED
        )
    return Point(
        arm=arm,
        depth=depth,
        prefill_s=seconds,
        prefill_tps=depth / seconds,
        decode_tps=decode,
        kv_mib=(view.device_bytes + view.stage_bytes) / 2**20 if view else _full_kv(llm) / 2**20,
        used_mib=_used(llm) / 2**20,
        streamed_gib=streamed / 2**30,
        step_ms=steps,
        copy_ms=copied * 1e3,
        turn_ms=turns,
    )


def _decode(llm: Llama, tokens: npt.NDArray[np.int32]) -> float:
    for token in tokens[:8]:  # the first steps build the graph, and bring what the prompt's end asked for
        llm.eval([int(token)])
    _finish(llm)
    began = time.perf_counter()
    for token in tokens[8:]:
        llm.eval([int(token)])
        _finish(llm)
    return len(tokens[8:]) / (time.perf_counter() - began)


def _step_ms(llm: Llama, text: npt.NDArray[np.int32], rows: int, repeats: int, *, streams: bool) -> float:
    """Median of steps that go on with the text; the first one, which builds a graph, does not count."""
    from kvflash_ggml.sequence.step import LAST

    took = []
    for _ in range(repeats + 1):
        tokens = text[llm.n_tokens : llm.n_tokens + rows]
        began = time.perf_counter()
        if session_of(llm) is None:
            llm.eval(tokens.tolist())
        else:
            step(llm, tokens, LAST, stream=streams)
        _finish(llm)
        took.append(time.perf_counter() - began)
    return float(np.median(took[1:])) * 1e3


def _turns(llm: Llama, text: npt.NDArray[np.int32], repeats: int) -> dict[str, float]:
    """Medians of turns of both kinds, one after the other; the first of each does not count."""
    session = paged(llm)
    assert session.scoring is not None
    scorer, took = session.scoring.scorer, dict[str, list[float]]()
    assert isinstance(scorer, QKScorer)
    for turn in range(2 * repeats + 2):
        scorer.measures = turn % 2 == 0
        at = llm.n_tokens
        began = time.perf_counter()
        llm.eval(text[at : at + QUESTION].tolist())
        _finish(llm)
        read = time.perf_counter()
        llm.eval([int(text[at + QUESTION])])
        _finish(llm)
        ranked = session.stats.ranked
        took.setdefault(ranked, []).append(read - began)
        took.setdefault(f"{ranked}, first token", []).append(time.perf_counter() - began)
    scorer.measures = True
    return {kind: float(np.median(times[1:])) * 1e3 for kind, times in took.items()}


def _finish(llm: Llama) -> npt.NDArray[np.float32]:
    """The logits, as sampling would wait for them."""
    return llm.newest_logits()


def _full_kv(llm: Llama) -> float:
    from kvflash_ggml.placement.sizing import slot_size
    from kvflash_ggml.runtime.model import weights_of

    return float(slot_size(weights_of(llm), llm.context_params) * llm.n_ctx())


def _used(llm: Llama) -> int:
    from kvflash_ggml.placement import memory

    *devices, host = memory.of_model(address(llm.model))
    return sum(device.total - device.free for device in devices or [host])


def ratios(points: list[Point], logits: dict[tuple[str, int], npt.NDArray[np.float32]]) -> list[dict[str, Any]]:
    """Each point with its ratios to the full cache at the same depth."""
    full = {p.depth: p for p in points if p.arm == "full"}
    out = []
    for p in points:
        row = asdict(p)
        if p.depth in full:
            row["prefill_vs_full"] = p.prefill_tps / full[p.depth].prefill_tps
            row["decode_vs_full"] = p.decode_tps / full[p.depth].decode_tps
            row["same_bits"] = logits[p.arm, p.depth].tobytes() == logits["full", p.depth].tobytes()
        if p.copy_ms:
            row["step_vs_copy"] = {n: ms / p.copy_ms for n, ms in p.step_ms.items()}
        out.append(row)
    return out


_COLUMNS = {
    "arm": "arm", "depth": "depth", "prefill_s": "read s", "prefill_vs_full": "t/s /full", "same_bits": "same bits",
    "decode_tps": "decode t/s", "kv_mib": "KV MiB", "used_mib": "used MiB", "step_ms": "step of {} ms",
    "copy_ms": "copy ms", "turn_ms": "turn ms: {}",
}  # fmt: skip
"""Names of a row's values. A dictionary of times, as step_ms is, has one column a key."""


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the header and the cells of the table of `ratios`; None where a row has no such value."""
    header: list[str] = []
    cells: list[list[Any]] = [[] for _ in rows]
    for name, title in _COLUMNS.items():
        nested = [row[name] for row in rows] if "{}" in title else [{name: row.get(name)} for row in rows]
        for key in dict.fromkeys(key for values in nested for key in values):
            header.append(title.format(key))
            for line, values in zip(cells, nested, strict=True):
                line.append(values.get(key))
    return header, cells
